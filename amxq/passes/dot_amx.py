"""bf16 times int4 on AMX tile registers.

For a dot [M, K] · [K, 32] in tiles of D = 32 k (or 16, 8 where K asks for it):

    panel:   K/D x 2 B tiles, dequantised once by VPERMW into scratch memory
    chunk:   tilezero 0..3                                  2 x 2 tiles of C, 32 rows
             for each k tile: tileload 4, 5 (A), 6, 7 (B), four tdpbf16ps
             tilestore 0..3 to scratch

A large result is produced chunk by chunk when its consumer asks for those rows, and the
fp32 work on chunk i (scales, accumulation) is interleaved with the tile work of chunk i + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import F32, TileType
from amxq.passes.choose_dot import amx_shape
from amxq.passes.dot_vector import place_of
from amxq.passes.panels import panel_of
from amxq.passes.tiles import Row, Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

C, A, B = 0, 4, 6
"""Tile registers: C 0 to 3, A 4 and 5, B 6 and 7. Nothing is ever spilled."""


def lower(v: Vectorizer, op: ops.Dot) -> None:
    type_ = op.result.type
    assert isinstance(type_, TileType) and isinstance(op.lhs.type, TileType)
    rows, depth = op.lhs.type.shape
    shape = amx_shape(rows, depth)
    assert shape is not None
    tile_rows, k = shape
    row_tiles = 2 if rows >= 2 * tile_rows else 1
    v.tile_config = ((tile_rows, 64),) * 4 + ((tile_rows, 2 * k),) * 2 + ((k // 2, 64),) * 2

    b = v.b
    a = place_of(v, op.lhs)
    panel = panel_of(v, op.rhs, depth, k)
    start = v.tiles[op.acc] if op.acc is not None else None
    initial = v.materialize(start).place if start is not None else None
    chunk = tile_rows * row_tiles
    chunked = rows > chunk
    parts = [v.scratch(TileType((chunk, 32), F32)) for _ in range(2 if chunked else 1)]
    part_stride = b.i64(32 * F32.bytes)
    a_stride = b.mul(a.stride, b.i64(2))
    b_stride = b.i64(64)

    def prepare(first: Row) -> None:
        c_tiles = [(i, j) for i in range(row_tiles) for j in range(2)]
        for i, j in c_tiles:
            if initial is None:
                b.emit(hw.TileZero, t=C + 2 * i + j)
            else:
                row = Row(first.base, first.offset + i * tile_rows)
                pointer = v.element_pointer(initial, row, 16 * j)
                b.emit(hw.TileLoad, t=C + 2 * i + j, pointer=pointer, stride=part_stride)
        for step in range(depth // k):
            for j in range(2):
                pointer = b.addptr(panel, b.i64((2 * step + j) * 32 * k))
                b.emit(hw.TileLoad, t=B + j, pointer=pointer, stride=b_stride)
            for i in range(row_tiles):
                row = Row(first.base, first.offset + i * tile_rows)
                pointer = v.element_pointer(a, row, step * k)
                b.emit(hw.TileLoad, t=A + i, pointer=pointer, stride=a_stride)
                for j in range(2):
                    b.emit(hw.Tdpbf16ps, c=C + 2 * i + j, a=A + i, b=B + j)
        part = parts[first.offset // chunk % len(parts)]
        for i, j in c_tiles:
            pointer = v.element_pointer(part, Row(None, i * tile_rows), 16 * j)
            b.emit(hw.TileStore, t=C + 2 * i + j, pointer=pointer, stride=part_stride)

    def at(row: Row, column: int) -> Value:
        part = v.stored(TileType((chunk, 32), F32), parts[row.offset // chunk % len(parts)])
        return part.at(Row(None, row.offset % chunk), column)

    tile = Tile(type_, v.lanes, at, prepare=prepare, late=True)
    if chunked and v.uses.get(op.result, 0) != 1:  # several consumers: produce all rows now
        v.tiles[op.result] = v.materialize(tile)
    else:
        v.define(op.result, tile)
