"""``pack`` and ``dequantize``: checkpoint tensors to :class:`PackedWeight` and back to fp32.

Eight k of one column are one 32-bit word of the packed layout, whose nibbles hold k in the
order (0, 2, 4, 6 | 1, 3, 5, 7): the low half the even rows, the high half the odd ones. GPTQ and
AWQ words are brought into it by kernels (amxq_kernels/packing.py), plain input is gathered in
64-bit words. Only act order, and a K that ends inside a word, go through bytes [K, N].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from amxq.errors import DTypeError, ShapeError
from amxq.quantization import inputs, unpack
from amxq.quantization.inputs import Inputs
from amxq.quantization.packed import BLOCK, DEFAULT_ZERO, PANEL, PackedWeight
from amxq.runtime import memory
from amxq_kernels import packing as kernels

Format = Literal["gptq", "gptq_v2", "awq", "plain"]

_ROWS = 8  # of words that a program of the kernels takes: as many streams as prefetchers follow

_PAGE_WORDS = 1024

_PAD_WORD = -0x77777778  # 0x88888888 as int32: eight nibbles of 8


def pack(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    format: Format,
    group_size: int | None = None,
    g_idx: torch.Tensor | None = None,
    allow_nonfinite: bool = False,
) -> PackedWeight:
    """Pack an INT4 weight once, at load time, for ``amxq.linear`` and ``amxq.fused_moe``.

    Args:
        qweight: ``"gptq"``, ``"gptq_v2"``: int32 [K/8, N]. ``"awq"``: int32 [K, N/8].
            ``"plain"``: uint8 [N, K], values 0..15. Stacked experts carry a leading E.
        scales: fp16, bf16 or fp32, kept as they are. [G, N]; ``"plain"``: [N, G].
        zeros: int32 [G, N/8]; ``"plain"``: uint8 [N, G], values 0..15. None: 8 everywhere.
        format: ``"gptq"`` stores zeros minus one, the others as they are. The word is taken:
            wrongly labelled files are recognised where a whole checkpoint is read.
        group_size: rows of k that share a scale: a multiple of 8, or -1 for one group of K.
            None: what ``g_idx`` says, or K / G. The last group may be short.
        g_idx: int32 or int64 [K] (experts: or [E, K]): each input feature's group. Not
            i // group_size means act order; the weights are then sorted by group. Where experts
            differ, perm is [E, K].
        allow_nonfinite: take scales that are NaN or infinite, and give what they give.

    Returns:
        The packed weight. Its dequantised values are exactly (q - z) · s of the input. A group
        size that does not divide K rounded up to 8 is replaced by the largest divisor of it
        that does, with scales and zeros repeated. Zeros that are all 8 become None.

    Raises:
        ShapeError: the shapes, or group_size, contradict each other.
        DTypeError: an argument is no tensor or of another dtype.
        LayoutError: not on the CPU; values out of range; scales that are not finite, unless
            allowed; a g_idx
            whose groups have unequal sizes; an unknown format.
    """
    if inputs.orders_differ(qweight, g_idx):
        from amxq.quantization.experts import stack_experts  # which uses this module

        rest = [[None] * len(qweight) if t is None else t for t in (zeros, g_idx)]
        each = zip(qweight, scales, *rest, strict=True)
        options: dict[str, Any] = {"format": format, "group_size": group_size}
        options["allow_nonfinite"] = allow_nonfinite
        experts = (pack(q, s, z, g_idx=g, **options) for q, s, z, g in each)
        return stack_experts(experts, len(qweight))
    given = inputs.validate(qweight, scales, zeros, format, group_size, g_idx, allow_nonfinite)
    packed = pack_all([given])[0]
    memory.use_huge_pages()
    return packed


def pack_all(batch: Sequence[Inputs]) -> list[PackedWeight]:
    """Pack many weights; those of one format and size are packed together."""
    packed = []
    for given, qweight in zip(batch, _qweights(batch), strict=True):
        plain = given.format == "plain"
        scale_rows = given.scales.transpose(-1, -2) if plain else given.scales
        zero_rows = _zero_points(given)
        perm = given.order
        if perm is None and given.K % BLOCK:
            perm = torch.arange(given.K, device="cpu")
        packed.append(
            PackedWeight(
                qweight,
                _panel_order(_regroup(scale_rows, given)),
                None if zero_rows is None else _panel_order(_regroup(zero_rows, given)),
                None if perm is None else perm.to(torch.int32),
            )
        )
    return packed


def dequantize(w: PackedWeight) -> torch.Tensor:
    """The weight as float32 [N, K] ([E, N, K]), input features in their original order.

    Each value is exactly (q - z) · s, computed in fp32.

    Raises:
        ShapeError, DTypeError, LayoutError: w is not a consistent packed weight.
    """
    if not isinstance(w, PackedWeight):
        raise DTypeError(
            f"w is a {type(w).__name__}; expected an amxq.PackedWeight, as amxq.pack returns it"
        )
    w.check()
    integers = unpack_integers(w)
    q = integers.reshape(*integers.shape[:-1], w.num_groups, w.group_size).float()
    if w.zeros is None:
        q -= DEFAULT_ZERO
    else:
        q -= group_rows(w.zeros).transpose(-1, -2).unsqueeze(-1)
    q *= group_rows(w.scales).transpose(-1, -2).float().unsqueeze(-1)
    rows = q.flatten(-2)[..., : w.in_features]
    if w.perm is None:
        return rows.contiguous()
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return out.scatter_(-1, w.perm.long().unsqueeze(-2).expand_as(rows), rows)


def unpack_integers(w: PackedWeight) -> torch.Tensor:
    """The raw q, 0..15, uint8 [N, 8·ceil(K/8)] ([E, ...]), in packed order of k."""
    *lead, panels, blocks, _, _ = w.qweight.shape
    pairs = w.qweight.view(*lead, panels, blocks, PANEL, 2, 2)  # ..., column, parity, byte
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=-1)  # ..., parity, byte, nibble
    q = nibbles.flatten(-2).transpose(-1, -2)  # ..., column, i, parity: k = 2i + parity
    q = q.movedim(-4, -3)  # [..., P, 32, K8, 4, 2]
    return q.reshape(*lead, panels * PANEL, blocks * BLOCK)[..., : w.out_features, :]


def group_rows(panel_ordered: torch.Tensor) -> torch.Tensor:
    """Scales or zeros of a PackedWeight, [..., N, G] panel by panel → [..., G, N] in order."""
    *lead, N, G = panel_ordered.shape
    full = N // PANEL * PANEL
    flat = panel_ordered.reshape(*lead, N * G)
    head = flat[..., : full * G].reshape(*lead, N // PANEL, G, PANEL).movedim(-3, -2)
    tail = flat[..., full * G :].reshape(*lead, G, N - full)
    return torch.cat((head.reshape(*lead, G, full), tail), dim=-1)


def is_raw(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> bool:
    """Whether these are checkpoint tensors (int32 words) and not a PackedWeight's (uint8)."""
    return isinstance(qweight, torch.Tensor) and qweight.dtype == torch.int32


