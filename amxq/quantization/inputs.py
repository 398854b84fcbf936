"""What ``pack`` was given, checked against itself before a single weight is touched."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.quantization.packed import BLOCK, SCALE_DTYPES

FORMATS = ("gptq", "gptq_v2", "awq", "plain")

_LAYOUTS = {
    "gptq": ("[K/8, N]", "[G, N]", "[G, N/8]"),
    "gptq_v2": ("[K/8, N]", "[G, N]", "[G, N/8]"),
    "awq": ("[K, N/8]", "[G, N]", "[G, N/8]"),
    "plain": ("[N, K]", "[N, G]", "[N, G]"),
}


_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


@dataclass(frozen=True)
class Inputs:
    """Validated tensors of one weight, and what their shapes say.

    ``group`` is the size of all groups but the last, which may be short. ``order`` is None, or
    int64 [K], the input features sorted by group: act order.
    """

    format: str
    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    N: int
    K: int
    G: int
    group: int

    @property
    def blocks(self) -> int:
        """ceil(K / 8)."""
        return -(-self.K // BLOCK)


def validate(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    format: str,
    group_size: int | None,
    g_idx: torch.Tensor | None,
    allow_nonfinite: bool,
) -> Inputs:
    """Check ``pack``'s arguments; see there for what they are and what is raised."""
    if format not in FORMATS:
        raise LayoutError(f"format is {format!r}; expected one of {', '.join(FORMATS)}")
    plain = format == "plain"
    integers = torch.uint8 if plain else torch.int32
    qweight = _tensor("qweight", qweight, (integers,), format)
    scales = _tensor("scales", scales, SCALE_DTYPES, format)
    if zeros is not None:
        zeros = _tensor("zeros", zeros, (integers,), format)
    if g_idx is not None:
        g_idx = _tensor("g_idx", g_idx, (torch.int32, torch.int64), format)
    _check_ranks(qweight, scales, zeros, format)
    N, K, G = _sizes(qweight, scales, format, g_idx)
    if zeros is not None:
        expected = scales.shape if plain else (*scales.shape[:-1], -(-N // 8))
        if zeros.shape != tuple(expected):
            raise ShapeError(
                f"zeros have shape {list(zeros.shape)}; format {format!r} with scales "
                f"{list(scales.shape)} expects {list(expected)}, that is {_LAYOUTS[format][2]}"
            )
    groups = None if g_idx is None else _one_g_idx(g_idx, qweight.shape[:-2], K, G)
    group = _group(group_size, groups, K, G)
    order = None if groups is None else _order(groups, K, G, group)
    if plain:
        _check_nibbles("qweight", qweight)
        if zeros is not None:
            _check_nibbles("zeros", zeros)
    if not allow_nonfinite:
        _check_finite(scales)
    return Inputs(format, qweight, scales, zeros, order, N, K, G, group)


def _tensor(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], format: str
) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(
            f"{name} is a {type(tensor).__name__}; expected a torch.Tensor; "
            f"convert it, for instance with torch.from_numpy"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(d) for d in dtypes)
        raise DTypeError(
            f"{name} has dtype {tensor.dtype}; format {format!r} expects {expected}; "
            f"choose the format that the tensors have, or convert them"
        )
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name} is on device {tensor.device}; expected cpu; move it with .cpu()")
    if tensor.layout != torch.strided:
        raise LayoutError(f"{name} has layout {tensor.layout}; expected a dense tensor")
    return tensor.detach()


def _check_ranks(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: str
) -> None:
    names = _LAYOUTS[format]
    if qweight.dim() not in (2, 3):
        raise ShapeError(
            f"qweight has shape {list(qweight.shape)}; format {format!r} expects {names[0]}, "
            f"or a leading E for stacked experts"
        )
    lead = qweight.shape[:-2]
    for name, tensor, shape in (("scales", scales, names[1]), ("zeros", zeros, names[2])):
        if tensor is not None and (tensor.dim() != qweight.dim() or tensor.shape[:-2] != lead):
            raise ShapeError(
                f"{name} have shape {list(tensor.shape)} beside qweight {list(qweight.shape)}; "
                f"format {format!r} expects {shape}"
                + (f" with a leading {lead[0]}" if lead else "")
            )
    for name, tensor in (("qweight", qweight), ("scales", scales)):
        if 0 in tensor.shape:
            raise ShapeError(f"{name} has shape {list(tensor.shape)}; every size must be 1 or more")


