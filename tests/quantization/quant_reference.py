"""An independent reader and writer of the layouts, in NumPy, element by element where it matters.

Written from the description of the layouts, not from amxq's code: loops over nibbles, no swaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Nibbles → int32 words along an axis, padded with 0: nibble p holds element order[p]."""
    values = np.moveaxis(values.astype(np.uint64), axis, -1)
    short = -values.shape[-1] % 8
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)])
    groups = values.reshape(*values.shape[:-1], -1, 8)
    packed = np.zeros(groups.shape[:-1], dtype=np.uint64)
    for nibble, element in enumerate(order):
        packed |= groups[..., element] << np.uint64(4 * nibble)
    return np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis)


def minus_one(stored: np.ndarray) -> np.ndarray:
    """GPTQ v1: 0x11111111 taken from whole words, with borrow."""
    return ((stored.astype(np.int64) - 0x11111111) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


@dataclass
class Weight:
    """q [N, K] 0..15, z and s [N, G], group of each k [K]."""

    q: np.ndarray
    z: np.ndarray | None
    s: np.ndarray
    groups: np.ndarray

    def exact(self) -> np.ndarray:
        """(q - z) · s in fp32."""
        z = np.full(self.s.shape, 8) if self.z is None else self.z
        difference = self.q.astype(np.float32) - z[:, self.groups].astype(np.float32)
        return difference * self.s.astype(np.float32)[:, self.groups]

    def tensors(self, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """qweight, scales and zeros as a checkpoint of that format stores them."""
        z = self.z
        if format == "plain":
            return self.q, self.s, z
        if format == "awq":
            zeros = None if z is None else words(z.T, 1, AWQ_ORDER)
            return words(self.q.T, 1, AWQ_ORDER), np.ascontiguousarray(self.s.T), zeros
        zeros = None if z is None else words(z.T, 1)
        if format == "gptq" and zeros is not None:
            zeros = minus_one(zeros)
        return words(self.q.T, 0), np.ascontiguousarray(self.s.T), zeros


def read_packed(
    qweight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, perm: np.ndarray | None
) -> np.ndarray:
    """A PackedWeight's tensors (no experts) → fp32 [N, K], by the layout's definition."""
    panels, blocks, _, _ = qweight.shape
    N, G = scales.shape
    K = 8 * blocks if perm is None else len(perm)
    word16 = qweight.view("<u2").reshape(panels, blocks, 2, 32)
    group = 8 * blocks // G
    out = np.zeros((N, K), dtype=np.float32)
    for n in range(N):
        panel, column = divmod(n, 32)
        half, c = divmod(column, 16)
        width = min(32, N - 32 * panel)
        for k in range(K):
            block, inside = divmod(k, 8)
            i, parity = divmod(inside, 2)
            q = (int(word16[panel, block, half, 2 * c + parity]) >> (4 * i)) & 15
            at = 32 * panel * G + (k // group) * width + column
            z = 8 if zeros is None else int(zeros.reshape(-1)[at])
            value = np.float32(q - z) * np.float32(scales.reshape(-1)[at])
            out[n, k if perm is None else perm[k]] = value
    return out


def padding(qweight: np.ndarray, N: int, K: int) -> set[int]:
    """The values of all nibbles beyond N or K."""
    panels, blocks, _, _ = qweight.shape
    word16 = qweight.view("<u2").reshape(panels, blocks, 2, 32)
    found: set[int] = set()
    for n in range(32 * panels):
        for k in range(8 * blocks):
            if n >= N or k >= K:
                half, c = divmod(n % 32, 16)
                i, parity = divmod(k % 8, 2)
                word = int(word16[n // 32, k // 8, half, 2 * c + parity])
                found.add((word >> (4 * i)) & 15)
    return found
