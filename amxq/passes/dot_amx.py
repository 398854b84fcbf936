"""bf16 times int4 on AMX tile registers.

For a dot [M, K] · [K, 32] in tiles of D = 32 k (or 16, 8 where K asks for it):

    panel:   K/D x 2 B tiles, dequantised once by VPERMW into scratch memory
    chunk:   tilezero 0..3                                  2 x 2 tiles of C, 32 rows
             for each k tile: tileload 4, 5 (A), 6, 7 (B), four tdpbf16ps
             tilestore 0..3 to scratch

Which registers, and what happens to numbers of rows that 32 does not divide, is in
:mod:`amxq.passes.tile_registers`. A large result is produced chunk by chunk when its consumer asks
for those rows, and the fp32 work on chunk i (scales, accumulation) is interleaved with the tile
work of chunk i + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import F32, TileType
from amxq.passes.dot_vector import place_of
from amxq.passes.panels import panel_of
from amxq.passes.tile_registers import depth_of_tile, numbers, row_tiles, shapes
from amxq.passes.tiles import CHUNK, Row, Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def lower(v: Vectorizer, op: ops.Dot) -> None:
    type_ = op.result.type
    assert isinstance(type_, TileType) and isinstance(op.lhs.type, TileType)
    rows, depth = op.lhs.type.shape
    k, heights = depth_of_tile(depth), row_tiles(rows)
    registers = numbers(v.tile_config, shapes(rows, k))
    C, A, B = registers[: 2 * len(heights)], registers[2 * len(heights) : -2], registers[-2:]

    b = v.b
    a = place_of(v, op.lhs)
    panel = panel_of(v, op.rhs, depth, k)
    start = v.tiles[op.acc] if op.acc is not None else None
    initial = v.materialize(start).place if start is not None else None
    part_type = TileType((sum(heights), 32), F32)
    parts = [v.scratch(part_type) for _ in range(2 if rows > CHUNK else 1)]
    part_stride = b.i64(32 * F32.bytes)
    a_stride = b.mul(a.stride, b.i64(2))
    b_stride = b.i64(64)

    def chunk_at(row: int) -> tuple[int, list[int]]:
        """First row of the chunk that holds ``row``, and of its tiles; the last one ends at M."""
        first = row // CHUNK * CHUNK
        tiles = heights[: len(row_tiles(rows - first))]
        first = min(first, rows - sum(tiles))
        return first, [first + sum(heights[:i]) for i in range(len(tiles))]

    def prepare(row: Row) -> None:
        first, tiles = chunk_at(row.offset)
        c_tiles = [(i, j) for i in range(len(tiles)) for j in range(2)]
        for i, j in c_tiles:
            if initial is None:
                b.emit(hw.TileZero, t=C[2 * i + j])
            else:
                pointer = v.element_pointer(initial, Row(None, tiles[i]), 16 * j)
                b.emit(hw.TileLoad, t=C[2 * i + j], pointer=pointer, stride=part_stride)
        for step in range(depth // k):
            for j in range(2):
                pointer = b.addptr(panel, b.i64((2 * step + j) * 32 * k))
                b.emit(hw.TileLoad, t=B[j], pointer=pointer, stride=b_stride)
            for i, tile in enumerate(tiles):
                pointer = v.element_pointer(a, Row(None, tile), step * k)
                b.emit(hw.TileLoad, t=A[i], pointer=pointer, stride=a_stride)
                for j in range(2):
                    b.emit(hw.Tdpbf16ps, c=C[2 * i + j], a=A[i], b=B[j])
        part = parts[row.offset // CHUNK % len(parts)]
        for i, j in c_tiles:
            pointer = v.element_pointer(part, Row(None, tiles[i] - first), 16 * j)
            b.emit(hw.TileStore, t=C[2 * i + j], pointer=pointer, stride=part_stride)

    def at(row: Row, column: int) -> Value:
        first, _ = chunk_at(row.offset)
        part = v.stored(part_type, parts[row.offset // CHUNK % len(parts)])
        return part.at(Row(None, row.offset - first), column)

    tile = Tile(type_, v.lanes, at, prepare=prepare, late=True)
    if not tile.small and v.uses.get(op.result, 0) != 1:  # several consumers: all rows now
        v.tiles[op.result] = v.materialize(tile)
    else:
        v.define(op.result, tile)
