"""The layer not quantised, in fp32: torch.nn.functional.linear (oneDNN, MKL)."""

from __future__ import annotations

import torch

from benchmarks.contestants.torch_bf16 import call, size, unavailable
from benchmarks.problems import Linear

__all__ = ["call", "given", "pack", "size", "unavailable"]


def pack(problem: Linear) -> torch.Tensor:
    return torch.from_numpy(problem.weight).clone()


def given(x: torch.Tensor) -> torch.Tensor:
    return x.float()
