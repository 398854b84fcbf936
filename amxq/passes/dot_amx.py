"""bf16, fp16 or int8 times int4 on AMX tile registers.

For a dot [M, K] · [K, 32] in tiles of D = 32 k of 16 bits, 64 k of int8 (or a half, a quarter, …
of that where K asks for it):

    panel:   K/D x 2 B tiles, dequantised once into scratch memory
    chunk:   tilezero 0..3                                  2 x 2 tiles of C, 32 rows
             for each k tile: tileload 4, 5 (A), 6, 7 (B), four tdpbf16ps, tdpfp16ps or
             tdpbssd, or one row of tiles after the other
             tilestore 0..3 to scratch, each when it is ready

Which registers, and what happens to numbers of rows that 32 does not divide, is in
:mod:`amxq.passes.tile_registers`. A large result is produced chunk by chunk when its consumer asks
for those rows, and the vector work on chunk i (scales, accumulation) is interleaved with the tile
work of chunk i + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Value
from amxq.ir.types import BF16, F16, I8, TileType, scalar_of
from amxq.passes.dot_vector import place_of
from amxq.passes.interleave import interleaved
from amxq.passes.panels import Form, panel_of
from amxq.passes.tile_registers import numbers, row_tiles, shapes, width_of_tile
from amxq.passes.tiles import CHUNK, Index, Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


PRODUCTS = {BF16: hw.Tdpbf16ps, F16: hw.Tdpfp16ps, I8: hw.Tdpbssd}


def lower(v: Vectorizer, op: ops.Dot) -> None:
    type_ = op.result.type
    assert isinstance(type_, TileType) and isinstance(op.lhs.type, TileType)
    rows, depth = op.lhs.type.shape
    element, left = scalar_of(type_), scalar_of(op.lhs.type)
    size, product = left.bytes, PRODUCTS[left]
    width, heights = width_of_tile(depth * size), row_tiles(rows)
    registers = numbers(v.tile_config, shapes(rows, width))
    C, A, B = registers[: 2 * len(heights)], registers[2 * len(heights) : -2], registers[-2:]

    b = v.b
    a = place_of(v, op.lhs)
    panel = panel_of(v, op.rhs, Form(depth, width, left))
    start = v.tiles[op.acc] if op.acc is not None else None
    initial = v.materialize(start).place if start is not None else None
    part_type = TileType((sum(heights), 32), element)
    parts = [v.scratch(part_type) for _ in range(2 if rows > CHUNK else 1)]
    part_stride = b.i64(32 * element.bytes)
    a_stride = b.mul(a.stride, b.i64(size))
    b_stride = b.i64(64)

    def chunk_at(row: int) -> tuple[int, list[int]]:
        """First row of the chunk that holds ``row``, and of its tiles; the last one ends at M."""
        first = row // CHUNK * CHUNK
        tiles = heights[: len(row_tiles(rows - first))]
        first = min(first, rows - sum(tiles))
        return first, [first + sum(heights[:i]) for i in range(len(tiles))]

    steps = depth * size // width

    def order(row_tiles: int) -> list[tuple[int, int]]:
        """(row tile, step of k) of every multiplication.

        bf16: one row tile after the other, so that one is stored while the next is multiplied,
        though B tiles are loaded twice (Emerald Rapids, 2026-11-30: 5 to 10 % less time than
        both together). int8 has half the steps, and the loads would be its limit."""
        if size == 1:
            return [(i, step) for step in range(steps) for i in range(row_tiles)]
        return [(i, step) for i in range(row_tiles) for step in range(steps)]

    def prepare(row: Index) -> None:
        products = Block()
        with b.inside(products):
            multiply(row)
        chunks_left = -(-rows // CHUNK) - row.offset // CHUNK
        b.block.ops += interleaved(products.ops, panel.meanwhile(v, chunks_left))

    def multiply(row: Index) -> None:
        first, tiles = chunk_at(row.offset)
        c_tiles = [(i, j) for i in range(len(tiles)) for j in range(2)]
        for i, j in c_tiles:
            if initial is None:
                b.emit(hw.TileZero, t=C[2 * i + j])
            else:
                pointer = v.element_pointer(initial, Index(None, tiles[i]), Index(None, 16 * j))
                b.emit(hw.TileLoad, t=C[2 * i + j], pointer=pointer, stride=part_stride)
        part = parts[row.offset // CHUNK % len(parts)]
        loaded = None
        for i, step in order(len(tiles)):
            if step != loaded:
                for j in range(2):
                    pointer = b.addptr(panel.pointer, b.i64((2 * step + j) * 16 * width))
                    b.emit(hw.TileLoad, t=B[j], pointer=pointer, stride=b_stride)
                loaded = step
            pointer = v.element_pointer(a, Index(None, tiles[i]), Index(None, step * width // size))
            b.emit(hw.TileLoad, t=A[i], pointer=pointer, stride=a_stride, once=True)
            for j in range(2):
                b.emit(product, c=C[2 * i + j], a=A[i], b=B[j])
            for j in range(2) if step == steps - 1 else ():
                at_tile = Index(None, tiles[i] - first), Index(None, 16 * j)
                pointer = v.element_pointer(part, *at_tile)
                b.emit(hw.TileStore, t=C[2 * i + j], pointer=pointer, stride=part_stride)

    def at(row: Index, column: Index) -> Value:
        first, _ = chunk_at(row.offset)
        part = v.stored(part_type, parts[row.offset // CHUNK % len(parts)])
        return part.at(Index(None, row.offset - first), column)

    tile = Tile(type_, v.lanes, at, prepare=prepare, late=True)
    if not tile.small and v.uses.get(op.result, 0) != 1:  # several consumers: all rows now
        v.tiles[op.result] = v.materialize(tile)
    else:
        v.define(op.result, tile)
