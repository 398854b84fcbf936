"""Dots of floating-point tiles: bf16, fp16, fp32 and fp64.

b is packed into scratch memory, once a dot: panels of one vector of columns, k by k, so that the
loop over k reads it in one stream; for bf16 two k stand in 32 bits, as VDPBF16PS wants them and as
the rows of a B tile of AMX:

    b[p] = pack b                                      panels [N/lanes][K] or [N/16][K/2]
    for columns j of C vectors, rows i of R:           R x C sums in registers
        for k: sums = vdpbf16ps(sums, splat a[i, k], b[j, k])        or fma

fp16, and bf16 on targets without VDPBF16PS, are widened to fp32 while they are packed. The sums
start from acc, and stay where the loop around the dot carries them (Vectorizer.destinations).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import BF16, F32, U16, U32, DType, PointerType, TileType, VectorType, scalar_of
from amxq.passes.dot_vector import bitcast
from amxq.passes.rearrange import nest, transposed
from amxq.passes.tile_registers import numbers, row_tiles, shapes, width_of_tile
from amxq.passes.tiles import FIRST, Index, Place, Tile, registers

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

K_UNROLL = 4
"""Steps of one iteration of the loop over k."""


def lower(v: Vectorizer, op: ops.Dot) -> None:
    dot = DenseDot(v, op)
    if op.lowering == "amx":
        dot.on_tiles()
    else:
        dot.in_vectors()


class DenseDot:
    """One dot: its operands where they lie, b packed."""

    def __init__(self, v: Vectorizer, op: ops.Dot) -> None:
        type_ = op.result.type
        assert isinstance(type_, TileType) and isinstance(op.lhs.type, TileType)
        self.v, self.op, self.type = v, op, type_
        self.rows, self.depth = op.lhs.type.shape
        self.pairs = op.lowering != "fma"
        self.sum = scalar_of(type_)
        self.lanes = v.lanes_of(type_)
        self.columns = type_.shape[1] // self.lanes
        self.steps = self.depth // 2 if self.pairs else self.depth
        self.acc = v.tiles[op.acc] if op.acc is not None else None
        self.block = self._block()
        whole = self.block == (self.rows, self.columns)
        if self.acc is not None and (self.acc.prepare or self.acc.static and not whole):
            self.acc = v.materialize(self.acc)
        element = BF16 if self.pairs else self.sum
        a = self._converted(v.tiles[op.lhs], element)
        place = a.place or v.materialize(a).place
        assert place is not None
        self.a = place
        self.b, self.panel_stride = self._panels(element)

    def _converted(self, tile: Tile, element: DType) -> Tile:
        if tile.dtype == element:
            return tile
        return dataclasses.replace(
            tile,
            type=TileType(tile.type.shape, element),
            at=lambda row, column: self.v.b.cast(tile.at(row, column), element),
            element=None,
            place=None,
        )

    def _panels(self, element: DType) -> tuple[Value, Value]:
        """b in panels, and how far one is from the next: where it lies, if it came in pairs."""
        v, b, tile = self.v, self.v.b, self.v.tiles[self.op.rhs]
        if self.op.packed:
            place = tile.place or v.materialize(tile).place
            assert place is not None
            words = bitcast(b, place.pointer, PointerType(U32))
            stride = b.binary("div", place.stride, b.i64(2))
            if self.pairs:
                return words, stride
            tile = self._unpacked(words, stride)
        else:
            tile = self._converted(tile, element)
        return self._packed(tile), b.i64(self.steps * self.lanes)

    def _unpacked(self, words: Value, stride: Value) -> Tile:
        """[K, N] in fp32 of pairs in panels of 16 columns."""
        v, b, type_ = self.v, self.v.b, VectorType(self.lanes, U32)

        def at(row: Index, column: Index) -> Value:
            k, n = v.number(row), v.number(column)
            offset = b.mul(b.binary("div", n, b.i64(16)), stride)
            offset = b.add(offset, b.mul(b.binary("div", k, b.i64(2)), b.i64(16)))
            offset = b.add(offset, b.binary("and", n, b.i64(15)))
            pointer = b.addptr(words, offset)
            pair = b.value(hw.VectorLoad, type_, pointer=pointer, mask=None)
            odd = b.cast(b.binary("and", k, b.i64(1)), U32)
            up = b.mul(b.sub(b.constant(1, U32), odd), b.constant(16, U32))
            upper = b.binary("shl", pair, v.splat(up, self.lanes))
            upper = b.binary("and", upper, b.constant(0xFFFF0000, type_))
            return bitcast(b, upper, VectorType(self.lanes, F32))

        return Tile(TileType((self.depth, self.type.shape[1]), F32), self.lanes, at)

    def _panel(self, column: Index, more: int = 0) -> Value:
        """Where the panel of a column begins, or one of those that follow."""
        b = self.v.b
        number = b.binary("div", self.v.number(column), b.i64(self.lanes))
        return b.addptr(self.b, b.mul(b.add(number, b.i64(more)), self.panel_stride))

    def _packed(self, tile: Tile) -> Value:
        """b in panels, as fp32 or as pairs in u32."""
        v, b = self.v, self.v.b
        element = U32 if self.pairs else self.sum
        panels = v.scratch(TileType((self.steps, self.type.shape[1]), element)).pointer

        def write(row: Index, column: Index, value: Value) -> None:
            # column is a multiple of lanes: panel column / lanes begins at column · steps
            offset = b.mul(v.number(column), b.i64(self.steps))
            offset = b.add(offset, b.mul(v.number(row), b.i64(self.lanes)))
            b.emit(hw.VectorStore, pointer=b.addptr(panels, offset), value=value, mask=None)

        if self.op.transposed:
            self._transposed(tile, write)
        else:
            tile = self._paired(tile) if self.pairs else tile
            v.traversal.parts(tile, lambda row, column: write(row, column, tile.at(row, column)))
        return panels

    def _transposed(self, tile: Tile, write: Callable[[Index, Index, Value], None]) -> None:
        """Writes [K, N] from a tile [N, K], a square of vectors at a time. A pair of k is 32 bits
        of a row already."""
        v, b = self.v, self.v.b
        per_step = self.depth // self.steps
        if tile.static or tile.prepare:
            tile = v.materialize(tile)

        def square(indices: list[Value]) -> None:
            row, k = indices
            rows = [tile.at(Index(row, i), Index(k, 0)) for i in range(self.lanes)]
            if self.pairs:
                rows = [bitcast(b, r, VectorType(tile.lanes // 2, U32)) for r in rows]
            first = b.binary("div", k, b.i64(per_step))
            for i, column in enumerate(transposed(b, rows)):
                write(Index(first, i), Index(row, 0), column)

        nest(v, [(self.type.shape[1], self.lanes), (self.depth, tile.lanes)], square)

    def _paired(self, tile: Tile) -> Tile:
        """[K, N] of bf16 as [K/2, N] of u32: k 2i in the low, 2i + 1 in the high half."""
        b, words = self.v.b, VectorType(self.lanes, U16)

        def at(row: Index, column: Index) -> Value:
            base = None if row.base is None else b.mul(row.base, b.i64(2))
            low, high = (
                b.cast(bitcast(b, tile.at(Index(base, 2 * row.offset + i), column), words), U32)
                for i in range(2)
            )
            shifted = b.binary("shl", high, b.constant(16, high.type))
            return b.binary("or", low, shifted)

        return Tile(TileType((self.steps, tile.type.shape[1]), U32), self.lanes, at)

    # --- vector registers -------------------------------------------------------------------

    def in_vectors(self) -> None:
        v, b, result = self.v, self.v.b, registers(self.type, self.lanes, [])
        rows, columns = self.block
        if (rows, columns) == (self.rows, self.columns) and result.small:
            parts = self._sums(FIRST, FIRST, rows, columns)
            v.define(self.op.result, registers(self.type, self.lanes, parts))
            return
        home = v.destinations.get(self.op.result) or v.scratch(self.type)

        def column_block(column: Index, width: int) -> None:  # a panel stays in the first cache
            def row_block(row: Index, count: int) -> None:
                for i, part in enumerate(self._sums(row, column, count, width)):
                    r, c = i // width, i % width * self.lanes
                    at = Index(row.base, row.offset + r), Index(column.base, column.offset + c)
                    pointer = v.element_pointer(home, *at)
                    b.emit(hw.VectorStore, pointer=pointer, value=part, mask=None)

            _blocks(v, self.rows, rows, 1, row_block)

        _blocks(v, self.columns, columns, self.lanes, column_block)
        v.define(self.op.result, v.stored(self.type, home))

    def _block(self) -> tuple[int, int]:
        """Rows and vectors of columns of a block: the fewest loads for each multiplication among
        the blocks whose sums, a row of b and an element of a fit the registers. A last block of
        fewer rows is no loss where it is rare."""
        most = (30 if self.v.lanes == 16 else 15) * 32 // self.sum.bits
        sizes = [
            (r, c)
            for c in range(1, 5)
            for r in range(1, 9)
            if self.columns % c == 0 and r * c + c + 1 <= most
            if self.rows % r == 0 or self.rows >= 8 * r
        ]
        return min(sizes, key=lambda size: (size[0] + size[1]) / (size[0] * size[1]))

    def _sums(self, row: Index, column: Index, rows: int, columns: int) -> list[Value]:
        """The results of one block, row-major, from its ``row`` and ``column`` on."""
        v, b = self.v, self.v.b
        wide = self.sum if self.lanes == 1 else VectorType(self.lanes, self.sum)
        start = [b.constant(0.0, wide)] * (rows * columns)
        if self.acc is not None:
            start = [
                self.acc.at(
                    Index(row.base, row.offset + i // columns),
                    Index(column.base, column.offset + i % columns * self.lanes),
                )
                for i in range(rows * columns)
            ]
        a = Place(v.element_pointer(self.a, row, FIRST), self.a.stride)
        panels = [self._panel(column, c) for c in range(columns)]
        unroll = next(u for u in range(K_UNROLL, 0, -1) if self.steps % u == 0)

        def steps(k: Value, sums: list[Value]) -> list[Value]:
            for u in range(unroll):
                sums = self._step(a, panels, Index(k, u), sums)
            return sums

        return b.loop(self.steps, unroll, steps, start)

    def _step(self, a: Place, panels: list[Value], k: Index, sums: list[Value]) -> list[Value]:
        v, b, columns = self.v, self.v.b, len(panels)
        vectors = []
        for panel in panels:
            pointer = v.element_pointer(Place(panel, b.i64(self.lanes)), k, FIRST)
            element = U32 if self.pairs else self.sum
            type_ = element if self.lanes == 1 else VectorType(self.lanes, element)
            vector = b.value(hw.VectorLoad, type_, pointer=pointer, mask=None)
            vectors.append(bitcast(b, vector, VectorType(32, BF16)) if self.pairs else vector)
        for i, acc in enumerate(sums):
            if i % columns == 0:
                x = self._broadcast(a, i // columns, k)
            if self.pairs:
                dp = {"acc": acc, "a": x, "b": vectors[i % columns]}
                sums[i] = b.value(hw.Vdpbf16ps, acc.type, **dp)
            else:
                sums[i] = b.value(hw.Fma, acc.type, a=x, b=vectors[i % columns], c=acc)
        return sums

    def _broadcast(self, a: Place, row: int, k: Index) -> Value:
        """a[row, k], or the pair of step k, in every lane."""
        v, b = self.v, self.v.b
        if not self.pairs:
            pointer = v.element_pointer(a, Index(None, row), k)
            return v.splat(b.value(hw.VectorLoad, self.sum, pointer=pointer, mask=None), self.lanes)
        base = None if k.base is None else b.mul(k.base, b.i64(2))
        pointer = v.element_pointer(a, Index(None, row), Index(base, 2 * k.offset))
        pointer = b.value(hw.Bitcast, PointerType(U32), operand=pointer)
        pair = b.value(hw.VectorLoad, U32, pointer=pointer, mask=None)
        return bitcast(b, v.splat(pair, self.lanes), VectorType(32, BF16))

    # --- tile registers ---------------------------------------------------------------------

    def on_tiles(self) -> None:
        """Blocks of two by two tiles, C from where the sums lie and back."""
        v = self.v
        home = v.destinations.get(self.op.result) or v.scratch(self.type)
        if self.acc is not None and self.acc.place != home:
            v.materialize(self.acc, home)
        heights = row_tiles(self.rows)
        self.width = width_of_tile(2 * self.depth)
        self.tiles = numbers(v.tile_config, shapes(self.rows, self.width))

        def row_block(row: Index, count: int) -> None:
            def column_block(column: Index, panels: int) -> None:
                self._tile_block(home, row, column, heights[:count], panels)

            _blocks(v, self.columns, 2, 16, column_block)

        if len(heights) == 1 or heights[1] < 16:
            row_block(FIRST, len(heights))
        else:
            _blocks(v, self.rows // 16, 2, 16, row_block)
        v.define(self.op.result, v.stored(self.type, home))

    def _tile_block(
        self, home: Place, row: Index, column: Index, heights: tuple[int, ...], panels: int
    ) -> None:
        v, b = self.v, self.v.b
        c = [(i, j) for i in range(len(heights)) for j in range(panels)]
        count = len(row_tiles(self.rows))
        c_tiles, a_tiles, b_tiles = (
            self.tiles[: 2 * count],
            self.tiles[2 * count : -2],
            self.tiles[-2:],
        )
        c_stride = b.mul(home.stride, b.i64(4))
        a_stride, b_stride = b.mul(self.a.stride, b.i64(2)), b.i64(64)
        c_at = {}
        for i, j in c:
            at = Index(row.base, row.offset + 16 * i), Index(column.base, column.offset + 16 * j)
            c_at[i, j] = pointer = v.element_pointer(home, *at)
            if self.acc is None:
                b.emit(hw.TileZero, t=c_tiles[2 * i + j])
            else:
                b.emit(hw.TileLoad, t=c_tiles[2 * i + j], pointer=pointer, stride=c_stride)
        starts = [self._panel(column, j) for j in range(panels)]
        per_tile = self.width // 4  # steps of one multiplication

        def multiply(k: Value, _: list[Value]) -> list[Value]:
            for j in range(panels):
                pointer = v.element_pointer(Place(starts[j], b.i64(16)), Index(k, 0), FIRST)
                b.emit(hw.TileLoad, t=b_tiles[j], pointer=pointer, stride=b_stride)
            for i in range(len(heights)):
                at = Index(row.base, row.offset + 16 * i)
                pointer = v.element_pointer(self.a, at, Index(b.mul(k, b.i64(2)), 0))
                b.emit(hw.TileLoad, t=a_tiles[i], pointer=pointer, stride=a_stride)
                for j in range(panels):
                    b.emit(hw.Tdpbf16ps, c=c_tiles[2 * i + j], a=a_tiles[i], b=b_tiles[j])
            return []

        b.loop(self.steps, per_tile, multiply)
        for i, j in c:
            b.emit(hw.TileStore, t=c_tiles[2 * i + j], pointer=c_at[i, j], stride=c_stride)


def _blocks(
    v: Vectorizer, total: int, size: int, unit: int, body: Callable[[Index, int], None]
) -> None:
    """Calls ``body(first, count)`` for blocks of ``size`` of ``total`` tiles, each of ``unit`` rows
    or columns, in a loop; the last block may be smaller."""
    whole = total // size * size

    def block(index: Value, _: list[Value]) -> list[Value]:
        body(Index(index, 0), size)
        return []

    if whole:
        v.b.loop(whole * unit, size * unit, block)
    if total > whole:
        body(Index(None, whole * unit), total - whole)
