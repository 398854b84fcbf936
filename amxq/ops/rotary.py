"""Rotary position embedding of queries and keys, in one launch."""

from __future__ import annotations

import functools

import torch

from amxq.ops.schedule import compile_with
from amxq.runtime.compiler import Launchable
from amxq.runtime.targets import get_target


def can_rotate(x: torch.Tensor, cos: object, sin: object, head: int) -> bool:
    """Whether :func:`rotate` takes these cosines and sines for heads of x [B, T, ...]."""
    return (
        type(cos) is torch.Tensor
        and type(sin) is torch.Tensor
        and head % 2 == 0
        and cos.shape in ((1, x.shape[1], head), (x.shape[0], x.shape[1], head))
        and sin.shape == cos.shape
        and cos.dtype is sin.dtype is x.dtype
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.is_cpu
        and sin.is_cpu
    )


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x · cos + (-x₂, x₁) · sin for x = (x₁, x₂) in q and k, rounded after each operation: the
    bits of transformers' ``apply_rotary_pos_emb``.

    Args:
        q, k: [B, T, heads, D] of one dtype, bf16, fp16 or fp32, on the CPU.
        cos, sin: that :func:`can_rotate` lets pass.

    Returns:
        contiguous [B, heads, T, D] of both.
    """
    q, k = _side_by_side(q), _side_by_side(k)
    B, T, q_heads, D = q.shape
    k_heads = k.shape[2]
    rotated_q, rotated_k = q.new_empty((B, q_heads, T, D)), q.new_empty((B, k_heads, T, D))
    tensors = (q, k, cos, sin, rotated_q, rotated_k)
    numbers = (T, q_heads, k_heads, q.stride(1), k.stride(1), cos.shape[0] * T)
    kernel = _kernel(get_target(), q.dtype, D)
    kernel.launch((B * T, 1, 1), (*(t.data_ptr() for t in tensors), *numbers))
    return rotated_q, rotated_k


def plain_rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`rotate` computes, by torch's operators."""

    def one(x: torch.Tensor) -> torch.Tensor:
        low, high = x.transpose(1, 2).chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        return torch.cat((low, high), -1) * cos[:, None] + turned * sin[:, None]

    return one(q), one(k)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with the heads of a token side by side and tokens equally far apart."""
    batch, token, head, element = x.stride()
    good = element == 1 and head == x.shape[3] and batch == x.shape[1] * token
    return x if good else x.contiguous()


@functools.cache
def _kernel(target: str, dtype: torch.dtype, head: int) -> Launchable:
    from amxq_kernels.rotary import rotate as kernel

    names = ("q", "k", "cos", "sin", "rotated_q", "rotated_k")
    return compile_with(kernel, dict.fromkeys(names, dtype), {"HALF": head // 2}, target)
