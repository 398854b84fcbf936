"""``amxq.linear`` and ``torch.ops.amxq.linear``: y = x · Wᵀ + bias for a packed INT4 weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from amxq.errors import AmxqError, ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.ops import schedule
from amxq.ops.activations import bf16_parts, ordered_rows
from amxq.ops.bound import BoundCall
from amxq.ops.gradient import linear_with_gradient
from amxq.ops.raw import packed_once
from amxq.quantization.packed import SCALE_DTYPES, PackedWeight
from amxq.runtime.targets import get_target

PRECISIONS = ("bf16", "int8")

_BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ARGUMENTS = (
    "Tensor x, Tensor qweight, Tensor scales, Tensor? zeros=None, Tensor? perm=None, *, "
    "Tensor? bias=None, str precision='bf16'"
)

_library = torch.library.Library("amxq", "DEF")
for _schema in (
    f"linear({_ARGUMENTS}) -> Tensor",
    f"linear_out({_ARGUMENTS}, Tensor(a!) out) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor | None = None,
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
    The same input gives the same bits whatever the number of threads. Gradients flow to x and to
    bias; weights have none.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides, any number of rows (0 too).
        qweight, scales, zeros, perm: a packed weight's tensors; or a raw checkpoint triple
            (int32 GPTQ or AWQ qweight, scales, int32 zeros), packed at first use and remembered
            while its qweight lives. Of perm only the range is checked here; that it names no
            feature twice is checked by whatever makes or loads packed weights.
        bias: [N] or None; any floating dtype.
        precision: "bf16", exact as said above, or "int8": x is quantised at run time to 8 bits,
            with a scale for each row and block of at most 128 features within a group. Faster
            from a few rows on; the error is that of the activations, about 0.65 % of the result's
            norm where they are Gaussian. A NaN or an infinity makes its whole row NaN.
        out: [..., N] contiguous tensor of x's dtype to write to, or None for a new one; apart
            from x in memory.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        ArgumentError: there is no such precision or activation.
        TargetError: this CPU cannot run the target that was asked for.
    """
    if scales is None:  # as in amxq.linear(x, w)
        _refuse({"x": x, "qweight": qweight, "scales": scales}, precision)
    assert scales is not None
    try:
        if torch.is_grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad)
        ):
            if out is not None:
                raise LayoutError("out= has no gradient: leave it out, or use torch.no_grad()")
            return linear_with_gradient(x, qweight, scales, zeros, perm, bias, precision)
        if out is None:
            return torch.ops.amxq.linear(  # type: ignore[no-any-return]
                x, qweight, scales, zeros, perm, bias=bias, precision=precision
            )
        torch.ops.amxq.linear_out(
            x, qweight, scales, zeros, perm, bias=bias, precision=precision, out=out
        )
        return out
    except (AttributeError, RuntimeError) as problem:  # of torch, before a kernel was reached
        if not isinstance(problem, AmxqError):
            given = {"x": x, "qweight": qweight, "scales": scales}
            options = {"zeros": zeros, "perm": perm, "bias": bias, "out": out}
            _refuse(given | {k: v for k, v in options.items() if v is not None}, precision)
        raise


