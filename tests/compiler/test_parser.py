"""Tile-IR from text: mistakes have a place, and no text does more than raise them. That every
printed stage parses back is checked by conftest for each kernel that these tests compile."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amxq
import amxq.language as tl
from amxq.errors import CompilationError, TileIRError
from amxq.ir import hardware, ops, parser
from amxq.ir.parser import parse_function
from amxq.ir.printer import print_function
from amxq.ir.types import F32, I32, U8, U16, PointerType, TileType, VectorType
from amxq.ir.verifier import verify


@amxq.jit
def everything(x, q, y, n, BLOCK: tl.constexpr):
    w = tl.int4_tensor(q, x, None, [BLOCK, 32], BLOCK, [BLOCK, 32])
    a = tl.make_tensor_descriptor(x, [32, BLOCK], [BLOCK, 1], [32, BLOCK]).load([0, 0])
    acc = tl.dot(a.to(tl.bfloat16), w.load([0, 0]))
    for i in range(n):
        acc = tl.where(acc > 1e-7, acc / 3.0, -acc) + i
    if n > 3:
        acc = tl.fma(acc, acc, acc)
    at = tl.arange(0, 32)
    total = tl.max(acc, 1)
    tl.store(y + at * 3, total, mask=at < n)


@pytest.fixture(scope="module")
def stages() -> list[str]:
    texts = []
    for target in ("amx", "avx2"):
        types = (torch.float32, torch.uint8, torch.float32, tl.int32)
        kernel = everything.warmup(*types, BLOCK=64, target=target)
        texts += [
            part.split("\n", 1)[1].rstrip("\n") + "\n"
            for part in kernel.asm["tir"].split("// after ")[1:]
        ]
    return texts


def test_every_stage_parses_back(stages: list[str]) -> None:
    assert any("tileload" in text for text in stages)
    assert any("scatter" in text for text in stages)
    for text in stages:
        function = parse_function(text)
        verify(function, "the parser")
        assert print_function(function) == text


def test_types_numbers_and_attributes() -> None:
    text = """
    // a comment
    func @f(%p: ptr<u8>, %t.7: i32) tiles 0:16x64 1:2x8 {
      %0 = constant value=-0.0 : f64   %1 = constant value=1e-07:f32
      %2 = constant value=inf : f32
      %3 = constant value=(1, 2) : vec<2xu16>
      %4 = constant value=-3 : tile<1x2x3xi8>
      yield values = ( )
    }"""
    function = parse_function(text)
    values = [op.value for op in function.body.ops if isinstance(op, ops.Constant)]
    assert math.copysign(1, values[0]) == -1 and values[1:] == [1e-07, math.inf, (1, 2), -3]
    assert [type(v) for v in values] == [float, float, float, tuple, int]
    types = [op.result.type for op in function.body.ops[:-1]]
    assert types[3:] == [VectorType(2, U16), TileType((1, 2, 3), parser.DTYPES["i8"])]
    assert function.tiles == ((16, 64), (2, 8))
    assert [p.type for p in function.params] == [PointerType(U8), I32]
    assert [p.hint for p in function.params] == ["p", "t"]
    assert function.body.ops[0].loc == ops.Location("<tile-IR>", 4, 6)
    printed = print_function(function)
    assert print_function(parse_function(printed)) == printed


def test_every_field_has_a_form_in_text() -> None:
    known = {"Value", "Value | None", "tuple[Value, ...]", "Block", "str", "int", "bool"}
    known |= {"tuple[int, ...]", "int | float | tuple[int, ...]"}
    for module in (ops, hardware):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, ops.Op):
                forms = {f.type for f in dataclasses.fields(cls)} - {"tuple[Value, ...]"}
                assert forms <= known | {"Location"}, cls
    assert not set(parser._KINDS) & set(parser._OPS)


MISTAKES = {
    "": (1, 0, "expected func"),
    "fun @f() {}": (1, 3, "expected func"),
    "func @f(": (1, 8, "expected a value"),
    "func @f(%x: f31) {}": (1, 12, "f31 is not a type"),
    "func @f(%x: tile<0x2xf32>) {}": (1, 12, "not a type"),
    "func @f(%x: tile<1x2x3x4xf32>) {}": (1, 12, "not a type"),
    "func @f(%x: vec<4xptr<f32>>) {}": (1, 12, "not a type"),
    "func @f(%x: f32, %x: f32) {}": (1, 17, "%x is defined twice"),
    "func @f() {\n  %1 = add %2, %2 : f32\n}": (2, 11, "%2 is not defined"),
    "func @f() {\n  %1 = addd %2 : f32\n}": (2, 7, "there is no operation addd"),
    "func @f() {\n  %1 = arange start=1.5 : i32\n}": (2, 20, "expected a whole number"),
    "func @f() {\n  %1 = arange : i32\n}": (2, 7, "arange misses the field start"),
    "func @f() {\n  %1 = arange end=3 : i32\n}": (2, 14, "arange has no further field end"),
    "func @f() {\n  %1 = arange start=0 start=0 : i32\n}": (2, 22, "no further field start"),
    "func @f() {\n  %1, %2 = arange start=0 : i32\n}": (2, 11, "2 results of 1 types"),
    "func @f() {\n  %1 = constant value=" + "9" * 5000 + " : i32\n}": (2, 22, "is too large"),
    "func @f() {\n  yield values=()\n": (3, 0, "expected an operation"),
    "func @f() { }\nmore": (2, 0, "expected the end"),
    "func @f() tiles 1:2x3 { }": (1, 16, "expected tile 0"),
    'func @f(%x: f32) { %1 = reduce kind="\\q" operand=%x : f32 }': (1, 36, "JSON"),
}


@pytest.mark.parametrize("text", MISTAKES, ids=[m[2] for m in MISTAKES.values()])
def test_mistakes_have_a_place(text: str) -> None:
    line, column, message = MISTAKES[text]
    with pytest.raises(TileIRError) as caught:
        parse_function(text, "kernel.tir")
    error = caught.value
    assert message in error.message
    assert (error.file, error.line, error.column) == ("kernel.tir", line, column)
    assert str(error).startswith(f"kernel.tir:{line}:{column + 1}: ")


def test_regions_nest_to_a_limit() -> None:
    text = "func @f(%c: i1) {" + "if condition=%c {" * 5000
    with pytest.raises(TileIRError, match="nested more than 64"):
        parse_function(text)


@pytest.mark.parametrize(
    "op",
    [
        "for lower=%x upper=%x step=%x inits=() { yield values=() }",
        "add %x, %x",
        "%1, %2 = add %x, %x : i32, i32",
        "arange start=0",
    ],
)
def test_what_parses_may_still_be_refused(op: str) -> None:
    function = parse_function(f"func @f(%x: i32) {{ {op} yield values=() }}")
    with pytest.raises(CompilationError, match="it lacks a result"):
        verify(function, "the parser")


WORDS = st.sampled_from(
    ["%0", "%x", "add", "for", "yield", "values=", "()", "(", ")", "{", "}", ":", "=", ",", "^("]
    + ["tile<", "f32", "ptr<f32>", "vec<8xf32>", "constant", "value=", "1", "-", "1e999", '"', "//"]
    + ["\n", " ", "é", "\0", "%", "@", "func @f(", "tiles 0:16x64", "dot", "lowering=", "tileload"]
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_text_crashes_the_parser_or_the_verifier(data: st.DataObject, stages: list[str]) -> None:
    """Words put into, or cut out of, a good text, and words alone."""
    text = data.draw(st.sampled_from([stages[0], stages[1], ""]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(WORDS) + text[at + cut :]
    try:
        verify(parse_function(text), "the parser")
    except CompilationError:
        pass


def test_a_constant_of_every_type_prints_and_parses() -> None:
    for dtype in parser.DTYPES.values():
        if dtype.name != "u4":
            number = "1.5" if dtype.is_float else "1"
            text = (
                f"func @f() {{\n  %0 = constant value={number} : {dtype}\n  yield values=()\n}}\n"
            )
            assert print_function(parse_function(text)) == text
    assert F32 in parser.DTYPES.values()
