"""The documented surface of the kernel language. The functions here have no body: inside an
``@amxq.jit`` function the compiler gives them their meaning (:mod:`amxq.frontend.builtins`),
outside one they raise.

A *tile* is a block of values with a static shape. Scalars and tiles mix by broadcasting, and
types by Triton's promotion rules: a Python number takes the type of the other operand, bf16
with f32 gives f32, bf16 with f16 gives f32, the wider integer wins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from amxq.ir import types as _types

int1, int8, int16, int32, int64 = _types.I1, _types.I8, _types.I16, _types.I32, _types.I64
uint8, uint16, uint32, uint64 = _types.U8, _types.U16, _types.U32, _types.U64
bfloat16, float16, float32, float64 = _types.BF16, _types.F16, _types.F32, _types.F64


class constexpr:
    """Annotation of a parameter whose value is compiled in: ``BLOCK: tl.constexpr``."""


_F = TypeVar("_F", bound=Callable[..., Any])


interpreting: ContextVar[Any] = ContextVar("interpreting", default=None)
"""The interpreter's program that runs in this thread, which calls of the language go to."""


def _builtin(function: _F) -> _F:
    """Marks a function as one that only the compiler and the interpreter give a meaning."""

    def outside_of_a_kernel(*args: Any, **kwargs: Any) -> Any:
        interpreter = interpreting.get()
        if interpreter is not None:
            return interpreter(outside_of_a_kernel, args, kwargs)
        raise RuntimeError(
            f"amxq.language.{function.__name__} works inside an @amxq.jit kernel only; "
            "call the kernel as kernel[grid](...)"
        )

    outside_of_a_kernel.__name__ = function.__name__
    outside_of_a_kernel.__doc__ = function.__doc__
    return outside_of_a_kernel  # type: ignore[return-value]


# --- the grid ---------------------------------------------------------------------------


@_builtin
def program_id(axis: int) -> Any:
    """Index of this program along grid axis 0, 1 or 2, an int32 scalar. Axis 0 runs fastest."""


@_builtin
def num_programs(axis: int) -> Any:
    """Size of the grid along axis 0, 1 or 2, an int32 scalar."""


# --- making tiles -----------------------------------------------------------------------


@_builtin
def arange(start: int, end: int) -> Any:
    """The int32 tile start, …, end - 1; both bounds are compile-time constants."""


@_builtin
def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    """A tile with ``value`` (a number or a scalar) in every element."""


@_builtin
def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """A tile of zeros."""


@_builtin
def expand_dims(tile: Any, axis: int) -> Any:
    """Inserts a dimension of size 1; the same as ``tile[:, None]``."""


@_builtin
def broadcast_to(tile: Any, shape: tuple[int, ...]) -> Any:
    """Repeats dimensions of size 1 until the tile has ``shape``."""


# --- element-wise -----------------------------------------------------------------------


@_builtin
def cast(value: Any, dtype: Any) -> Any:
    """Number conversion, round to nearest even; the same as ``value.to(dtype)``."""


@_builtin
def where(condition: Any, x: Any, y: Any) -> Any:
    """x where ``condition`` (int1) holds, else y, element by element."""


@_builtin
def maximum(x: Any, y: Any) -> Any:
    """The larger one, element by element; the number where one side is NaN."""


@_builtin
def minimum(x: Any, y: Any) -> Any:
    """The smaller one, element by element; the number where one side is NaN."""


@_builtin
def abs(x: Any) -> Any:
    """Absolute value."""


@_builtin
def sqrt(x: Any) -> Any:
    """Square root of floats, correctly rounded."""


@_builtin
def floor(x: Any) -> Any:
    """Largest whole number not above x, as a float."""


@_builtin
def ceil(x: Any) -> Any:
    """Smallest whole number not below x, as a float."""


@_builtin
def exp(x: Any) -> Any:
    """e to the power x, of floats, within 1 unit of the last place (bf16 and f16 are computed
    in f32). 0 below and infinite above the type's range; denormal results are rounded once."""


@_builtin
def exp2(x: Any) -> Any:
    """2 to the power x, as :func:`exp`; exact for whole numbers."""


@_builtin
def log(x: Any) -> Any:
    """Natural logarithm of floats, within 1.5 units of the last place; NaN for negative numbers,
    minus infinity for 0."""


@_builtin
def log2(x: Any) -> Any:
    """Logarithm to the base 2, as :func:`log`, within 2 units of the last place."""


@_builtin
def rsqrt(x: Any) -> Any:
    """1 / sqrt(x) of floats, within 1.5 units of the last place."""


