"""Vectorisation of atomic operations and of printing, which go element by element.

Before:  %old = atomic kind=add pointer=%p value=%x mask=%m : tile<64xf32>
After:   %1 … = scratch                     (offsets, values, mask, results)
         for %i = 0 to 64 {
           if mask[%i] { old[%i] = atomic kind=add pointer=%base + offsets[%i] value=x[%i] }
         }
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Value
from amxq.ir.types import I64, PointerType, TileType, scalar_of, shape_of
from amxq.passes import memory
from amxq.passes.rearrange import nest
from amxq.passes.tiles import Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def atomic(v: Vectorizer, op: ops.Atomic) -> None:
    def one(pointer: Value, value: Value) -> Value:
        return v.b.value(
            ops.Atomic, value.type, kind=op.kind, pointer=pointer, value=value, mask=None
        )

    _each(v, op, one, [op.value], op.mask)


def compare_exchange(v: Vectorizer, op: ops.CompareExchange) -> None:
    def one(pointer: Value, expected: Value, value: Value) -> Value:
        fields = {"pointer": pointer, "expected": expected, "value": value}
        return v.b.value(ops.CompareExchange, value.type, **fields)

    _each(v, op, one, [op.expected, op.value], None)


def _each(
    v: Vectorizer,
    op: ops.Atomic | ops.CompareExchange,
    one: Callable[..., Value],
    operands: list[Value],
    mask: Value | None,
) -> None:
    """Carries out ``one`` for a scalar, or for every element of a tile."""
    type_ = op.result.type
    if not isinstance(type_, TileType):
        pointer, *values = (v.scalars[x] for x in (op.pointer, *operands))
        if mask is None:
            v.scalars[op.result] = one(pointer, *values)
        else:
            v.scalars[op.result] = _guarded(v, v.scalars[mask], lambda: one(pointer, *values))
        return
    pointers = memory.pointers_of(v, op.pointer)
    offsets = Tile(
        TileType(type_.shape, I64),
        v.lanes_of(type_),
        lambda row, column: pointers.offset(row, column, type_),
    )
    parts = [_written(v, t) for t in (offsets, *(v.tiles[x] for x in operands))]
    guard = None if mask is None else _written(v, v.tiles[mask])
    results = v.scratch(type_)

    def body(i: Value) -> None:
        offset, *values = (_element(v, p, i) for p in parts)
        pointer = v.b.addptr(pointers.base, offset)
        if guard is None:
            old = one(pointer, *values)
        else:
            old = _guarded(v, _element(v, guard, i), lambda: one(pointer, *values))
        place = v.b.addptr(results.pointer, i)
        v.b.emit(hw.VectorStore, pointer=place, value=old, mask=None)

    nest(v, [(math.prod(type_.shape), 1)], lambda indices: body(*indices))
    v.define(op.result, v.stored(type_, results))


def print_values(v: Vectorizer, op: ops.Print) -> None:
    shape = shape_of(op.values[0].type) if op.values else ()
    if not shape:
        values = tuple(v.scalars[x] for x in op.values)
        v.b.emit(ops.Print, prefix=op.prefix, indices=(), values=values)
        return
    parts = [_written(v, v.tiles[x]) for x in op.values]

    def body(i: Value) -> None:
        indices: list[Value] = []
        rest = i
        for size in reversed(shape):
            indices.insert(0, v.b.binary("mod", rest, v.b.i64(size)))
            rest = v.b.binary("div", rest, v.b.i64(size))
        values = tuple(_element(v, p, i) for p in parts)
        v.b.emit(ops.Print, prefix=op.prefix, indices=tuple(indices), values=values)

    nest(v, [(math.prod(shape), 1)], lambda indices: body(*indices))


def _written(v: Vectorizer, tile: Tile) -> Value:
    """The address of a tile's elements, one after another."""
    place = v.materialize(tile).place
    assert place is not None
    return place.pointer


def _element(v: Vectorizer, pointer: Value, i: Value) -> Value:
    assert isinstance(pointer.type, PointerType)
    place = v.b.addptr(pointer, i)
    return v.b.value(hw.VectorLoad, pointer.type.element, pointer=place, mask=None)


def _guarded(v: Vectorizer, condition: Value, make: Callable[[], Value]) -> Value:
    """What ``make`` gives where the condition holds, else 0."""
    then, other = Block(), Block()
    with v.b.inside(then):
        made = make()
        v.b.emit(ops.Yield, values=(made,))
    with v.b.inside(other):
        zero = v.b.constant(0.0 if scalar_of(made.type).is_float else 0, made.type)
        v.b.emit(ops.Yield, values=(zero,))
    return v.b.value(ops.If, made.type, condition=condition, then=then, other=other)
