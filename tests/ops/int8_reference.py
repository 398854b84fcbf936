"""An independent model of ``amxq.linear(..., precision="int8")``: NumPy, integers and fp64."""

from __future__ import annotations

import numpy as np
import torch
from linear_reference import Weight

F32 = np.float32


def block_of(group: int) -> int:
    """Activations that share a scale: the largest divisor of the weight's group up to 128, whole
    32s preferred."""
    divisors = [d for d in range(8, min(group, 128) + 1, 8) if group % d == 0]
    return max(divisors, key=lambda d: (d % 32 == 0, d))


def quantise(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers -127 … 127 [M, blocks, block] and fp32 scales [M, blocks] of fp32 x [M, K]."""
    x = x.reshape(len(x), x.shape[1] // block, block)
    largest = np.abs(x).max(-1)
    counts = largest > F32(1e-36)
    inverse = np.where(counts, F32(127) / np.where(counts, largest, F32(1)), F32(0))
    # a product of two fp32 numbers is exact in fp64; rint rounds to nearest even
    a = np.rint(x.astype(np.float64) * inverse[..., None].astype(np.float64))
    return a.astype(np.int64), (largest / F32(127)).astype(F32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(F32)


def int8_linear(
    x: torch.Tensor, weight: Weight, group: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Every bit of the result for x [M, K], in x's dtype; ``group`` is the packed weight's."""
    order = np.argsort(weight.groups, kind="stable")
    pad = -len(order) % 8
    a, scale = quantise(np.pad(x.float().numpy()[:, order], ((0, 0), (0, pad))), block_of(group))
    q = np.pad(weight.q[:, order], ((0, 0), (0, pad)))  # times activations that are 0
    q = q.reshape(len(q), *a.shape[1:])
    y = np.zeros((len(a), len(q)), F32)
    for j in range(q.shape[1]):
        g = weight.groups[order[j * a.shape[2]]]
        dot = np.einsum("mk,nk->mn", a[:, j], q[:, j]).astype(F32)
        offset = (F32(-8) * scale[:, j] * a[:, j].sum(-1).astype(F32))[:, None]
        if weight.z is not None:
            offset = offset * (weight.z[:, g].astype(F32) / F32(8))
        y = fma(fma(dot, scale[:, j, None], offset), weight.s[:, g].float().numpy(), y)
    if bias is not None:
        y = y + bias.float().numpy()
    return torch.from_numpy(y).to(x.dtype)
