"""The layer in bf16 with oneDNN's prepacked weight, as torch.compile's freezing makes it."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.problems import Linear

Packed = tuple[Any, int]


def unavailable() -> str:
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    have = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "" if have else "oneDNN has no bf16 on this CPU"


def pack(problem: Linear) -> Packed:
    weight = torch.from_numpy(problem.weight).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed, weight.numel() * weight.element_size()


def size(packed: Packed) -> int:
    return packed[1]


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed[0], None, "none", [], "")
    return y
