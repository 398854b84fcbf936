"""Linear layers whose weights are not INT4, for few rows: bf16 as checkpoints have them, or int8.

A weight that is used once a token is read at the speed of memory, which torch's multiplication of
one row is far from.
"""

from __future__ import annotations

import functools

import torch

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.ops.bound import observed
from amxq.ops.checks import check_devices
from amxq.ops.gradient import refuse_tangents
from amxq.ops.schedule import compile_with
from amxq.runtime.compiler import Launchable
from amxq.runtime.targets import get_target
from amxq_kernels.dense_linear import BLOCK_N, LANES

FEW_ROWS = 4
"""Rows that reading the weight hides the arithmetic of, which has no tiles here."""
GROUPS = (64, 32, 16)
"""Columns of an int8 weight that may share a scale."""
_QUANTISED_AT_ONCE = 4096  # rows
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "int8_weight_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """x · Wᵀ + bias, added up in fp32 and rounded once, or None where torch has to compute it.

    Args:
        x: [..., K]; served are 1 to FEW_ROWS rows of bf16, on the CPU, without gradients.
        weight: [N, K], served where it is contiguous bf16 with K a multiple of 16.
        bias: [N] contiguous bf16, or None.
    """
    bf16, (N, K) = torch.bfloat16, weight.shape
    if (
        x.dtype is not bf16
        or weight.dtype is not bf16
        or not 0 < x.numel() <= FEW_ROWS * K
        or x.shape[-1] != K
        or K % LANES
        or N < BLOCK_N
        or type(x) is not torch.Tensor
        or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        or not (bias is None or (bias.dtype is bf16 and bias.is_contiguous() and bias.is_cpu))
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or observed(x, weight)
    ):
        return None
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], N))
    extra = () if bias is None else (bias.data_ptr(),)
    kernel = _dense(get_target(), bias is not None)
    grid = x.numel() // K, -(-N // BLOCK_N), 1
    kernel.launch(grid, (x.data_ptr(), weight.data_ptr(), *extra, y.data_ptr(), N, K))
    return y


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K] and bf16 scales [N, K / group] such that weight ≈ int8 · scale.

    A group is 64 columns, 32 or 16 where K is no multiple of that. Integers go from -127 to 127,
    rounded to nearest: the error is half a scale at most, 0.6 % of the norm for Gaussian weights.

    Args:
        weight: [N, K] bf16, fp16 or fp32.

    Raises:
        ShapeError: K is no multiple of 16, or N less than 4.
        DTypeError: another dtype.
    """
    if weight.dim() != 2 or weight.shape[1] % LANES or weight.shape[0] < BLOCK_N:
        raise ShapeError(
            f"weight has shape {list(weight.shape)}; expected [N, K] with K a multiple of "
            f"{LANES} and N {BLOCK_N} or more"
        )
    if weight.dtype not in _DTYPES:
        raise DTypeError(f"weight is {weight.dtype}; expected bf16, fp16 or fp32")
    N, K = weight.shape
    group = next(g for g in GROUPS if K % g == 0)
    values = torch.empty((N, K), dtype=torch.int8, device="cpu")
    scales = torch.empty((N, K // group), dtype=torch.bfloat16, device="cpu")
    for n in range(0, N, _QUANTISED_AT_ONCE):
        rows = weight[n : n + _QUANTISED_AT_ONCE].float().unflatten(1, (-1, group))
        scale = (rows.abs().amax(-1) / 127).bfloat16()
        scales[n : n + _QUANTISED_AT_ONCE] = scale
        divisor = torch.where(scale == 0, 1, scale)[..., None]
        integers = (rows / divisor).round().clamp(-127, 127)
        values[n : n + _QUANTISED_AT_ONCE] = integers.flatten(1)
    return values, scales


def dequantize_rows(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [N, K] that :func:`quantize_rows` made int8, rounded to ``dtype``."""
    groups = values.view(values.shape[0], scales.shape[1], -1)
    return (groups * scales.float()[..., None]).flatten(1).to(dtype)


def int8_weight_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x · (weight · scales)ᵀ + bias, added up in fp32, rounded once; x is not quantised.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU.
        weight, scales: what :func:`quantize_rows` returns, contiguous.
        bias: [N] of x's dtype, or None.

    Returns:
        [..., N] in x's dtype, the same bits for any number of rows.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
    """
    group = _check_int8(x, weight, scales, bias)
    N, K = weight.shape
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], N))
    extra = () if bias is None else (bias.data_ptr(),)
    kernel = _int8(get_target(), x.dtype, bias is not None, group)
    grid = x.numel() // K, -(-N // BLOCK_N), 1
    if not x.numel():
        return y
    tensors = x.data_ptr(), weight.data_ptr(), scales.data_ptr(), *extra, y.data_ptr()
    kernel.launch(grid, (*tensors, N, K))
    return y


def _check_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> int:
    """Columns that share a scale; raises what :func:`int8_weight_linear` says."""
    if weight.dim() != 2 or scales.dim() != 2 or weight.shape[0] != scales.shape[0]:
        raise ShapeError(
            f"weight has shape {list(weight.shape)} and scales {list(scales.shape)}; "
            "expected [N, K], [N, groups]"
        )
    (N, K), groups = weight.shape, scales.shape[1]
    if N < BLOCK_N or not groups or K % groups or K // groups not in GROUPS:
        raise ShapeError(
            f"weight has shape {[N, K]} and {groups} groups; expected {BLOCK_N} rows or more, and "
            f"groups of {', '.join(map(str, GROUPS))} columns"
        )
    if not x.dim() or x.shape[-1] != K or (bias is not None and bias.shape != (N,)):
        given = "no" if bias is None else list(bias.shape)
        raise ShapeError(f"x is {list(x.shape)}, bias {given}; expected [..., {K}] and [{N}]")
    if weight.dtype is not torch.int8 or scales.dtype is not torch.bfloat16:
        raise DTypeError(f"weight is {weight.dtype}, scales {scales.dtype}; expected int8 and bf16")
    if x.dtype not in _DTYPES or (bias is not None and bias.dtype is not x.dtype):
        raise DTypeError(f"x is {x.dtype}; expected bf16, fp16 or fp32, and a bias of that dtype")
    for name, tensor in (("weight", weight), ("scales", scales), ("bias", bias)):
        if tensor is not None and not (tensor.is_contiguous() and tensor.is_cpu):
            raise LayoutError(f"{name} is not a contiguous CPU tensor: use .contiguous()")
    if not x.is_cpu:
        raise LayoutError(f"x is on {x.device}; expected a CPU tensor")
    return K // groups


def _cpu(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    refuse_tangents("int8_weight_linear", x, bias)
    return int8_weight_linear(x, weight, scales, bias)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    check_devices({"x": x, "weight": weight, "scales": scales, "bias": bias})
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library.impl("int8_weight_linear", _cpu, "CPU")
torch.library.register_fake("amxq::int8_weight_linear", _fake, lib=_library)


@functools.cache
def _dense(target: str, bias: bool) -> Launchable:
    from amxq_kernels.dense_linear import dense_linear as kernel

    bf16 = torch.bfloat16
    types = {"x": bf16, "weight": bf16, "bias": bf16 if bias else None, "y": bf16}
    return compile_with(kernel, types, {}, target)


@functools.cache
def _int8(target: str, x: torch.dtype, bias: bool, group: int) -> Launchable:
    from amxq_kernels.dense_linear import int8_weight_linear as kernel

    types = {"x": x, "weight": torch.int8, "scales": torch.bfloat16, "y": x}
    return compile_with(kernel, types | {"bias": x if bias else None}, {"GROUP": group}, target)
