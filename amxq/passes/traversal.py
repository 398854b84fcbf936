"""Loops over the parts of a tile, and what such loops remember.

Before:  store %p, %x : tile<4096xf32>
After:   for %c = 0 to 4096 step 128 { eight vectors of %x at %c, eight vector stores }

Rows and columns of more vectors than are worth unrolling become loops; compile time does not
depend on a tile's size. Expressions are evaluated where they are consumed, so a tile with two
consumers would be computed, or read, twice: the first loop over a tile that
:mod:`amxq.passes.keep` names also writes it to scratch memory, where later ones read it.
Within one iteration nothing is computed twice either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Value
from amxq.ir.types import I64
from amxq.passes import interleave
from amxq.passes.keep import Keep, kept_values
from amxq.passes.tiles import REGISTER_VECTORS, Index, Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

LOOP_VECTORS = 8
"""Vectors of a row that one iteration of a loop over columns handles: enough independent work
to cover the latency of an addition, and few enough to stay in registers."""

Position = tuple[Index, Index]


class Traversal:
    """The loop over a tile's parts that is being written, if any."""

    def __init__(self, v: Vectorizer, function: ops.Function) -> None:
        self.v = v
        self.kept = kept_values(function)
        self._known: dict[tuple[Value, Position], Value] | None = None
        self._position: Position | None = None
        self._region: Block | None = None
        self._written: dict[Value, Tile] = {}

    # --- loops ----------------------------------------------------------------------------

    def parts(self, tile: Tile, body: Callable[[Index, Index], None]) -> None:
        """Calls ``body`` for every (row, column) of the tile's vectors."""

        def columns(row: Index) -> None:
            def part(column: Index, _: int, carried: list[Value]) -> list[Value]:
                body(row, column)
                return carried

            self.columns(tile, row, part, [])

        self.rows(tile, columns)

    def rows(self, tile: Tile, body: Callable[[Index], None]) -> None:
        """Calls ``body`` for every row: unrolled when there are few, else a loop over chunks.
        ``body`` calls :meth:`columns` once."""
        chunk, b = tile.chunk, self.v.b
        with self._traversing():
            if tile.prepare:
                interleave.pipelined(self.v, tile.prepare, tile.rows, body)
            elif tile.rows <= chunk:
                for r in range(tile.rows):
                    body(Index(None, r))
            else:
                loop = Block((Value(I64, "row"),))
                with b.inside(loop), self._iteration():
                    for r in range(chunk):
                        body(Index(loop.args[0], r))
                    b.emit(ops.Yield, values=())
                lower, upper, step = (b.i64(x) for x in (0, tile.rows, chunk))
                b.emit(ops.For, lower=lower, upper=upper, step=step, inits=(), body=loop)

    def columns(
        self,
        tile: Tile,
        row: Index,
        body: Callable[[Index, int, list[Value]], list[Value]],
        carried: list[Value],
    ) -> list[Value]:
        """Calls ``body(column, number, carried)`` for every vector of a row, each with what the
        one before has returned; returns the last one's. A long row becomes a loop, in which
        ``number`` counts the vectors of one iteration."""
        lanes, b = tile.lanes, self.v.b

        def visit(column: Index, number: int, carried: list[Value]) -> list[Value]:
            self._position = (row, column)
            return body(column, number, carried)

        done = 0
        if tile.columns > REGISTER_VECTORS:
            done = tile.columns // LOOP_VECTORS * LOOP_VECTORS
            loop = Block((Value(I64, "column"), *(Value(x.type) for x in carried)))
            with b.inside(loop), self._iteration():
                values = list(loop.args[1:])
                for i in range(LOOP_VECTORS):
                    values = visit(Index(loop.args[0], i * lanes), i, values)
                b.emit(ops.Yield, values=tuple(values))
            lower, upper, step = (b.i64(x * lanes) for x in (0, done, LOOP_VECTORS))
            made = b.emit(
                ops.For,
                *(x.type for x in carried),
                lower=lower,
                upper=upper,
                step=step,
                inits=tuple(carried),
                body=loop,
            )
            carried = list(made.results)
        for c in range(done, tile.columns):
            carried = visit(Index(None, c * lanes), c - done, carried)
        return carried

    @contextmanager
    def _traversing(self) -> Iterator[None]:
        before = self._known, self._position, self._region, self._written
        self._known, self._position = {}, None
        self._region, self._written = self.v.region, {}
        try:
            yield
            for value, tile in self._written.items():
                self.v.tiles[value] = tile
        finally:
            self._known, self._position, self._region, self._written = before

    @contextmanager
    def _iteration(self) -> Iterator[None]:
        """What is computed in a loop's body is known in this body only."""
        before, self._known = self._known, {}
        try:
            yield
        finally:
            self._known = before

    # --- what they remember -----------------------------------------------------------------

    def remembered(self, value: Value, tile: Tile) -> Tile:
        """``tile``, whose vectors are computed once an iteration, and once altogether if it is
        worth keeping."""
        keep = self.kept.get(value) if tile.place is None else None
        if keep is not None and self.v.scratch_left < tile.bytes:
            keep = None
        if keep is Keep.NOW:
            return self.v.materialize(tile)
        home = self.v.stored(tile.type, self.v.scratch(tile.type)) if keep else None
        region = self.v.region

        def at(row: Index, column: Index) -> Value:
            key = (value, (row, column))
            if self._known is not None and key in self._known:
                return self._known[key]
            now = self.v.tiles.get(value)
            if now is home and home is not None:
                result = home.at(row, column)
            else:
                result = tile.at(row, column)
                if home is not None and self._region is region and self._position == key[1]:
                    assert home.place is not None
                    pointer = self.v.element_pointer(home.place, row, column)
                    self.v.b.emit(hw.VectorStore, pointer=pointer, value=result, mask=None)
                    self._written[value] = home
            if self._known is not None:
                self._known[key] = result
            return result

        return dataclasses.replace(tile, at=at)
