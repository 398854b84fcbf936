"""INT4 panels in AMX tile form.

A block [K, 32] of packed weights becomes K/D x 2 B tiles in scratch memory: rows of 64 bytes,
pairs of bf16 or fp16 by VPERMW or quads of bytes by shift and mask, for 16 columns. Tile loads of
freshly stored lines stall unless two tiles lie between (Emerald Rapids, 2026-11-30: 38 cycles
against 8), which is why a whole panel is written before its first multiplication. In a loop over K
there are two panels:

    before:      panel 0 ← block 0
    iteration i: tiles of panel i mod 2   ║   panel (i + 1) mod 2 ← block i + 1

The two sides of ║ are merged instruction by instruction (:mod:`amxq.passes.interleave`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Op, Value
from amxq.ir.types import I1, I64, U8, U16, DType, PointerType
from amxq.passes.dot_int8 import int4_quads
from amxq.passes.dot_vector import (
    BLOCK_BYTES,
    bitcast,
    int4_pair,
    int4_table,
    packed_block,
    prefetch,
    words_at,
)

if TYPE_CHECKING:
    from amxq.passes.control import Loop
    from amxq.passes.vectorize import Vectorizer


@dataclass(frozen=True)
class Form:
    """What a panel is made for: ``depth`` k, A tiles ``width`` bytes wide, activations of type
    ``element``. It holds [depth · size / width][2] tiles of width / 4 rows."""

    depth: int
    width: int
    element: DType

    @property
    def size(self) -> int:
        return self.element.bytes

    @property
    def bytes(self) -> int:
        return self.depth * 32 * self.size


def dequantise(v: Vectorizer, source: Value, panel: Value, form: Form) -> None:
    """Emits the work for one block: ``source`` (u8) packed weights, ``panel`` (u8) where to."""
    b = v.b
    table = int4_table(b, form.element) if form.size == 2 else None
    for kb in range(form.depth // 8):
        step, byte = divmod(8 * form.size * kb, form.width)  # of a row of the other operand
        for half in range(2):
            prefetch(b, b.addptr(source, b.i64(kb * BLOCK_BYTES + 64 * half)))
            words = words_at(b, source, b.i64(kb), half)
            if table is None:
                rows = int4_quads(b, words)
            else:
                rows = [int4_pair(b, table, words, nibble) for nibble in range(4)]
            for i, row in enumerate(rows):
                offset = 16 * ((2 * step + half) * form.width + byte) + 64 * i
                pointer = bitcast(b, b.addptr(panel, b.i64(offset)), PointerType(U16))
                b.emit(hw.VectorStore, pointer=pointer, value=row, mask=None)


@dataclass
class Panel:
    """Where an int4 tile lies dequantised, and work to be merged with its multiplication.

    Attributes:
        pointer: u8, in the form asked for.
        loop: the loop whose ``rest`` dequantises the next iteration's panel, or None.
    """

    pointer: Value
    loop: Loop | None

    def meanwhile(self, v: Vectorizer, parts: int) -> list[Op]:
        """Takes one of ``parts`` equal pieces of what is left of that work, where it may stand:
        in the loop's body and not in a branch of it."""
        if self.loop is None or self.loop is not v.loop:
            return []
        size = -(-len(self.loop.rest) // parts)
        taken, self.loop.rest[:size] = self.loop.rest[:size], []
        return taken


def panel_of(v: Vectorizer, value: Value, form: Form) -> Panel:
    """The panel of an int4 tile: written by an earlier dot of this block, by the iteration
    before, where the loop allows it, or now."""
    known = v.panels.get((value, form.element))
    if known is not None and known[0] is v.b.block:
        return Panel(known[1], None)
    load = v.defs[value]
    assert isinstance(load, ops.LoadInt4)
    stepping = _stepping(v, load)
    if stepping is not None:
        panel = _pipelined(v, stepping, form)
    else:
        pointer = v.b.value(hw.Scratch, PointerType(U8), bytes=form.bytes)
        dequantise(v, packed_block(v, load, v.scalars[load.k]), pointer, form)
        panel = Panel(pointer, None)
    v.panels[value, form.element] = (v.b.block, panel.pointer)
    return panel


def _stepping(v: Vectorizer, load: ops.LoadInt4) -> ops.LoadInt4 | None:
    """The load in terms of values from outside of the loop at hand, if it takes its k from the
    loop's index and all else from there."""
    loop = v.loop
    if loop is None or v.b.block is not loop.body or loop.writes:
        return None
    if _uncast(v, load.k) is not loop.op.body.args[0]:
        return None
    base, n, blocks = (_uncast(v, x) for x in (load.base, load.n, load.k_blocks))
    if not loop.invariant(base, n, blocks):
        return None
    return replace(load, base=base, n=n, k_blocks=blocks)


def _uncast(v: Vectorizer, value: Value) -> Value:
    op = v.defs.get(value)
    return op.operand if isinstance(op, ops.Cast) else value


def _pipelined(v: Vectorizer, load: ops.LoadInt4, form: Form) -> Panel:
    """Two panels, used in turn: one is multiplied while the next block goes to the other."""
    b, loop = v.b, v.loop
    assert loop is not None
    with b.inside(loop.before):
        panels = b.value(hw.Scratch, PointerType(U8), bytes=2 * form.bytes)
        first = Block()
        with b.inside(first):
            dequantise(v, packed_block(v, load, b.cast(loop.lower, I64)), panels, form)
            b.emit(ops.Yield, values=())
        nothing = Block(ops=[ops.build(ops.Yield, (), b.loc, values=())])
        runs = b.value(ops.Compare, I1, kind="lt", lhs=loop.lower, rhs=loop.upper)
        b.emit(ops.If, condition=runs, then=first, other=nothing)
        start = b.i64(0)
    now = loop.carry(start)
    later = b.sub(b.i64(form.bytes), now)
    loop.nexts.append(later)
    index = loop.body.args[0]
    following = b.add(index, loop.step)
    more = b.value(ops.Compare, I1, kind="lt", lhs=following, rhs=loop.upper)
    # the last iteration has none to prepare: it reads its own block once more
    following = b.value(ops.Select, index.type, condition=more, then=following, other=index)
    source = packed_block(v, load, b.cast(following, I64))
    rest = Block(ops=loop.rest)
    with b.inside(rest):
        dequantise(v, source, b.addptr(panels, later), form)
    return Panel(b.addptr(panels, now), loop)
