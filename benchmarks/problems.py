"""Quantised layers to measure on: the same in every process, from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

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
    kind: ClassVar[str] = "linear"

    def make(self) -> None:
        """Compute what is kept."""
        _ = self.weight

    def inputs(self, m: int) -> list[tuple[Array, ...]]:
        """What calls are made with, in turns."""
        return [(self.input(m),)]

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


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: out[m] = Σ_j weights[m, j] · expert(ids[m, j])(x[m]). An expert is
    w2 · (silu(gate) · up), with gate and up the halves of w13 · x.

    Integers and scales are drawn, full-range; each call has other tokens, for other experts.

    Attributes:
        experts, topk: how many there are, and for each token.
        hidden, inner: H and I; w13 is [2I, H], w2 [H, I].
    """

    experts: int
    topk: int
    hidden: int
    inner: int
    group: int = 128
    symmetric: bool = True
    seed: int = 0
    kind: ClassVar[str] = "experts"

    def make(self) -> None:
        """Nothing is kept: the weights may be larger than memory."""

    def matrix(self, expert: int, which: int) -> tuple[Array, Array, Array]:
        """q uint8 [N, K], scales fp32 [N, K / group], zeros uint8, of w13 (which = 0) or w2 (1)."""
        n, k = (2 * self.inner, self.hidden) if which == 0 else (self.hidden, self.inner)
        rng = np.random.default_rng((self.seed, expert, which))
        q = rng.integers(0, 16, (n, k), np.uint8)
        scales = round_to_bf16(rng.uniform(0.1, 0.3, (n, k // self.group)) / np.sqrt(k))
        zeros = np.full(scales.shape, 8, np.uint8)
        if not self.symmetric:
            zeros = rng.integers(0, 16, scales.shape, np.uint8)
        return q, scales, zeros

    def weight(self, expert: int, which: int) -> Array:
        """fp32 [N, K], exact."""
        q, scales, zeros = self.matrix(expert, which)
        grouped = q.reshape(len(q), -1, self.group).astype(np.float32) - zeros[..., None]
        return (grouped * scales[..., None]).reshape(q.shape)

    def inputs(self, m: int) -> list[tuple[Array, ...]]:
        """(x, weights, ids) in turns: so many that small calls find no expert in a cache."""
        rng = np.random.default_rng(m)
        return [self._input(rng, m) for _ in range(max(1, min(32, 128 // m)))]

    def _input(self, rng: np.random.Generator, m: int) -> tuple[Array, ...]:
        x = round_to_bf16(rng.standard_normal((m, self.hidden), np.float32))
        ids = np.stack([rng.permutation(self.experts)[: self.topk] for _ in range(m)])
        return x, round_to_bf16(rng.uniform(0, 1, ids.shape)), ids.astype(np.int32)

    def touched_bytes(self, m: int) -> float:
        """Bytes of packed weights that a call reads, on average over the turns."""
        touched = np.mean([len(np.unique(ids)) for _, _, ids in self.inputs(m)])
        return float(touched * 3 * self.hidden * self.inner * (0.5 + 2 / self.group))

    def error(self, y: Array) -> float:
        """Relative error in the Euclidean norm against fp64, over the first two tokens of y."""
        x, weights, ids = self.inputs(len(y))[0]
        exact = np.zeros((min(2, len(y)), self.hidden))
        for token, j in np.ndindex(len(exact), self.topk):
            w13, w2 = (self.weight(ids[token, j], i).astype(np.float64) for i in range(2))
            gate, up = np.split(w13 @ x[token].astype(np.float64), 2)
            exact[token] += weights[token, j] * (w2 @ (gate / (1 + np.exp(-gate)) * up))
        return float(np.linalg.norm(y[: len(exact)] - exact) / np.linalg.norm(exact))


Problem = Linear | Experts
PROBLEMS: dict[str, Any] = {kind.kind: kind for kind in (Linear, Experts)}
