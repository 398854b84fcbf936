"""What ``amxq.linear`` and its relatives are given: checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from amxq.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.quantization.packed import SCALE_DTYPES, PackedWeight

PRECISIONS = ("bf16", "int8")

_BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_weight(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
) -> tuple[int, int, int]:
    """(K, N, G) of a packed weight; everything that memory safety rests on is checked here,
    quickly; the messages are PackedWeight.check's."""
    q, s = qweight.shape, scales.shape
    good = (
        len(q) == 4
        and len(s) == 2
        and qweight.dtype == torch.uint8
        and scales.dtype in SCALE_DTYPES
        and q[2] == 2
        and q[3] == 64
        and s[0] > 0
        and s[1] > 0
        and q[0] == -(-s[0] // 32)
        and q[1] % s[1] == 0
        and qweight.is_contiguous()
        and scales.is_contiguous()
        and qweight.is_cpu
        and scales.is_cpu
        and (
            zeros is None
            or (
                zeros.dtype == torch.uint8
                and zeros.shape == s
                and zeros.is_contiguous()
                and zeros.is_cpu
            )
        )
    )
    if perm is not None and good:
        good = (
            perm.dtype == torch.int32
            and perm.dim() == 1
            and perm.is_cpu
            and 8 * q[1] - 8 < perm.shape[0] <= 8 * q[1]
        )
    if not good:
        if qweight.dim() == 5:
            raise ShapeError(
                f"qweight has shape {list(q)}, which is a stack of experts: "
                "amxq.linear takes one [N/32, K/8, 2, 64]; index the expert"
            )
        PackedWeight(qweight, scales, zeros, perm).check()
        raise LayoutError("qweight, scales, zeros and perm do not fit each other: use amxq.pack")
    return (8 * q[1] if perm is None else perm.shape[0]), s[0], s[1]


def check_activations(
    x: torch.Tensor,
    K: int,
    N: int,
    precision: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> int:
    """The number of rows of x."""
    check_precision(precision)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(f"x has dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] != K:
        raise ShapeError(f"x has shape {list(x.shape)}; expected [..., {K}], the weight's K")
    M = x.numel() // K
    if M >= 1 << 29:
        raise ShapeError(f"x has shape {list(x.shape)}; expected fewer than 2^29 rows")
    if bias is not None:
        check_bias(bias, N)
    if residual is not None:
        check_like_result("residual", residual, x, N)
    return M


def check_precision(precision: object) -> None:
    """Raises ArgumentError for what is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")


def check_bias(bias: torch.Tensor, N: int) -> None:
    """Raises an error for what is no bias [N]."""
    if bias.shape != (N,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{N}]")
    if bias.layout is not torch.strided:
        raise LayoutError(f"bias has layout {bias.layout}; expected a dense tensor")
    if bias.dtype not in _BIAS_DTYPES:
        raise DTypeError(f"bias has dtype {bias.dtype}; expected a floating dtype, 16 to 64 bits")


def check_like_result(name: str, tensor: torch.Tensor, x: torch.Tensor, N: int) -> None:
    """Raises an error for what has not the shape, dtype and device of the result for x."""
    shape = (*x.shape[:-1], N)
    if tensor.shape != shape:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    if tensor.dtype != x.dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; expected x's, {x.dtype}")
    if tensor.device != x.device or tensor.layout is not torch.strided:
        raise LayoutError(
            f"{name} is {tensor.layout} on {tensor.device}; expected dense, on x's {x.device}"
        )


def check_devices(tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Raises LayoutError where some tensors are on one device and some on another: for a call with
    one on the meta device torch takes the shape of the result, and memory that nobody writes."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        lost = next(name for name, device in devices.items() if device.type != "cpu")
        other = next(name for name, device in devices.items() if device != devices[lost])
        raise LayoutError(
            f"{lost} is on {devices[lost]} and {other} on {devices[other]}; expected CPU tensors"
        )


def check_out(out: torch.Tensor, x: torch.Tensor, N: int) -> torch.Tensor:
    """``out``, if the result for x can be written there."""
    check_like_result("out", out, x, N)
    if not out.is_contiguous():
        raise LayoutError(f"out has strides {out.stride()}; expected a contiguous tensor")
    return out


def lazy(tensor: torch.Tensor | None) -> bool:
    """Whether the memory of a real tensor does not hold what it stands for: a negation that torch
    carries out before it calls a kernel of an operator, or zeros without memory."""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())


def check_writable(out: torch.Tensor) -> None:
    """Raises LayoutError for what torch lets no operator write to."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise LayoutError("out= cannot be transformed by torch.func: leave it out")
    if lazy(out):
        raise LayoutError(
            "out is a lazy negation or zero, whose memory holds other numbers; expected a tensor "
            "of its own: use .clone()"
        )


def check_apart(out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Rows of the result are written while inputs are still read."""
    first = out.data_ptr()
    for name, tensor in inputs.items():
        if tensor is None or not tensor.numel():
            continue
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        start, stop = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
        if first < stop and start < first + out.numel() * out.element_size():
            raise LayoutError(f"out overlaps {name} in memory; expected a tensor of its own")
