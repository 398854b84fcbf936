"""Operands that make floating-point instructions show their order, rounding and special cases."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_EDGES = (0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x4000, 0x7F7F, 0xFF7F)
_NUMBERS = (0, 0x8000, 0x3F80, 0xBF80)
_NANS = (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0x7FAA, 0xFFD5, 0x7FFF)

BF16_KINDS = ("normal", "cancelling", "underflowing", "finite", "edges", "bits", "infinities")
C_KINDS = ("zero", "normal", "bits")


def bf16(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Bit patterns of bf16 numbers, uint16.

    ``normal`` Gaussian · ``cancelling`` exponents within 2**12 of each other, any sign ·
    ``underflowing`` products around the smallest normal fp32 · ``finite`` any finite number ·
    ``edges`` zeros, denormals, extremes · ``bits`` anything · ``infinities`` with NaNs, rarely.
    """
    if kind == "normal":
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind == "bits":
        return rng.integers(0, 1 << 16, shape, np.uint16)
    if kind == "edges":
        return rng.choice(np.array(_EDGES, np.uint16), shape)
    if kind == "infinities":
        odds = [0.23] * len(_NUMBERS) + [0.01] * len(_NANS)
        return rng.choice(np.array(_NUMBERS + _NANS, np.uint16), shape, p=odds)
    low, high = {"cancelling": (120, 132), "underflowing": (50, 70), "finite": (0, 255)}[kind]
    sign, exponent = rng.integers(0, 2, shape), rng.integers(low, high, shape)
    return (sign << 15 | exponent << 7 | rng.integers(0, 128, shape)).astype(np.uint16)


def accumulators(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """fp32 values of C: zeros, Gaussian numbers, or any bit pattern (NaNs, denormals)."""
    if kind == "zero":
        return np.zeros(shape, np.float32)
    if kind == "normal":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)


def tininess(shape: tuple[int, int, int]) -> tuple[Array, Array, Array]:
    """2**-126 minus a bit, in each column another bit: does the sum round up to a normal
    number or is it flushed? Operands c, a, b of one tile of M rows, N columns, K pairs."""
    rows, columns, depth = shape
    a, b = np.zeros((1, rows, 2 * depth), np.uint16), np.zeros((1, depth, 2 * columns), np.uint16)
    for side in (0, 1):  # the even and the odd chain
        a[..., side], b[:, 0, side::2] = 0x2180, 0x1E80  # 2**-60 · 2**-66
        a[..., 2 + side] = 0x9980  # -2**-76
        b[:, 1, side::2] = [(127 - 78 + n) << 7 for n in range(columns)]  # · 2**(n - 78)
    return np.zeros((1, rows, columns), np.float32), a, b


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Any value of an integer type."""
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
