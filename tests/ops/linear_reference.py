"""An independent fp64 reference of ``amxq.linear``, and how far a result may be from it.

Nothing here calls amxq: weights are drawn as integers and stored in a checkpoint's layout by
loops over nibbles; products are NumPy's in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
EPS32 = 2.0**-24  # largest relative error of one fp32 rounding
TINY32 = 2.0**-126  # what tile and VDPBF16PS instructions flush to zero, as operand and result
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}


def words(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Nibbles → int32 words along an axis, padded with 0: nibble p holds element order[p]."""
    values = np.moveaxis(values.astype(np.uint64), axis, -1)
    values = np.pad(values, [(0, 0), (0, -values.shape[-1] % 8)])
    groups = values.reshape(values.shape[0], -1, 8)
    packed = np.zeros(groups.shape[:-1], dtype=np.uint64)
    for nibble, element in enumerate(order):
        packed |= groups[..., element] << np.uint64(4 * nibble)
    packed = np.moveaxis(packed, -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed.astype(np.uint32).view(np.int32)))


@dataclass
class Weight:
    """q [N, K] 0..15, s [N, G] (a torch tensor), z [N, G] 0..15 or None, group of each k [K]."""

    q: np.ndarray
    s: torch.Tensor
    z: np.ndarray | None
    groups: np.ndarray
    difference: np.ndarray = field(init=False)
    scale: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        z = np.full(self.s.shape, 8) if self.z is None else self.z
        self.difference = (self.q.astype(np.int64) - z[:, self.groups]).astype(np.float64)
        self.scale = self.s.double().numpy()[:, self.groups]

    def tensors(self, format: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """qweight, scales and zeros as a checkpoint of that format stores them."""
        z = self.z
        if format == "plain":
            zeros = None if z is None else torch.from_numpy(z.astype(np.uint8))
            return torch.from_numpy(self.q.astype(np.uint8)), self.s, zeros
        scales = self.s.T.contiguous()
        if format == "awq":
            zeros = None if z is None else words(z.T, 1, AWQ_ORDER)
            return words(self.q.T, 1, AWQ_ORDER), scales, zeros
        zeros = None if z is None else words(z.T, 1)
        if format == "gptq" and zeros is not None:  # v1: minus one, whole words with borrow
            less = (zeros.numpy().astype(np.int64) - 0x11111111) & 0xFFFFFFFF
            zeros = torch.from_numpy(less.astype(np.uint32).view(np.int32))
        return words(self.q.T, 0), scales, zeros

    def exact(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> np.ndarray:
        """x [M, K] times the weight in fp64."""
        y = x.double().numpy() @ (self.difference * self.scale).T
        return y if bias is None else y + bias.double().numpy()

    def bound(self, x: torch.Tensor, bias: torch.Tensor | None, y: np.ndarray) -> np.ndarray:
        """How far a result may be from ``y``, the exact one.

        * The result's own rounding: half a unit in the last place.
        * fp32 sums. Products x · (q - 8) are exact. Each output adds up blocks of at most 128 k,
          with sums of the block's x times (z - 8) for zero points, and blocks times scales.
          Whatever the order, an element passes through fewer than 128 + K / 8 additions in the
          worst case, but roundings are of random sign: their standard deviation grows with the
          root of that number, and 4 of them hold with a margin over all outputs drawn here.
          Three parts of an fp32 activation are three terms.
        * Operands and results below 2**-126 count as zero in the instructions.
        """
        K = self.q.shape[1]
        z = np.zeros((1, 1)) if self.z is None else np.abs(self.z.astype(np.float64) - 8)
        size = (
            np.abs(self.q.astype(np.float64) - 8) + np.broadcast_to(z, self.s.shape)[:, self.groups]
        )
        terms = np.abs(x.double().numpy()) @ (size * np.abs(self.scale)).T
        flushed = 64 * TINY32 * np.abs(self.scale).sum(1)
        additions = min(K, 128) + K / 8 + 8
        result = HALF_ULP[x.dtype] * np.abs(y) + SMALLEST[x.dtype]
        sums = 4 * np.sqrt(additions) * EPS32 * (terms + np.abs(y))
        if bias is not None:
            sums += 2 * EPS32 * np.abs(bias.double().numpy())
        # the rounding's error is relative to what is rounded, which the sums' error is part of
        return (result + sums + flushed) * (1 + HALF_ULP[x.dtype])


def draw(
    rng: np.random.Generator,
    n: int,
    k: int,
    group: int,
    *,
    symmetric: bool,
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
) -> Weight:
    """A weight with full-range nibbles, scales of both signs, full-range zero points.
    ``group`` -1 is one group of K; the last group may be short."""
    group = k if group == -1 else group
    count = -(-k // group)
    groups = np.arange(k) // group
    if act_order:
        groups = rng.permutation(groups)
    scales = rng.uniform(0.002, 0.05, (n, count)) * rng.choice((-1.0, 1.0), (n, count))
    zeros = None if symmetric else rng.integers(0, 16, (n, count))
    return Weight(rng.integers(0, 16, (n, k)), torch.from_numpy(scales).to(dtype), zeros, groups)


def assert_exact(
    got: torch.Tensor, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """``got`` [M, N] is the product up to rounding; x is [M, K]."""
    y = weight.exact(x, bias)
    error = np.abs(got.double().numpy() - y)
    bound = weight.bound(x, bias, y)
    worst = np.unravel_index(np.argmax(error / bound), error.shape) if error.size else (0, 0)
    assert got.shape == y.shape
    assert (error <= bound).all(), (
        f"at {worst}: {got[worst].item()} for {y[worst]}, off by {error[worst]:.3g}, "
        f"allowed {bound[worst]:.3g}"
    )
