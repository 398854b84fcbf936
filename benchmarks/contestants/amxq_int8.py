"""amxq with activations quantised to int8; otherwise as :mod:`benchmarks.contestants.amxq`."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contestants.amxq import pack, size, unavailable

__all__ = ["call", "pack", "size", "unavailable"]


def call(x: torch.Tensor, packed: Any) -> torch.Tensor:
    import amxq

    return amxq.linear(x, *packed, precision="int8")