def _refuse(tensors: Mapping[str, object], precision: object) -> None:
    """Names the argument that torch does not let through to a kernel."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            way = "; unpack a weight: amxq.linear(x, *w)" if isinstance(tensor, tuple) else ""
            raise DTypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor{way}")
        if tensor.is_quantized or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"quantised, {tensor.dtype}"
            raise LayoutError(f"{name} is {kind}; expected a plain tensor")
        if tensor.layout is not torch.strided:
            raise LayoutError(f"{name} has layout {tensor.layout}; expected dense: use .to_dense()")
        if not (tensor.is_cpu or tensor.is_meta):
            raise LayoutError(f"{name} is on {tensor.device}; expected a CPU tensor; use .cpu()")
    check_precision(precision)


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


def _cpu_out(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor,
) -> None:
    _run(x, qweight, scales, zeros, perm, bias, precision, out)


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
    """Shapes and dtypes only, for tracing. A call of tensors some of which are on the meta device
    ends here too, and must not return memory that nobody has written."""
    tensors = {"qweight": qweight, "scales": scales, "zeros": zeros, "perm": perm, "bias": bias}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise LayoutError(
                f"{name} is on {tensor.device} and x on {x.device}; expected CPU tensors"
            )
    raw = qweight.dtype == torch.int32
    if not raw:
        K = 8 * qweight.shape[1] if perm is None else perm.shape[0]
        check_activations(x, K, bias, scales.shape[0], precision)
    return x.new_empty((*x.shape[:-1], scales.shape[-1] if raw else scales.shape[0]))


def _fake_out(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor,
) -> None:
    y = _fake(x, qweight, scales, zeros, perm, bias=bias, precision=precision)
    _check_out(out, x, y.shape[-1])


_library.impl("linear", _cpu, "CPU")
_library.impl("linear_out", _cpu_out, "CPU")
torch.library.register_fake("amxq::linear", _fake, lib=_library)
torch.library.register_fake("amxq::linear_out", _fake_out, lib=_library)


def bound_linear(
    packed: PackedWeight, bias: torch.Tensor | None, precision: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``amxq.linear`` of one weight, for many calls: it is checked here, and not at each call."""
    K, N, G = check_weight(*packed)
    if bias is not None:
        _check_bias(bias, N)

    def general(x: torch.Tensor) -> torch.Tensor:
        return linear(x, *packed, bias=bias, precision=precision)

    if packed.perm is not None or (precision == "bf16" and packed.zeros is not None):
        return general  # these have work to do before the kernel
    if bias is not None and (bias.dtype is torch.float64 or not bias.is_contiguous()):
        return general
    scales, zeros = packed.scales.dtype, packed.zeros is not None
    kind = None if bias is None else bias.dtype

    def plan(M: int, target: str) -> schedule.Plan:
        return schedule.plan(
            M, K, N, K // G, target, scales, zeros, kind, torch.bfloat16, precision
        )

    fixed = tuple(t for t in (*packed[:3], bias) if t is not None)
    return BoundCall((N, K, K // G), fixed, plan, general)


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
        qweight, scales, zeros, perm = packed_once(qweight, scales, zeros, perm)
    K, N, G = check_weight(qweight, scales, zeros, perm)
    M = check_activations(x, K, bias, N, precision)
    if out is None:
        y = x.new_empty((*x.shape[:-1], N))
    else:
        y = _check_out(out, x, N)
        _check_apart(out, x=x, qweight=qweight, scales=scales, zeros=zeros, bias=bias)
    if M == 0:
        return y
    if bias is not None:
        # fp32 sums are what it is added to
        bias = bias.float() if bias.dtype is torch.float64 else bias.contiguous()

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
        precision,
    )
    rows = x if perm is None and x.is_contiguous() else ordered_rows(x, perm, padded)
    weight = [qweight.data_ptr(), scales.data_ptr()]
    if zeros is not None:
        weight.append(zeros.data_ptr())
    result = [y.data_ptr()] if bias is None else [bias.data_ptr(), y.data_ptr()]
    sizes = (M, N, padded, padded // G, plan.grid[0])

    if plan.int8:
        quantised, _held = plan.quantised(rows.data_ptr(), M, padded)
        plan.kernel.launch(plan.grid, [*quantised, *weight, *result, *sizes])
        return y
    if plan.splits > 1:
        rows = bf16_parts(rows.view(M, padded))
    if plan.prepare is not None:
        sums = torch.empty((M, padded // plan.block_k), dtype=torch.float32)
        weight.append(sums.data_ptr())
        plan.prepare.launch((M, 1, 1), (rows.data_ptr(), sums.data_ptr(), M, padded))
    plan.kernel.launch(plan.grid, [rows.data_ptr(), *weight, *result, *sizes])
    return y


# --- validation -------------------------------------------------------------------------


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
    x: torch.Tensor, K: int, bias: torch.Tensor | None, N: int, precision: str
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
        _check_bias(bias, N)
    return M


def check_precision(precision: object) -> None:
    """Raises ArgumentError for what is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")


def _check_bias(bias: torch.Tensor, N: int) -> None:
    if bias.shape != (N,):
        raise ShapeError(f"bias has shape {list(bias.shape)}; expected [{N}]")
    if bias.layout is not torch.strided:
        raise LayoutError(f"bias has layout {bias.layout}; expected a dense tensor")
    if bias.dtype not in _BIAS_DTYPES:
        raise DTypeError(f"bias has dtype {bias.dtype}; expected a floating dtype, 16 to 64 bits")


def _check_out(out: torch.Tensor, x: torch.Tensor, N: int) -> torch.Tensor:
    shape = (*x.shape[:-1], N)
    if out.shape != shape:
        raise ShapeError(f"out has shape {list(out.shape)}; expected {list(shape)}")
    if out.dtype != x.dtype:
        raise DTypeError(f"out has dtype {out.dtype}; expected x's, {x.dtype}")
    if out.device != x.device or not out.is_contiguous():
        raise LayoutError(
            f"out has strides {out.stride()} on {out.device}; expected a contiguous CPU tensor"
        )
    return out


def _check_apart(out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
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
