"""Turns tiles into vectors: after this pass only scalars, vectors and hardware operations remain.

Before:  %s = add %x, %y : tile<2x16xf32>
After:   %5 = add %1, %3 : vec<16xf32>
         %6 = add %2, %4 : vec<16xf32>

Small tiles become vectors where they are defined. Large element-wise expressions are evaluated
row by row where they are consumed (stored, carried round a loop), so that no intermediate tile
is written to memory; loop-carried large tiles live in scratch memory and are updated in place.
How a dot is carried out is in :mod:`amxq.passes.dot_vector` and :mod:`amxq.passes.dot_amx`.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from amxq.errors import CompilationError
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import I8, I64, U4, DType, PointerType, TileType, VectorType, element_of
from amxq.passes import aliases, control, dot_amx, dot_vector, interleave, memory
from amxq.passes.dot_int8 import Int8Dot
from amxq.passes.dot_vector import Dense, Int4Dot
from amxq.passes.tiles import CHUNK, Place, Row, Tile, all_rows, registers

MAX_ELEMENTS = 1 << 20
"""Of one tile, as in Triton."""
MAX_SCRATCH = 1 << 20
"""Bytes of scratch memory: it lies on the stacks of worker threads (2 MB and more)."""
MAX_COLUMNS = 1024
"""Vectors of one row: rows are unrolled, so longer ones would take minutes to compile."""


def vectorize(function: Function, lanes: int) -> None:
    """Rewrites ``function`` in place for vectors of ``lanes`` 32-bit elements."""
    v = Vectorizer(function, lanes)
    body = Block()
    with v.b.inside(body):
        v.block(function.body)
        v.b.emit(ops.Yield, values=())
    function.body = body


class Vectorizer:
    def __init__(self, function: Function, lanes: int) -> None:
        self.b = Builder(Block())
        self.lanes = lanes
        self.defs = {r: op for op in ops.walk(function.body) for r in op.results}
        self.uses: dict[Value, int] = {}
        for op in ops.walk(function.body):
            for operand in ops.operands(op):
                self.uses[operand] = self.uses.get(operand, 0) + 1
        self.scalars: dict[Value, Value] = {p: p for p in function.params}
        self.tiles: dict[Value, Tile] = {}
        self.pointers: dict[Value, memory.Pointers] = {}
        self.scratch_bytes = 0
        self.tile_config = function.tiles
        # (int4 tile, bytes of an activation) → where it is dequantised
        self.panels: dict[tuple[Value, int], tuple[Block, Value]] = {}
        self.loop: control.Loop | None = None  # the innermost loop around what is rewritten

    def error(self, message: str, hint: str) -> CompilationError:
        """What is wrong with the operation at hand, for the user."""
        at = self.b.loc
        line = linecache.getline(at.file, at.line).rstrip("\n")
        return CompilationError(
            message, file=at.file, line=at.line, column=at.column, source_line=line, hint=hint
        )

    # --- the walk -------------------------------------------------------------------------

    def block(self, block: Block) -> tuple[Value, ...]:
        """Rewrites a block's operations to the insertion point; returns what it yields."""
        for i, op in enumerate(block.ops):
            self.b.loc = op.loc
            if isinstance(op, ops.Yield):
                return op.values
            if aliases.writes(op):
                aliases.settle(self, op, block.ops[i:])
            self.op(op)
        return ()

    def op(self, op: Op) -> None:
        handler: Callable[[Any], None] | None = getattr(self, f"on_{op.name}", None)
        if handler is not None:
            handler(op)
        elif isinstance(op, aliases.POINTWISE):
            self._pointwise(op)
        else:  # scalar operations stay as they are
            self._copy(op)

    def _copy(self, op: Op) -> None:
        fields = {
            k: self.scalars[v] if isinstance(v, Value) else v for k, v in ops.fields_of(op).items()
        }
        if isinstance(op, ops.Constant):
            self.scalars[op.result] = self.b.constant(op.value, op.result.type)  # type: ignore[arg-type]
        elif isinstance(op, ops.Binary):
            self.scalars[op.result] = self.b.binary(op.kind, fields["lhs"], fields["rhs"])
        elif isinstance(op, ops.Cast):
            assert isinstance(op.result.type, DType)
            self.scalars[op.result] = self.b.cast(fields["operand"], op.result.type)
        else:
            new = self.b.emit(type(op), *(r.type for r in op.results), **fields)
            self.scalars.update(zip(op.results, new.results))
        for result in op.results:
            if result.hint and not self.scalars[result].hint:
                self.scalars[result].hint = result.hint

    # --- tiles ----------------------------------------------------------------------------

    def lanes_of(self, type_: TileType) -> int:
        """Lanes of one vector: the widest power of two that divides a row."""
        lanes = math.gcd(type_.shape[-1], self.lanes)
        if type_.shape[-1] > MAX_COLUMNS * lanes or math.prod(type_.shape) > MAX_ELEMENTS:
            raise self.error(
                f"{type_} is too large: a tile has at most {MAX_ELEMENTS} elements and "
                f"{MAX_COLUMNS} vectors of {lanes} in a row",
                "use smaller blocks and a larger grid, or a loop",
            )
        return lanes

    def define(self, value: Value, tile: Tile) -> None:
        """Binds a tile; a small one is computed here and now."""
        if tile.small:
            if tile.prepare:
                tile.prepare(Row(None, 0))
            parts = [tile.at(row, column) for row, column in all_rows(tile)]
            place = tile.place
            tile = Tile(
                tile.type,
                tile.lanes,
                registers(tile.type, tile.lanes, parts).at,
                place,
                late=place is not None and tile.late,
            )
        else:
            prepare = self._placed(tile.prepare) if tile.prepare else None
            tile = replace(tile, at=self._placed(tile.at), prepare=prepare)
        self.tiles[value] = tile

    def _placed(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """``compute``, for later; what it emits then still belongs to the source line at hand."""
        loc = self.b.loc

        def placed(*args: Any) -> Any:
            before, self.b.loc = self.b.loc, loc
            try:
                return compute(*args)
            finally:
                self.b.loc = before

        return placed

    def scratch(self, type_: TileType) -> Place:
        """Uninitialised memory for a tile, row-major."""
        assert isinstance(type_.element, DType)
        size = type_.element.bytes
        for extent in type_.shape:
            size *= extent
        self.scratch_bytes += size
        if self.scratch_bytes > MAX_SCRATCH:
            raise self.error(
                f"the kernel's tiles need more than {MAX_SCRATCH} bytes of scratch memory",
                "use smaller blocks",
            )
        pointer = self.b.value(hw.Scratch, PointerType(type_.element), bytes=size)
        return Place(pointer, self.b.i64(type_.shape[-1]))

    def materialize(self, tile: Tile, place: Place | None = None) -> Tile:
        """Writes a tile to memory (``place`` or new scratch) and returns it as lying there."""
        place = place or self.scratch(tile.type)

        def write(row: Row) -> None:
            for c in range(tile.columns):
                pointer = self.element_pointer(place, row, c * tile.lanes)
                self.b.emit(hw.VectorStore, pointer=pointer, value=tile.at(row, c), mask=None)

        self.for_rows(tile, write)
        return self.stored(tile.type, place)

    def stored(self, type_: TileType, place: Place) -> Tile:
        """A tile that lies in memory of our own."""
        lanes = self.lanes_of(type_)

        def at(row: Row, column: int) -> Value:
            pointer = self.element_pointer(place, row, column * lanes)
            return self.b.value(hw.VectorLoad, tile.part_type(), pointer=pointer, mask=None)

        tile = Tile(type_, lanes, at, place, late=True)
        return tile

    def element_pointer(self, place: Place, row: Row, column: int) -> Value:
        b = self.b
        offset = b.add(b.mul(b.i64(row.offset), place.stride), b.i64(column))
        pointer = place.pointer
        if row.base is not None:
            pointer = b.addptr(pointer, b.mul(row.base, place.stride))
        return b.addptr(pointer, offset)

    def for_rows(self, tile: Tile, body: Callable[[Row], None]) -> None:
        """Calls ``body`` for every row: unrolled when few, else a loop over chunks."""
        if tile.prepare:
            interleave.pipelined(self, tile.prepare, tile.rows, body)
        elif tile.rows <= CHUNK:
            for r in range(tile.rows):
                body(Row(None, r))
        else:
            chunk = next(c for c in range(CHUNK, 0, -1) if tile.rows % c == 0)
            loop = Block((Value(I64, "row"),))
            with self.b.inside(loop):
                for r in range(chunk):
                    body(Row(loop.args[0], r))
                self.b.emit(ops.Yield, values=())
            lower, upper, step = (self.b.i64(x) for x in (0, tile.rows, chunk))
            self.b.emit(ops.For, lower=lower, upper=upper, step=step, inits=(), body=loop)

    # --- element-wise ---------------------------------------------------------------------

    def _pointwise(self, op: Op) -> None:
        if not isinstance(op.result.type, TileType):
            self._copy(op)
            return
        type_ = op.result.type
        fields = ops.fields_of(op)
        sources = {
            k: self.tiles.get(v, self.scalars.get(v))
            for k, v in fields.items()
            if isinstance(v, Value)
        }
        tiles = [t for t in sources.values() if isinstance(t, Tile)]
        attributes = {k: v for k, v in fields.items() if k not in sources}

        def at(row: Row, column: int) -> Value:
            parts = {k: t.at(row, column) if isinstance(t, Tile) else t for k, t in sources.items()}
            return self.b.value(type(op), tile.part_type(), **parts, **attributes)

        tile = Tile(
            type_,
            self.lanes_of(type_),
            at,
            prepare=_both([t.prepare for t in tiles]),
            late=any(t.late for t in tiles),
        )
        self.define(op.result, tile)

    def on_constant(self, op: ops.Constant) -> None:
        if not isinstance(op.result.type, TileType):
            self._copy(op)
            return
        assert not isinstance(op.value, tuple)
        number = op.value
        self._uniform(op.result, lambda tile: self.b.constant(number, tile.part_type()))

    def on_splat(self, op: ops.Splat) -> None:
        scalar = self.scalars[op.operand]
        if isinstance(op.operand.type, PointerType):
            self.pointers[op.result] = memory.Pointers(self, scalar, (), 0)
            return
        self._uniform(op.result, lambda tile: self.splat(scalar, tile.lanes))

    def splat(self, scalar: Value, lanes: int) -> Value:
        assert isinstance(scalar.type, DType)
        if lanes == 1:
            return scalar
        return self.b.value(ops.Splat, VectorType(lanes, scalar.type), operand=scalar)

    def _uniform(self, value: Value, make: Callable[[Tile], Value]) -> None:
        assert isinstance(value.type, TileType)
        tile = Tile(value.type, self.lanes_of(value.type), lambda row, column: make(tile))
        self.tiles[value] = tile  # nothing to compute: not worth a register per part

    def on_arange(self, op: ops.Arange) -> None:
        assert isinstance(op.result.type, TileType)

        def at(row: Row, column: int) -> Value:
            first = op.start + column * tile.lanes
            numbers = tuple(range(first, first + tile.lanes))
            value = numbers[0] if tile.lanes == 1 else numbers
            return self.b.value(ops.Constant, tile.part_type(), value=value)

        tile = Tile(op.result.type, self.lanes_of(op.result.type), at)
        self.define(op.result, tile)

    # --- shape ----------------------------------------------------------------------------

    def on_expand_dims(self, op: ops.ExpandDims) -> None:
        assert isinstance(op.result.type, TileType)
        if op.operand in self.pointers:
            pointers = self.pointers[op.operand]
            self.pointers[op.result] = pointers.expanded(op.result.type.shape, op.axis)
        else:
            tile = self.expanded(self.tiles[op.operand], op.result.type.shape, op.axis)
            self.define(op.result, tile)

    def expanded(self, source: Tile, shape: tuple[int, ...], axis: int) -> Tile:
        """``source`` with a dimension of size 1 inserted at ``axis``, which gives ``shape``."""
        type_ = TileType(shape, source.dtype)
        if axis < len(shape) - 1:  # rows and vectors stay what they are
            return Tile(type_, source.lanes, source.at, source.place, source.prepare, source.late)
        last = source.type.shape[-1]
        if source.rows * last > CHUNK and not self._dense(source):
            source = self.materialize(source)

        def at(row: Row, _: int) -> Value:
            if source.place is not None and (source.rows == 1 or row.base is not None):
                place = Place(source.place.pointer, self.b.i64(1))
                pointer = self.element_pointer(place, row, 0)
                return self.b.value(hw.VectorLoad, source.dtype, pointer=pointer, mask=None)
            r, lane = divmod(row.offset, last)
            part = source.at(Row(None, r), lane // source.lanes)
            if source.lanes == 1:
                return part
            return self.b.value(hw.Extract, source.dtype, vector=part, lane=lane % source.lanes)

        return Tile(type_, 1, at, late=source.late)

    def _dense(self, tile: Tile) -> bool:
        """Whether a tile lies in memory without gaps between its rows."""
        last = tile.type.shape[-1]
        return tile.place is not None and (
            tile.rows == 1 or self.b.known(tile.place.stride) == last
        )

    def on_broadcast(self, op: ops.Broadcast) -> None:
        assert isinstance(op.result.type, TileType)
        shape = op.result.type.shape
        if op.operand in self.pointers:
            self.pointers[op.result] = self.pointers[op.operand].repeated(shape)
        else:  # a broadcast repeats what its source holds: compute it at its uses
            self.tiles[op.result] = self.repeated(self.tiles[op.operand], shape)

    def repeated(self, source: Tile, shape: tuple[int, ...]) -> Tile:
        """``source`` with its dimensions of size 1 repeated to ``shape``."""
        type_ = TileType(shape, source.dtype)
        lanes = self.lanes_of(type_)
        if source.prepare and math.prod(shape[:-1]) != source.rows:
            source = self.materialize(source)  # its chunks of rows are not the result's

        def at(row: Row, column: int) -> Value:
            inner = memory.source_row(self, source.type.shape, shape, row)
            if source.type.shape[-1] == 1 and shape[-1] > 1:
                return self.splat(source.at(inner, 0), lanes)
            return source.at(inner, column)

        return Tile(type_, lanes, at, prepare=source.prepare, late=source.late)

    def on_reduce(self, op: ops.Reduce) -> None:
        source = self.tiles[op.operand]
        kind, element = op.kind, source.dtype

        def reduced(row: Row) -> Value:
            parts = [source.at(row, c) for c in range(source.columns)]
            while len(parts) > 1:  # pairwise, in a fixed order
                pairs = zip(parts[::2], parts[1::2])
                odd = parts[len(parts) & ~1 :]
                parts = [self.b.binary(kind, x, y) for x, y in pairs] + odd
            if source.lanes == 1:
                return parts[0]
            return self.b.value(hw.Horizontal, element, kind=kind, vector=parts[0])

        if not isinstance(op.result.type, TileType):
            if source.prepare:
                source.prepare(Row(None, 0))
            self.scalars[op.result] = reduced(Row(None, 0))
            return
        flat = self.scratch(op.result.type)
        place = Place(flat.pointer, self.b.i64(1))

        def write(row: Row) -> None:
            pointer = self.element_pointer(place, row, 0)
            self.b.emit(hw.VectorStore, pointer=pointer, value=reduced(row), mask=None)

        self.for_rows(source, write)
        self.define(op.result, self.stored(op.result.type, flat))

    # --- memory (amxq.passes.memory) ------------------------------------------------------

    def on_addptr(self, op: ops.AddPtr) -> None:
        if isinstance(op.result.type, TileType):
            self.pointers[op.result] = memory.pointers_of(self, op.pointer).moved(op.offset)
        else:
            self._copy(op)

    def on_load(self, op: ops.Load) -> None:
        memory.load(self, op)

    def on_store(self, op: ops.Store) -> None:
        memory.store(self, op)

    def on_load_block(self, op: ops.LoadBlock) -> None:
        memory.load_block(self, op)

    def on_store_block(self, op: ops.StoreBlock) -> None:
        memory.store_block(self, op)

    def on_int4_order(self, op: ops.Int4Order) -> None:
        source = self.tiles[op.operand]

        def at(row: Row, column: int) -> Value:
            order = tuple(i & -8 | i >> 1 & 3 | (i & 1) << 2 for i in range(source.lanes))
            vector = source.at(row, column)
            return self.b.value(hw.Shuffle, vector.type, vector=vector, lanes=order)

        tile = Tile(source.type, source.lanes, at, prepare=source.prepare, late=source.late)
        self.define(op.result, tile)

    def on_load_int4(self, op: ops.LoadInt4) -> None:
        """Read by the dots that use it."""

    def on_dot(self, op: ops.Dot) -> None:
        if op.lowering == "amx":
            dot_amx.lower(self, op)
        else:
            int4 = element_of(op.rhs.type) == U4
            method = Int8Dot if element_of(op.lhs.type) == I8 else Int4Dot if int4 else Dense
            dot_vector.lower(self, op, method(self, op))

    # --- control (amxq.passes.control) ----------------------------------------------------

    def on_for(self, op: ops.For) -> None:
        control.for_loop(self, op)

    def on_if(self, op: ops.If) -> None:
        control.branch(self, op)


def _both(hooks: list[Callable[[Row], None] | None]) -> Callable[[Row], None] | None:
    present = [h for h in hooks if h is not None]
    if not present:
        return None

    def prepare(row: Row) -> None:
        for hook in present:
            hook(row)

    return prepare
