"""``amxq.gated_linear``, ``torch.ops.amxq.gated_linear``: activation(x · Wgateᵀ) · (x · Wupᵀ)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amxq.errors import ArgumentError, LayoutError, ShapeError
from amxq.ir.types import I32, U8, PointerType, Type
from amxq.ops import linear as one
from amxq.ops import schedule
from amxq.ops.activations import bf16_parts, ordered_rows, split_count
from amxq.ops.bound import BoundCall
from amxq.quantization.packed import PackedWeight
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers
from amxq.runtime.targets import get_target

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "gated_linear(Tensor x, Tensor gate_qweight, Tensor gate_scales, Tensor? gate_zeros, "
    "Tensor up_qweight, Tensor up_scales, Tensor? up_zeros, *, str activation='silu') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def gated_linear(
    x: torch.Tensor, gate: PackedWeight, up: PackedWeight, *, activation: str = "silu"
) -> torch.Tensor:
    """activation(x · Wgateᵀ) · (x · Wupᵀ) in one launch, in fp32 until the result is rounded.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides.
        gate, up: packed weights [N, K] of one shape, group size and kind, without perm.
        activation: "silu", "gelu" (by erf) or "gelu_tanh".

    Returns:
        [..., N] in x's dtype. Where x needs a gradient it is computed in three steps.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        ArgumentError: there is no such precision or activation.
        TargetError: this CPU cannot run the target that was asked for.
    """
    _check_no_perm(gate, up)
    if torch.is_grad_enabled() and x.requires_grad:
        _check(x, gate, up, activation)
        return ACTIVATIONS[activation](one.linear(x, *gate)) * one.linear(x, *up)
    return torch.ops.amxq.gated_linear(  # type: ignore[no-any-return]
        x, *gate[:3], *up[:3], activation=activation
    )


def bound_gated_linear(
    gate: PackedWeight, up: PackedWeight, activation: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """:func:`gated_linear` of these weights, for many calls: they are checked here only."""
    sizes = _check_weights(gate, up, activation)

    def general(x: torch.Tensor) -> torch.Tensor:
        return gated_linear(x, gate, up, activation=activation)

    if gate.zeros is not None:
        return general  # sums of activations come first

    def plan(M: int, target: str) -> schedule.Plan:
        return _plan(M, *sizes, target, gate.scales.dtype, False, torch.bfloat16, activation)

    fixed = (gate.qweight, gate.scales, up.qweight, up.scales)
    return BoundCall(sizes, fixed, plan, general)


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
) -> torch.Tensor:
    gate = PackedWeight(gate_qweight, gate_scales, gate_zeros, None)
    up = PackedWeight(up_qweight, up_scales, up_zeros, None)
    M, N, K, group = _check(x, gate, up, activation)
    y = x.new_empty((*x.shape[:-1], N))
    if M == 0:
        return y
    plan = _plan(
        M, N, K, group, get_target(), gate.scales.dtype, gate.zeros is not None, x.dtype, activation
    )
    rows = x if x.is_contiguous() else ordered_rows(x, None, K)
    rows = bf16_parts(rows.view(M, K)) if plan.splits > 1 else rows
    addresses = [t.data_ptr() for w in (gate, up) for t in w if t is not None]
    if plan.prepare is not None:
        sums = torch.empty((M, K // plan.block_k), dtype=torch.float32)
        addresses.append(sums.data_ptr())
        plan.prepare.launch((M, 1, 1), (rows.data_ptr(), sums.data_ptr(), M, K))
    sizes = (M, N, K, group, plan.grid[0])
    plan.kernel.launch(plan.grid, [rows.data_ptr(), *addresses, y.data_ptr(), *sizes])
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
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], gate_scales.shape[0]))


_library.impl("gated_linear", _cpu, "CPU")
torch.library.register_fake("amxq::gated_linear", _fake, lib=_library)


def _check_weights(gate: PackedWeight, up: PackedWeight, activation: str) -> tuple[int, int, int]:
    """(N, K, group size) of two weights that belong together."""
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ArgumentError(f"activation={activation!r}; expected one of {names}")
    K, N, G = one.check_weight(*gate)
    if one.check_weight(*up) != (K, N, G):
        raise ShapeError(
            f"gate is [{N}, {K}] with {G} groups, up has scales {list(up.scales.shape)} and "
            f"qweight {list(up.qweight.shape)}; expected weights of the same shape"
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
    x: torch.Tensor, gate: PackedWeight, up: PackedWeight, activation: str
) -> tuple[int, int, int, int]:
    """(M, N, K, group size) of a call."""
    N, K, group = _check_weights(gate, up, activation)
    return one.check_activations(x, K, None, N, "bf16"), N, K, group


@functools.lru_cache(maxsize=4096)
def _plan(
    M: int,
    N: int,
    K: int,
    group: int,
    target: str,
    scales: torch.dtype,
    zeros: bool,
    y: torch.dtype,
    activation: str,
) -> schedule.Plan:
    """As :func:`amxq.ops.schedule.plan`, for the kernel that multiplies two weights."""
    block_m, block_k = schedule.block_rows(M, target, zeros), schedule.block_depth(group)
    splits = split_count(y)
    kernel = _kernel(target, scales, zeros, y, activation, splits, block_m, block_k)
    sums = schedule.block_sums(target, splits, block_k) if zeros else None
    return schedule.Plan(kernel, sums, splits, block_k, schedule.grid_of(M, K, N, block_m))


@functools.cache
def _kernel(
    target: str,
    scales: torch.dtype,
    zeros: bool,
    y: torch.dtype,
    activation: str,
    splits: int,
    block_m: int,
    block_k: int,
) -> Launchable:
    from amxq_kernels.gated_linear import gated_linear as kernel

    table = pointers()
    types: dict[str, Type] = {"x": table[torch.bfloat16]}
    constants: dict[str, Any] = {
        "ACTIVATION": activation,
        "SPLITS": splits,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }
    for name in ("gate", "up"):
        types |= {f"{name}_qweight": PointerType(U8), f"{name}_scales": table[scales]}
        if zeros:
            types[f"{name}_zeros"] = PointerType(U8)
        else:
            constants[f"{name}_zeros"] = None
    if zeros:
        types["block_sums"] = table[torch.float32]
    else:
        constants["block_sums"] = None
    types["y"] = table[y]
    types |= dict.fromkeys(("M", "N", "K", "group_size", "row_blocks"), I32)
    return kernel.compile(types, constants, target)
