"""``amxq.gated_linear``, ``torch.ops.amxq.gated_linear``: activation(x · Wgateᵀ) · (x · Wupᵀ)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from amxq.errors import ArgumentError, LayoutError, ShapeError
from amxq.ops import linear as one
from amxq.ops import schedule
from amxq.ops.activations import ordered_rows
from amxq.ops.bound import Bound, BoundCall, bound
from amxq.ops.checks import (
    check_activations,
    check_devices,
    check_precision,
    check_weight,
    lazy,
)
from amxq.ops.gradient import differentiated, primal, refuse_tangents
from amxq.quantization.packed import PackedWeight
from amxq.runtime.compiler import Launchable
from amxq.runtime.targets import get_target

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "gated_linear(Tensor x, Tensor gate_qweight, Tensor gate_scales, Tensor? gate_zeros, "
    "Tensor up_qweight, Tensor up_scales, Tensor? up_zeros, *, str activation='silu', "
    "str precision='bf16') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def gated_linear(
    x: torch.Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    *,
    activation: str = "silu",
    precision: str = "bf16",
) -> torch.Tensor:
    """activation(x · Wgateᵀ) · (x · Wupᵀ) in one launch, in fp32 until the result is rounded.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides.
        gate, up: packed weights [N, K] of one shape, group size and kind, without perm.
        activation: "silu", "gelu" (by erf) or "gelu_tanh".
        precision: "bf16" or "int8", see :func:`amxq.linear`.

    Returns:
        [..., N] in x's dtype. Where x needs a gradient it is computed in three steps.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        ArgumentError: there is no such precision or activation.
        TargetError: this CPU cannot run the target that was asked for.
    """
    _check_no_perm(gate, up)
    if differentiated(x):
        _check(x, gate, up, activation, precision)
        gated = one.linear(x, *gate, precision=precision)
        return ACTIVATIONS[activation](gated) * one.linear(x, *up, precision=precision)
    operator, weights = torch.ops.amxq.gated_linear, (*gate[:3], *up[:3])
    return primal(  # type: ignore[no-any-return]
        operator, x, *weights, activation=activation, precision=precision
    )


def bound_gated_linear(
    gate: PackedWeight, up: PackedWeight, activation: str, precision: str
) -> Bound:
    """:func:`gated_linear` of these weights, for many calls: they are checked here only."""

    def general(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = gated_linear(x, gate, up, activation=activation, precision=precision)
        return y if residual is None else y + residual

    return bound(bound_call(gate, up, activation, precision), general)


def bound_call(
    gate: PackedWeight, up: PackedWeight, activation: str, precision: str
) -> BoundCall | None:
    """The call of weights that this checks, if there can be one."""
    sizes = N, K, group = _check_weights(gate, up, activation)
    check_precision(precision)
    operands = schedule.Operands(gate.scales.dtype, gate.zeros is not None)

    def plan(M: int, target: str, residual: bool) -> schedule.Plan:
        return _plan(M, K, N, group, target, operands, torch.bfloat16, precision, activation)

    weight = tuple(t for w in (gate, up) for t in w if t is not None)
    return None if any(map(lazy, weight)) else BoundCall(sizes, weight, None, plan)


def _cpu(
    x: torch.Tensor,
    gate_qweight: torch.Tensor,
    gate_scales: torch.Tensor,
    gate_zeros: torch.Tensor | None,
    up_qweight: torch.Tensor,
    up_scales: torch.Tensor,
    up_zeros: torch.Tensor | None,
    *,
    activation: str = "silu",
    precision: str = "bf16",
) -> torch.Tensor:
    refuse_tangents("gated_linear", x)
    gate = PackedWeight(gate_qweight, gate_scales, gate_zeros, None)
    up = PackedWeight(up_qweight, up_scales, up_zeros, None)
    M, N, K, group = _check(x, gate, up, activation, precision)
    y = x.new_empty((*x.shape[:-1], N))
    if M == 0:
        return y
    operands = schedule.Operands(gate.scales.dtype, gate.zeros is not None)
    plan = _plan(M, K, N, group, get_target(), operands, x.dtype, precision, activation)
    rows = x if x.is_contiguous() else ordered_rows(x, None, K)
    plan.run(rows, one.addresses(*gate, *up), [y.data_ptr()], (M, N, K, group))
    return y


def _fake(
    x: torch.Tensor,
    gate_qweight: torch.Tensor,
    gate_scales: torch.Tensor,
    gate_zeros: torch.Tensor | None,
    up_qweight: torch.Tensor,
    up_scales: torch.Tensor,
    up_zeros: torch.Tensor | None,
    *,
    activation: str = "silu",
    precision: str = "bf16",
) -> torch.Tensor:
    """Shapes and dtypes only, for tracing, or for a call with tensors on the meta device."""
    gate = {"gate.qweight": gate_qweight, "gate.scales": gate_scales, "gate.zeros": gate_zeros}
    up = {"up.qweight": up_qweight, "up.scales": up_scales, "up.zeros": up_zeros}
    check_devices({"x": x, **gate, **up})
    N = gate_scales.shape[0]
    check_activations(x, 8 * gate_qweight.shape[1], N, precision)
    return x.new_empty((*x.shape[:-1], N))


_library.impl("gated_linear", _cpu, "CPU")
torch.library.register_fake("amxq::gated_linear", _fake, lib=_library)


def _check_weights(gate: PackedWeight, up: PackedWeight, activation: str) -> tuple[int, int, int]:
    """(N, K, group size) of two weights that belong together."""
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ArgumentError(f"activation={activation!r}; expected one of {names}")
    K, N, G = check_weight(*gate)
    if (other := check_weight(*up)) != (K, N, G):
        raise ShapeError(
            f"gate is [{N}, {K}] with groups of {K // G}, up [{other[1]}, {other[0]}] with groups "
            f"of {other[0] // other[2]}; expected weights of the same shape and group size"
        )
    _check_no_perm(gate, up)
    if gate.scales.dtype != up.scales.dtype or (gate.zeros is None) != (up.zeros is None):
        raise LayoutError(
            f"gate has {gate.scales.dtype} scales and {'no ' if gate.zeros is None else ''}zeros, "
            f"up {up.scales.dtype} and {'no ' if up.zeros is None else ''}zeros; expected the same"
        )
    return N, K, K // G


def _check_no_perm(gate: PackedWeight, up: PackedWeight) -> None:
    if gate.perm is not None or up.perm is not None:
        raise LayoutError("gate or up has a perm; expected weights without: use amxq.linear")


def _check(
    x: torch.Tensor, gate: PackedWeight, up: PackedWeight, activation: str, precision: str
) -> tuple[int, int, int, int]:
    """(M, N, K, group size) of a call."""
    N, K, group = _check_weights(gate, up, activation)
    return check_activations(x, K, N, precision), N, K, group


@functools.lru_cache(maxsize=4096)
def _plan(
    M: int,
    K: int,
    N: int,
    group: int,
    target: str,
    operands: schedule.Operands,
    y: torch.dtype,
    precision: str,
    activation: str,
) -> schedule.Plan:
    """As :func:`amxq.ops.schedule.plan`, for the kernel that multiplies two weights."""
    compiled = functools.partial(_kernel, activation)
    panels = -(-N // schedule.PANEL)
    return schedule.plan_of(compiled, M, K, panels, group, target, operands, y, precision)


@functools.cache
def _kernel(
    activation: str,
    target: str,
    operands: schedule.Operands,
    y: torch.dtype,
    splits: int,
    block_m: int,
    block_k: int,
) -> Launchable:
    from amxq_kernels.gated_linear import gated_linear as kernel

    types, constants = schedule.activation_types(splits, operands.zeros, y)
    for name in ("gate", "up"):
        types[f"{name}_qweight"] = torch.uint8
        types[f"{name}_scales"] = operands.scales
        types[f"{name}_zeros"] = torch.uint8 if operands.zeros else None
    types["y"] = y
    constants |= {"ACTIVATION": activation, "BLOCK_M": block_m, "BLOCK_K": block_k}
    return schedule.compile_with(kernel, types, constants, target)
