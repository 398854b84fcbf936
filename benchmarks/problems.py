"""Quantised linear layers to measure on: the same in every process, from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def round_to_bf16(x: Array) -> Array:
    """fp32 values that bf16 holds exactly, nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@dataclass(frozen=True)
class Linear:
    """y [M, n] = x [M, k] · W [n, k]ᵀ, W[n, k] = (q - zero) · scale.

    Gaussian weights, quantised by rounding to the nearest of 16 steps. Scales are exact in
    bf16, so that contestants which keep them in bf16 have the same weights.

    Attributes:
        group: columns of W that share a scale; divides k.
        symmetric: the zero point is 8 everywhere.
    """

    n: int
    k: int
    group: int = 128
    symmetric: bool = True
    seed: int = 0

    @cached_property
    def _quantised(self) -> tuple[Array, Array, Array]:
        w = np.random.default_rng(self.seed).standard_normal((self.n, self.k), np.float32) * 0.02
        grouped = w.reshape(self.n, self.k // self.group, self.group)
        if self.symmetric:
            scales = round_to_bf16(np.abs(grouped).max(2) / 7.5)
            zeros = np.full(scales.shape, 8.0, np.float32)
        else:
            low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
            scales = round_to_bf16((high - low) / 15)
            zeros = np.clip(np.rint(-low / scales), 0, 15)
        steps = np.rint(grouped / scales[..., None]) + zeros[..., None]
        q = np.clip(steps, 0, 15).astype(np.uint8).reshape(self.n, self.k)
        return q, scales, zeros.astype(np.uint8)

    @property
    def q(self) -> Array:
        """uint8 [n, k], values 0..15."""
        return self._quantised[0]

    @property
    def scales(self) -> Array:
        """fp32 [n, k / group]."""
        return self._quantised[1]

    @property
    def zeros(self) -> Array:
        """uint8 [n, k / group]."""
        return self._quantised[2]

    @cached_property
    def weight(self) -> Array:
        """fp32 [n, k], exact."""
        q = self.q.reshape(self.n, -1, self.group).astype(np.float32)
        return ((q - self.zeros[..., None]) * self.scales[..., None]).reshape(self.n, self.k)

    def input(self, m: int) -> Array:
        """fp32 [m, k], exact in bf16."""
        return round_to_bf16(np.random.default_rng(m).standard_normal((m, self.k), np.float32))

    def error(self, y: Array) -> float:
        """Relative error in the Euclidean norm against fp64, over the first 16 rows of y."""
        x = self.input(len(y))[:16].astype(np.float64)
        exact = x @ self.weight.astype(np.float64).T
        return float(np.linalg.norm(y[:16] - exact) / np.linalg.norm(exact))