@_builtin
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of floats, within 3 units of the last place; 0 where it is below the
    smallest normal number."""


@_builtin
def tanh(x: Any) -> Any:
    """Hyperbolic tangent of floats, within 3.5 units of the last place."""


@_builtin
def erf(x: Any) -> Any:
    """The error function of floats, within 1.5 units of the last place."""


@_builtin
def sin(x: Any) -> Any:
    """Sine of floats, x in radians, within 2 units of the last place; NaN for |x| > 2^40."""


@_builtin
def cos(x: Any) -> Any:
    """Cosine of floats, x in radians, within 2 units of the last place; NaN for |x| > 2^40."""


@_builtin
def fma(x: Any, y: Any, z: Any) -> Any:
    """x·y + z with one rounding; floats of one type."""


@_builtin
def cdiv(x: Any, div: Any) -> Any:
    """x divided by div, rounded up; x ≥ 0, div > 0."""


# --- along an axis ----------------------------------------------------------------------


@_builtin
def sum(tile: Any, axis: int) -> Any:
    """Sum along the last axis, in the tile's type (bf16 and f16 add up in f32)."""


@_builtin
def max(tile: Any, axis: int) -> Any:
    """Maximum along the last axis."""


@_builtin
def min(tile: Any, axis: int) -> Any:
    """Minimum along the last axis."""


# --- memory -----------------------------------------------------------------------------


@_builtin
def load(pointer: Any, mask: Any = None, other: Any = None) -> Any:
    """Loads through a pointer or a tile of pointers. Where ``mask`` (int1, same shape) is
    false nothing is read and the element is ``other`` (default 0)."""


@_builtin
def store(pointer: Any, value: Any, mask: Any = None) -> None:
    """Stores through a pointer or a tile of pointers; where ``mask`` is false nothing is
    written."""


@_builtin
def make_tensor_descriptor(base: Any, shape: Any, strides: Any, block_shape: Any) -> Any:
    """A strided array in memory, read and written in blocks.

    Args:
        base: pointer to its first element.
        shape, strides: sizes and strides in elements; the last stride is 1.
        block_shape: constants, the shape of one block.

    The descriptor's ``load(offsets, boundary_check=None)`` gives a tile of ``block_shape`` whose
    corner is at ``offsets``; elements outside of the array are 0. ``store(offsets, tile,
    boundary_check=None)`` leaves them alone. ``boundary_check`` lists the dimensions that are
    checked (default all): leave one out where the block is known to lie inside. ``dtype`` is
    the element type.
    """


@_builtin
def int4_tensor(
    qweight: Any, scales: Any, zeros: Any, shape: Any, group_size: int, block_shape: Any
) -> Any:
    """A packed INT4 weight, as made by :func:`amxq.pack`.

    Args:
        qweight: pointer (uint8) to the panels [N/32][K/8][2][64].
        scales: pointer (bf16, f16 or f32) to N·G scales in panel order.
        zeros: pointer (uint8) to N·G zero points in panel order, or None: 8 everywhere.
        shape: [K, N]. K is a multiple of the group size.
        group_size: elements of K that share a scale: a scalar or a constant.
        block_shape: constants [BLOCK_K, 32]; BLOCK_K is a multiple of 8.

    ``load([k, n])`` gives the integers as an operand of :func:`dot`, which subtracts 8 beside
    bf16. ``scales([g, n])`` gives the float32 scales of group g for the 32 columns from n on;
    ``zeros([g, n])`` the zero points minus 8, float32. ``has_zeros`` is a constant.
    """


# --- multiplication ---------------------------------------------------------------------


@_builtin
def dot(a: Any, b: Any, acc: Any = None) -> Any:
    """a [M, K] · b [K, N] (+ acc [M, N]) in float32, or in int32 where a is int8.

    a is bf16, b an int4 tile or a bf16 tile; or both float32. Products of a bf16 number and a
    4-bit integer are exact, so the only rounding is that of the float32 sum.

    An int8 a multiplies an int4 b exactly. There b's integers count as they are stored, 0 to 15,
    without the 8 subtracted, because that is what the instructions take (VPDPBUSD multiplies
    unsigned by signed bytes): subtract 8 or the zero point times the sum of a's row. a's columns
    are in the order of :func:`int4_order`.
    """


@_builtin
def int4_order(tile: Any) -> Any:
    """The columns of a tile in the order in which packed int4 weights are multiplied with int8:
    0, 4, 1, 5, 2, 6, 3, 7 of every 8. Reorder activations once, when they are quantised."""


# --- control and compile time -----------------------------------------------------------


@_builtin
def range(start: Any, stop: Any = None, step: Any = None) -> Any:
    """A loop at run time, as Python's; step > 0."""


@_builtin
def static_range(start: int, stop: int | None = None, step: int = 1) -> Any:
    """A loop unrolled at compile time over constants."""


@_builtin
def static_assert(condition: bool, message: str = "") -> None:
    """A CompilationError unless the constant ``condition`` holds."""


@_builtin
def static_print(*values: Any) -> None:
    """Prints constants, or the types of values, while the kernel is compiled."""