def _sizes(
    qweight: torch.Tensor, scales: torch.Tensor, format: str, g_idx: torch.Tensor | None
) -> tuple[int, int, int]:
    """N, K and G, from shapes that agree."""
    rows, columns = qweight.shape[-2:]
    if format == "plain":
        N, K, G, agree = rows, columns, scales.shape[-1], scales.shape[-2] == rows
    else:
        G, N = scales.shape[-2:]
        if format == "awq":
            K, agree = rows, columns == -(-N // 8)
        else:
            K, agree = 8 * rows, columns == N
    if not agree:
        hint = _other_format(qweight, scales)
        raise ShapeError(
            f"qweight {list(qweight.shape)} and scales {list(scales.shape)} disagree on N; "
            f"format {format!r} expects {_LAYOUTS[format][0]} and {_LAYOUTS[format][1]}"
            + (f"; the shapes fit format {hint!r}" if hint and hint != format else "")
        )
    # Eight rows share a GPTQ word, so only g_idx can say that K ends inside the last one.
    if g_idx is not None and format in ("gptq", "gptq_v2") and g_idx.dim() >= 1:
        if K - 8 < g_idx.shape[-1] < K:
            K = g_idx.shape[-1]
    return N, K, G


def _other_format(qweight: torch.Tensor, scales: torch.Tensor) -> str | None:
    if qweight.dtype != torch.int32:
        return None
    N = scales.shape[-1]
    return {N: "gptq", -(-N // 8): "awq"}.get(qweight.shape[-1])


def orders_differ(qweight: torch.Tensor, g_idx: torch.Tensor | None) -> bool:
    """Whether stacked experts [E, ..] have each a g_idx of their own, and not all the same."""
    if not isinstance(qweight, torch.Tensor) or not isinstance(g_idx, torch.Tensor):
        return False
    if qweight.dim() != 3 or g_idx.dim() != 2 or len(g_idx) != len(qweight):
        return False
    return bool((g_idx != g_idx[:1]).any())


def _one_g_idx(g_idx: torch.Tensor, lead: torch.Size, K: int, G: int) -> torch.Tensor:
    """g_idx, [K] or [E, K], as int64 [K], every value in 0..G-1."""
    if lead and g_idx.shape[:-1] == lead:
        if not bool((g_idx == g_idx[:1]).all()):
            expert = int((g_idx != g_idx[:1]).any(dim=1).nonzero()[0])
            raise LayoutError(
                f"g_idx of expert {expert} differs from that of expert 0; pack such experts with "
                f"amxq.pack, or one by one"
            )
        g_idx = g_idx[0]
    if g_idx.shape != (K,):
        raise ShapeError(
            f"g_idx has shape {list(g_idx.shape)}; expected [{K}], one group for each input "
            f"feature of qweight"
        )
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= G:
        at = int(g_idx.argmin() if low < 0 else g_idx.argmax())
        raise LayoutError(
            f"g_idx[{at}] is {low if low < 0 else high}; expected a group 0..{G - 1}, as the "
            f"scales have {G} groups"
        )
    return g_idx.long()


def _group(group_size: int | None, groups: torch.Tensor | None, K: int, G: int) -> int:
    """The size of every group but the last."""
    if group_size is None:
        if groups is not None:
            group = int(torch.bincount(groups).max())
        elif K % G == 0:
            group = K // G
        else:
            raise ShapeError(
                f"K = {K} is not a multiple of the {G} groups of the scales, so the last group "
                f"is short; pass group_size"
            )
    else:
        try:
            group = operator.index(group_size)
        except TypeError:
            raise DTypeError(
                f"group_size is {group_size!r}; expected a whole number, -1 or None"
            ) from None
        if group == -1:
            group = K
        elif group < 1:
            raise ShapeError(
                f"group_size is {group}; expected a multiple of {BLOCK}, or -1 for one group of K"
            )
        expected = -(-K // group)
        if expected != G:
            raise ShapeError(
                f"group_size {group_size} makes {expected} groups of K = {K}, but the scales "
                f"have {G}; correct group_size or leave it out"
            )
    if G > 1 and group % BLOCK:
        raise ShapeError(
            f"group size {group} (K = {K}, {G} groups) is not a multiple of {BLOCK}; "
            f"quantise with group size 32, 64 or 128, or pass the right group_size"
        )
    return group


def _order(groups: torch.Tensor, K: int, G: int, group: int) -> torch.Tensor | None:
    """The input features sorted by group, or None when they are in order already."""
    if torch.equal(groups, torch.arange(K, device="cpu") // group):
        return None
    counts = torch.bincount(groups, minlength=G)
    expected = torch.full((G,), group, device="cpu")
    expected[-1] = K - group * (G - 1)
    if not torch.equal(counts, expected):
        at = int((counts != expected).nonzero()[0])
        raise LayoutError(
            f"g_idx puts {int(counts[at])} input features into group {at}; expected "
            f"{int(expected[at])} with group size {group}, K = {K} and {G} groups; the file is "
            f"damaged or its group size is another one"
        )
    return groups.argsort(stable=True)


def _check_nibbles(name: str, tensor: torch.Tensor) -> None:
    if int(tensor.max()) > 15:
        at = (tensor > 15).nonzero()[0].tolist()
        raise LayoutError(f"{name}{at} is {int(tensor[tuple(at)])}; expected 4-bit values 0..15")


def is_finite(scales: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, that is, has no exponent of ones only.

    In NumPy: torch would wake its threads for more than 32,768 elements, which takes longer.
    """
    exponent = _EXPONENT[scales.dtype]
    return not ((bits(scales) & exponent) == exponent).any()


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as integers of their size, in the same memory; NumPy knows no bf16."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(integers[tensor.dtype.itemsize]).numpy()


def _check_finite(scales: torch.Tensor) -> None:
    if not is_finite(scales):
        at = (~scales.isfinite()).nonzero()[0].tolist()
        raise LayoutError(
            f"scales{at} is {scales[tuple(at)].item()}; expected finite scales; "
            f"the checkpoint is damaged or was quantised to overflow: quantise it again"
        )
