"""amxq itself, on the target that AMXQ_TARGET names (unset: the best this CPU runs)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.problems import Experts


def unavailable() -> str:
    return ""


def pack(problem: Experts) -> Any:
    import amxq

    def expert(number: int, which: int) -> Any:
        q, scales, zeros = map(torch.from_numpy, problem.matrix(number, which))
        given = None if problem.symmetric else zeros
        return amxq.pack(q, scales.bfloat16(), given, format="plain")

    count = problem.experts
    return tuple(
        amxq.stack_experts((expert(e, which) for e in range(count)), count) for which in range(2)
    )


def size(packed: Any) -> int:
    return sum(weight.nbytes for weight in packed)


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any) -> torch.Tensor:
    y: torch.Tensor = torch.ops.amxq.fused_moe(x, *packed[0], *packed[1], weights, ids)
    return y
