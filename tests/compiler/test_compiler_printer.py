"""Tile-IR as text: what the printer writes at which stage."""

from __future__ import annotations

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.frontend.code_generator import generate
from amxq.ir.printer import print_function
from amxq.ir.types import F32, I32, PointerType

P = PointerType(F32)


@amxq.jit
def printed(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside, other=0.0)
    for i in range(n):
        total = total * 2.0 + i
    if n > 3:
        tl.store(y + at, total, mask=inside)


EXPECTED = """\
func @printed(%x: ptr<f32>, %y: ptr<f32>, %n: i32) {
  %3 = program_id axis=0 : i32
  %4 = constant value=32 : i32
  %5 = mul %3, %4 : i32
  %6 = arange start=0 : tile<32xi32>
  %7 = splat operand=%5 : tile<32xi32>
  %at = add %7, %6 : tile<32xi32>
  %9 = splat operand=%n : tile<32xi32>
  %inside = lt %at, %9 : tile<32xi1>
  %11 = splat operand=%x : tile<32xptr<f32>>
  %12 = cast operand=%at : tile<32xi64>
  %13 = addptr pointer=%11 offset=%12 : tile<32xptr<f32>>
  %14 = constant value=0.0 : f32
  %15 = constant value=0.0 : tile<32xf32>
  %total = load pointer=%13 mask=%inside other=%15 : tile<32xf32>
"""


def text() -> str:
    types = {"x": P, "y": P, "n": I32}
    return print_function(generate(printed.kernel_source, types, {"BLOCK": 32}))


def test_the_printed_front_end() -> None:
    assert text().startswith(EXPECTED)
    assert "inits=(%total) : tile<32xf32> { ^(%i: i32, %total.21: tile<32xf32>)" in text()
    assert text().count("yield values=(") == 4


def test_printing_is_deterministic_and_names_are_unique() -> None:
    assert text() == text()
    defined = [
        name
        for line in text().splitlines()
        if " = " in line
        for name in line.split(" = ")[0].split(", ")
    ]
    assert len(defined) == len(set(defined))


def test_every_stage_is_printed() -> None:
    kernel = printed.warmup(torch.float32, torch.float32, tl.int32, BLOCK=32, target="avx2")
    stages = [line for line in kernel.asm["tir"].splitlines() if line.startswith("// after")]
    assert stages[0] == "// after front end"
    assert "// after vectorize" in stages and len(stages) >= 4
    assert list(kernel.asm) == ["tir", "llir", "asm", "obj"] and len(kernel.asm) == 4
    assert "vec<8xf32>" in kernel.asm["tir"] and "define" in kernel.asm["llir"]
    assert kernel.asm["obj"][:4] == b"\x7fELF"
    with pytest.raises(KeyError, match="ptx.*tir, llir, asm, obj"):
        kernel.asm["ptx"]
