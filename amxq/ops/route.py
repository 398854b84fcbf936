"""``amxq.route`` and ``torch.ops.amxq.route``: experts of each token and their weights."""

from __future__ import annotations

import functools
from typing import Any

import torch

from amxq.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.ir.types import F32, I32, I64, Type
from amxq.ops.gradient import has_tangent, primal, refuse_tangents
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers
from amxq.runtime.targets import get_target

SCORINGS = ("softmax", "sigmoid")
MOST_EXPERTS = 4096

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "route(Tensor logits, int topk, *, str scoring='softmax', bool renormalize=False, "
    "Tensor? correction_bias=None, int num_groups=1, int? topk_groups=None, "
    "float? routed_scaling_factor=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def route(
    logits: torch.Tensor,
    topk: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    routed_scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The topk experts of each token and their weights, for ``amxq.fused_moe``.

    Mixtral and Qwen3-MoE: softmax, renormalised (GPT-OSS's softmax over the chosen logits is the
    same). Qwen2-MoE, OLMoE, DeepSeek-V2: softmax. DeepSeek-V3: sigmoid with correction_bias, groups
    and a scaling factor. One small kernel for all of it: a softmax, a top-k and a division in torch
    take three times as long for one token.

    Args:
        logits: [M, E] bf16, fp16 or fp32, the router's output.
        topk: experts of a token, 1 to E.
        scoring: "softmax" over all experts or "sigmoid" of each, in fp32.
        renormalize: divide the weights of a token by their sum.
        correction_bias: [E]; added to the scores where experts are chosen, not to the weights.
        num_groups: groups of equally many experts, one after the other.
        topk_groups: experts come from so many groups only: those with the largest score, or, with
            "sigmoid", the largest sum of two scores. None: all.
        routed_scaling_factor: multiplies the weights.

    Returns:
        (weights fp32 [M, topk], ids int32 [M, topk]), largest first; of equal scores that of the
        lower expert comes first. The ids of a token differ; scores of NaN or -inf come last.

    Raises:
        ShapeError, DTypeError, LayoutError, ArgumentError: the arguments do not fit.
    """
    if not isinstance(logits, torch.Tensor):
        raise DTypeError(f"logits is a {type(logits).__name__}; expected a torch.Tensor")
    if logits.layout is not torch.strided or not (logits.is_cpu or logits.is_meta):
        raise LayoutError(f"logits is {logits.layout} on {logits.device}; expected a CPU tensor")
    for name, value in {"topk": topk, "num_groups": num_groups, "topk_groups": topk_groups}.items():
        if not isinstance(value, (int, torch.SymInt)) and (value is not None or name == "topk"):
            raise ArgumentError(f"{name} is {value!r}; expected a whole number")
    if has_tangent(logits, correction_bias):
        raise LayoutError("logits has a tangent, which amxq.route has not: call it with primals")
    return primal(  # type: ignore[no-any-return]
        torch.ops.amxq.route,
        logits,
        topk,
        scoring=scoring,
        renormalize=renormalize,
        correction_bias=correction_bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        routed_scaling_factor=routed_scaling_factor,
    )


def _cpu(
    logits: torch.Tensor,
    topk: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    routed_scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_tangents("route", logits, correction_bias)
    top_groups = _check(logits, topk, scoring, correction_bias, num_groups, topk_groups)
    weights, ids = _empty(logits, topk)
    M, E = logits.shape
    if not M:
        return weights, ids
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = None if correction_bias is None else correction_bias.float().contiguous()
    kernel = _kernel(
        get_target(),
        logits.dtype,
        bias is not None,
        scoring == "sigmoid",
        renormalize,
        num_groups,
        E // num_groups,
        top_groups,
    )
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    addresses = [t.data_ptr() for t in (logits, bias, weights, ids) if t is not None]
    kernel.launch((M, 1, 1), (*addresses, logits.stride(0), topk, factor))
    return weights, ids


def _fake(
    logits: torch.Tensor,
    topk: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int | None = None,
    routed_scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits, topk, scoring, correction_bias, num_groups, topk_groups)
    return _empty(logits, topk)


_library.impl("route", _cpu, "CPU")
torch.library.register_fake("amxq::route", _fake, lib=_library)


def _empty(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits.shape[0], topk
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _check(
    logits: torch.Tensor,
    topk: int,
    scoring: str,
    correction_bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int | None,
) -> int:
    """How many groups experts come from."""
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(f"logits have dtype {logits.dtype}; expected bfloat16, float16 or float32")
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ShapeError(
            f"logits have shape {list(logits.shape)}; expected [M, E], 1 to {MOST_EXPERTS} experts"
        )
    E = logits.shape[1]
    if scoring not in SCORINGS:
        raise ArgumentError(f"scoring={scoring!r}; expected {' or '.join(map(repr, SCORINGS))}")
    if num_groups < 1 or E % num_groups:
        raise ArgumentError(f"num_groups={num_groups}; expected a divisor of E = {E}")
    top_groups = num_groups if topk_groups is None else topk_groups
    if not 1 <= top_groups <= num_groups:
        raise ArgumentError(f"topk_groups={topk_groups}; expected 1 to num_groups = {num_groups}")
    if scoring == "sigmoid" and top_groups < num_groups and E // num_groups < 2:
        raise ShapeError(
            f"num_groups={num_groups} of E = {E}; expected two experts or more in each"
        )
    most = E // num_groups * top_groups
    if not 1 <= topk <= most:
        raise ArgumentError(f"topk={topk}; expected 1 to {most}, the experts that can be chosen")
    if correction_bias is not None:
        if not correction_bias.is_floating_point():
            raise DTypeError(f"correction_bias has dtype {correction_bias.dtype}; expected floats")
        if correction_bias.shape != (E,) or correction_bias.device != logits.device:
            raise ShapeError(
                f"correction_bias is {list(correction_bias.shape)} on {correction_bias.device}; "
                f"expected [{E}] on {logits.device}"
            )
    return top_groups


@functools.cache
def _kernel(
    target: str,
    logits: torch.dtype,
    bias: bool,
    sigmoid: bool,
    renormalize: bool,
    groups: int,
    size: int,
    top_groups: int,
) -> Launchable:
    from amxq_kernels.route import route as kernel

    table = pointers()
    types: dict[str, Type] = {"logits": table[logits]}
    constants: dict[str, Any] = {
        "SIGMOID": sigmoid,
        "RENORMALIZE": renormalize,
        "GROUPS": groups,
        "SIZE": size,
        "TOP_GROUPS": top_groups,
    }
    if bias:
        types["bias"] = table[torch.float32]
    else:
        constants["bias"] = None
    types |= {"weights": table[torch.float32], "ids": table[torch.int32]}
    types |= {"stride": I64, "topk": I32, "factor": F32}
    return kernel.compile(types, constants, target)
