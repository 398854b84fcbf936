"""What each function of :mod:`amxq.language` does while a kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amxq.language as tl
from amxq.frontend.descriptors import Int4Tensor, TensorDescriptor
from amxq.frontend.semantic import Mistake, Semantic, describe
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import I32, PointerType, TileType, element_of, scalar_of, shape_of

HANDLERS: dict[Any, Callable[..., Any]] = {}


def _implements(surface: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS[surface] = handler
        return handler

    return register


def _axis(axis: object) -> int:
    if type(axis) is int and 0 <= axis <= 2:
        return axis
    raise Mistake(f"axis {axis!r} of the grid", "it is the constant 0, 1 or 2")


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(s, int) or s < 1 for s in sizes):
        raise Mistake(
            f"shape {tuple(describe(s) for s in sizes)} is not made of constants",
            "tile shapes are compile-time constants: annotate BLOCK: tl.constexpr",
        )
    return sizes


@_implements(tl.program_id)
def _program_id(sem: Semantic, axis: object) -> Value:
    return sem.b.value(ops.ProgramId, I32, axis=_axis(axis))


@_implements(tl.num_programs)
def _num_programs(sem: Semantic, axis: object) -> Value:
    return sem.b.value(ops.NumPrograms, I32, axis=_axis(axis))


@_implements(tl.arange)
def _arange(sem: Semantic, start: object, end: object) -> Value:
    if not (isinstance(start, int) and isinstance(end, int) and start < end):
        raise Mistake(f"arange({start!r}, {end!r})", "both are constants, start < end")
    return sem.b.value(ops.Arange, TileType((end - start,), I32), start=start)


@_implements(tl.full)
def _full(sem: Semantic, shape: Any, value: Any, dtype: Any) -> Value:
    return sem.broadcast_to(sem.cast(value, dtype), _shape(shape))


@_implements(tl.zeros)
def _zeros(sem: Semantic, shape: Any, dtype: Any) -> Value:
    return sem.broadcast_to(sem.cast(0, dtype), _shape(shape))


@_implements(tl.expand_dims)
def _expand_dims(sem: Semantic, tile: Value, axis: int) -> Value:
    return sem.expand_dims(tile, axis)


@_implements(tl.broadcast_to)
def _broadcast_to(sem: Semantic, tile: Any, shape: Any) -> Value:
    return sem.broadcast_to(sem.value(tile), _shape(shape))


@_implements(tl.cast)
def _cast(sem: Semantic, value: Any, dtype: Any) -> Value:
    return sem.cast(value, dtype)


@_implements(tl.where)
def _where(sem: Semantic, condition: Any, x: Any, y: Any) -> Value:
    return sem.where(condition, x, y)


def _constant(*values: object) -> bool:
    return all(isinstance(v, (int, float)) for v in values)


@_implements(tl.maximum)
def _maximum(sem: Semantic, x: Any, y: Any) -> Any:
    return max(x, y) if _constant(x, y) else sem.binary("max", x, y)


@_implements(tl.minimum)
def _minimum(sem: Semantic, x: Any, y: Any) -> Any:
    return min(x, y) if _constant(x, y) else sem.binary("min", x, y)


@_implements(tl.cdiv)
def _cdiv(sem: Semantic, x: Any, div: Any) -> Any:
    if _constant(x, div):
        return -(-x // div)
    return sem.binary("floordiv", sem.binary("add", x, sem.binary("sub", div, 1)), div)


def _unary(kind: str) -> Callable[..., Any]:
    return lambda sem, x: sem.unary(kind, x)


HANDLERS |= {
    tl.abs: _unary("abs"),
    tl.sqrt: _unary("sqrt"),
    tl.floor: _unary("floor"),
    tl.ceil: _unary("ceil"),
    tl.exp: _unary("exp"),
    tl.exp2: _unary("exp2"),
    tl.log: _unary("log"),
    tl.log2: _unary("log2"),
    tl.rsqrt: _unary("rsqrt"),
    tl.sigmoid: _unary("sigmoid"),
    tl.tanh: _unary("tanh"),
    tl.erf: _unary("erf"),
    tl.sin: _unary("sin"),
    tl.cos: _unary("cos"),
}


@_implements(tl.fma)
def _fma(sem: Semantic, x: Any, y: Any, z: Any) -> Value:
    a, b = sem.common(x, y)
    a, c = sem.common(a, z)
    a, b = sem.common(a, b)
    if not scalar_of(a.type).is_float:
        raise Mistake(f"fma needs floats, got {a.type}")
    return sem.b.value(hw.Fma, a.type, a=a, b=b, c=c)


def _reduce(kind: str) -> Callable[..., Any]:
    return lambda sem, tile, axis: sem.reduce(kind, tile, axis)


HANDLERS |= {tl.sum: _reduce("add"), tl.max: _reduce("max"), tl.min: _reduce("min")}


@_implements(tl.load)
def _load(sem: Semantic, pointer: Any, mask: Any = None, other: Any = None) -> Value:
    return sem.load(pointer, mask, other)


@_implements(tl.store)
def _store(sem: Semantic, pointer: Any, value: Any, mask: Any = None) -> None:
    sem.store(pointer, value, mask)


@_implements(tl.make_tensor_descriptor)
def _descriptor(
    sem: Semantic, base: Any, shape: Any, strides: Any, block_shape: Any
) -> TensorDescriptor:
    return TensorDescriptor.make(sem, base, shape, strides, block_shape)


@_implements(tl.int4_tensor)
def _int4_tensor(
    sem: Semantic,
    qweight: Any,
    scales: Any,
    zeros: Any,
    shape: Any,
    group_size: Any,
    block_shape: Any,
) -> Int4Tensor:
    return Int4Tensor.make(sem, qweight, scales, zeros, shape, group_size, block_shape)


@_implements(tl.int4_order)
def _int4_order(sem: Semantic, tile: Any) -> Value:
    return sem.int4_order(tile)


@_implements(tl.dot)
def _dot(sem: Semantic, a: Any, b: Any, acc: Any = None) -> Value:
    return sem.dot(a, b, acc)


@_implements(tl.static_assert)
def _static_assert(sem: Semantic, condition: Any, message: str = "") -> None:
    if isinstance(condition, Value):
        raise Mistake("static_assert needs a constant condition")
    if not condition:
        raise Mistake(f"static_assert failed{': ' + message if message else ''}")


@_implements(tl.static_print)
def _static_print(sem: Semantic, *values: Any) -> None:
    print(*(describe(v) if isinstance(v, Value) else v for v in values))


METHODS: dict[str, Callable[..., Any]] = {
    "to": _cast,
    "sum": _reduce("add"),
    "max": _reduce("max"),
    "min": _reduce("min"),
}
"""Methods of values: ``tile.to(tl.float32)``."""


def attribute(sem: Semantic, value: Value, name: str) -> Any:
    """``value.name`` in a kernel: its shape, its dtype, or a bound method."""
    if name == "shape":
        return shape_of(value.type)
    if name == "dtype":
        element = element_of(value.type)
        return element.element if isinstance(element, PointerType) else element
    if name in METHODS:
        return lambda *args, **kwargs: METHODS[name](sem, value, *args, **kwargs)
    raise Mistake(f"{describe(value)} has no attribute {name!r}")
