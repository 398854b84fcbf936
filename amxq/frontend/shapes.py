"""Typing rules of reductions, scans, transposition, and reshaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from amxq.frontend.semantic import Mistake, Operand, Semantic, describe, numbers
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    I32,
    U32,
    DType,
    TileType,
    element_of,
    scalar_of,
    shape_of,
)


def sizes_of(shape: Any, what: str = "shape") -> tuple[int, ...]:
    """The sizes of a tile, as a kernel gives them."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if any(not isinstance(s, int) for s in sizes):
        raise Mistake(
            f"{what} {describe(sizes)} is not made of constants",
            "the shapes of tiles are known at compile time: annotate BLOCK: tl.constexpr",
        )
    if not 1 <= len(sizes) <= 3 or any(s < 1 for s in sizes):
        raise Mistake(f"{what} {list(sizes)}", "tiles have 1 to 3 dimensions, each of 1 or more")
    return sizes


def axis_of(axis: Any, rank: int, shape: tuple[int, ...]) -> int:
    """An axis counted from the front."""
    if not isinstance(axis, int):
        raise Mistake(f"the axis is {describe(axis)}, it must be a constant integer")
    if not -rank <= axis < rank:
        hint = f"its axes are {-rank} to {rank - 1}"
        raise Mistake(f"axis {axis} of a tile of shape {list(shape)}", hint)
    return axis % rank


def flag(name: str, value: object) -> bool:
    """A choice that is made when the kernel is compiled."""
    if not isinstance(value, int):
        raise Mistake(f"{name} is {describe(value)}, it must be a constant, True or False")
    return bool(value)


def reduce(sem: Semantic, kind: str, x: Operand, axis: Any, keep_dims: bool) -> Value:
    """The sum, minimum or maximum along an axis, or of all elements where it is None."""
    x = numbers(sem.value(x))
    shape = shape_of(x.type)
    if not shape:
        raise Mistake(f"expected a tile of numbers, got {describe(x)}")
    if kind == "add":
        x = sem.b.cast(x, summed(scalar_of(x.type)))
    axes = range(len(shape)) if axis is None else (axis_of(axis, len(shape), shape),)
    for a in reversed(axes):
        left = shape_of(x.type)
        rest = (*left[:a], *left[a + 1 :])
        out = TileType(rest, scalar_of(x.type)) if rest else scalar_of(x.type)
        x = sem.b.value(ops.Reduce, out, kind=kind, operand=x, axis=a)
    return _kept(sem, x, shape, axes) if flag("keep_dims", keep_dims) else x


def summed(element: DType) -> DType:
    """What elements add up in."""
    if element.is_float:
        return F32 if element in (BF16, F16) else element
    return element if element.bits >= 32 else U32 if element.kind == "uint" else I32


def _kept(sem: Semantic, x: Value, shape: tuple[int, ...], axes: Sequence[int]) -> Value:
    """What a reduction of a tile along ``axes`` gave, with dimensions of size 1 for them."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return reshape(sem, x, kept) if shape_of(x.type) else sem.broadcast_to(x, kept)


def beyond(function: str) -> Mistake:
    """What is said of a combine_fn of that name that does anything else than it may."""
    return Mistake(
        f"{function} does more than computing with its arguments",
        "a combine_fn works element by element: use tl.where instead of if; loads, stores, loops "
        "and the program's place in the grid are not possible there",
    )


def combine(
    sem: Semantic,
    kind: str,
    x: Any,
    axis: Any,
    function: object,
    reverse: bool = False,
    keep_dims: bool = False,
) -> Any:
    """A reduction or a scan, by ``function``, of a tile or a tuple of them."""
    tiles = [numbers(sem.value(t)) for t in (x if isinstance(x, tuple) else (x,))]
    if not tiles or not shape_of(tiles[0].type):
        raise Mistake(f"expected a tile of numbers, or several, got {describe(x)}")
    shape = shape_of(tiles[0].type)
    if any(shape_of(t.type) != shape for t in tiles):
        raise Mistake(f"the tiles have different shapes: {', '.join(map(describe, tiles))}")
    if not isinstance(function, partial):  # what the two modes make of a jit function
        raise Mistake(f"combine_fn is {describe(function)}", "it is a function under @amxq.jit")
    whole = axis is None and kind == "reduce"
    if whole:
        tiles = [reshape(sem, t, (math.prod(shape),)) for t in tiles]
    axis = 0 if whole else axis_of(axis, len(shape), shape)

    def combined(*args: Value) -> list[Value]:
        found = function(*args)
        given = found if isinstance(found, tuple) else (found,)
        if len(given) != len(tiles):
            raise Mistake(f"combine_fn returns {len(given)} values for {len(tiles)} tiles")
        values = []
        for new, old in zip(given, args):
            value = sem.value(new, scalar_of(old.type))
            if scalar_of(value.type) != scalar_of(old.type):
                raise Mistake(
                    f"combine_fn returns {value.type} where it takes {old.type}",
                    "convert the tile before, or the result with .to()",
                )
            values.append(sem.broadcast_to(value, shape_of(old.type)))
        return values

    made = sem.b.combine(kind, tiles, axis, flag("reverse", reverse), combined)
    if flag("keep_dims", keep_dims):
        axes = range(len(shape)) if whole else (axis,)
        made = tuple(_kept(sem, m, shape, axes) for m in made)
    return tuple(made) if isinstance(x, tuple) else made[0]


def running(sem: Semantic, kind: str, x: Operand, axis: Any, reverse: bool, dtype: object) -> Value:
    """Sums or products of the elements up to each one."""
    x = numbers(sem.value(x))
    x = sem.cast(x, summed(scalar_of(x.type)) if dtype is None else dtype)
    scan = combine(sem, "scan", x, axis, partial(sem.binary, kind), reverse)
    assert isinstance(scan, Value)
    return scan


def arg_reduce(sem: Semantic, kind: str, x: Operand, axis: Any, keep_dims: bool) -> Value:
    """The int32 index of the first minimum or maximum along an axis; of the flattened tile
    where the axis is None. NaN is chosen where there is nothing else, the first one."""
    x = numbers(sem.value(x))
    shape = shape_of(x.type)
    if axis is None:
        flat = arg_reduce(sem, kind, reshape(sem, x, (math.prod(shape),)), 0, False)
        return sem.broadcast_to(flat, (1,) * len(shape)) if flag("keep_dims", keep_dims) else flat
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
        raise Mistake(f"cannot permute shape {list(shape)} by {list(axes)}", "name each axis once")
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
