"""Vectorisation of what moves elements between rows: permute, reshape, and reductions along
another axis than the last. They go through scratch memory.

Before:  %s = reduce kind=add operand=%x axis=0 : tile<64xf32>              (%x: tile<100x64xf32>)
After:   %m = scratch                                                       (%x, row by row)
         %s0 … %s3 = for %i = 0 to 100 { add %s0, vector_load %m + 64 · %i … }
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Value
from amxq.ir.types import I64, DType, TileType, Type, VectorType, shape_of
from amxq.passes.tiles import Place

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

_ACCUMULATORS = 8
"""Vectors that are summed side by side: enough to cover the latency of an addition."""


def reshape(v: Vectorizer, op: ops.Reshape) -> None:
    assert isinstance(op.result.type, TileType)
    place = Place(written(v, op.operand), v.b.i64(op.result.type.shape[-1]))
    v.define(op.result, v.stored(op.result.type, place))


def permute(v: Vectorizer, op: ops.Permute) -> None:
    """Each vector of the result is gathered from, or lies in, the source."""
    type_ = op.result.type
    assert isinstance(type_, TileType) and isinstance(type_.element, DType)
    source, sizes = written(v, op.operand), shape_of(op.operand.type)
    strides = [math.prod(sizes[axis + 1 :]) for axis in op.order]
    result, lanes, b = v.scratch(type_), v.lanes_of(type_), v.b
    part = _part(type_.element, lanes)

    def vector(indices: list[Value]) -> None:
        terms = [b.mul(i, b.i64(s)) for i, s in zip(indices, strides)]
        pointer = b.addptr(source, _sum(v, terms))
        if lanes == 1 or strides[-1] == 1:
            value = b.value(hw.VectorLoad, part, pointer=pointer, mask=None)
        else:
            steps = tuple(i * strides[-1] for i in range(lanes))
            offsets = b.value(ops.Constant, VectorType(lanes, I64), value=steps)
            value = b.value(hw.Gather, part, pointer=pointer, offsets=offsets, mask=None)
        own = [math.prod(type_.shape[axis + 1 :]) for axis in range(len(indices))]
        at = _sum(v, [b.mul(i, b.i64(s)) for i, s in zip(indices, own)])
        b.emit(hw.VectorStore, pointer=b.addptr(result.pointer, at), value=value, mask=None)

    steps = [*(1 for _ in sizes[:-1]), lanes]
    nest(v, list(zip(type_.shape, steps)), vector)
    v.define(op.result, v.stored(type_, result))


def reduce(v: Vectorizer, op: ops.Reduce) -> None:
    """A reduction of the middle of [outer, count, inner]."""
    type_, b = op.result.type, v.b
    assert isinstance(type_, TileType) and isinstance(type_.element, DType)
    source, shape = written(v, op.operand), shape_of(op.operand.type)
    outer, inner = math.prod(shape[: op.axis]), math.prod(shape[op.axis + 1 :])
    count, lanes = shape[op.axis], math.gcd(inner, v.lanes)
    vectors = next(n for n in range(_ACCUMULATORS, 0, -1) if inner // lanes % n == 0)
    result, part = v.scratch(type_), _part(type_.element, lanes)

    def loads(first: Value) -> list[Value]:
        pointers = (b.addptr(first, b.i64(j * lanes)) for j in range(vectors))
        return [b.value(hw.VectorLoad, part, pointer=p, mask=None) for p in pointers]

    def column(indices: list[Value]) -> None:
        o, c = indices
        first = b.addptr(source, b.add(b.mul(o, b.i64(count * inner)), c))
        start = loads(first)
        loop = Block((Value(I64, "i"), *(Value(part) for _ in start)))
        with b.inside(loop):
            new = loads(b.addptr(first, b.mul(loop.args[0], b.i64(inner))))
            sums = (b.binary(op.kind, x, y) for x, y in zip(loop.args[1:], new))
            b.emit(ops.Yield, values=tuple(sums))
        lower, upper, step = b.i64(1), b.i64(count), b.i64(1)
        made = b.emit(
            ops.For,
            *(part for _ in start),
            lower=lower,
            upper=upper,
            step=step,
            inits=tuple(start),
            body=loop,
        )
        to = b.addptr(result.pointer, b.add(b.mul(o, b.i64(inner)), c))
        for j, value in enumerate(made.results):
            pointer = b.addptr(to, b.i64(j * lanes))
            b.emit(hw.VectorStore, pointer=pointer, value=value, mask=None)

    nest(v, [(outer, 1), (inner, vectors * lanes)], column)
    v.define(op.result, v.stored(type_, result))


def written(v: Vectorizer, value: Value) -> Value:
    """The address of a tile's elements, one after another."""
    place = v.materialize(v.tiles[value]).place
    assert place is not None
    return place.pointer


def _part(element: DType, lanes: int) -> Type:
    return element if lanes == 1 else VectorType(lanes, element)


def _sum(v: Vectorizer, terms: list[Value]) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = v.b.add(total, term)
    return total


def transposed(b: Builder, rows: list[Value]) -> list[Value]:
    """The columns of vectors of equal type, as many as a power of two and no fewer than lanes.
    The first half of them is interleaved with the second, and so on until one row is left."""
    parts = [[row] for row in rows]
    while len(parts) > 1:
        half = len(parts) // 2
        pairs = zip(parts[:half], parts[half:])
        parts = [
            [both for x, y in zip(*pair) for both in _interleaved(b, x, y, len(rows))]
            for pair in pairs
        ]
    return parts[0]


def _interleaved(b: Builder, x: Value, y: Value, most: int) -> list[Value]:
    """x[0], y[0], x[1], y[1], … in one vector, or in two if it had more than ``most`` lanes."""
    assert isinstance(x.type, VectorType)
    lanes = x.type.lanes
    order = [i + lanes * side for i in range(lanes) for side in range(2)]
    size = min(2 * lanes, most)
    type_ = VectorType(size, x.type.element)
    return [
        b.value(hw.Shuffle, type_, vector=x, other=y, lanes=tuple(order[i : i + size]))
        for i in range(0, 2 * lanes, size)
    ]


def nest(v: Vectorizer, loops: list[tuple[int, int]], body: Callable[[list[Value]], None]) -> None:
    """``body`` for every index of nested loops, each from 0 to a size in steps."""
    if not loops:
        body([])
        return
    (size, by), *inner = loops
    if size == by:
        zero = v.b.i64(0)
        nest(v, inner, lambda indices: body([zero, *indices]))
        return
    loop = Block((Value(I64, "i"),))
    with v.b.inside(loop):
        nest(v, inner, lambda indices: body([loop.args[0], *indices]))
        v.b.emit(ops.Yield, values=())
    lower, upper, step = v.b.i64(0), v.b.i64(size), v.b.i64(by)
    v.b.emit(ops.For, lower=lower, upper=upper, step=step, inits=(), body=loop)
