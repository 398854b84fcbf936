"""Dots of batches: a loop over dots of two dimensions.

Before:  %c = dot lhs=%a rhs=%b acc=%s … : tile<4x64x32xf32>     (%a: tile<4x64x16xf32>)
After:   %a, %b, %c = scratch                                    (%c = %s)
         for %i = 0 to 4 { a dot of %a + 1024 · %i, %b + 512 · %i, sums in %c + 2048 · %i }
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import TileType
from amxq.passes import dot_dense
from amxq.passes.dot_vector import place_of
from amxq.passes.tiles import Place

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def lower(v: Vectorizer, op: ops.Dot) -> None:
    type_, b = op.result.type, v.b
    assert isinstance(type_, TileType)
    home = v.destinations.get(op.result) or v.scratch(type_)
    if op.acc is not None and v.tiles[op.acc].place != home:
        v.materialize(v.tiles[op.acc], home)
    places = place_of(v, op.lhs), place_of(v, op.rhs)

    def one(i: Value, _: list[Value]) -> list[Value]:
        def part(whole: Value, place: Place) -> tuple[Value, Place]:
            """One member of a batch, as a tile that lies in memory."""
            assert isinstance(whole.type, TileType)
            type_ = TileType(whole.type.shape[1:], whole.type.element)
            first = b.mul(b.mul(i, b.i64(type_.shape[0])), place.stride)
            member = Value(type_), Place(b.addptr(place.pointer, first), place.stride)
            v.tiles[member[0]] = v.stored(type_, member[1])
            return member

        lhs, rhs = (part(x, place)[0] for x, place in zip((op.lhs, op.rhs), places))
        sums, at = part(op.result, home)
        acc = None if op.acc is None else sums
        v.destinations[sums] = at
        dot = dataclasses.replace(op, results=(sums,), lhs=lhs, rhs=rhs, acc=acc)
        dot_dense.lower(v, dot)
        if v.tiles[sums].place != at:
            v.materialize(v.tiles[sums], at)
        return []

    b.loop(type_.shape[0], 1, one)
    v.define(op.result, v.stored(type_, home))
