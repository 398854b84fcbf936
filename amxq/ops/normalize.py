"""``torch.ops.amxq.rms_norm``: root mean square normalisation of rows, in one launch."""

from __future__ import annotations

import functools

import torch

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.ir.types import F32, I32, Type
from amxq.ops.checks import check_devices
from amxq.ops.gradient import refuse_tangents
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers
from amxq.runtime.targets import get_target

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 64

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight · (x / sqrt(mean(x²) + eps)) for every row, computed in fp32; the quotient is rounded
    to x's dtype before it is multiplied, as in transformers' Llama.

    Args:
        x: [..., N] contiguous bf16, fp16 or fp32 on the CPU.
        weight: [N] contiguous, of x's dtype.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
    """
    N = weight.shape[0] if weight.dim() == 1 else 0
    if not x.dim() or x.shape[-1] != N or not N:
        raise ShapeError(
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}; expected [..., N], [N]"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise DTypeError(f"x is {x.dtype} and weight {weight.dtype}; expected one of bf16 … fp32")
    if not (x.is_contiguous() and weight.is_contiguous() and x.is_cpu and weight.is_cpu):
        raise LayoutError("x or weight is not a contiguous CPU tensor: use .contiguous()")
    y = torch.empty_like(x)
    M = x.numel() // N
    kernel = compiled(get_target(), x.dtype)
    kernel.launch((M, 1, 1), (x.data_ptr(), weight.data_ptr(), y.data_ptr(), N, eps))
    return y


def _cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    refuse_tangents("rms_norm", x, weight)
    return rms_norm(x.contiguous(), weight, eps)


def _fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    check_devices({"x": x, "weight": weight})
    return x.new_empty(x.shape)


_library.impl("rms_norm", _cpu, "CPU")
torch.library.register_fake("amxq::rms_norm", _fake, lib=_library)


@functools.cache
def compiled(target: str, dtype: torch.dtype) -> Launchable:
    """The kernel for x of this dtype."""
    from amxq_kernels.normalize import rms_norm as kernel

    pointer = pointers()[dtype]
    types: dict[str, Type] = {"x": pointer, "weight": pointer, "y": pointer, "N": I32, "eps": F32}
    return kernel.compile(types, {"BLOCK": _BLOCK}, target)
