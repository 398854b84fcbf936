"""Calls of experts that do not change: checked once, and without torch's dispatcher for one token.

As :mod:`amxq.ops.bound` for linears: decoding calls a layer of experts for every token, and what
Python does before its kernels start is then a part of the time (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch

from amxq.ops import expert_token
from amxq.ops.bound import observed
from amxq.ops.checks import lazy
from amxq.ops.expert_checks import ROUTING_DTYPES, Sizes, check_activation
from amxq.ops.expert_weights import ExpertWeights, versions
from amxq.ops.fused_moe import fused_moe
from amxq.quantization.packed import PackedWeight
from amxq.runtime.targets import get_target


class BoundExperts:
    """:func:`amxq.fused_moe` of fixed weights and options: call it with x, weights and ids."""

    def __init__(
        self,
        w13: PackedWeight,
        w2: PackedWeight,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        *,
        activation: str = "silu",
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float | None = None,
        precision: str = "bf16",
    ) -> None:
        """Arguments and errors are those of :func:`amxq.fused_moe`."""
        self._act = check_activation(activation, interleaved, limit, alpha)
        layer = self._layer = ExpertWeights(w13, w2, w13_bias, w2_bias, interleaved)
        self._perms, self._int8 = (w13.perm, w2.perm), precision == "int8"
        self._sizes = Sizes(1, layer.E, layer.H, layer.inner, 1, layer.E)
        options: dict[str, Any] = {"activation": activation, "interleaved": interleaved}
        options |= {"limit": limit, "alpha": alpha, "precision": precision}
        options |= {"w13_bias": w13_bias, "w2_bias": w2_bias}

        def general(
            x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
        ) -> torch.Tensor:
            return fused_moe(x, w13, w2, topk_weights, topk_ids, **options)

        self._general = general
        # what the addresses of ``layer`` do not lead to: weights that torch negates lazily, and
        # numbers that are written later to tensors that had to be copied
        given = self._given = (*w13, *w2, w13_bias, w2_bias)
        counted = not any(t is not None and t.is_inference() for t in given)
        self._bypassed = any(map(lazy, given)) or (layer.copied and not counted)
        self._versions = versions(given) if layer.copied and counted else []

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """[M, H] of x [M, H], in x's dtype. Raises what :func:`amxq.fused_moe` raises."""
        layer = self._layer
        if (
            type(x) is not torch.Tensor
            or type(topk_ids) is not torch.Tensor
            or type(topk_weights) is not torch.Tensor
            or observed(x, topk_weights, topk_ids)
            or x.dtype is not torch.bfloat16
            or x.shape != (1, layer.H)
            or topk_ids.dtype is not torch.int64
            or topk_ids.dim() != 2
            or topk_weights.dtype not in ROUTING_DTYPES
            or not topk_ids.shape[0] == 1 <= topk_ids.shape[1]
            or topk_weights.shape != topk_ids.shape
            or not (x.is_contiguous() and topk_weights.is_contiguous())
            or not (x.is_cpu and topk_weights.is_cpu and topk_ids.is_cpu)
            or not layer.shared_order
            or self._bypassed
            or (layer.copied and self._versions != versions(self._given))
            or (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))
        ):
            return self._general(x, topk_weights, topk_ids)
        sizes = self._sizes
        if sizes.topk != topk_ids.shape[1]:
            sizes = self._sizes = sizes._replace(topk=topk_ids.shape[1])
        owners = expert_token.owners_of(topk_ids, None, sizes)
        if not owners:
            return torch.zeros_like(x)
        out = torch.empty_like(x)
        options = self._act, self._int8, x, self._perms, topk_weights, False, 1.0, out
        expert_token.run(get_target(), layer, owners, *options)
        return out
