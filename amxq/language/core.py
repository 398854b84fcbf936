"""The documented surface of the kernel language. The functions here have no body: inside an
``@amxq.jit`` function the compiler gives them their meaning (:mod:`amxq.frontend.builtins`),
outside one they raise.

A *tile* is a block of values with a static shape. Scalars and tiles mix by broadcasting, and
types by Triton's promotion rules: a Python number takes the type of the other operand, bf16
with f32 gives f32, bf16 with f16 gives f32, the wider integer wins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from amxq.ir import types as _types

int1, int8, int16, int32, int64 = _types.I1, _types.I8, _types.I16, _types.I32, _types.I64
uint8, uint16, uint32, uint64 = _types.U8, _types.U16, _types.U32, _types.U64
bfloat16, float16, float32, float64 = _types.BF16, _types.F16, _types.F32, _types.F64


class constexpr:
    """A value known while a kernel is compiled.

    As an annotation, ``BLOCK: tl.constexpr``, it marks a parameter whose value is compiled in. As
    a value, ``WIDTH = tl.constexpr(4)``, it is a global constant; plain numbers, strings and
    tuples are such constants too.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


_F = TypeVar("_F", bound=Callable[..., Any])


interpreting: ContextVar[Any] = ContextVar("interpreting", default=None)
"""The interpreter's program that runs in this thread, which calls of the language go to."""


def builtin(function: _F) -> _F:
    """Marks a function as one that only the compiler and the interpreter give a meaning."""

    def outside_of_a_kernel(*args: Any, **kwargs: Any) -> Any:
        interpreter = interpreting.get()
        if interpreter is not None:
            return interpreter(outside_of_a_kernel, args, kwargs)
        raise RuntimeError(
            f"amxq.language.{function.__name__} works inside an @amxq.jit kernel only; "
            "call the kernel as kernel[grid](...)"
        )

    functools.update_wrapper(outside_of_a_kernel, function)
    return outside_of_a_kernel  # type: ignore[return-value]


# --- the grid ---------------------------------------------------------------------------


@builtin
def program_id(axis: int) -> Any:
    """Index of this program along grid axis 0, 1 or 2, an int32 scalar. Axis 0 runs fastest."""


@builtin
def num_programs(axis: int) -> Any:
    """Size of the grid along axis 0, 1 or 2, an int32 scalar."""


# --- making tiles -----------------------------------------------------------------------


@builtin
def arange(start: int, end: int) -> Any:
    """The int32 tile start, …, end - 1 of rank 1. Both bounds are constants, start < end; any
    length is allowed, powers of two are fastest."""


@builtin
def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    """A tile with ``value`` (a number or a scalar) in every element; ``shape`` is made of 1 to 3
    constants."""


