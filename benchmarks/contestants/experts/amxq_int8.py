"""amxq with activations quantised to int8; otherwise as :mod:`.amxq`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contestants.experts.amxq import pack, size, unavailable

__all__ = ["call", "pack", "size", "unavailable"]


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Any) -> torch.Tensor:
    y: torch.Tensor = torch.ops.amxq.fused_moe(
        x, *packed[0], *packed[1], weights, ids, precision="int8"
    )
    return y
