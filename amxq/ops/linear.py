"""``amxq.linear`` and ``torch.ops.amxq.linear``: y = x · Wᵀ + bias for a packed INT4 weight."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.ops import schedule
from amxq.ops.activations import bf16_parts
from amxq.quantization.packed import SCALE_DTYPES, PackedWeight
from amxq.quantization.packing import format_of_raw, pack
from amxq.runtime.targets import get_target

PRECISIONS = ("bf16",)

_library = torch.library.Library("amxq", "DEF")
_library.define(
    "linear(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros=None, Tensor? perm=None, *, "
    "Tensor? bias=None, str precision='bf16') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · Wᵀ + bias, with W given as the fields of a :class:`amxq.PackedWeight`.

    Exact up to the rounding of fp32 sums and of the result: weights stay integers, and fp16 and
    fp32 activations are multiplied as the two or three bf16 numbers that they are the sum of.
    The same input gives the same bits whatever the number of threads.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides, any number of rows (0 too).
        qweight, scales, zeros, perm: a packed weight's tensors; or a raw checkpoint triple
            (int32 GPTQ or AWQ qweight, scales, int32 zeros), packed at first use and remembered
            while its qweight lives.
        bias: [N] or None; any floating dtype.
        precision: "bf16".
        out: [..., N] contiguous tensor of x's dtype to write to, or None for a new one.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        TargetError: this CPU cannot run the target that was asked for.
    """
    if out is None:
        return torch.ops.amxq.linear(  # type: ignore[no-any-return]
            x, qweight, scales, zeros, perm, bias=bias, precision=precision
        )
    return _run(x, qweight, scales, zeros, perm, bias, precision, out)


def _cpu(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    return _run(x, qweight, scales, zeros, perm, bias, precision, None)


def _fake(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    """Shapes and dtypes only, for tracing."""
    columns = scales.shape[-1] if qweight.dtype == torch.int32 else scales.shape[0]
    return x.new_empty((*x.shape[:-1], columns))


_library.impl("linear", _cpu, "CPU")
torch.library.register_fake("amxq::linear", _fake, lib=_library)


# --- one call ---------------------------------------------------------------------------


def _run(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    precision: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if qweight.dtype is torch.int32:
        qweight, scales, zeros, perm = _packed_once(qweight, scales, zeros, perm)
    K, N, G = _check_weight(qweight, scales, zeros, perm)
    M = _check_activations(x, K, bias, N, precision)
    y = x.new_empty((*x.shape[:-1], N)) if out is None else _check_out(out, x, N)
    if M == 0:
        return y

    padded = 8 * qweight.shape[1]
    plan = schedule.plan(
        M,
        padded,
        N,
        padded // G,
        get_target(),
        scales.dtype,
        zeros is not None,
        None if bias is None else bias.dtype,
        y.dtype,
    )
    rows = x
    if plan.splits > 1 or perm is not None or not x.is_contiguous():
        rows = bf16_parts(x.reshape(M, K), perm, padded)

    args = [rows.data_ptr(), qweight.data_ptr(), scales.data_ptr()]
    if zeros is not None and plan.sums is not None:
        sums = torch.empty((M, padded // plan.block_k), dtype=torch.float32)
        args += (zeros.data_ptr(), sums.data_ptr())
        plan.sums.launch((M, 1, 1), (args[0], args[4], M, padded))
    if bias is not None:
        bias = bias.contiguous()
        args.append(bias.data_ptr())
    args += (y.data_ptr(), M, N, padded, padded // G, plan.grid[0])
    plan.kernel.launch(plan.grid, args)
    return y


# --- validation -------------------------------------------------------------------------


def _check_weight(
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


def _check_activations(
    x: torch.Tensor, K: int, bias: torch.Tensor | None, N: int, precision: str
) -> int:
    """The number of rows of x."""
    if precision not in PRECISIONS:
        raise DTypeError(
            f"precision={precision!r}: this version has {', '.join(map(repr, PRECISIONS))}"
        )
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(f"x has dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.dim() == 0 or x.shape[-1] != K:
        raise ShapeError(f"x has shape {list(x.shape)}; expected [..., {K}], the weight's K")
    if not x.is_cpu:
        raise LayoutError(f"x is on {x.device}; expected a CPU tensor; move it with .cpu()")
    if x.layout != torch.strided:
        raise LayoutError(f"x has layout {x.layout}; expected a dense tensor")
    M = x.numel() // K
    if M >= 1 << 29:
        raise ShapeError(f"x has shape {list(x.shape)}; expected fewer than 2^29 rows")
    if bias is not None:
        _check_bias(bias, N)
    return M


def _check_bias(bias: torch.Tensor, N: int) -> None:
    if bias.shape != (N,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{N}]")
    if not bias.is_cpu:
        raise LayoutError(f"bias is on {bias.device}; expected a CPU tensor; use .cpu()")
    if bias.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(f"bias has dtype {bias.dtype}; expected bfloat16, float16 or float32")


def _check_out(out: torch.Tensor, x: torch.Tensor, N: int) -> torch.Tensor:
    shape = (*x.shape[:-1], N)
    if out.shape != shape:
        raise ShapeError(f"out has shape {list(out.shape)}; expected {list(shape)}")
    if out.dtype != x.dtype:
        raise DTypeError(f"out has dtype {out.dtype}; expected x's, {x.dtype}")
    if not out.is_cpu or not out.is_contiguous():
        raise LayoutError("out must be a contiguous CPU tensor")
    return out


# --- raw checkpoint tensors -------------------------------------------------------------

_Remembered = tuple[Any, tuple[Any, ...], PackedWeight]
_packed: dict[int, _Remembered] = {}


def _packed_once(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
) -> PackedWeight:
    """The packed form of a raw triple, remembered while its qweight lives and is not written."""
    if perm is not None:
        raise LayoutError(
            "perm beside raw checkpoint tensors: pack them first, with amxq.pack(..., g_idx=…)"
        )
    key = id(qweight)
    state = tuple((id(t), t._version) for t in (qweight, scales, zeros) if t is not None)
    found = _packed.get(key)
    if found is not None and found[0]() is qweight and found[1] == state:
        return found[2]
    packed = pack(qweight, scales, zeros, format=format_of_raw(qweight, scales, zeros))
    owner = weakref.ref(qweight, lambda _: _packed.pop(key, None))
    _packed[key] = (owner, state, packed)
    return packed

