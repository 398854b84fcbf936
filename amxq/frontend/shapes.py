"""Typing rules of what changes a tile's shape: reductions, transposition, reshaping."""

from __future__ import annotations

import math
from typing import Any

from amxq.frontend.semantic import Mistake, Operand, Semantic, describe, numbers
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import BF16, F16, F32, I32, U32, TileType, element_of, scalar_of, shape_of


def axis_of(axis: Any, rank: int, shape: tuple[int, ...]) -> int:
    """An axis counted from the front."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise Mistake(f"axis {axis!r} of a tile of shape {list(shape)}")
    return axis % rank


def reduce(sem: Semantic, kind: str, x: Operand, axis: Any, keep_dims: bool) -> Value:
    """The sum, minimum or maximum along an axis, or of all elements where it is None."""
    x = numbers(sem.value(x))
    shape = shape_of(x.type)
    if not shape:
        raise Mistake(f"expected a tile of numbers, got {describe(x)}")
    element = scalar_of(x.type)
    if kind == "add" and element in (BF16, F16):
        x = sem.b.cast(x, F32)
    elif kind == "add" and not element.is_float and element.bits < 32:
        x = sem.b.cast(x, U32 if element.kind == "uint" else I32)
    axes = range(len(shape)) if axis is None else (axis_of(axis, len(shape), shape),)
    for a in reversed(axes):
        left = shape_of(x.type)
        rest = (*left[:a], *left[a + 1 :])
        out = TileType(rest, scalar_of(x.type)) if rest else scalar_of(x.type)
        x = sem.b.value(ops.Reduce, out, kind=kind, operand=x, axis=a)
    if not keep_dims:
        return x
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return reshape(sem, x, kept) if shape_of(x.type) else sem.broadcast_to(x, kept)


def arg_reduce(sem: Semantic, kind: str, x: Operand, axis: Any, keep_dims: bool) -> Value:
    """The int32 index of the first minimum or maximum along an axis; of the flattened tile
    where the axis is None. NaN is chosen where there is nothing else, the first one."""
    x = numbers(sem.value(x))
    shape = shape_of(x.type)
    if axis is None:
        flat = arg_reduce(sem, kind, reshape(sem, x, (math.prod(shape),)), 0, False)
        return sem.broadcast_to(flat, (1,) * len(shape)) if keep_dims else flat
    axis = axis_of(axis, len(shape), shape)
    best = reduce(sem, kind, x, axis, keep_dims=True)
    index = sem.arange(0, shape[axis])
    for i in range(len(shape)):
        if i != axis:
            index = sem.expand_dims(index, i)
    equal = sem.compare("eq", x, best)
    if scalar_of(x.type).is_float:
        equal = sem.binary("or", equal, sem.compare("ne", best, best))
    return reduce(sem, "min", sem.where(equal, index, shape[axis] - 1), axis, keep_dims)


def permute(sem: Semantic, x: Operand, order: tuple[Any, ...]) -> Value:
    """Dimension i of the result is dimension order[i] of x."""
    x = numbers(sem.value(x))
    shape = shape_of(x.type)
    axes = tuple(axis_of(a, len(shape), shape) for a in order)
    if sorted(axes) != list(range(len(shape))):
        raise Mistake(f"cannot permute shape {list(shape)} by {list(order)}")
    if axes == tuple(range(len(shape))):
        return x
    type_ = TileType(tuple(shape[a] for a in axes), element_of(x.type))
    return sem.b.value(ops.Permute, type_, operand=x, order=axes)


def reshape(sem: Semantic, x: Operand, shape: tuple[int, ...]) -> Value:
    """The same elements, row-major, in another shape."""
    x = numbers(sem.value(x))
    have = shape_of(x.type)
    if math.prod(have) != math.prod(shape) or not have:
        raise Mistake(
            f"cannot reshape {list(have)} to {list(shape)}",
            f"that is {math.prod(have)} elements against {math.prod(shape)}",
        )
    if have == shape:
        return x
    return sem.b.value(ops.Reshape, TileType(shape, element_of(x.type)), operand=x)
