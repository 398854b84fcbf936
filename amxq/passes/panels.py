"""INT4 panels in AMX tile form.

A block [K, 32] of packed weights becomes K/D x 2 B tiles in scratch memory: rows of 64 bytes,
pairs of bf16 by VPERMW or quads of bytes by shift and mask, for 16 columns. Tile loads of freshly
stored lines stall unless two tiles lie between (Emerald Rapids, 2026-11-30: 38 cycles against 8),
which is why a whole panel is written before the first multiplication. Writing the next panel
meanwhile, instruction by instruction, was tried and gained nothing there (docs/performance.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import U8, U16, PointerType
from amxq.passes.dot_int8 import int4_quads
from amxq.passes.dot_vector import (
    BLOCK_BYTES,
    bitcast,
    int4_pair,
    int4_table,
    packed_block,
    words_at,
)

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

PREFETCH = 4096
"""Bytes ahead of the weight stream: from memory, one row, 9 to 10 → 12 GB/s (Emerald Rapids,
2026-11-30, docs/amx.md)."""


def dequantise(
    v: Vectorizer, source: Value, panel: Value, depth: int, width: int, size: int
) -> None:
    """Emits the work for one block: ``source`` (u8) packed, ``panel`` (u8) [K/D][2] tiles of
    ``width`` / 4 rows, for activations of ``size`` bytes."""
    b = v.b
    table = int4_table(b) if size == 2 else None
    for kb in range(depth // 8):
        step, byte = divmod(8 * size * kb, width)  # of a row of the other operand
        for half in range(2):
            ahead = b.addptr(source, b.i64(kb * BLOCK_BYTES + 64 * half + PREFETCH))
            b.emit(hw.Prefetch, pointer=ahead, locality=3)
            words = words_at(b, source, b.i64(kb), half)
            if table is None:
                rows = int4_quads(b, words)
            else:
                rows = [int4_pair(b, table, words, nibble) for nibble in range(4)]
            for i, row in enumerate(rows):
                offset = 16 * ((2 * step + half) * width + byte) + 64 * i
                pointer = bitcast(b, b.addptr(panel, b.i64(offset)), PointerType(U16))
                b.emit(hw.VectorStore, pointer=pointer, value=row, mask=None)


def panel_of(v: Vectorizer, value: Value, depth: int, width: int, size: int) -> Value:
    """The panel (u8) of an int4 tile for activations of ``size`` bytes, written by an earlier dot
    of this block or now."""
    known = v.panels.get((value, size))
    if known is not None and known[0] is v.b.block:
        return known[1]
    load = v.defs[value]
    assert isinstance(load, ops.LoadInt4)
    panel = v.b.value(hw.Scratch, PointerType(U8), bytes=depth * 32 * size)
    dequantise(v, packed_block(v, load, v.scalars[load.k]), panel, depth, width, size)
    v.panels[value, size] = (v.b.block, panel)
    return panel
