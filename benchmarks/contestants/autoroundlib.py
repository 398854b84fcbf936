"""AutoRound's own CPU kernels (package auto-round-lib), in the mode that its layers choose."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Linear

Packed = tuple[torch.Tensor, torch.Tensor, int, int, int, bool]


def unavailable() -> str:
    return without("auto_round_kernel")


def pack(problem: Linear) -> Packed:
    import auto_round_kernel

    group, asymmetric = problem.group, not problem.symmetric
    q = torch.from_numpy(np.ascontiguousarray(problem.q.T.astype(np.int8) - 8))
    zeros = torch.empty(0, dtype=torch.int8)
    if asymmetric:
        zeros = torch.from_numpy(np.ascontiguousarray(problem.zeros.T.astype(np.int8) - 8))
    scales = torch.from_numpy(np.ascontiguousarray(problem.scales.T))
    weight = auto_round_kernel.repack_quantized_weight(
        q, scales, zeros, group, "auto", "int4", "fp32", asymmetric
    )
    return weight, torch.empty(0), problem.n, problem.k, group, asymmetric


def size(packed: Packed) -> int:
    return packed[0].numel() * packed[0].element_size()


def given(x: torch.Tensor) -> torch.Tensor:
    return x.float()


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    import auto_round_kernel

    weight, bias, n, k, group, asymmetric = packed
    y: torch.Tensor = auto_round_kernel.woqgemm(
        x, weight, bias, n, k, group, "auto", "int4", "fp32", asymmetric
    )
    return y
