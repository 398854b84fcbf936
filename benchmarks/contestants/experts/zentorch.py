"""AMD's zentorch: experts with activations quantised per token (DA8W4)."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.contestants.zentorch import unavailable
from benchmarks.problems import Experts

__all__ = ["call", "pack", "size", "unavailable"]

Packed = tuple[torch.Tensor, ...]


def pack(problem: Experts) -> Packed:
    """(w13, scales, w2, scales), each with a leading E."""
    import zentorch  # noqa: F401  registers the operators

    if not problem.symmetric:
        raise ValueError("zentorch's experts take symmetric weights only")
    repack = torch.ops.zentorch.zentorch_woq_repack_weight
    stacks = []
    for which in range(2):
        words, scales = [], []
        for e in range(problem.experts):
            q, s, _ = problem.matrix(e, which)
            words.append(repack(torch.from_numpy(q.astype(np.int8) - 8)))
            scales.append(torch.from_numpy(s).bfloat16().t().contiguous())
        stacks += [torch.stack(words), torch.stack(scales)]
    return tuple(stacks)


def size(packed: Packed) -> int:
    return sum(t.numel() * t.element_size() for t in packed)


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed) -> torch.Tensor:
    w13, scales13, w2, scales2 = packed
    y = torch.empty_like(x)
    torch.ops.zentorch.zentorch_fused_moe(
        y, x, w13, w2, None, None, weights.float(), ids, False, "silu", scales13, scales2
    )
    return y