def format_of_raw(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> Format:
    """Tell GPTQ from AWQ for raw int32 tensors without a label.

    The scales are [G, N] in both formats, and say N. GPTQ's qweight is [K/8, N], AWQ's
    [K, N/8]: the last size decides, whatever K is, so that no shape is ambiguous (for N = 1,
    where both sizes are 1, it is GPTQ: AWQ stores eight columns a word and no fewer). What
    shapes cannot tell, v1 from v2, is read from the zeros: all stored as 8 is v2, which then
    means symmetric; anything else is v1, as nearly all files are. Who has asymmetric v2 tensors
    packs them first, with ``format="gptq_v2"``.

    Raises:
        ShapeError: the shapes fit neither format.
        DTypeError: qweight is not int32, or scales are no floating-point tensor.
    """
    if not is_raw(qweight, scales, zeros):
        found = qweight.dtype if isinstance(qweight, torch.Tensor) else type(qweight).__name__
        raise DTypeError(f"qweight is {found}; expected an int32 GPTQ or AWQ checkpoint tensor")
    if not isinstance(scales, torch.Tensor) or not scales.is_floating_point():
        found = scales.dtype if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise DTypeError(f"scales are {found}; expected a tensor [G, N] of fp16, bf16 or fp32")
    if qweight.dim() < 2 or scales.dim() != qweight.dim() or 0 in scales.shape:
        raise _no_raw_format(qweight, scales)
    N = scales.shape[-1]
    if qweight.shape[-1] != N:
        if qweight.shape[-1] == -(-N // 8):
            return "awq"
        raise _no_raw_format(qweight, scales)
    words = (*scales.shape[:-1], -(-N // 8))
    if zeros is not None and zeros.dtype == torch.int32 and zeros.shape == words:
        if unpack.uniform_stored_zero(zeros, N) == DEFAULT_ZERO:
            return "gptq_v2"
    return "gptq"


def _no_raw_format(qweight: torch.Tensor, scales: torch.Tensor) -> ShapeError:
    return ShapeError(
        f"qweight {list(qweight.shape)} and scales {list(scales.shape)} are neither GPTQ "
        f"([K/8, N] with [G, N]) nor AWQ ([K, N/8] with [G, N]); pack them first with "
        f"amxq.pack(..., format=...)"
    )


def _zero_points(given: Inputs) -> torch.Tensor | None:
    """uint8 [..., G, N], or None when all are 8."""
    if given.zeros is None:
        return None
    if given.format != "plain":  # most are symmetric, and their words all alike
        stored = 7 if given.format == "gptq" else DEFAULT_ZERO
        if unpack.uniform_stored_zero(given.zeros, given.N) == stored:
            return None
    if given.format == "plain":
        zeros = given.zeros.transpose(-1, -2)
    elif given.format == "awq":
        zeros = unpack.awq_rows(given.zeros, given.N)
    else:
        zeros = unpack.gptq_zeros(given.zeros, given.N, minus_one=given.format == "gptq")
    return None if bool((zeros == DEFAULT_ZERO).all()) else zeros


def _regroup(rows: torch.Tensor, given: Inputs) -> torch.Tensor:
    """[..., G, N] → [..., G', N], groups that divide 8·ceil(K/8) evenly."""
    total = BLOCK * given.blocks
    if given.G == 1 or given.G * given.group == total:
        return rows
    group = math.gcd(given.group, total)
    return rows.repeat_interleave(given.group // group, dim=-2)[..., : total // group, :]


def _panel_order(rows: torch.Tensor) -> torch.Tensor:
    """[..., G, N] → [..., N, G] with the elements panel by panel. In NumPy, as in is_finite."""
    *lead, G, N = rows.shape
    full = N // PANEL * PANEL
    given = inputs.bits(rows)
    out = np.empty((*lead, N * G), given.dtype)
    head = given[..., :full].reshape(*lead, G, N // PANEL, PANEL)
    out[..., : full * G].reshape(*lead, N // PANEL, G, PANEL)[...] = np.moveaxis(head, -2, -3)
    if full != N:
        out[..., full * G :].reshape(*lead, G, N - full)[...] = given[..., full:]
    return torch.from_numpy(out).view(rows.dtype).view(*lead, N, G)


def _qweights(batch: Sequence[Inputs]) -> list[torch.Tensor]:
    """uint8 [..., P, K8, 2, 64] of each."""
    out = []
    alike: dict[tuple[bool, int, int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for given in batch:
        lead = given.qweight.shape[:-2]
        packed = memory.empty((*lead, -(-given.N // PANEL), given.blocks, PANEL), torch.int32)
        if not lead and memory.several_nodes():
            words_of_panel = given.blocks * PANEL
            kernels.touch[packed.shape[0],](packed, words_of_panel, PAGE=_PAGE_WORDS)
        if given.format != "plain" and given.order is None and given.K % BLOCK == 0:
            key = given.format == "awq", given.blocks, given.N, math.prod(lead)
            alike.setdefault(key, []).append((given.qweight.contiguous(), packed))
        else:
            _fill(packed, _words(given))
        out.append(packed.view(torch.uint8).view(*packed.shape[:-1], 2, 64))
    for (awq, blocks, N, experts), pairs in alike.items():
        kernel = kernels.pack_awq if awq else kernels.pack_gptq
        words, into = zip(*pairs, strict=True)
        sources, targets = _begins(words, experts), _begins(into, experts)
        grid = -(-N // PANEL), -(-blocks // _ROWS), len(sources)
        arguments = words[0], sources, into[0], targets, blocks, N
        kernel[grid](*arguments, BLOCK=_ROWS, PAD=_PAD_WORD)
    return out


def _begins(tensors: Sequence[torch.Tensor], experts: int) -> torch.Tensor:
    """int64: where every matrix begins, in words from the first tensor on."""
    first = tensors[0].data_ptr()
    return torch.tensor(
        [
            (tensor.data_ptr() - first) // 4 + expert * (tensor.numel() // experts)
            for tensor in tensors
            for expert in range(experts)
        ],
        device="cpu",
    )


def _fill(panels: torch.Tensor, words: torch.Tensor) -> None:
    """int32 panels [..., P, K8, 32] from words [..., K8, N], any strides."""
    full, rest = divmod(words.shape[-1], PANEL)
    # unflatten keeps the strides of a transposed view; reshape would copy it.
    head = torch.unflatten(words[..., : full * PANEL], -1, (full, PANEL))
    panels[..., :full, :, :].copy_(head.movedim(-2, -3))
    if rest:
        panels[..., full, :, rest:] = _PAD_WORD
        panels[..., full, :, :rest] = words[..., full * PANEL :]


def _words(given: Inputs) -> torch.Tensor:
    """int32 [..., K8, N] (any strides): eight k of one column, nibbles in packed order."""
    if given.format == "plain":
        return _words_of_plain(given)
    if given.format == "awq":
        rows = unpack.awq_rows(given.qweight, given.N)
    else:
        rows = unpack.gptq_rows(given.qweight)[..., : given.K, :]
    if given.order is not None:
        rows = rows.index_select(-2, given.order)
    return _words_of_rows(rows, given.blocks)


def _words_of_rows(rows: torch.Tensor, blocks: int) -> torch.Tensor:
    """uint8 [..., K, N] → int32 [..., K8, N], padded with 8."""
    *lead, K, N = rows.shape
    if K != BLOCK * blocks:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, BLOCK * blocks - K), value=DEFAULT_ZERO)
    k = rows.reshape(*lead, blocks, BLOCK, N)
    out = torch.empty((*lead, blocks, N, 4), dtype=torch.uint8, device="cpu")
    for byte, (low, high) in enumerate(((0, 2), (4, 6), (1, 3), (5, 7))):
        torch.bitwise_or(k[..., low, :], k[..., high, :] << 4, out=out[..., byte])
    return out.view(torch.int32).squeeze(-1)


def _words_of_plain(given: Inputs) -> torch.Tensor:
    """uint8 [..., N, K] → int32 [..., K8, N] (a transposed view), padded with 8."""
    q = given.qweight if given.order is None else given.qweight.index_select(-1, given.order)
    if given.K % BLOCK:
        pad = BLOCK * given.blocks - given.K
        q = torch.nn.functional.pad(q, (0, pad), value=DEFAULT_ZERO)
    eight = _realigned(q).view(torch.int64)  # byte j is k = j
    pairs = eight | (eight >> 12)  # bytes, k in their nibbles: 02 13 .. .. 46 57 .. ..
    low = (pairs & 0xFF) | ((pairs >> 24) & 0xFF00)
    high = ((pairs << 8) & 0xFF0000) | ((pairs >> 16) & 0xFF000000)
    return (low | high).to(torch.int32).transpose(-1, -2)


def _realigned(q: torch.Tensor) -> torch.Tensor:
    """Contiguous, and starting where an int64 may: view(dtype) asks for both."""
    q = q.contiguous()
    return q if q.storage_offset() % 8 == 0 else q.clone()
