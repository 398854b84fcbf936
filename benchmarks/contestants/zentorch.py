"""AMD's zentorch: bf16 activations, and ones quantised per token (int8)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Linear

VARIANTS = {"bf16": {"int8": False}, "int8": {"int8": True}}
Packed = tuple[Callable[[torch.Tensor], torch.Tensor], int]


def unavailable() -> str:
    return without("zentorch")


def pack(problem: Linear, int8: bool) -> Packed:
    import zentorch  # noqa: F401  registers the operators

    operators = torch.ops.zentorch
    if int8 and not problem.symmetric:
        raise ValueError("zentorch's int8 path takes symmetric weights only")
    q = problem.q.astype(np.int8) - (8 if problem.symmetric else 0)
    weight = operators.zentorch_woq_repack_weight(torch.from_numpy(q))
    scales = torch.from_numpy(problem.scales).bfloat16().t().contiguous()
    size = problem.q.size // 2 + 2 * scales.numel()
    if int8:
        function = operators.zentorch_dynamic_qlinear.default
        call = functools.partial(_call, function, weight.view(torch.int8), scales, None)
        return call, size
    zeros = None
    if not problem.symmetric:
        zeros = torch.from_numpy(problem.zeros.astype(np.int8)).t().contiguous()
    function = operators.zentorch_woq_linear.default
    return functools.partial(_call, function, weight.t(), scales, zeros, None), size


def _call(function: Callable[..., torch.Tensor], *rest: object) -> torch.Tensor:
    *arguments, x = rest
    return function(x, *arguments)


def size(packed: Packed) -> int:
    return packed[1]


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return packed[0](x)
