"""What each function of :mod:`amxq.language` does while a kernel is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import amxq.language as tl
from amxq.frontend import effects, shapes, wording
from amxq.frontend.descriptors import BlockPointer, Int4Tensor, TensorDescriptor
from amxq.frontend.semantic import Mistake, Semantic, describe
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import I32, PointerType, element_of, scalar_of, shape_of

HANDLERS: dict[Any, Callable[..., Any]] = {}


def _implements(surface: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS[surface] = handler
        return handler

    return register


def _axis(axis: object) -> int:
    if type(axis) is int and 0 <= axis <= 2:
        return axis
    raise Mistake(f"the axis of the grid is {describe(axis)}", "it is the constant 0, 1 or 2")


@_implements(tl.program_id)
def _program_id(sem: Semantic, axis: object) -> Value:
    return sem.b.value(ops.ProgramId, I32, axis=_axis(axis))


@_implements(tl.num_programs)
def _num_programs(sem: Semantic, axis: object) -> Value:
    return sem.b.value(ops.NumPrograms, I32, axis=_axis(axis))


@_implements(tl.arange)
def _arange(sem: Semantic, start: object, end: object) -> Value:
    return sem.arange(start, end)


@_implements(tl.full)
def _full(sem: Semantic, shape: Any, value: Any, dtype: Any) -> Value:
    return sem.broadcast_to(sem.cast(value, dtype), shapes.sizes_of(shape))


@_implements(tl.zeros)
def _zeros(sem: Semantic, shape: Any, dtype: Any) -> Value:
    return sem.broadcast_to(sem.cast(0, dtype), shapes.sizes_of(shape))


@_implements(tl.expand_dims)
def _expand_dims(sem: Semantic, tile: Value, axis: int) -> Value:
    return sem.expand_dims(tile, axis)


def _spread(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or dimensions, given one by one or as one tuple."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


@_implements(tl.broadcast_to)
def _broadcast_to(sem: Semantic, tile: Any, *shape: Any) -> Value:
    return sem.broadcast_to(sem.value(tile), shapes.sizes_of(_spread(shape)))


@_implements(tl.zeros_like)
def _zeros_like(sem: Semantic, tile: Any) -> Value:
    value = sem.value(tile)
    return sem.broadcast_to(sem.cast(0, element_of(value.type)), shape_of(value.type))


def _reshape(sem: Semantic, tile: Any, *shape: Any) -> Value:
    return shapes.reshape(sem, tile, shapes.sizes_of(_spread(shape)))


HANDLERS |= {tl.reshape: _reshape, tl.view: _reshape}


@_implements(tl.ravel)
def _ravel(sem: Semantic, tile: Any) -> Value:
    return shapes.reshape(sem, tile, (math.prod(shape_of(sem.value(tile).type)),))


@_implements(tl.permute)
def _permute(sem: Semantic, tile: Any, *dims: Any) -> Value:
    return shapes.permute(sem, tile, _spread(dims))


@_implements(tl.trans)
def _trans(sem: Semantic, tile: Any, *dims: Any) -> Value:
    rank = len(shape_of(sem.value(tile).type))
    if dims:
        return shapes.permute(sem, tile, _spread(dims))
    if rank < 2:
        raise Mistake(
            f"cannot transpose {describe(sem.value(tile))}",
            "expected a tile of rank 2 or 3; tile[:, None] makes a column of one of rank 1",
        )
    return shapes.permute(sem, tile, (*range(rank - 2), rank - 1, rank - 2))


@_implements(tl.cast)
def _cast(
    sem: Semantic, value: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False
) -> Value:
    if fp_downcast_rounding not in (None, "rtne"):
        raise Mistake(
            f"the rounding is {describe(fp_downcast_rounding)}",
            'casts round to nearest even, "rtne"',
        )
    return sem.cast(value, dtype, bitcast)


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
    def handler(sem: Semantic, x: Any) -> Value:
        return sem.unary(kind, x)

    handler.__qualname__ = f"_{kind}"  # for messages
    return handler


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


@_implements(tl.clamp)
def _clamp(sem: Semantic, x: Any, min: Any, max: Any) -> Value:
    return sem.binary("min", sem.binary("max", x, min), max)


@_implements(tl.swizzle2d)
def _swizzle2d(
    sem: Semantic, i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any
) -> tuple[Value, Value]:
    ij = sem.binary("add", sem.binary("mul", i, size_j), j)
    size_gj = sem.binary("mul", size_g, size_j)
    first = sem.binary("mul", sem.binary("floordiv", ij, size_gj), size_g)
    rows = sem.binary("min", sem.binary("sub", size_i, first), size_g)
    ij = sem.binary("mod", ij, size_gj)
    row = sem.binary("add", first, sem.binary("mod", ij, rows))
    return row, sem.binary("floordiv", ij, rows)


@_implements(tl.sum)
def _sum(sem: Semantic, tile: Any, axis: Any = None, keep_dims: bool = False) -> Value:
    return shapes.reduce(sem, "add", tile, axis, keep_dims)


def _extremum(kind: str) -> Callable[..., Any]:
    def handler(
        sem: Semantic,
        tile: Any,
        axis: Any = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:
        best = shapes.reduce(sem, kind, tile, axis, keep_dims)
        if not return_indices:
            return best
        return best, shapes.arg_reduce(sem, kind, tile, axis, keep_dims)

    return handler


def _arg(kind: str) -> Callable[..., Any]:
    def handler(
        sem: Semantic, tile: Any, axis: Any, tie_break_left: bool = True, keep_dims: bool = False
    ) -> Value:
        return shapes.arg_reduce(sem, kind, tile, axis, keep_dims)

    return handler


HANDLERS |= {
    tl.max: _extremum("max"),
    tl.min: _extremum("min"),
    tl.argmax: _arg("max"),
    tl.argmin: _arg("min"),
}


@_implements(tl.reduce)
def _reduce(sem: Semantic, input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False) -> Any:
    return shapes.combine(sem, "reduce", input, axis, combine_fn, keep_dims=keep_dims)


@_implements(tl.associative_scan)
def _associative_scan(
    sem: Semantic, input: Any, axis: Any, combine_fn: Any, reverse: bool = False
) -> Any:
    return shapes.combine(sem, "scan", input, axis, combine_fn, reverse)


def _running(kind: str) -> Callable[..., Any]:
    def handler(
        sem: Semantic, input: Any, axis: Any = 0, reverse: bool = False, dtype: Any = None
    ) -> Value:
        return shapes.running(sem, kind, input, axis, reverse, dtype)

    return handler


HANDLERS |= {tl.cumsum: _running("add"), tl.cumprod: _running("mul")}


@_implements(tl.load)
def _load(
    sem: Semantic,
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: str = "",
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Value:
    if not isinstance(pointer, BlockPointer):
        return sem.load(pointer, mask, other)
    if mask is not None or other is not None:
        raise Mistake("a block pointer takes no mask", "use boundary_check and padding_option")
    return pointer.load(boundary_check, padding_option)


@_implements(tl.store)
def _store(
    sem: Semantic,
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:
    if not isinstance(pointer, BlockPointer):
        sem.store(pointer, value, mask)
    elif mask is not None:
        raise Mistake("a block pointer takes no mask", "use boundary_check")
    else:
        pointer.store(value, boundary_check)


@_implements(tl.prefetch)
def _prefetch(sem: Semantic, pointer: Any) -> None:
    if not isinstance(pointer, Value) or not isinstance(pointer.type, PointerType):
        raise Mistake(f"prefetch takes one pointer, not {describe(pointer)}", "index by scalars")
    sem.b.emit(hw.Prefetch, pointer=pointer, locality=3)


@_implements(tl.make_block_ptr)
def _make_block_ptr(
    sem: Semantic,
    base: Any,
    shape: Any,
    strides: Any,
    offsets: Any,
    block_shape: Any,
    order: Any = None,
) -> BlockPointer:
    return BlockPointer.make(sem, base, shape, strides, offsets, block_shape)


@_implements(tl.advance)
def _advance(sem: Semantic, pointer: Any, offsets: Any) -> BlockPointer:
    if not isinstance(pointer, BlockPointer):
        raise Mistake(f"expected a block pointer, got {describe(pointer)}")
    return pointer.advanced(offsets)


def _atomic(kind: str) -> Callable[..., Any]:
    def handler(
        semantic: Semantic,
        pointer: Any,
        value: Any,
        mask: Any = None,
        sem: Any = None,
        scope: Any = None,
    ) -> Value:
        return effects.atomic(semantic, kind, pointer, value, mask)

    return handler


HANDLERS |= {
    tl.atomic_add: _atomic("add"),
    tl.atomic_max: _atomic("max"),
    tl.atomic_min: _atomic("min"),
    tl.atomic_and: _atomic("and"),
    tl.atomic_or: _atomic("or"),
    tl.atomic_xor: _atomic("xor"),
    tl.atomic_xchg: _atomic("exchange"),
}


@_implements(tl.atomic_cas)
def _atomic_cas(
    semantic: Semantic, pointer: Any, cmp: Any, value: Any, sem: Any = None, scope: Any = None
) -> Value:
    return effects.compare_exchange(semantic, pointer, cmp, value)


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
def _dot(
    sem: Semantic,
    a: Any,
    b: Any,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = None,
) -> Value:
    return sem.dot(a, b, acc, out_dtype)


@_implements(tl.static_assert)
def _static_assert(sem: Semantic, condition: Any, message: str = "") -> None:
    if isinstance(condition, Value):
        raise Mistake("static_assert needs a constant condition")
    if not condition:
        raise Mistake(f"static_assert failed{': ' + message if message else ''}")


@_implements(tl.static_print)
def _static_print(sem: Semantic, *values: Any) -> None:
    print(*(describe(v) if isinstance(v, Value) else v for v in values))


@_implements(tl.device_print)
def _device_print(sem: Semantic, prefix: Any, *values: Any) -> None:
    effects.print_values(sem, prefix, values)


def _promise(sem: Semantic, value: Any, values: Any) -> Any:
    return value


HANDLERS |= {
    tl.assume: lambda sem, condition: None,
    tl.debug_barrier: lambda sem: None,
    tl.multiple_of: _promise,
    tl.max_contiguous: _promise,
    tl.max_constancy: _promise,
}

METHODS: dict[str, Callable[..., Any]] = {
    "to": _cast,
    **{
        name: HANDLERS[getattr(tl, name)]
        for name in (
            *("abs", "cast", "exp", "exp2", "log", "log2", "rsqrt", "sqrt", "sigmoid", "floor"),
            *("sum", "max", "min", "argmax", "argmin", "reduce", "associative_scan", "cumsum"),
            *("cumprod", "reshape", "view", "ravel", "trans", "permute", "broadcast_to"),
            "expand_dims",
        )
    },
}
"""Methods of values: ``tile.to(tl.float32)``."""


def attribute(sem: Semantic, value: Value, name: str) -> Any:
    """``value.name`` in a kernel: what its type says, its transpose, or a bound method."""
    if name == "shape":
        return shape_of(value.type)
    if name == "type":
        return value.type
    if name == "dtype":
        element = element_of(value.type)
        return element.element if isinstance(element, PointerType) else element
    if name == "T":
        return _trans(sem, value)
    if name in METHODS:
        return lambda *args, **kwargs: METHODS[name](sem, value, *args, **kwargs)
    names = ("shape", "type", "dtype", "T", *METHODS)
    raise Mistake(*wording.missing_attribute(value, name, names))
