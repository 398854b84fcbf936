"""The experts not quantised, one after the other: F.linear in bf16 (oneDNN)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from benchmarks.problems import Experts

Packed = tuple[torch.Tensor, torch.Tensor]


def unavailable() -> str:
    return ""


def pack(problem: Experts) -> Packed:
    """[E, 2I, H] and [E, H, I], filled expert by expert."""
    inner, hidden = problem.inner, problem.hidden
    w13 = torch.empty((problem.experts, 2 * inner, hidden), dtype=torch.bfloat16)
    w2 = torch.empty((problem.experts, hidden, inner), dtype=torch.bfloat16)
    for expert in range(problem.experts):
        w13[expert] = torch.from_numpy(problem.weight(expert, 0))
        w2[expert] = torch.from_numpy(problem.weight(expert, 1))
    return w13, w2


def size(packed: Packed) -> int:
    return sum(t.numel() * t.element_size() for t in packed)


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        gate, up = linear(x[tokens], packed[0][expert]).chunk(2, -1)
        y = linear(silu(gate) * up, packed[1][expert])
        out.index_add_(0, tokens, y.float() * weights[tokens, places, None])
    return out.to(x.dtype)
