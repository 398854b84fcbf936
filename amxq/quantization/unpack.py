"""Checkpoint tensors to integers: GPTQ v1 and v2, AWQ.

The layouts (K = in_features, N = out_features, G groups; a leading E for stacked experts):

=======  ==========================================  ======================================
format   qweight                                     zeros
=======  ==========================================  ======================================
GPTQ     int32 [K/8, N]: k = 8r + i in bits 4i       int32 [G, N/8]: n = 8c + i in bits 4i
AWQ      int32 [K, N/8]: nibble p of a word holds    int32 [G, N/8], nibbles as in qweight
         column (0, 2, 4, 6, 1, 3, 5, 7)[p]
=======  ==========================================  ======================================

GPTQ v1 stores z - 1, v2 and AWQ store z. GPTQModel subtracts 0x11111111 from whole words, so
that a zero point 0 borrows from its neighbours: v1 is decoded by adding 0x11111111 to the whole
word, modulo 2³², before the nibbles are taken. Where no zero point is 0 this is field-wise + 1.
"""

from __future__ import annotations

import torch

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

_V1_ONES = 0x11111111
_WORD = 0xFFFFFFFF


def gptq_rows(qweight: torch.Tensor) -> torch.Tensor:
    """int32 [..., K/8, N] → uint8 [..., K, N], values 0..15."""
    *lead, blocks, columns = qweight.shape
    pairs = _bytes(qweight)
    rows = torch.empty((*lead, blocks, 8, columns), dtype=torch.uint8, device="cpu")
    for i in range(4):
        torch.bitwise_and(pairs[..., i], 15, out=rows[..., 2 * i, :])
        torch.bitwise_right_shift(pairs[..., i], 4, out=rows[..., 2 * i + 1, :])
    return rows.view(*lead, 8 * blocks, columns)


def awq_rows(qweight: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [..., K, ceil(columns/8)] → uint8 [..., K, columns], values 0..15.

    Takes AWQ's zeros too, whose nibbles are in the same order.
    """
    *lead, rows, words = qweight.shape
    pairs = _bytes(qweight)
    out = torch.empty((*lead, rows, words, 8), dtype=torch.uint8, device="cpu")
    for i in range(4):
        torch.bitwise_and(pairs[..., i], 15, out=out[..., AWQ_COLUMNS[2 * i]])
        torch.bitwise_right_shift(pairs[..., i], 4, out=out[..., AWQ_COLUMNS[2 * i + 1]])
    return out.view(*lead, rows, 8 * words)[..., :columns]


def gptq_zeros(zeros: torch.Tensor, columns: int, *, minus_one: bool) -> torch.Tensor:
    """int32 [..., G, ceil(columns/8)] → uint8 zero points [..., G, columns], values 0..15.

    Args:
        minus_one: the words hold z - 1 (GPTQ v1); otherwise z (v2).
    """
    words = zeros.long() & _WORD
    if minus_one:
        words = (words + _V1_ONES) & _WORD
    shifts = torch.arange(0, 32, 4, device="cpu")
    nibbles = (words.unsqueeze(-1) >> shifts) & 15
    return nibbles.to(torch.uint8).flatten(-2)[..., :columns].contiguous()


def uniform_stored_zero(zeros: torch.Tensor, columns: int) -> int | None:
    """The one value that every stored zero nibble of the first ``columns`` has, or None.

    Takes int32 [..., G, ceil(columns/8)], GPTQ or AWQ; nothing is added for v1. A last word
    may be only partly used; its unused nibbles are not looked at.
    """
    low, high = (int(word) & _WORD for word in zeros.aminmax())
    if low == high and low % _V1_ONES == 0:  # all words alike, and so are their nibbles
        return low // _V1_ONES
    stored = gptq_zeros(zeros, columns, minus_one=False)
    first = int(stored.flatten()[0])
    return first if bool((stored == first).all()) else None


def symmetric_minus_one(zeros: torch.Tensor, columns: int, *, minus_one: bool) -> bool:
    """Whether a *symmetric* GPTQ layer really stores z - 1, whatever its label says.

    A symmetric checkpoint's zero point is 8 everywhere, so stored sevens mean v1 and stored
    eights v2. Files labelled wrongly exist and give gibberish when the label is believed.

    Args:
        zeros: int32 [..., G, ceil(columns/8)].
        minus_one: what the label says.

    Returns:
        What the tensor says, or ``minus_one`` when the tensor is neither all 7 nor all 8.
    """
    stored = uniform_stored_zero(zeros, columns)
    return {7: True, 8: False}.get(-1 if stored is None else stored, minus_one)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] → uint8 [..., 4], the lowest byte first (x86 is little-endian)."""
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)
