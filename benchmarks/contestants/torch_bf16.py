"""The layer not quantised at all: torch.nn.functional.linear in bf16 (oneDNN)."""

from __future__ import annotations

import torch

from benchmarks.problems import Linear


def unavailable() -> str:
    return ""


def pack(problem: Linear) -> torch.Tensor:
    return torch.from_numpy(problem.weight).bfloat16()


def size(packed: torch.Tensor) -> int:
    return packed.numel() * packed.element_size()


def call(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, packed)
