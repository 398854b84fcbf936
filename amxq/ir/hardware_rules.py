"""What each operation of the machine must satisfy; see :mod:`amxq.ir.rules`."""

from __future__ import annotations

from amxq.ir import hardware as hw
from amxq.ir.ops import Op
from amxq.ir.rules import Rule, arrow, like, number
from amxq.ir.types import (
    BF16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    U8,
    DType,
    PointerType,
    TileType,
    Type,
    VectorType,
    scalar_of,
    with_element,
)


def _vector_memory(op: hw.VectorLoad | hw.VectorStore) -> str | None:
    value = op.result if isinstance(op, hw.VectorLoad) else op.value
    element = number(value.type)
    if element is None or op.pointer.type != PointerType(element):
        return f"{op.pointer.type} does not address {value.type}"
    if op.mask is not None and op.mask.type != with_element(value.type, I1):
        return f"mask is {op.mask.type}"
    return None


def _gather_scatter(op: hw.Gather | hw.Scatter) -> str | None:
    value = op.result if isinstance(op, hw.Gather) else op.value
    if not isinstance(value.type, VectorType) or op.offsets.type != with_element(value.type, I64):
        return f"offsets {op.offsets.type} of {value.type}"
    if op.pointer.type != PointerType(value.type.element):
        return f"{op.pointer.type} does not address {value.type}"
    mask = op.mask
    return None if mask is None or like(mask.type, value.type) else f"mask is {mask.type}"


def _scratch(op: hw.Scratch) -> str | None:
    fits = isinstance(op.result.type, PointerType) and op.bytes > 0
    return None if fits else f"{op.bytes} bytes of {op.result.type}"


def _prefetch(op: hw.Prefetch) -> str | None:
    fits = isinstance(op.pointer.type, PointerType) and op.locality in (0, 1, 2, 3)
    return None if fits else f"{op.pointer.type} with locality {op.locality}"


def _extract(op: hw.Extract) -> str | None:
    vector = op.vector.type
    if not isinstance(vector, VectorType) or op.result.type != vector.element:
        return arrow(op, op.vector)
    return None if 0 <= op.lane < vector.lanes else f"lane {op.lane} of {vector}"


def _horizontal(op: hw.Horizontal) -> str | None:
    vector = op.vector.type
    if op.kind not in ("add", "min", "max"):
        return f"unknown kind {op.kind}"
    if not isinstance(vector, VectorType) or op.result.type != vector.element:
        return arrow(op, op.vector)
    return "lanes are not a power of two" if vector.lanes & (vector.lanes - 1) else None


def _bitcast(op: hw.Bitcast) -> str | None:
    one, other = op.operand.type, op.result.type
    if isinstance(one, PointerType) and isinstance(other, PointerType):
        return None
    if isinstance(one, TileType):
        fits = number(one) and number(other) and like(one, other)
        fits = fits and scalar_of(one).bits == scalar_of(other).bits
    else:
        fits = _bits(one) == _bits(other) is not None
    return None if fits else arrow(op, op.operand)


def _bits(type_: Type) -> int | None:
    if isinstance(type_, DType):
        return type_.bits
    return type_.lanes * type_.element.bits if isinstance(type_, VectorType) else None


def _fma(op: hw.Fma) -> str | None:
    if not op.a.type == op.b.type == op.c.type == op.result.type:
        return f"types differ: {arrow(op, op.a, op.b, op.c)}"
    element = number(op.a.type)
    return None if element is not None and element.is_float else f"needs floats, got {op.a.type}"


def _scalef(op: hw.Scalef) -> str | None:
    fits = op.x.type == op.n.type == op.result.type == VectorType(16, F32)
    return None if fits else arrow(op, op.x, op.n)


def _vpermw(op: hw.Vpermw) -> str | None:
    types = (op.table.type, op.index.type, op.result.type)
    wide = all(isinstance(t, VectorType) and t.lanes == 32 for t in types)
    if wide and all(scalar_of(t).bits == 16 for t in types):
        return None
    return "needs three vectors of 32 16-bit lanes"


def _vdpbf16ps(op: hw.Vdpbf16ps) -> str | None:
    wide, pairs = VectorType(16, F32), VectorType(32, BF16)
    ok = op.acc.type == op.result.type == wide and op.a.type == op.b.type == pairs
    return None if ok else arrow(op, op.acc, op.a, op.b)


def _shuffle(op: hw.Shuffle) -> str | None:
    vector = op.vector.type
    if not isinstance(vector, VectorType) or op.other and op.other.type != vector:
        return arrow(op, op.vector)
    if op.result.type != VectorType(len(op.lanes), vector.element):
        return f"{len(op.lanes)} lanes give {op.result.type}"
    inside = all(0 <= lane < vector.lanes * (2 if op.other else 1) for lane in op.lanes)
    return None if inside else f"{op.lanes} of {vector}"


def _vpdpbusd(op: hw.Vpdpbusd) -> str | None:
    wide, a, b = (VectorType(n, t) for n, t in ((16, I32), (64, U8), (64, I8)))
    ok = op.acc.type == op.result.type == wide and op.a.type == a and op.b.type == b
    return None if ok else arrow(op, op.acc, op.a, op.b)


def _pairs(op: hw.Vpmaddubsw | hw.Vpmaddwd) -> str | None:
    """Two vectors of 256 or 512 bits, and half as many lanes of twice the width."""
    a, b, to = (U8, I8, I16) if isinstance(op, hw.Vpmaddubsw) else (I16, I16, I32)
    for bits in (256, 512):
        types = tuple(VectorType(bits // t.bits, t) for t in (a, b, to))
        if (op.a.type, op.b.type, op.result.type) == types:
            return None
    return arrow(op, op.a, op.b)


def _tile_memory(op: hw.TileLoad | hw.TileStore) -> str | None:
    if not isinstance(op.pointer.type, PointerType):
        return f"pointer is {op.pointer.type}"
    return None if op.stride.type == I64 else f"stride is {op.stride.type}, expected i64"


def _always(op: Op) -> None:
    """Nothing but what holds for every operation."""


HARDWARE_RULES: dict[type[Op], Rule] = {
    hw.VectorLoad: _vector_memory,
    hw.VectorStore: _vector_memory,
    hw.Gather: _gather_scatter,
    hw.Scatter: _gather_scatter,
    hw.Scratch: _scratch,
    hw.Prefetch: _prefetch,
    hw.Extract: _extract,
    hw.Horizontal: _horizontal,
    hw.Bitcast: _bitcast,
    hw.Fma: _fma,
    hw.Scalef: _scalef,
    hw.Vpermw: _vpermw,
    hw.Vdpbf16ps: _vdpbf16ps,
    hw.Shuffle: _shuffle,
    hw.Vpdpbusd: _vpdpbusd,
    hw.Vpmaddubsw: _pairs,
    hw.Vpmaddwd: _pairs,
    hw.TileZero: _always,
    hw.TileLoad: _tile_memory,
    hw.TileStore: _tile_memory,
    hw.Tdpbf16ps: _always,
    hw.Tdpbssd: _always,
    hw.Tdpfp16ps: _always,
}
