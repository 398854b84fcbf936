"""The gradient of ``amxq.linear``: flows to activations, bias and residual, never to weights.

It is not registered with torch's dispatcher, whose call into Python for every forward pass, with
or without a gradient, costs 5 µs.
"""

from __future__ import annotations

from typing import Any

import torch

from amxq.ops.raw import packed_once
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packing import dequantize


class _Linear(torch.autograd.Function):
    """The operator with its gradient; the weight, dequantised, is a constant."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        perm: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        precision: str,
    ) -> torch.Tensor:
        return torch.ops.amxq.linear(  # type: ignore[no-any-return]
            x, qweight, scales, zeros, perm, bias=bias, residual=residual, precision=precision
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, *ctx.weight, bias, _, _ = inputs
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_dtype, bias_dtype = ctx.dtypes
        grad = grads[0].float()
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            qweight, scales, zeros, perm = ctx.weight
            raw = qweight.dtype is torch.int32
            packed = packed_once(qweight, scales, zeros, perm) if raw else PackedWeight(*ctx.weight)
            to_x = (grad @ dequantize(packed)).to(x_dtype)
        if ctx.needs_input_grad[5]:
            to_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
        to_residual = grads[0] if ctx.needs_input_grad[6] else None
        return to_x, None, None, None, None, to_bias, to_residual, None


def linear_with_gradient(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    precision: str,
) -> torch.Tensor:
    """The operator, recorded for a backward pass."""
    result = _Linear.apply(  # type: ignore[no-untyped-call]
        x, qweight, scales, zeros, perm, bias, residual, precision
    )
    return result  # type: ignore[no-any-return]
