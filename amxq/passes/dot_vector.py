"""Dots in vector registers.

bf16 times int4 (see docs/design.md, "Packed weights"): for 8 k and 16 columns one 64-byte vector
of 16-bit words; nibble i of all words is the operand of the k pair (2i, 2i + 1).

    words = vector_load panel                     32 words, 16 columns
    b     = vpermw(table, words >> 4·i)           32 bf16 integers: the pair of 16 columns
    acc   = vdpbf16ps(acc, splat(a[m, pair]), b)  for every row m

The table holds the 16 values twice, so the fifth index bit needs no mask. On targets without
VDPBF16PS the same pair is widened to two fp32 vectors and multiplied by fused multiply-add.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    U16,
    U32,
    DType,
    PointerType,
    TileType,
    Type,
    VectorType,
    scalar_of,
)
from amxq.passes.tiles import FIRST, Index, Place, Tile, registers

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

BLOCK_BYTES = 128  # 8 k of 32 columns
CHAINS = 8
"""Independent accumulation chains to cover the latency of a multiply-add (8 x 0.5 to 2 cycles)."""
ROWS = 8
"""Rows of a block: 8 x 32 columns are 16 of the 32 vector registers of AVX-512."""
ROWS_NARROW = 2
"""The same for AVX2: 2 x 32 columns are 8 of its 16 registers."""
PREFETCH = ((8192, 2), (512, 3))
"""Bytes ahead of the weight stream, and the locality: far ahead into the second-level cache, as the
first has too few buffers for all lines that memory owes, then from there into the first (Emerald
Rapids, 2026-12-01, docs/performance.md; Zen 4 liked 512 to 1024 where one distance was tried)."""


def prefetch(b: Builder, line: Value) -> None:
    """Asks for what lies ahead of a line of packed weights."""
    for ahead, locality in PREFETCH:
        b.emit(hw.Prefetch, pointer=b.addptr(line, b.i64(ahead)), locality=locality)


def lower(v: Vectorizer, op: ops.Dot, method: Int4Dot) -> None:
    """Emits a dot by ``method``, which does a block of rows."""
    type_ = op.result.type
    assert isinstance(type_, TileType)
    acc = v.tiles[op.acc] if op.acc is not None else None
    a = place_of(v, op.lhs)
    result = registers(type_, v.lanes_of(type_), [])
    if result.small:
        parts = method.run(a, result.rows, acc, Index(None, 0))
        v.define(op.result, registers(type_, result.lanes, parts))
        return
    # A large result is computed in blocks of rows whose sums fit the registers.
    if acc is not None and acc.prepare:
        acc = v.materialize(acc)
    home = v.scratch(type_)
    most = ROWS if v.lanes == 16 else ROWS_NARROW
    block = next(r for r in range(most, 0, -1) if result.rows % r == 0)
    loop = Block((Value(I64, "row"),))
    with v.b.inside(loop):
        row = loop.args[0]
        rows = Place(v.element_pointer(a, Index(row, 0), FIRST), a.stride)
        parts = method.run(rows, block, acc, Index(row, 0))
        for i, part in enumerate(parts):
            at = Index(row, i // result.columns), Index(None, i % result.columns * result.lanes)
            pointer = v.element_pointer(home, *at)
            v.b.emit(hw.VectorStore, pointer=pointer, value=part, mask=None)
        v.b.emit(ops.Yield, values=())
    bounds = (v.b.i64(0), v.b.i64(result.rows), v.b.i64(block))
    v.b.emit(ops.For, lower=bounds[0], upper=bounds[1], step=bounds[2], inits=(), body=loop)
    v.tiles[op.result] = v.stored(type_, home)


def _start(
    v: Vectorizer, acc: Tile | None, first: Index, rows: int, columns: int, type_: Type
) -> list[Value]:
    """Initial sums of a block of rows: zeros, or rows of acc."""
    if acc is None:
        return [v.b.constant(0.0 if scalar_of(type_).is_float else 0, type_)] * (rows * columns)
    return [
        acc.at(Index(first.base, first.offset + i // columns), Index(None, i % columns * acc.lanes))
        for i in range(rows * columns)
    ]


def place_of(v: Vectorizer, value: Value) -> Place:
    """Where a tile lies in memory; a computed one is written to scratch first."""
    tile = v.tiles[value]
    place = tile.place or v.materialize(tile).place
    assert place is not None
    return place


def int4_table(b: Builder, element: DType = BF16) -> Value:
    """bf16 or fp16 of -8 … 7, twice: the lookup table of VPERMW."""
    bits = [_bits(float(q - 8), element) for q in range(16)]
    return b.value(ops.Constant, VectorType(32, U16), value=tuple(bits * 2))


def _bits(number: float, element: DType) -> int:
    if element == F16:
        return int.from_bytes(struct.pack("<e", number), "little")
    return int.from_bytes(struct.pack("<f", number), "little") >> 16


def packed_block(v: Vectorizer, load: ops.LoadInt4, k: Value) -> Value:
    """The first byte of the packed weights of a load_int4, at depth ``k``."""
    b = v.b
    base = v.scalars[load.base]
    n, blocks = (b.cast(v.scalars[x], I64) for x in (load.n, load.k_blocks))
    block = b.add(b.mul(b.binary("div", n, b.i64(32)), blocks), b.binary("div", k, b.i64(8)))
    return b.addptr(base, b.mul(block, b.i64(BLOCK_BYTES)))


def words_at(b: Builder, pointer: Value, kb: Value, half: int) -> Value:
    """The 32 packed words of block ``kb``, columns 16·half onwards."""
    offset = b.add(b.mul(kb, b.i64(BLOCK_BYTES)), b.i64(64 * half))
    address = bitcast(b, b.addptr(pointer, offset), PointerType(U16))
    return b.value(hw.VectorLoad, VectorType(32, U16), pointer=address, mask=None)


def int4_pair(b: Builder, table: Value, words: Value, nibble: int) -> Value:
    """bf16 integers of the k pair (2·nibble, 2·nibble + 1) of 16 columns, as 16-bit words."""
    shift = b.constant(4 * nibble, words.type)
    index = b.binary("shr", words, shift) if nibble else words
    return b.value(hw.Vpermw, words.type, table=table, index=index)


def bitcast(b: Builder, value: Value, type_: VectorType | PointerType) -> Value:
    return b.value(hw.Bitcast, type_, operand=value)


@dataclass
class Int4Dot:
    """bf16 tile [M, K] times packed int4 [K, 32]."""

    v: Vectorizer
    op: ops.Dot

    def run(self, a: Place, rows: int, acc: Tile | None, first: Index) -> list[Value]:
        """Sums of ``rows`` rows from ``a`` on, row-major; ``first`` is their number in acc."""
        v, b = self.v, self.v.b
        assert isinstance(self.op.lhs.type, TileType)
        self.rows, depth = rows, self.op.lhs.type.shape[1]
        self.vectors = 32 // v.lanes
        load = v.defs[self.op.rhs]
        assert isinstance(load, ops.LoadInt4)
        self.panel = packed_block(v, load, v.scalars[load.k])
        self.a, self.a_stride = a.pointer, a.stride
        self.setup()
        self.chains = max(1, min(4, CHAINS // (rows * self.vectors)))
        count = rows * self.vectors
        part = VectorType(v.lanes, scalar_of(self.op.result.type))
        start = _start(v, acc, first, rows, self.vectors, part)
        start += _start(v, None, first, rows, self.vectors, part) * (self.chains - 1)
        blocks = depth // 8
        unroll = next(u for u in (4, 2, 1) if blocks % u == 0 and u * self.rows <= 8 or u == 1)
        if blocks == unroll:
            accs = self._blocks(b.i64(0), unroll, start)
        else:
            accs = self._loop(blocks, unroll, start)
        for chain in range(1, self.chains):  # the chains add up in a fixed order
            for i in range(count):
                accs[i] = b.add(accs[i], accs[chain * count + i])
        return accs[:count]

    def setup(self) -> None:
        """What is needed before the loop."""
        self.use_dp = self.op.lowering == "vdpbf16ps"
        self.table = int4_table(self.v.b) if self.v.lanes == 16 else None

    def _loop(self, blocks: int, unroll: int, start: list[Value]) -> list[Value]:
        b = self.v.b
        body = Block((Value(I64, "kb"), *(Value(s.type) for s in start)))
        with b.inside(body):
            accs = self._blocks(body.args[0], unroll, list(body.args[1:]))
            b.emit(ops.Yield, values=tuple(accs))
        loop = b.emit(
            ops.For,
            *(s.type for s in start),
            lower=b.i64(0),
            upper=b.i64(blocks),
            step=b.i64(unroll),
            inits=tuple(start),
            body=body,
        )
        return list(loop.results)

    def _blocks(self, first: Value, count: int, accs: list[Value]) -> list[Value]:
        b = self.v.b
        for u in range(count):
            kb = b.add(first, b.i64(u))
            for half in range(2):
                line = b.add(b.mul(kb, b.i64(BLOCK_BYTES)), b.i64(64 * half))
                prefetch(b, b.addptr(self.panel, line))
            accs = self.block(kb, u, accs)
        return accs

    def block(self, kb: Value, number: int, accs: list[Value]) -> list[Value]:
        """The sums after 8 k more, from 8·kb on; ``number`` counts blocks within an iteration."""
        return self._wide(kb, accs) if self.v.lanes == 16 else self._narrow(kb, accs)

    def _wide(self, kb: Value, accs: list[Value]) -> list[Value]:
        """512-bit: two halves of 16 columns, by table."""
        b = self.v.b
        assert self.table is not None
        words = [words_at(b, self.panel, kb, half) for half in range(2)]
        for nibble in range(4):
            pairs = [int4_pair(b, self.table, w, nibble) for w in words]
            if self.use_dp:
                pairs = [bitcast(b, p, VectorType(32, BF16)) for p in pairs]
            else:
                parities = [self._widen(p) for p in pairs]
            for row in range(self.rows):
                a = self.activation(row, kb, 2 * nibble)
                low_high = None if self.use_dp else self._widen(a)
                for half in range(2):
                    i = self.index(row, half, nibble)
                    if self.use_dp:
                        dp = bitcast(b, a, VectorType(32, BF16))
                        accs[i] = b.value(
                            hw.Vdpbf16ps, accs[i].type, acc=accs[i], a=dp, b=pairs[half]
                        )
                    else:
                        assert low_high is not None
                        for x, w in zip(low_high, parities[half]):
                            accs[i] = b.value(hw.Fma, accs[i].type, a=x, b=w, c=accs[i])
        return accs

    def _narrow(self, kb: Value, accs: list[Value]) -> list[Value]:
        """256-bit: four vectors of 8 columns, by shift, mask and conversion."""
        b = self.v.b
        type_ = VectorType(8, U32)
        pointer = bitcast(b, self.panel, PointerType(U32))
        for vector in range(4):
            offset = b.add(b.mul(kb, b.i64(BLOCK_BYTES // 4)), b.i64(8 * vector))
            words = b.value(hw.VectorLoad, type_, pointer=b.addptr(pointer, offset), mask=None)
            for nibble in range(4):
                weights = []
                for parity in range(2):
                    shift = b.constant(16 * parity + 4 * nibble, type_)
                    q = b.binary("and", b.binary("shr", words, shift), b.constant(15, type_))
                    signed = bitcast(b, q, VectorType(8, I32))
                    weights.append(b.sub(b.cast(signed, F32), b.constant(8.0, VectorType(8, F32))))
                for row in range(self.rows):
                    i = self.index(row, vector, nibble)
                    a = self.activation(row, kb, 2 * nibble)
                    for x, w in zip(self._widen(a), weights):
                        accs[i] = b.value(hw.Fma, accs[i].type, a=x, b=w, c=accs[i])
        return accs

    def index(self, row: int, vector: int, step: int) -> int:
        """Which sum: steps of k take turns on the chains."""
        chain = step % self.chains
        return (chain * self.rows + row) * self.vectors + vector

    def activation(self, row: int, kb: Value, first: int) -> Value:
        """a[row, 8·kb + first + (0, 1, …)], 32 bits of it, in every 32-bit lane."""
        b = self.v.b
        column = b.add(b.mul(kb, b.i64(8)), b.i64(first))
        offset = b.add(b.mul(b.i64(row), self.a_stride), column)
        pointer = bitcast(b, b.addptr(self.a, offset), PointerType(U32))
        pair = b.value(hw.VectorLoad, U32, pointer=pointer, mask=None)
        return self.v.splat(pair, self.v.lanes)

    def _widen(self, pairs: Value) -> tuple[Value, Value]:
        """fp32 of the even and of the odd member of each bf16 pair."""
        b = self.v.b
        bits = VectorType(self.v.lanes, U32)
        if pairs.type != bits:
            pairs = bitcast(b, pairs, bits)
        even = b.binary("shl", pairs, b.constant(16, bits))
        odd = b.binary("and", pairs, b.constant(0xFFFF0000, bits))
        wide = VectorType(self.v.lanes, F32)
        return bitcast(b, even, wide), bitcast(b, odd, wide)
