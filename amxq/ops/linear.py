"""``amxq.linear`` and ``torch.ops.amxq.linear``: y = x · Wᵀ + bias + residual for a packed INT4
weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from amxq.errors import AmxqError, DTypeError, LayoutError
from amxq.ops import remembered, schedule
from amxq.ops.activations import ordered_rows
from amxq.ops.bound import Bound, BoundCall, bound
from amxq.ops.checks import (
    check_activations,
    check_apart,
    check_bias,
    check_devices,
    check_out,
    check_precision,
    check_weight,
    check_writable,
    lazy,
)
from amxq.ops.gradient import differentiated, linear_with_gradient, primal, refuse_tangents
from amxq.ops.raw import packed_once
from amxq.quantization.packed import PackedWeight
from amxq.runtime.targets import get_target

_ARGUMENTS = (
    "Tensor x, Tensor qweight, Tensor scales, Tensor? zeros=None, Tensor? perm=None, *, "
    "Tensor? bias=None, Tensor? residual=None, str precision='bf16'"
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
    residual: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · Wᵀ + bias + residual, with W given as the fields of a :class:`amxq.PackedWeight`.

    Exact up to the rounding of fp32 sums and of the result: weights stay integers, and fp16 and
    fp32 activations are multiplied as the two or three bf16 numbers that they are the sum of.
    The same input gives the same bits whatever the number of threads. Gradients flow to x,
    bias and residual; weights have none.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides, any number of rows (0 too).
        qweight, scales, zeros, perm: a packed weight's tensors; or a raw checkpoint triple
            (int32 GPTQ or AWQ qweight, scales, int32 zeros), packed at first use and remembered
            while its qweight lives. Of perm only the range is checked here; that it names no
            feature twice is checked by whatever makes or loads packed weights.
        bias: [N] or None; any floating dtype.
        residual: [..., N] in x's dtype, any strides, or None: added in fp32, before the result is
            rounded, so that the sum is rounded once.
        precision: "bf16", exact as said above, or "int8": x is quantised at run time to 8 bits,
            with a scale for each row and block of at most 128 features within a group. Faster
            from a few rows on; the error is that of the activations, about 0.65 % of the result's
            norm where they are Gaussian. A NaN or an infinity makes its whole row NaN.
        out: [..., N] contiguous tensor of x's dtype to write to, or None for a new one; apart
            from the others in memory.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        ArgumentError: there is no such precision or activation.
        TargetError: this CPU cannot run the target that was asked for.
    """
    if (
        out is not None
        or not isinstance(precision, str)
        or torch.compiler.is_compiling()
        or getattr(bias, "requires_grad", False)
    ):
        return _dispatched(x, qweight, scales, zeros, perm, bias, residual, precision, out)
    call = remembered.find(precision, qweight, scales, zeros, perm, bias)
    if call is not None:
        y = call.serve(x, residual)
        if y is not None:
            return y
    y = _dispatched(x, qweight, scales, zeros, perm, bias, residual, precision, out)
    if call is None and scales is not None and qweight.dtype is torch.uint8:
        remembered.remember(bound_call, precision, qweight, scales, zeros, perm, bias)
    return y


