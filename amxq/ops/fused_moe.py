"""``amxq.fused_moe`` and ``torch.ops.amxq.fused_moe``: mixture-of-experts layers in INT4."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from amxq.errors import AmxqError, DTypeError, LayoutError
from amxq.ops import expert_checks as checks
from amxq.ops import expert_token
from amxq.ops.checks import check_devices, check_precision
from amxq.ops.expert_layer import ExpertLayer
from amxq.ops.expert_weights import weights_of
from amxq.ops.gradient import differentiated, primal, refuse_tangents
from amxq.quantization.packed import PackedWeight
from amxq.runtime.targets import get_target

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "fused_moe(Tensor x, Tensor w13_qweight, Tensor w13_scales, Tensor? w13_zeros, "
    "Tensor? w13_perm, Tensor w2_qweight, Tensor w2_scales, Tensor? w2_zeros, Tensor? w2_perm, "
    "Tensor topk_weights, Tensor topk_ids, *, str activation='silu', bool interleaved=False, "
    "float? limit=None, float? alpha=None, bool apply_router_weight_on_input=False, "
    "float? routed_scaling_factor=None, Tensor? expert_map=None, Tensor? w13_bias=None, "
    "Tensor? w2_bias=None, str precision='bf16') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def fused_moe(
    x: torch.Tensor,
    w13: PackedWeight,
    w2: PackedWeight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    """out[m] = Σ_j topk_weights[m, j] · expert(topk_ids[m, j])(x[m]).

    An expert is w2 · act(gate, up) with gate and up the two halves of w13 · x. Sums are fp32, and
    what w2 is multiplied with has the precision of x. The same input gives the same bits whatever
    the number of threads. Inference only.

    Args:
        x: [M, H] bf16, fp16 or fp32 on the CPU, any strides; M may be 0.
        w13: E packed matrices [2I, H], gate before up; H and I are multiples of 8. Each of the two
            may be padded to a multiple of 32 rows, as ``amxq.quantization.paired`` does it.
        w2: E packed matrices [H, I]. Its group size, zeros and order are its own.
        topk_weights: [M, topk] bf16, fp16 or fp32.
        topk_ids: [M, topk] int32 or int64; negative ones contribute nothing, and an expert may
            occur twice in a row.
        activation: "silu": silu(gate) · up. "gelu": the exact one, by erf; "gelu_tanh": its usual
            approximation; both times up. "swiglu": gate · sigmoid(alpha · gate) · (up + 1), as in
            GPT-OSS.
        interleaved: rows of w13 are gate 0, up 0, gate 1, up 1, … instead of two halves. Such a
            w13, and one whose I is no multiple of 32, is brought into the order of the kernels at
            first use, which is remembered while its tensors live and takes their memory again;
            torch does not tell of writes through ``.data`` or NumPy, which go unnoticed then.
        limit: clamp gate to at most limit, and up to ±limit. None: no limit; for "swiglu" 7.
        alpha: of "swiglu", default 1.702.
        apply_router_weight_on_input: multiply x with the weight instead of the result.
        routed_scaling_factor: multiplies the result; None is 1.
        expert_map: int32 or int64 [number of ids]: what an id stands for, an expert 0..E-1, or -1
            for one that contributes nothing here (expert parallelism). None: ids are experts.
        w13_bias, w2_bias: [E, 2I] and [E, H], any floating dtype, or None.
        precision: "bf16", or "int8": x and what w2 is multiplied with are quantised at run time
            to 8 bits, with a scale for each block of at most 128, as in :func:`amxq.linear`.

    Returns:
        [M, H] in x's dtype.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit, or an id is not an expert's; no
            expert has run.
        ArgumentError: there is no such activation or precision, or a number is out of range.
        TargetError: this CPU cannot run the target that was asked for.
    """
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, tuple) or len(weight) != 4:
            raise DTypeError(
                f"{name} is a {type(weight).__name__}; expected an amxq.PackedWeight of stacked "
                f"experts, as amxq.pack returns it"
            )
    if differentiated(x, topk_weights):
        raise LayoutError(
            "x or topk_weights requires a gradient or has a tangent, which amxq.fused_moe has not: "
            "call it under torch.no_grad(), and with primals"
        )
    try:
        return primal(  # type: ignore[no-any-return]
            torch.ops.amxq.fused_moe,
            x,
            *w13,
            *w2,
            topk_weights,
            topk_ids,
            activation=activation,
            interleaved=interleaved,
            limit=limit,
            alpha=alpha,
            apply_router_weight_on_input=apply_router_weight_on_input,
            routed_scaling_factor=routed_scaling_factor,
            expert_map=expert_map,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            precision=precision,
        )
    except (AttributeError, RuntimeError) as problem:  # of torch, before a kernel was reached
        if not isinstance(problem, AmxqError):
            checks.refuse(
                {
                    "x": x,
                    **_named("w13", w13),
                    **_named("w2", w2),
                    "topk_weights": topk_weights,
                    "topk_ids": topk_ids,
                    "expert_map": expert_map,
                    "w13_bias": w13_bias,
                    "w2_bias": w2_bias,
                },
                {"activation": activation, "precision": precision},
                {"limit": limit, "alpha": alpha, "routed_scaling_factor": routed_scaling_factor},
            )
        raise


def _named(name: str, weight: Iterable[object]) -> dict[str, object]:
    fields = ("qweight", "scales", "zeros", "perm")
    return {f"{name}.{field}": tensor for field, tensor in zip(fields, weight, strict=True)}


def _cpu(
    x: torch.Tensor,
    w13_qweight: torch.Tensor,
    w13_scales: torch.Tensor,
    w13_zeros: torch.Tensor | None,
    w13_perm: torch.Tensor | None,
    w2_qweight: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_zeros: torch.Tensor | None,
    w2_perm: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    refuse_tangents("fused_moe", x, topk_weights)
    w13 = PackedWeight(w13_qweight, w13_scales, w13_zeros, w13_perm)
    w2 = PackedWeight(w2_qweight, w2_scales, w2_zeros, w2_perm)
    layer = weights_of(w13, w2, w13_bias, w2_bias, interleaved)
    known = layer.E, layer.H, layer.inner
    sizes = checks.check_call(known, x, topk_weights, topk_ids, expert_map)
    act = checks.check_activation(activation, interleaved, limit, alpha)
    check_precision(precision)
    target, int8 = get_target(), precision == "int8"
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    out = x.new_empty((sizes.M, sizes.H))
    weights, on_input = topk_weights.contiguous(), apply_router_weight_on_input
    if sizes.M == 1 and layer.shared_order:
        owners = expert_token.owners_of(topk_ids, expert_map, sizes)
        if not owners:
            return out.zero_()
        perms = w13_perm, w2_perm
        expert_token.run(target, layer, owners, act, int8, x, perms, weights, on_input, factor, out)
        return out
    call = ExpertLayer(target, sizes, act, x.dtype, int8)
    if not call.sort(topk_ids, expert_map):
        return out.zero_()
    h = call.first(x, layer.w13, w13_perm, weights.float() if on_input else None)
    call.second(h, layer.w2, w2_perm, None if on_input else weights, factor, out)
    return out


def _fake(
    x: torch.Tensor,
    w13_qweight: torch.Tensor,
    w13_scales: torch.Tensor,
    w13_zeros: torch.Tensor | None,
    w13_perm: torch.Tensor | None,
    w2_qweight: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_zeros: torch.Tensor | None,
    w2_perm: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float | None = None,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    """Shapes and dtypes only, for tracing, or for a call with tensors on the meta device."""
    given: dict[str, Any] = {
        "x": x,
        **_named("w13", (w13_qweight, w13_scales, w13_zeros, w13_perm)),
        **_named("w2", (w2_qweight, w2_scales, w2_zeros, w2_perm)),
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "expert_map": expert_map,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
    }
    check_devices(given)
    checks.check_activation(activation, interleaved, limit, alpha)
    check_precision(precision)
    w13 = PackedWeight(w13_qweight, w13_scales, w13_zeros, w13_perm)
    w2 = PackedWeight(w2_qweight, w2_scales, w2_zeros, w2_perm)
    known = checks.check_weights(w13, w2, w13_bias, w2_bias, interleaved)
    checks.check_call(known, x, topk_weights, topk_ids, expert_map)
    return x.new_empty(x.shape)


_library.impl("fused_moe", _cpu, "CPU")
torch.library.register_fake("amxq::fused_moe", _fake, lib=_library)
