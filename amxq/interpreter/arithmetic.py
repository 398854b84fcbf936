"""Arithmetic of tile-IR's scalar types on NumPy arrays, bit for bit what compiled kernels do.

A bf16 number is held as the float32 of its value and rounded after every operation; bf16 and f16
are computed in float32 and rounded once, as the code generator does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from amxq.codegen.instructions import fused
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    U4,
    U8,
    U16,
    U32,
    U64,
    DType,
)

Array = np.ndarray[Any, Any]

HELD: dict[DType, Any] = {
    I1: np.bool_,
    I8: np.int8,
    I16: np.int16,
    I32: np.int32,
    I64: np.int64,
    U4: np.uint8,
    U8: np.uint8,
    U16: np.uint16,
    U32: np.uint32,
    U64: np.uint64,
    BF16: np.float32,
    F16: np.float16,
    F32: np.float32,
    F64: np.float64,
}
"""The NumPy type that a scalar type's numbers are held in."""


def round_bf16(x: Array) -> Array:
    """float32 to the nearest bf16, ties to even; a NaN is made quiet and keeps its high bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    kept = np.where(np.isnan(x), bits | 0x00400000, rounded) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32).reshape(np.shape(x))


def from_memory(stored: Array, dtype: DType) -> Array:
    """Numbers as they are held, of elements as they lie in memory (:func:`memory_type`)."""
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored & 1 != 0 if dtype == I1 else stored


def to_memory(held: Array, dtype: DType) -> Array:
    if dtype == BF16:
        return (np.ascontiguousarray(held).view(np.uint32) >> 16).astype(np.uint16)
    return held.astype(np.uint8) if dtype == I1 else held


def memory_type(dtype: DType) -> Any:
    return {BF16: np.uint16, I1: np.uint8}.get(dtype) or HELD[dtype]


def cast(x: Array, source: DType, to: DType) -> Array:
    """Number conversion: to nearest even; floats to integers truncate and saturate, NaN is 0."""
    if source == to:
        return x
    if source == BF16:
        return cast(x, F32, to)
    if to == BF16:
        return round_bf16(cast(x, source, F32))
    if to == I1:
        return np.asarray(x != 0)
    if {source, to} == {F16, F64}:
        x = x.astype(np.float32)
    if source.is_float and not to.is_float:
        return _saturated(x, to)
    return x.astype(HELD[to])


def _saturated(x: Array, to: DType) -> Array:
    limits = np.iinfo(HELD[to])
    whole = np.trunc(x.astype(np.float64))
    low, high = whole < float(limits.min), whole >= float(limits.max) + (to.bits < 64)
    inside = np.where(low | high | np.isnan(whole), 0.0, whole).astype(HELD[to])
    return np.where(low, limits.min, np.where(high, limits.max, inside)).astype(HELD[to])


def computed(dtype: DType, function: Callable[..., Array], *operands: Array) -> Array:
    """``function`` in the type that ``dtype`` is computed in, rounded to ``dtype``."""
    if dtype in (BF16, F16):
        wide = function(*(cast(x, dtype, F32) for x in operands))
        return cast(np.asarray(wide, np.float32), F32, dtype)
    return np.asarray(function(*operands)).astype(HELD[dtype], copy=False)


# --- operations by kind ---------------------------------------------------------------------


def _divisor(a: Array, b: Array) -> Array:
    """``b``, or 1 where dividing by it would trap on the machine."""
    traps = b == 0
    if b.dtype.kind == "i":
        traps = traps | (b == -1) & (a == np.iinfo(a.dtype).min)
    return np.where(traps, b.dtype.type(1), b)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    b = _divisor(a, b)
    return np.asarray((a - np.fmod(a, b)) // b)  # towards zero


def _remainder(a: Array, b: Array) -> Array:
    return np.fmod(a, b if a.dtype.kind == "f" else _divisor(a, b))


def _count(b: Array) -> Array:
    return np.asarray(b & b.dtype.type(8 * b.dtype.itemsize - 1))


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "mod": _remainder,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, b: np.left_shift(a, _count(b)),
    "shr": lambda a, b: np.right_shift(a, _count(b)),
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
}

MATH: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": lambda x: np.array([math.erf(v) for v in x.ravel()]).reshape(x.shape),
    "sin": lambda x: np.where(np.abs(x) > 2.0**40, np.nan, np.sin(x)),
    "cos": lambda x: np.where(np.abs(x) > 2.0**40, np.nan, np.cos(x)),
}
"""Elementary functions of float64; :func:`unary` rounds them once."""


def unary(kind: str, x: Array, dtype: DType) -> Array:
    if kind in MATH:
        return cast(np.asarray(MATH[kind](cast(x, dtype, F64))), F64, dtype)
    return computed(dtype, UNARY[kind], x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of float32 or float64, rounded once."""
    if a.dtype == np.float32:
        return fused(a, b, c).astype(np.float32)
    rough = np.asarray(a * b + c)
    exact: Array = rough.copy()
    for i in np.ndindex(rough.shape):
        if np.isfinite([a[i], b[i], c[i]]).all():
            total = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if total:  # else rough has the sign of zero
                exact[i] = _nearest(total)
    return exact


def _nearest(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number)
