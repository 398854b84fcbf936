"""PyTorch's own int4 linear for CPUs, aten::_weight_int4pack_mm_for_cpu."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.problems import Linear

Packed = tuple[torch.Tensor, int, torch.Tensor]


def unavailable() -> str:
    have = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return "" if have else f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu"


def pack(problem: Linear) -> Packed:
    q = torch.from_numpy(problem.q.astype(np.int32))
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    # it computes (q - 8) · scale + offset
    offsets = (8.0 - problem.zeros.astype(np.float32)) * problem.scales
    pairs = torch.from_numpy(np.stack([problem.scales.T, offsets.T], -1))
    return weight, problem.group, pairs.contiguous().bfloat16()


def size(packed: Packed) -> int:
    return sum(t.numel() * t.element_size() for t in (packed[0], packed[2]))


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, *packed)
    return y
