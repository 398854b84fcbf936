"""What the verifier of tile-IR refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from amxq.errors import CompilationError
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Value
from amxq.ir.types import (
    BF16,
    F32,
    I1,
    I32,
    I64,
    U4,
    U8,
    U16,
    PointerType,
    TileType,
    VectorType,
)
from amxq.ir.verifier import verify

P = PointerType(F32)
TILE = TileType((4, 16), F32)


def function(build: Callable[[Builder, dict[str, Value]], object], tiles: object = ()) -> Function:
    """A function whose body ``build`` writes; its parameters are p, q (pointers) and n, m."""
    names = {"p": P, "q": PointerType(U8), "n": I32, "m": I64, "c": I1, "f": F32}
    params = {name: Value(type_, name) for name, type_ in names.items()}
    body = Block()
    b = Builder(body)
    build(b, params)
    body.ops.append(ops.build(ops.Yield, (), ops.UNKNOWN, values=()))
    return Function("f", tuple(params.values()), body, tiles)  # type: ignore[arg-type]


def refused(
    message: str, build: Callable[[Builder, dict[str, Value]], object], tiles: object = ()
) -> None:
    with pytest.raises(CompilationError, match=message) as caught:
        verify(function(build, tiles), "a test")
    assert "the IR after a test is not valid" in caught.value.message
    assert "report it" in caught.value.hint


ALL_TILES = ((16, 64),) * 8


# --- tile registers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "tiles", [((16, 64),) * 9, ((17, 64),), ((16, 68),), ((0, 64),), ((16, 0),), ((4, 6),)]
)
def test_tile_configurations_outside_of_palette_1(tiles: object) -> None:
    refused("tile configuration .* is outside palette 1", lambda b, v: None, tiles)


@pytest.mark.parametrize("t", [-1, 8, 100, True, "0"])
def test_tile_numbers(t: object) -> None:
    refused("tile number of", lambda b, v: b.emit(hw.TileZero, t=t), ALL_TILES)


def test_tiles_that_are_not_configured() -> None:
    refused("not configured .2 tiles", lambda b, v: b.emit(hw.TileZero, t=2), ALL_TILES[:2])
    refused("not configured .0 tiles", lambda b, v: b.emit(hw.TileZero, t=0))


@pytest.mark.parametrize(
    ("c", "a", "b"), [(0, 0, 1), (0, 1, 1), (0, 1, 0), (3, 1, 2), (0, 4, 2), (0, 1, 5)]
)
def test_tiles_that_do_not_multiply(c: int, a: int, b: int) -> None:
    tiles = ((8, 64), (8, 32), (8, 64), (7, 64), (8, 64), (16, 64))
    good = function(lambda e, v: e.emit(hw.Tdpbf16ps, c=0, a=1, b=2), tiles)
    verify(good, "a test")
    refused("do not fit", lambda e, v: e.emit(hw.Tdpbf16ps, c=c, a=a, b=b), tiles)


def test_tile_addresses() -> None:
    for cls in (hw.TileLoad, hw.TileStore):
        refused(
            "pointer",
            lambda b, v, cls=cls: b.emit(cls, t=0, pointer=v["n"], stride=v["m"]),
            ALL_TILES,
        )
        refused(
            "stride",
            lambda b, v, cls=cls: b.emit(cls, t=0, pointer=v["p"], stride=v["n"]),
            ALL_TILES,
        )


# --- values -----------------------------------------------------------------------------


def reduction(
    b: Builder, v: dict[str, Value], type_: TileType, *, axis: int, kind: str = "add"
) -> Value:
    return b.value(ops.Reduce, type_, kind=kind, operand=splat(b, v["f"]), axis=axis)


def printed(b: Builder, x: Value) -> Value:
    b.emit(ops.Print, prefix="x", indices=(), values=(x,))
    return x


def atomic(
    b: Builder,
    v: dict[str, Value],
    pointer: str,
    value: Value,
    kind: str = "add",
    mask: Value | None = None,
) -> Value:
    fields = {"kind": kind, "pointer": v[pointer], "value": value, "mask": mask}
    return b.value(ops.Atomic, value.type, **fields)


def splat(b: Builder, v: Value, type_: TileType | VectorType = TILE) -> Value:
    return b.value(ops.Splat, type_, operand=v)


VEC = VectorType(16, F32)
WRONG: dict[str, tuple[str, Callable[[Builder, dict[str, Value]], object]]] = {
    "types of a sum": (
        "types differ: i32, i64",
        lambda b, v: b.value(ops.Binary, I32, kind="add", lhs=v["n"], rhs=v["m"]),
    ),
    "kind of a binary": (
        "unknown kind pow",
        lambda b, v: b.value(ops.Binary, I32, kind="pow", lhs=v["n"], rhs=v["n"]),
    ),
    "pointers in a sum": (
        "needs numbers",
        lambda b, v: b.value(ops.Binary, P, kind="add", lhs=v["p"], rhs=v["p"]),
    ),
    "bits of floats": (
        "xor needs integers",
        lambda b, v: b.value(ops.Binary, F32, kind="xor", lhs=v["f"], rhs=v["f"]),
    ),
    "result of a comparison": (
        "result must be i1",
        lambda b, v: b.value(ops.Compare, I32, kind="lt", lhs=v["n"], rhs=v["n"]),
    ),
    "kind of a comparison": (
        "spaceship",
        lambda b, v: b.value(ops.Compare, I1, kind="spaceship", lhs=v["n"], rhs=v["n"]),
    ),
    "branches of a select": (
        "branches differ",
        lambda b, v: b.value(ops.Select, I32, condition=v["c"], then=v["n"], other=v["m"]),
    ),
    "condition of a select": (
        "condition is i32",
        lambda b, v: b.value(ops.Select, I32, condition=v["n"], then=v["n"], other=v["n"]),
    ),
    "float in an integer constant": (
        "1.5 does not fit i32",
        lambda b, v: b.value(ops.Constant, I32, value=1.5),
    ),
    "integer in a float constant": (
        "1 does not fit f32",
        lambda b, v: b.value(ops.Constant, F32, value=1),
    ),
    "constant out of range": (
        "300 does not fit u8",
        lambda b, v: b.value(ops.Constant, U8, value=300),
    ),
    "constant of a pointer": (
        "a constant of type ptr",
        lambda b, v: b.value(ops.Constant, P, value=0),
    ),
    "lanes of a constant": (
        "lanes do not match",
        lambda b, v: b.value(ops.Constant, VectorType(4, I32), value=(1, 2, 3)),
    ),
    "splat of another type": (
        "i32 -> tile",
        lambda b, v: b.value(ops.Splat, TILE, operand=v["n"]),
    ),
    "unary kind": (
        "unknown kind sinh",
        lambda b, v: b.value(ops.Unary, F32, kind="sinh", operand=v["f"]),
    ),
    "root of an integer": (
        "sqrt needs floats",
        lambda b, v: b.value(ops.Unary, I32, kind="sqrt", operand=v["n"]),
    ),
    "logarithm of an integer": (
        "log needs floats",
        lambda b, v: b.value(ops.Unary, I32, kind="log", operand=v["n"]),
    ),
    "type of a unary": (
        "f32 -> i32",
        lambda b, v: b.value(ops.Unary, I32, kind="neg", operand=v["f"]),
    ),
    "cast of a pointer": ("ptr<f32> -> i64", lambda b, v: b.value(ops.Cast, I64, operand=v["p"])),
    "cast that changes the shape": (
        "f32 -> tile",
        lambda b, v: b.value(ops.Cast, TILE, operand=v["f"]),
    ),
    "broadcast of another rank": (
        "tile<16xf32> -> tile<4x16xf32>",
        lambda b, v: b.value(ops.Broadcast, TILE, operand=splat(b, v["f"], TileType((16,), F32))),
    ),
    "broadcast of a dimension above 1": (
        "tile<2x16xf32> -> tile<4x16xf32>",
        lambda b, v: b.value(ops.Broadcast, TILE, operand=splat(b, v["f"], TileType((2, 16), F32))),
    ),
    "axis of a new dimension": (
        "axis 1",
        lambda b, v: b.value(
            ops.ExpandDims,
            TileType((1, 4, 16), F32),
            operand=splat(b, v["f"]),
            axis=1,
        ),
    ),
    "reduction's result": (
        "tile<4x16xf32> -> tile<16xf32>",
        lambda b, v: reduction(b, v, TileType((16,), F32), axis=1),
    ),
    "reduction's axis": (
        "axis 2 of tile<4x16xf32>",
        lambda b, v: reduction(b, v, TileType((4,), F32), axis=2),
    ),
    "reduction's kind": (
        "unknown kind mul",
        lambda b, v: reduction(b, v, TileType((4,), F32), axis=1, kind="mul"),
    ),
    "permutation that repeats": (
        "by .0, 0.",
        lambda b, v: b.value(ops.Permute, TILE, operand=splat(b, v["f"]), order=(0, 0)),
    ),
    "permutation's result": (
        "tile<4x16xf32> -> tile<4x16xf32> by .1, 0.",
        lambda b, v: b.value(ops.Permute, TILE, operand=splat(b, v["f"]), order=(1, 0)),
    ),
    "reshape to another count": (
        "tile<4x16xf32> -> tile<32xf32>",
        lambda b, v: b.value(ops.Reshape, TileType((32,), F32), operand=splat(b, v["f"])),
    ),
    "bitcast of a tile to another size": (
        "tile<4x16xf32> -> tile<4x16xbf16>",
        lambda b, v: b.value(hw.Bitcast, TileType((4, 16), BF16), operand=splat(b, v["f"])),
    ),
    "kind of a combination": (
        "unknown kind fold",
        lambda b, v: b.combine("fold", [splat(b, v["f"])], 0, False, lambda x, y: [x]),
    ),
    "combination to another type": (
        "yield does not match",
        lambda b, v: b.combine("scan", [splat(b, v["f"])], 0, False, lambda x, y: [v["n"]]),
    ),
    "combination that prints": (
        "more than computing",
        lambda b, v: b.combine("scan", [splat(b, v["f"])], 0, False, lambda x, y: [printed(b, x)]),
    ),
    "atomic kind": ("unknown kind mul", lambda b, v: atomic(b, v, "p", v["f"], "mul")),
    "atomic of bits of floats": ("or needs integers", lambda b, v: atomic(b, v, "p", v["f"], "or")),
    "atomic through another pointer": (
        "ptr<f32> does not address i32",
        lambda b, v: atomic(b, v, "p", v["n"]),
    ),
    "atomic of bytes": (
        "32 and 64 bits, got u8",
        lambda b, v: atomic(b, v, "q", b.constant(1, U8)),
    ),
    "atomic mask": ("mask is i32", lambda b, v: atomic(b, v, "p", v["f"], mask=v["n"])),
    "expected of another type": (
        "expected is i32",
        lambda b, v: b.value(
            ops.CompareExchange, F32, pointer=v["p"], expected=v["n"], value=v["f"]
        ),
    ),
    "prints of two shapes": (
        "prints f32, tile<4x16xf32>",
        lambda b, v: b.emit(ops.Print, prefix="x", indices=(), values=(v["f"], splat(b, v["f"]))),
    ),
    "index of a print": (
        "indices are i64",
        lambda b, v: b.emit(ops.Print, prefix="x", indices=(v["n"],), values=(v["f"],)),
    ),
    "axis of the grid": ("axis 3", lambda b, v: b.value(ops.ProgramId, I32, axis=3)),
    "type of a program's number": (
        "i64",
        lambda b, v: b.value(ops.NumPrograms, I64, axis=0),
    ),
    "type of an arange": ("f32", lambda b, v: b.value(ops.Arange, TILE, start=0)),
    # --- multiplication
    "shapes of a dot": (
        "gives tile<4x4xf32>",
        lambda b, v: b.value(
            ops.Dot,
            TileType((4, 4), F32),
            lhs=splat(b, v["f"]),
            rhs=splat(b, v["f"]),
            acc=None,
            lowering="",
        ),
    ),
    "rank of a dot": (
        "two tiles of rank 2",
        lambda b, v: b.value(ops.Dot, TILE, lhs=v["f"], rhs=v["f"], acc=None, lowering=""),
    ),
    "int4 tile": (
        "needs tile<8",
        lambda b, v: b.value(
            ops.LoadInt4, TileType((12, 32), U4), base=v["q"], k=v["m"], n=v["m"], k_blocks=v["m"]
        ),
    ),
    "int4 base": (
        "ptr<f32>",
        lambda b, v: b.value(
            ops.LoadInt4, TileType((8, 32), U4), base=v["p"], k=v["m"], n=v["m"], k_blocks=v["m"]
        ),
    ),
    # --- memory
    "load of another type": (
        "does not address i32",
        lambda b, v: b.value(ops.Load, I32, pointer=v["p"], mask=None, other=None),
    ),
    "store of another type": (
        "does not address i32",
        lambda b, v: b.emit(ops.Store, pointer=v["p"], value=v["n"], mask=None),
    ),
    "mask of a load": (
        "mask is i32",
        lambda b, v: b.value(ops.Load, F32, pointer=v["p"], mask=v["n"], other=None),
    ),
    "shape of a load": (
        "shapes of",
        lambda b, v: b.value(ops.Load, TILE, pointer=v["p"], mask=None, other=None),
    ),
    "offset of a pointer": (
        "i64",
        lambda b, v: b.value(ops.AddPtr, P, pointer=v["p"], offset=v["f"]),
    ),
    "pointer that is none": (
        "i32",
        lambda b, v: b.value(ops.AddPtr, I32, pointer=v["n"], offset=v["m"]),
    ),
    "offsets of a block": (
        "with 1 offsets",
        lambda b, v: b.value(
            ops.LoadBlock,
            TILE,
            base=v["p"],
            offsets=(v["m"],),
            strides=(v["m"], v["m"]),
            bounds=(v["m"], v["m"]),
            checked=(),
        ),
    ),
    "checks of a block": (
        "checked=",
        lambda b, v: b.value(
            ops.LoadBlock,
            TILE,
            base=v["p"],
            offsets=(v["m"], v["m"]),
            strides=(v["m"], v["m"]),
            bounds=(v["m"], v["m"]),
            checked=(2,),
        ),
    ),
    "types of a block": (
        "are i64",
        lambda b, v: b.value(
            ops.LoadBlock,
            TILE,
            base=v["p"],
            offsets=(v["m"], v["n"]),
            strides=(v["m"], v["m"]),
            bounds=(v["m"], v["m"]),
            checked=(),
        ),
    ),
    # --- vectors
    "vector load": (
        "does not address",
        lambda b, v: b.value(hw.VectorLoad, VEC, pointer=v["q"], mask=None),
    ),
    "vpermw": (
        "32 16-bit lanes",
        lambda b, v: b.value(
            hw.Vpermw,
            VectorType(16, U16),
            table=splat(b, b.constant(1, U16), VectorType(16, U16)),
            index=splat(b, b.constant(1, U16), VectorType(16, U16)),
        ),
    ),
    "vdpbf16ps": (
        "vec<16xf32>, vec<16xf32>",
        lambda b, v: b.value(
            hw.Vdpbf16ps,
            VEC,
            acc=splat(b, v["f"], VEC),
            a=splat(b, v["f"], VEC),
            b=splat(b, v["f"], VEC),
        ),
    ),
    "fma": (
        "types differ",
        lambda b, v: b.value(
            hw.Fma, VEC, a=splat(b, v["f"], VEC), b=v["f"], c=splat(b, v["f"], VEC)
        ),
    ),
    "fma of integers": (
        "needs floats",
        lambda b, v: b.value(hw.Fma, I32, a=v["n"], b=v["n"], c=v["n"]),
    ),
    "lane of an extract": (
        "lane 16",
        lambda b, v: b.value(hw.Extract, F32, vector=splat(b, v["f"], VEC), lane=16),
    ),
    "bits of a bitcast": (
        "vec<16xf32> -> vec<16xbf16>",
        lambda b, v: b.value(hw.Bitcast, VectorType(16, BF16), operand=splat(b, v["f"], VEC)),
    ),
    "offsets of a gather": (
        "offsets",
        lambda b, v: b.value(
            hw.Gather, VEC, pointer=v["p"], offsets=splat(b, v["n"], VectorType(16, I32)), mask=None
        ),
    ),
    "horizontal sum": (
        "vec<16xf32> -> i32",
        lambda b, v: b.value(hw.Horizontal, I32, kind="add", vector=splat(b, v["f"], VEC)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_verifier_refuses(name: str) -> None:
    refused(*WRONG[name])


# --- structure --------------------------------------------------------------------------


def test_use_before_definition() -> None:
    loose = Value(I32, "loose")
    refused(
        "uses <Value loose : i32> before it is defined",
        lambda b, v: b.add(loose, v["n"]),
    )


def test_values_of_an_inner_block_do_not_leave_it() -> None:
    def build(b: Builder, v: dict[str, Value]) -> None:
        then, other = Block(), Block()
        with b.inside(then):
            inner = b.value(ops.Binary, I32, kind="add", lhs=v["n"], rhs=v["n"])
            b.emit(ops.Yield, values=())
        with b.inside(other):
            b.emit(ops.Yield, values=())
        b.emit(ops.If, condition=v["c"], then=then, other=other)
        b.add(inner, v["n"])

    refused("before it is defined", build)


def loop(
    b: Builder, v: dict[str, Value], *, index: object = I32, init: Value, last: list[Value]
) -> None:
    body = Block((Value(index, "i"), Value(init.type, "x")))  # type: ignore[arg-type]
    with b.inside(body):
        b.emit(ops.Yield, values=tuple(last))
    b.emit(
        ops.For,
        init.type,
        lower=v["n"],
        upper=v["n"],
        step=v["n"],
        inits=(init,),
        body=body,
    )


def test_loops() -> None:
    verify(function(lambda b, v: loop(b, v, init=v["f"], last=[v["f"]])), "a test")
    refused("index differ", lambda b, v: loop(b, v, index=I64, init=v["f"], last=[v["f"]]))
    refused("yield does not match", lambda b, v: loop(b, v, init=v["f"], last=[v["n"]]))
    refused("yield does not match", lambda b, v: loop(b, v, init=v["f"], last=[]))

    def no_yield(b: Builder, v: dict[str, Value]) -> None:
        body = Block((Value(I32, "i"),))
        b.emit(ops.For, lower=v["n"], upper=v["n"], step=v["n"], inits=(), body=body)

    refused("does not end with yield", no_yield)


def test_a_condition_is_one_bool() -> None:
    def build(b: Builder, v: dict[str, Value]) -> None:
        blocks = [Block(), Block()]
        for block in blocks:
            with b.inside(block):
                b.emit(ops.Yield, values=())
        b.emit(ops.If, condition=v["n"], then=blocks[0], other=blocks[1])

    refused("condition is i32", build)


@pytest.mark.parametrize(
    ("message", "args", "test", "last"),
    [
        ("carried types differ", [F32], "c", "n"),
        ("carried types differ", [I32, I32], "c", "n"),
        ("yield does not match", [I32], "n", "n"),
        ("yield does not match", [I32], "c", "f"),
    ],
)
def test_while(message: str, args: list[object], test: str, last: str) -> None:
    def build(b: Builder, v: dict[str, Value]) -> None:
        blocks = [Block(tuple(Value(t) for t in args)) for _ in range(2)]  # type: ignore[arg-type]
        for block, name in zip(blocks, (test, last)):
            with b.inside(block):
                b.emit(ops.Yield, values=(v[name],))
        b.emit(ops.While, I32, inits=(v["n"],), test=blocks[0], body=blocks[1])

    refused(message, build)


def test_an_operation_without_a_rule_is_refused() -> None:
    class Strange(ops.Op):
        name = "strange"

    refused("no rule", lambda b, v: b.block.ops.append(Strange((), ops.UNKNOWN)))


def test_the_error_points_at_the_kernel() -> None:
    def build(b: Builder, v: dict[str, Value]) -> None:
        b.loc = ops.Location("kernel.py", 12, 4)
        b.value(ops.Cast, I64, operand=v["p"])

    with pytest.raises(CompilationError) as caught:
        verify(function(build), "a test")
    assert (caught.value.file, caught.value.line, caught.value.column) == ("kernel.py", 12, 4)
