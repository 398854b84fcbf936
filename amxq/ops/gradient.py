"""Derivatives of ``amxq.linear``, backwards and forwards: by activations, bias and residual, never
by weights.

It is not registered with torch's dispatcher, whose call into Python for every forward pass, with
or without a gradient, costs 5 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from amxq.errors import LayoutError
from amxq.ops.raw import packed_once
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packing import dequantize


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether torch differentiates forwards by one of them."""
    return forward_ad._current_level >= 0 and any(
        isinstance(t, torch.Tensor)
        and (
            torch.compiler.is_compiling()  # neither these nor batches tell
            or torch._C._functorch.is_batchedtensor(t)
            or forward_ad.unpack_dual(t).tangent is not None
        )
        for t in tensors
    )


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether a derivative by one of them may be asked for, backwards or forwards."""
    return (
        torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    ) or has_tangent(*tensors)


def refuse_tangents(operator: str, *tensors: torch.Tensor | None) -> None:
    """For what torch calls below its differentiation: raises LayoutError where the result would
    lack a tangent. ``torch.func.jvp`` hides them, so that in it all calls but primal's are refused.
    """
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    if eager_transforms.JVP_NESTING or has_tangent(*tensors):
        raise LayoutError(
            f"torch.ops.amxq.{operator} has no tangents, but is differentiated forwards: call "
            "amxq.linear or its relatives, or give it primals, outside of torch.func.jvp"
        )


def primal(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of arguments that are known to have no tangents."""
    if forward_ad._current_level < 0:
        return operator(*args, **kwargs)
    with forward_ad._set_fwd_grad_enabled(False):
        return operator(*args, **kwargs)


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
        x, *weight, bias, _, _ = inputs
        ctx.save_for_backward(*weight)
        ctx.save_for_forward(*weight)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, None if bias is None else bias.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_dtype, bias_dtype = ctx.dtypes
        grad = grads[0].float()
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            qweight, scales, zeros, perm = weight = ctx.saved_tensors
            raw = qweight.dtype is torch.int32
            packed = packed_once(*weight) if raw else PackedWeight(*weight)
            to_x = (grad @ dequantize(packed)).to(x_dtype)
        if ctx.needs_input_grad[5]:
            to_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
        to_residual = grads[0] if ctx.needs_input_grad[6] else None
        return to_x, None, None, None, None, to_bias, to_residual, None


class _Both(_Linear):
    """With its derivative forwards too, which torch.compile does not take."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        x, bias, residual = tangents[0], *tangents[5:7]
        weight: tuple[Any, Any, Any, Any] = ctx.saved_tensors
        if x is None:
            x = weight[1].new_zeros(ctx.shape, dtype=ctx.dtypes[0])
        return linear_with_gradient(x, *weight, bias, residual, "bf16")


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
    """The operator, recorded for a backward pass, and differentiated forwards."""
    arguments = x, qweight, scales, zeros, perm, bias, residual, precision
    if torch.compiler.is_compiling() and not has_tangent(x, bias, residual):
        return _Linear.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return _applied(*arguments)  # type: ignore[no-any-return]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="torch.compile takes no derivative forwards of amxq.linear"
)
def _applied(*arguments: Any) -> torch.Tensor:
    return _Both.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
