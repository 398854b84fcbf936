"""What ``amxq.fused_moe`` was given, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from amxq.errors import AmxqError, ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.quantization.packed import PANEL, SCALE_DTYPES, PackedWeight

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu")
ROUTING_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIMIT, _ALPHA = 7.0, 1.702  # of "swiglu", as in GPT-OSS


class Activation(NamedTuple):
    """A checked activation; ``limit`` is None where nothing is clamped."""

    kind: str
    interleaved: bool
    limit: float | None
    alpha: float


class Sizes(NamedTuple):
    """M tokens, E experts, sizes H and I (hidden, inner), experts of a token, number of ids."""

    M: int
    E: int
    H: int
    inner: int
    topk: int
    ids: int


def check_activation(
    kind: str, interleaved: bool, limit: float | None, alpha: float | None
) -> Activation:
    """Raises ArgumentError for an activation that there is not."""
    if kind not in ACTIVATIONS:
        raise ArgumentError(
            f"activation={kind!r}: expected one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    if alpha is not None and kind != "swiglu":
        raise ArgumentError(f"alpha={alpha} with activation={kind!r}; only 'swiglu' has an alpha")
    if limit is None and kind == "swiglu":
        limit = _LIMIT
    if limit is not None and not limit > 0:
        raise ArgumentError(f"limit={limit}; expected a number above 0, or None for no limit")
    return Activation(kind, interleaved, limit, _ALPHA if alpha is None else alpha)


def check_weights(
    w13: PackedWeight,
    w2: PackedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    interleaved: bool,
) -> tuple[int, int, int]:
    """(E, H, I). Raises ShapeError, DTypeError or LayoutError; contents are not read."""
    E, N, H = _check_weight("w13", w13)
    E2, N2, K2 = _check_weight("w2", w2)
    if N % 16 or H % 8:
        raise ShapeError(
            f"w13 is [{E}, {N}, {H}]; expected [E, 2·I, H] with I and H multiples of 8"
        )
    inner = N // 2
    if not interleaved and N % (2 * PANEL) == 0 and -(-K2 // PANEL) * PANEL == inner:
        inner = K2  # gate and up are padded to whole panels
    if (E2, N2, K2) != (E, H, inner):
        raise ShapeError(
            f"w2 is [{E2}, {N2}, {K2}] beside w13 [{E}, {N}, {H}]; expected [E, H, I], which is "
            f"[{E}, {H}, {N // 2}]"
        )
    for name, bias, columns in (("w13_bias", w13_bias, 2 * inner), ("w2_bias", w2_bias, H)):
        if bias is None:
            continue
        if not bias.is_floating_point() or bias.element_size() < 2:
            raise DTypeError(f"{name} has dtype {bias.dtype}; expected a floating dtype")
        if bias.shape != (E, columns):
            raise ShapeError(f"{name} has shape {list(bias.shape)}; expected [{E}, {columns}]")
    return E, H, inner


def check_call(
    weights: tuple[int, int, int],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> Sizes:
    """The sizes of a call, ``weights`` being (E, H, I). Raises as :func:`check_weights`."""
    E, H, inner = weights
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DTypeError(f"x has dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.dim() != 2 or x.shape[1] != H:
        raise ShapeError(f"x has shape {list(x.shape)}; expected [M, {H}], w13's H")
    M = x.shape[0]
    _check_routing(M, topk_weights, topk_ids)
    ids = E
    if expert_map is not None:
        if expert_map.dtype not in (torch.int32, torch.int64):
            raise DTypeError(f"expert_map has dtype {expert_map.dtype}; expected int32 or int64")
        if expert_map.dim() != 1 or not expert_map.shape[0]:
            raise ShapeError(
                f"expert_map has shape {list(expert_map.shape)}; expected [number of ids]"
            )
        ids = expert_map.shape[0]
    topk = topk_ids.shape[1]
    if (M + 1) * topk >= 1 << 24:
        raise ShapeError(
            f"{M} tokens of {topk} experts; expected fewer than 2^24 assignments: split the call"
        )
    return Sizes(M, E, H, inner, topk, ids)


def _check_routing(M: int, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"topk_ids has dtype {topk_ids.dtype}; expected int32 or int64")
    if topk_weights.dtype not in ROUTING_DTYPES:
        raise DTypeError(
            f"topk_weights has dtype {topk_weights.dtype}; expected bfloat16, float16 or float32"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != M:
        raise ShapeError(f"topk_ids has shape {list(topk_ids.shape)}; expected [{M}, topk]")
    if topk_weights.shape != topk_ids.shape:
        raise ShapeError(
            f"topk_weights has shape {list(topk_weights.shape)}; expected that of topk_ids, "
            f"{list(topk_ids.shape)}"
        )


def _check_weight(name: str, w: PackedWeight) -> tuple[int, int, int]:
    """(E, N, K) of stacked experts; everything that memory safety rests on is checked here,
    quickly; the messages are PackedWeight.check's."""
    qweight, scales, zeros, perm = w
    q, s = qweight.shape, scales.shape
    good = (
        len(q) == 5
        and len(s) == 3
        and q[0] == s[0] > 0
        and qweight.dtype == torch.uint8
        and scales.dtype in SCALE_DTYPES
        and q[3] == 2
        and q[4] == 64
        and s[1] > 0
        and s[2] > 0
        and q[1] == -(-s[1] // 32)
        and q[2] > 0
        and q[2] % s[2] == 0
        and qweight.is_contiguous()
        and scales.is_contiguous()
        and (
            zeros is None
            or (zeros.dtype == torch.uint8 and zeros.shape == s and zeros.is_contiguous())
        )
        and (
            perm is None
            or (perm.dtype == torch.int32 and perm.shape in ((8 * q[2],), (q[0], 8 * q[2])))
        )
    )
    if not good:
        if qweight.dim() == 4 or (qweight.dtype == torch.int32 and qweight.dim() in (2, 3)):
            raise ShapeError(
                f"{name}.qweight has shape {list(q)}, dtype {qweight.dtype}; expected packed, "
                f"stacked experts [E, N/32, K/8, 2, 64]: pack tensors with a leading E"
            )
        try:
            PackedWeight(qweight, scales, zeros, perm).check()
        except AmxqError as error:
            raise type(error)(f"{name}: {error}") from None
        raise ShapeError(f"{name}: K is {w.in_features}; expected a multiple of 8")
    return q[0], s[1], 8 * q[2]


def refuse(
    tensors: Mapping[str, object], names: Mapping[str, object], numbers: Mapping[str, object]
) -> None:
    """Names the argument that torch does not let through to a kernel. None is allowed for what may
    be absent."""
    for name, value in names.items():
        if not isinstance(value, str):
            raise ArgumentError(f"{name} is {value!r}; expected its name, a string")
    for name, value in numbers.items():
        if value is not None and not isinstance(value, (int, float)):
            raise ArgumentError(f"{name} is {value!r}; expected a number or None")
    for name, tensor in tensors.items():
        optional = name.endswith((".zeros", ".perm", "_map", "_bias"))
        if tensor is None and optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.is_quantized or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"quantised, {tensor.dtype}"
            raise LayoutError(f"{name} is {kind}; expected a plain tensor")
        if tensor.layout is not torch.strided:
            raise LayoutError(f"{name} has layout {tensor.layout}; expected dense: use .to_dense()")
        if not (tensor.is_cpu or tensor.is_meta):
            raise LayoutError(f"{name} is on {tensor.device}; expected a CPU tensor; use .cpu()")


def wrong_id(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, sizes: Sizes, at: int
) -> ShapeError:
    """The error for assignment ``at``, whose id is no expert's."""
    where = f"topk_ids[{at // sizes.topk}, {at % sizes.topk}]"
    given = int(topk_ids.reshape(-1)[at])
    if expert_map is not None and given >= sizes.ids:
        return ShapeError(
            f"{where} is {given}, but expert_map has shape [{sizes.ids}]; expected an entry for "
            f"each id that a router may give"
        )
    if expert_map is None:
        return ShapeError(
            f"{where} is {given}; expected an id below {sizes.ids}, or a negative one for none"
        )
    return ShapeError(
        f"expert_map[{given}] is {int(expert_map[given])}; expected an expert 0..{sizes.E - 1}, or "
        f"-1 for one that is elsewhere"
    )