def _dispatched(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    precision: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Through torch's operators, whatever is given."""
    if scales is None:  # as in amxq.linear(x, w)
        refuse({"x": x, "qweight": qweight, "scales": scales}, precision)
    assert scales is not None
    try:
        if differentiated(x, bias, residual, out):
            if out is not None:
                raise LayoutError(
                    "out= has no gradient and no tangent: leave it out, or use torch.no_grad() and "
                    "primals"
                )
            return linear_with_gradient(x, qweight, scales, zeros, perm, bias, residual, precision)
        if out is None:
            return primal(  # type: ignore[no-any-return]
                torch.ops.amxq.linear,
                *(x, qweight, scales, zeros, perm),
                bias=bias,
                residual=residual,
                precision=precision,
            )
        primal(
            torch.ops.amxq.linear_out,
            *(x, qweight, scales, zeros, perm),
            bias=bias,
            residual=residual,
            precision=precision,
            out=out,
        )
        return out
    except (AttributeError, RuntimeError) as problem:  # of torch, before a kernel was reached
        if not isinstance(problem, AmxqError):
            given = {"x": x, "qweight": qweight, "scales": scales}
            options = {"zeros": zeros, "perm": perm, "bias": bias, "residual": residual, "out": out}
            refuse(given | {k: v for k, v in options.items() if v is not None}, precision)
            if out is not None:
                check_writable(out)
        raise


def refuse(tensors: Mapping[str, object], precision: object) -> None:
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
    residual: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    return _run(x, qweight, scales, zeros, perm, bias, residual, precision, None)


def _cpu_out(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor,
) -> None:
    _run(x, qweight, scales, zeros, perm, bias, residual, precision, out)


def _fake(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    """Shapes and dtypes only, for tracing, or for a call with tensors on the meta device."""
    tensors = {"x": x, "qweight": qweight, "scales": scales, "zeros": zeros, "perm": perm}
    check_devices(tensors | {"bias": bias, "residual": residual})
    raw = qweight.dtype == torch.int32
    if not raw:
        K = 8 * qweight.shape[1] if perm is None else perm.shape[0]
        check_activations(x, K, scales.shape[0], precision, bias, residual)
    return x.new_empty((*x.shape[:-1], scales.shape[-1] if raw else scales.shape[0]))


def _fake_out(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    precision: str = "bf16",
    out: torch.Tensor,
) -> None:
    y = _fake(x, qweight, scales, zeros, perm, bias=bias, residual=residual, precision=precision)
    check_out(out, x, y.shape[-1])


def _lazy_out(*tensors: torch.Tensor | None, out: torch.Tensor, **options: Any) -> None:
    """For tensors that torch would carry out first, and ``out`` with them."""
    check_writable(out)
    *given, options["bias"], options["residual"] = [
        t.clone() if t is not None and lazy(t) else t
        for t in (*tensors, options.get("bias"), options.get("residual"))
    ]
    torch.ops.amxq.linear_out(*given, out=out, **options)


_library.impl("linear", _cpu, "CPU")
for _key in ("Negative", "ZeroTensor"):
    _library.impl("linear_out", _lazy_out, _key)
_library.impl("linear_out", _cpu_out, "CPU")
torch.library.register_fake("amxq::linear", _fake, lib=_library)
torch.library.register_fake("amxq::linear_out", _fake_out, lib=_library)


def bound_linear(packed: PackedWeight, bias: torch.Tensor | None, precision: str) -> Bound:
    """``amxq.linear`` of one weight, for many calls: it is checked here, and not at each call."""
    check_weight(*packed)
    check_precision(precision)
    if bias is not None:
        check_bias(bias, packed.out_features)

    def general(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return _dispatched(x, *packed, bias, residual, precision, None)

    return bound(bound_call(precision, *packed, bias), general)


def bound_call(
    precision: str,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> BoundCall | None:
    """The call of a weight that has been checked, if there can be one."""
    if perm is not None:
        return None  # activations are put into order first
    if bias is not None and (bias.dtype is torch.float64 or not bias.is_contiguous()):
        return None
    if any(map(lazy, (qweight, scales, zeros, bias))):
        return None
    K, (N, G) = 8 * qweight.shape[1], scales.shape
    group, kind = K // G, None if bias is None else bias.dtype
    panels, scale, asymmetric = qweight.shape[0], scales.dtype, zeros is not None

    def plan(M: int, target: str, residual: bool) -> schedule.Plan:
        operands = schedule.Operands(scale, asymmetric, kind, residual)
        return schedule.plan(M, K, panels, group, target, operands, torch.bfloat16, precision)

    weight = (qweight, scales) if zeros is None else (qweight, scales, zeros)
    return BoundCall((N, K, group), weight, bias, plan)


# --- one call ---------------------------------------------------------------------------


def _run(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    precision: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    refuse_tangents("linear", x, bias, residual, out)
    if qweight.dtype is torch.int32:
        qweight, scales, zeros, perm = packed_once(qweight, scales, zeros, perm)
    K, N, G = check_weight(qweight, scales, zeros, perm)
    M = check_activations(x, K, N, precision, bias, residual)
    if out is None:
        y = x.new_empty((*x.shape[:-1], N))
    else:
        y = check_out(out, x, N)
        weight = {"qweight": qweight, "scales": scales, "zeros": zeros}
        check_apart(out, x=x, bias=bias, residual=residual, **weight)
    if M == 0:
        return y
    if bias is not None:
        bias = usable_bias(bias)
    if residual is not None:
        residual = residual.contiguous()
    padded = 8 * qweight.shape[1]
    operands = schedule.Operands(
        scales.dtype,
        zeros is not None,
        None if bias is None else bias.dtype,
        residual is not None,
    )
    panels, group = qweight.shape[0], padded // G
    plan = schedule.plan(M, padded, panels, group, get_target(), operands, y.dtype, precision)
    rows = x if perm is None and x.is_contiguous() else ordered_rows(x, perm, padded)
    plan.run(
        rows,
        addresses(qweight, scales, zeros),
        addresses(bias, residual, y),
        (M, N, padded, group),
    )
    return y


def usable_bias(bias: torch.Tensor) -> torch.Tensor:
    """As kernels take it: fp32 sums are what it is added to."""
    return bias.float() if bias.dtype is torch.float64 else bias.contiguous()


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """In the order of a kernel's parameters; what is absent is left out."""
    return [t.data_ptr() for t in tensors if t is not None]
