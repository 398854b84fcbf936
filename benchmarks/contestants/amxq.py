"""amxq itself, on the target that AMXQ_TARGET names (unset: the best this CPU runs)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.problems import Linear


def unavailable() -> str:
    import amxq

    missing = [name for name in ("pack", "linear") if not hasattr(amxq, name)]
    return f"this amxq has no {' and no '.join(missing)}" if missing else ""


def pack(problem: Linear) -> Any:
    import amxq

    zeros = None if problem.symmetric else torch.from_numpy(problem.zeros)
    scales = torch.from_numpy(problem.scales).bfloat16()
    return amxq.pack(torch.from_numpy(problem.q), scales, zeros, format="plain")


def size(packed: Any) -> int:
    return sum(t.numel() * t.element_size() for t in packed if t is not None)


def call(x: torch.Tensor, packed: Any) -> torch.Tensor:
    import amxq

    return amxq.linear(x, *packed)
