"""Reductions along the last axis.

A short row is combined pairwise. A long one is a loop with eight independent sums, combined
pairwise after it; in both cases the order is fixed, so the result is too:

    %s0 … %s7 = for %c = 0 to N step 8·lanes inits=(identity …) { add %s0, part 0 … }
    %s  = horizontal add ((%s0 + %s1) + (%s2 + %s3)) + …
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import I1, DType, TileType
from amxq.passes.tiles import FIRST, REGISTER_VECTORS, Index, Place, Tile
from amxq.passes.traversal import LOOP_VECTORS

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def reduce(v: Vectorizer, op: ops.Reduce) -> None:
    source = v.tiles[op.operand]
    if not isinstance(op.result.type, TileType):
        made: list[Value] = []
        v.traversal.rows(source, lambda row: made.append(_row(v, source, op.kind, row)))
        v.scalars[op.result] = made[0]
        return
    flat = v.scratch(op.result.type)
    place = Place(flat.pointer, v.b.i64(1))

    def write(row: Index) -> None:
        pointer = v.element_pointer(place, row, FIRST)
        value = _row(v, source, op.kind, row)
        v.b.emit(hw.VectorStore, pointer=pointer, value=value, mask=None)

    v.traversal.rows(source, write)
    v.define(op.result, v.stored(op.result.type, flat))


def _row(v: Vectorizer, source: Tile, kind: str, row: Index) -> Value:
    if source.columns <= REGISTER_VECTORS:
        parts = v.traversal.columns(
            source, row, lambda column, _, parts: [*parts, source.at(row, column)], []
        )
    else:
        start = v.b.constant(identity(kind, source.dtype), source.part_type())

        def combine(column: Index, number: int, sums: list[Value]) -> list[Value]:
            sums[number] = v.b.binary(kind, sums[number], source.at(row, column))
            return sums

        parts = v.traversal.columns(source, row, combine, [start] * LOOP_VECTORS)
    while len(parts) > 1:  # pairwise, in a fixed order
        pairs = zip(parts[::2], parts[1::2])
        odd = parts[len(parts) & ~1 :]
        parts = [v.b.binary(kind, x, y) for x, y in pairs] + odd
    if source.lanes == 1:
        return parts[0]
    return v.b.value(hw.Horizontal, source.dtype, kind=kind, vector=parts[0])


def identity(kind: str, element: DType) -> int | float:
    """What changes nothing: -0.0 keeps the sign of a sum of zeros, and the minimum or maximum of
    NaN and a number is the number."""
    if element.is_float:
        return -0.0 if kind == "add" else math.nan
    if kind == "add":
        return 0
    low = -(1 << element.bits - 1) if element.is_signed else 0
    high = 1 if element == I1 else low + (1 << element.bits) - 1
    return low if kind == "max" else high
