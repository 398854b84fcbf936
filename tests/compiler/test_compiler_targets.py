"""Machine code: cross-compiling to every target on any machine, and what the code is made of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import TargetError
from amxq.runtime.compiler import CompiledKernel
from amxq.runtime.targets import TARGETS, available_targets, target

POINTERS: dict[str, Any] = {
    "x": torch.bfloat16,
    "qweight": torch.uint8,
    "scales": torch.float16,
    "y": torch.bfloat16,
}


def int4_linear(name: str, *, block_m: int, zeros: bool = False, splits: int = 1) -> CompiledKernel:
    """The shipped kernel for one target."""
    from amxq_kernels.int4_linear import int4_linear as kernel

    given: dict[str, Any] = dict.fromkeys(kernel.kernel_source.parameters, tl.int32)
    given |= POINTERS
    given |= dict.fromkeys(("table", "x_scales", "bias", "residual"))
    given |= {"SPLITS": splits, "BLOCK_M": block_m, "BLOCK_K": 128}
    given["zeros"] = torch.uint8 if zeros else None
    given["sums"] = torch.float32 if zeros else None
    return kernel.warmup(**given, target=name)


def range_function(asm: str) -> list[str]:
    """Instructions and labels of the function that runs the programs."""
    body = asm.split("\nrange:\n")[1].split("\n.Lfunc_end")[0]
    lines = [line.split("#")[0].strip() for line in body.splitlines()]
    return [line for line in lines if line and (line.endswith(":") or not line.startswith("."))]


def inner_loops(lines: list[str]) -> list[list[str]]:
    """The innermost loops: from a label to a jump back to it, with no other such jump inside."""
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\.\w+)$", line)
        if jump and places.get(jump[1], i) < i:
            loops.append((places[jump[1]], i))
    inner = [
        (a, b) for a, b in loops if not any(a <= c and d <= b for c, d in loops if (c, d) != (a, b))
    ]
    return [[line for line in lines[a : b + 1] if not line.endswith(":")] for a, b in inner]


def holding(loops: list[list[str]], mnemonic: str) -> list[list[str]]:
    return [loop for loop in loops if any(line.startswith(mnemonic) for line in loop)]


@pytest.mark.parametrize(
    ("block_m", "row_tiles"), [(1, 1), (16, 1), (24, 2), (32, 2), (47, 3), (50, 4), (128, 8)]
)
def test_amx_multiplies_in_its_inner_loop(block_m: int, row_tiles: int) -> None:
    kernel = int4_linear("amx", block_m=block_m)
    lines = range_function(kernel.asm["asm"])
    (inner,) = holding(inner_loops(lines), "tdpbf16ps")
    assert sum(line.startswith("tdpbf16ps") for line in inner) == row_tiles * 2 * (128 // 32)
    assert sum(line.startswith("tilestored") for line in inner) == row_tiles * 2
    assert any(line.startswith("vpermw") for line in inner)
    assert not any(line.startswith(("ldtilecfg", "tilerelease")) for line in inner)
    assert sum(line.startswith("ldtilecfg") for line in lines) == 1
    assert sum(line.startswith("tilerelease") for line in lines) == 1
    numbers = set(re.findall(r"%tmm(\d+)", "\n".join(lines)))
    assert numbers <= set("01234567")


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block_m", [1, 4, 8])
def test_avx512_bf16_has_no_mask_in_its_inner_loop(block_m: int, zeros: bool) -> None:
    """The lookup table holds its values twice, so the fifth index bit needs no masking."""
    kernel = int4_linear("avx512_bf16", block_m=block_m, zeros=zeros)
    inner = holding(inner_loops(range_function(kernel.asm["asm"])), "vdpbf16ps")
    assert len(inner) == 1
    names = [line.split()[0] for line in inner[0]]
    products = names.count("vdpbf16ps")
    assert products and names.count("vpermw") == products // block_m
    masks = [line for line in inner[0] if re.match(r"vpand|vpternlog|kmov|kand|kshift", line)]
    assert not masks
    assert not any("{%k" in line for line in inner[0])
    # nothing but loads, shifts, lookups and products: no spill inside of the loop
    spills = [line for line in inner[0] if re.search(r"zmm\d+, -?\d*\(%rsp", line)]
    assert not spills


def test_avx512_uses_fp32_and_avx2_stays_narrow() -> None:
    wide = range_function(int4_linear("avx512", block_m=4).asm["asm"])
    assert any("vfmadd" in line and "%zmm" in line for line in wide)
    assert not any(re.match(r"vdpbf16ps|tdp|tile", line) for line in wide)
    narrow = range_function(int4_linear("avx2", block_m=4).asm["asm"])
    assert any("vfmadd" in line and "%ymm" in line for line in narrow)
    assert not any("%zmm" in line or "%k" in line for line in narrow)


@amxq.jit
def simple(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool])
def test_every_target_compiles_on_every_machine(name: str, dtype: torch.dtype) -> None:
    kernel = simple.warmup(dtype, dtype, tl.int32, BLOCK=64, target=name)
    assert kernel.target.name == name
    assert kernel.asm["obj"].startswith(b"\x7fELF")
    calls = set(re.findall(r"callq\s+(\w+)", kernel.asm["asm"]))
    assert calls <= {"range", "take"}, f"library calls: {calls}"


def test_unknown_targets_are_named() -> None:
    with pytest.raises(TargetError, match="avx1024.*avx512_bf16"):
        simple.warmup(torch.float32, torch.float32, tl.int32, BLOCK=64, target="avx1024")


def test_warmup_takes_tensors_and_runs_nothing() -> None:
    x = torch.ones(64)
    y = torch.zeros(64)
    kernel = simple.warmup(x, y, 64, BLOCK=64)
    assert not y.any()
    assert simple[(1,)](x, y, 64, BLOCK=64) is kernel
    assert (y == 2).all()


def test_a_target_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise TargetError(f"{name} cannot run here")

    monkeypatch.setattr("amxq.runtime.compiler.require_runnable", refuse)
    x = torch.ones(80)
    with target("avx2"), pytest.raises(TargetError, match="avx2 cannot run here"):
        simple[(1,)](x, x, 80, BLOCK=80)
    assert (x == 1).all()


def test_all_targets_give_the_same_numbers() -> None:
    x = torch.randn(1000)
    results = []
    for name in available_targets():
        y = torch.zeros(1000)
        with target(name):
            simple[(amxq.cdiv(1000, 64),)](x, y, 1000, BLOCK=64)
        results.append(y)
    assert all(torch.equal(r, x * 2) for r in results)
