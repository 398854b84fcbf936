"""SGLang's experts with activations in int8 (W4A8), which vLLM's wheel for CPUs carries."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contestants.vllm import operators, packed_int8, unavailable
from benchmarks.problems import Experts

__all__ = ["call", "pack", "size", "unavailable"]

_INT4_W4A8 = 3


def pack(problem: Experts) -> tuple[Any, ...]:
    """(operators, w13, zeros, scales, w2, zeros, scales), each tensor with a leading E."""
    stacks = []
    for which in range(2):
        experts = (packed_int8(*problem.matrix(e, which)) for e in range(problem.experts))
        stacks += [torch.stack(tensors) for tensors in zip(*experts, strict=True)]
    return operators(), *stacks


def size(packed: tuple[Any, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in packed[1:])


def call(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: tuple[Any, ...]
) -> torch.Tensor:
    known, w13, zeros13, scales13, w2, zeros2, scales2 = packed
    y = torch.empty_like(x)
    absent = [None] * 6  # scales of other formats, biases, alpha and limit
    known.fused_experts_cpu(
        y, x, w13, w2, weights.float(), ids, _INT4_W4A8,
        scales13, scales2, zeros13, zeros2, *absent, True,
    )  # fmt: skip
    return y
