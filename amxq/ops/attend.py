"""Attention of one token: the kernel of :mod:`amxq_kernels.decode_attention`, compiled."""

from __future__ import annotations

import functools

import torch

from amxq.ir.types import F32, I32, Type
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers


@functools.cache
def attend_one(target: str, head: int) -> Launchable:
    """For bf16 heads of this even size."""
    from amxq_kernels.decode_attention import attend_one as kernel

    pointer = pointers()[torch.bfloat16]
    types: dict[str, Type] = dict.fromkeys(("qkv", "cos", "sin", "keys", "values", "y"), pointer)
    types |= dict.fromkeys(("length", "stride", "kv_heads"), I32) | {"scale": F32}
    return kernel.compile(types, {"HALF": head // 2}, target)