@builtin
def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tile of zeros; ``shape`` is made of 1 to 3 constants."""


@builtin
def zeros_like(tile: Any) -> Any:
    """A tile of zeros with the shape and the type of ``tile``."""


# --- shape ------------------------------------------------------------------------------


@builtin
def expand_dims(tile: Any, axis: int) -> Any:
    """Inserts a dimension of size 1; the same as ``tile[:, None]``. Tiles have at most three
    dimensions."""


@builtin
def broadcast_to(tile: Any, *shape: Any) -> Any:
    """Repeats dimensions of size 1 until the tile has ``shape``, given as one tuple or as several
    sizes. Missing leading dimensions are added."""


@builtin
def reshape(tile: Any, *shape: Any) -> Any:
    """The same elements in row-major order in another shape, given as one tuple or as several
    sizes; ``tile.reshape(…)`` is the same. Tiles of numbers only."""


@builtin
def view(tile: Any, *shape: Any) -> Any:
    """As :func:`reshape`."""


@builtin
def ravel(tile: Any) -> Any:
    """The elements in row-major order as a tile of rank 1."""


@builtin
def trans(tile: Any, *dims: Any) -> Any:
    """Exchanges the last two dimensions, or permutes them as :func:`permute` where ``dims`` are
    given; ``tile.T`` and ``tile.trans(…)`` are the same. Tiles of numbers only."""


@builtin
def permute(tile: Any, *dims: Any) -> Any:
    """Dimension i of the result is dimension ``dims[i]`` of the tile."""


# --- along an axis ----------------------------------------------------------------------


@builtin
def sum(tile: Any, axis: int | None = None, keep_dims: bool = False) -> Any:
    """Sum along ``axis``, or of all elements where it is None. bf16 and f16 add up in float32,
    integers below 32 bits and int1 in 32 bits, everything else in its own type. ``keep_dims``
    leaves a dimension of size 1. The order of additions is fixed: same input, same bits."""


@builtin
def max(
    tile: Any,
    axis: int | None = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """Maximum along ``axis``, or of all elements where it is None; with ``return_indices`` a pair
    of it and :func:`argmax`. NaN is skipped while there is a number."""


@builtin
def min(
    tile: Any,
    axis: int | None = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> Any:
    """Minimum; otherwise as :func:`max`."""


@builtin
def argmax(
    tile: Any, axis: int | None, tie_break_left: bool = True, keep_dims: bool = False
) -> Any:
    """The int32 index of the maximum along ``axis``, of the flattened tile where it is None; the
    first one of equals. NaN is never chosen while there is a number."""


@builtin
def argmin(
    tile: Any, axis: int | None, tie_break_left: bool = True, keep_dims: bool = False
) -> Any:
    """The int32 index of the minimum; otherwise as :func:`argmax`."""


@builtin
def reduce(input: Any, axis: int | None, combine_fn: Any, keep_dims: bool = False) -> Any:
    """What ``combine_fn`` makes of all elements along ``axis``, of the flattened tile where it is
    None.

    Args:
        input: a tile of numbers, or a tuple of tiles of one shape, which are combined together.
        combine_fn: a function under ``@amxq.jit`` that takes what came of the elements so far and
            the next element, for a tuple all of the one and then all of the other, and returns
            the new one or a tuple of them, in the same types. It does nothing but compute:
            ``tl.where`` instead of ``if``, no access to memory.
        keep_dims: leaves a dimension of size 1.

    Elements are combined one after another, the first two first; the order is fixed. :func:`sum`,
    :func:`max` and :func:`min` are faster.
    """


@builtin
def associative_scan(input: Any, axis: int, combine_fn: Any, reverse: bool = False) -> Any:
    """For every element what ``combine_fn`` makes of it and of those before it along ``axis``
    (after it, from the last one on, with ``reverse``): a tile of the same shape and type, or a
    tuple of them. Otherwise as :func:`reduce`."""


@builtin
def cumsum(input: Any, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Any:
    """For every element the sum of it and of those before it along ``axis`` (after it with
    ``reverse``), added up one after another in ``dtype``, by default as in :func:`sum`."""


@builtin
def cumprod(input: Any, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Any:
    """The product; otherwise as :func:`cumsum`."""


# --- multiplication ---------------------------------------------------------------------


@builtin
def dot(
    a: Any,
    b: Any,
    acc: Any = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
    max_num_imprecise_acc: int | None = None,
    out_dtype: Any = None,
) -> Any:
    """a [M, K] · b [K, N] (+ acc [M, N]) in float32, in float64 where a and b are, or in int32
    where a is int8. Tiles of rank 3 are batches: [B, M, K] · [B, K, N] (+ [B, M, N]).

    a and b are both bf16, float16, float32 or float64, or a is bf16 and b an int4 tile (of rank
    2). Products of 16-bit numbers, and of a bf16 number and a 4-bit integer, are exact, so the
    only rounding is that of the float32 sum. ``acc`` has the type that is added up in;
    ``out_dtype`` is that type, or a shorter floating one that float32 or float64 sums are
    converted to. float32 is always multiplied as such, whatever ``input_precision`` and
    ``allow_tf32`` say.
    A bf16 b that is unpacked from pairs of k in panels of 16 columns, as in
    docs/tutorials/03_packed_matrix_multiplication.py, is read where the pairs lie.
    An fp16 a multiplies an int4 b exactly too, on CPUs with AMX-FP16 only (compiled for
    "amx+fp16").

    An int8 a multiplies an int4 b exactly. There b's integers count as they are stored, 0 to 15,
    without the 8 subtracted, because that is what the instructions take (VPDPBUSD multiplies
    unsigned by signed bytes): subtract 8 or the zero point times the sum of a's row. a's columns
    are in the order of :func:`int4_order`.
    """


@builtin
def int4_order(tile: Any) -> Any:
    """The columns of a tile in the order in which packed int4 weights are multiplied with int8:
    0, 4, 1, 5, 2, 6, 3, 7 of every 8. Reorder activations once, when they are quantised."""
