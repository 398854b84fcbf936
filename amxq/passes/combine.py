"""Vectorisation of reductions and scans by a function.

Before:  %s = combine kind=scan operands=(%x) axis=0 reverse=False : tile<100x64xf32> {
           ^(%a: f32, %b: f32) … yield values=(%c) }
After:   %x, %s = scratch                                            (row by row)
         for %j = 0 to 64 step 64 {
           for %i = 0 to 99 inits=(vector_load %x + %j …) { ^(%i: i64, %a: vec<16xf32> …)
             %b = vector_load … ; … ; vector_store %s … ; yield values=(%c …) } }

The elements along the axis are combined one after another, in vectors of what lies beside them in
memory. Several of those go side by side: columns, or rows where the axis is the last one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import DType, TileType, Type, VectorType, scalar_of, shape_of
from amxq.passes.rearrange import nest, written
from amxq.passes.tiles import Place

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

_SIDE_BY_SIDE = 8
"""Vectors that are combined at a time: enough to cover the latency of an addition."""


def lower(v: Vectorizer, op: ops.Combine) -> None:
    b, shape, scan = v.b, shape_of(op.operands[0].type), op.kind == "scan"
    outer, inner = math.prod(shape[: op.axis]), math.prod(shape[op.axis + 1 :])
    count, lanes = shape[op.axis], math.gcd(inner, v.lanes)
    types = [scalar_of(x.type) for x in op.operands]
    sources = [written(v, x) for x in op.operands]
    results = [v.scratch(TileType(shape if scan else (outer, inner), t)).pointer for t in types]
    beside = inner // lanes if inner > 1 else outer
    chains = next(n for n in range(_SIDE_BY_SIDE, 0, -1) if beside % n == 0)

    def at(base: Value, length: int, place: list[Value], i: Value, chain: int) -> Value:
        """The address of element ``i`` of a chain in a tile [outer, length, inner]."""
        o, c = place
        first = b.add(c, b.i64(chain * (lanes if inner > 1 else length)))
        row = b.add(b.mul(o, b.i64(length)), i)
        return b.addptr(base, b.add(b.mul(row, b.i64(inner)), first))

    def loads(place: list[Value], i: Value) -> list[Value]:
        """The elements of every chain, those of all operands together."""
        return [
            b.value(
                hw.VectorLoad, _part(t, lanes), pointer=at(x, count, place, i, chain), mask=None
            )
            for chain in range(chains)
            for x, t in zip(sources, types)
        ]

    def stores(place: list[Value], length: int, i: Value, values: list[Value]) -> None:
        for j, value in enumerate(values):
            chain, operand = divmod(j, len(types))
            pointer = at(results[operand], length, place, i, chain)
            b.emit(hw.VectorStore, pointer=pointer, value=value, mask=None)

    def column(place: list[Value]) -> None:
        last = b.i64(count - 1)
        first = last if op.reverse else b.i64(0)
        start = loads(place, first)
        if scan:
            stores(place, count, first, start)

        def step(k: Value, carried: list[Value]) -> list[Value]:
            i = b.sub(b.i64(count - 2), k) if op.reverse else b.add(k, b.i64(1))
            new, n = loads(place, i), len(types)
            for j in range(0, len(new), n):
                carried[j : j + n] = _combined(v, op, carried[j : j + n] + new[j : j + n], lanes)
            if scan:
                stores(place, count, i, carried)
            return carried

        total = b.loop(count - 1, 1, step, start)
        if not scan:
            stores(place, 1, b.i64(0), total)

    rows, columns = (1, chains * lanes) if inner > 1 else (chains, 1)
    nest(v, [(outer, rows), (inner, columns)], column)
    for result, pointer in zip(op.results, results):
        if isinstance(result.type, TileType):
            home = Place(pointer, b.i64(result.type.shape[-1]))
            v.define(result, v.stored(result.type, home))
        else:
            v.scalars[result] = b.value(hw.VectorLoad, result.type, pointer=pointer, mask=None)


def _combined(v: Vectorizer, op: ops.Combine, args: list[Value], lanes: int) -> list[Value]:
    """What the function gives for vectors in place of its scalars."""
    known = dict(zip(op.body.args, args))

    def part(x: Value) -> Value:
        return known[x] if x in known else v.splat(v.scalars[x], lanes)

    *body, last = op.body.ops
    for inner in body:
        fields: dict[str, Any] = {
            k: part(x) if isinstance(x, Value) else x for k, x in ops.fields_of(inner).items()
        }
        type_ = _part(scalar_of(inner.result.type), lanes)
        known[inner.result] = v.b.value(type(inner), type_, **fields)
    return [part(x) for x in ops.operands(last)]


def _part(element: DType, lanes: int) -> Type:
    return element if lanes == 1 else VectorType(lanes, element)
