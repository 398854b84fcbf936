"""The experts not quantised, sorted and multiplied by torch's grouped matrix product in bf16."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from benchmarks.contestants.experts.torch_loop import Packed, pack, size

__all__ = ["call", "pack", "size", "unavailable"]


def unavailable() -> str:
    have = hasattr(torch.nn.functional, "grouped_mm")
    return "" if have else f"torch {torch.__version__} has no grouped_mm"


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed) -> torch.Tensor:
    flat, order = ids.reshape(-1).sort(stable=True)
    ends = torch.bincount(flat, minlength=len(packed[0])).cumsum(0).int()
    rows = x[order // ids.shape[1]]
    grouped = torch.nn.functional.grouped_mm
    gate, up = grouped(rows, packed[0].transpose(1, 2), offs=ends).chunk(2, -1)
    y = grouped(silu(gate) * up, packed[1].transpose(1, 2), offs=ends)
    sorted_back = torch.empty_like(y)
    sorted_back[order] = y
    weighted = sorted_back.view(*ids.shape, -1).float() * weights[..., None]
    return weighted.sum(1).to(x.dtype)
