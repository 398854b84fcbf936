"""Turns tiles into vectors: after this pass only scalars, vectors and hardware operations remain.

Before:  %s = add %x, %y : tile<2x16xf32>
After:   %5 = add %1, %3 : vec<16xf32>
         %6 = add %2, %4 : vec<16xf32>

Small tiles become vectors where they are defined. Large element-wise expressions are evaluated
part by part where they are consumed (stored, reduced, carried round a loop) by the loops of
:mod:`amxq.passes.traversal`, so that no intermediate tile is written to memory unless it is used
again; loop-carried large tiles live in scratch memory and are updated in place. How a dot is
carried out is in :mod:`amxq.passes.dot_vector` and :mod:`amxq.passes.dot_amx`.
"""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections.abc import Callable
from typing import Any

from amxq.errors import CompilationError
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import (
    I8,
    I32,
    U4,
    DType,
    PointerType,
    TileType,
    Type,
    VectorType,
    element_of,
    shape_of,
)
from amxq.passes import (
    affine,
    aliases,
    combine,
    control,
    dot_amx,
    dot_batched,
    dot_dense,
    dot_vector,
    effects,
    memory,
    rearrange,
    reductions,
)
from amxq.passes.dot_int8 import Int8Dot
from amxq.passes.dot_vector import Int4Dot
from amxq.passes.tiles import FIRST, At, Index, Place, Tile, positions, registers
from amxq.passes.traversal import Traversal

MAX_ELEMENTS = 1 << 20
"""Of one tile, as in Triton."""
MAX_SCRATCH = 1 << 20
"""Bytes of scratch memory: it lies on the stacks of worker threads (2 MB and more)."""


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
        self.scratch_left = MAX_SCRATCH
        self.tile_config = function.tiles
        # (int4 tile, type of an activation) → where it is dequantised
        self.panels: dict[tuple[Value, DType], tuple[Block, Value]] = {}
        self.destinations: dict[Value, Place] = {}  # dot → where the loop around carries its result
        self.loop: control.Loop | None = None  # the innermost loop around what is rewritten
        self.traversal = Traversal(self, function)
        self.region: Block = function.body  # of the source, that is being rewritten

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
        before, self.region = self.region, block
        for i, op in enumerate(block.ops):
            self.b.loc = op.loc
            if isinstance(op, ops.Yield):
                break
            if aliases.writes(op):
                aliases.settle(self, op, block.ops[i:])
            self.op(op)
        self.region = before
        last = block.ops[-1] if block.ops else None
        return last.values if isinstance(last, ops.Yield) else ()

    def op(self, op: Op) -> None:
        handler: Callable[[Any], None] | None = getattr(self, f"on_{op.name}", None)
        if handler is not None:
            handler(op)
        elif isinstance(op, hw.POINTWISE):
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
        if math.prod(type_.shape) > MAX_ELEMENTS:
            raise self.error(
                f"{type_} is too large: a tile has at most {MAX_ELEMENTS} elements",
                "use smaller blocks and a larger grid, or a loop",
            )
        return math.gcd(type_.shape[-1], self.lanes)

    def define(self, value: Value, tile: Tile) -> None:
        """Binds a tile; a small one is computed here and now, a large one that is read from
        memory or computed at some cost, and used several times, is kept in scratch."""
        if tile.small:
            if tile.prepare:
                tile.prepare(FIRST)
            parts = [tile.at(row, column) for row, column in positions(tile)]
            element = tile.element
            if tile.place is not None:
                element = self.load_element(tile.place)
            known = registers(tile.type, tile.lanes, parts, element)
            late = tile.place is not None and tile.late
            tile = dataclasses.replace(known, place=tile.place, late=late)
        else:
            prepare = self._placed(tile.prepare) if tile.prepare else None
            tile = dataclasses.replace(tile, at=self._placed(tile.at), prepare=prepare)
            if prepare is None:
                tile = self.traversal.remembered(value, tile)
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
        size = type_.element.bytes * math.prod(type_.shape)
        self.scratch_left -= size
        if self.scratch_left < 0:
            raise self.error(
                f"the kernel's tiles need more than {MAX_SCRATCH} bytes of scratch memory",
                "use smaller blocks",
            )
        pointer = self.b.value(hw.Scratch, PointerType(type_.element), bytes=size)
        return Place(pointer, self.b.i64(type_.shape[-1]))

    def materialize(self, tile: Tile, place: Place | None = None) -> Tile:
        """Writes a tile to memory (``place`` or new scratch) and returns it as lying there."""
        place = place or self.scratch(tile.type)

        def write(row: Index, column: Index) -> None:
            pointer = self.element_pointer(place, row, column)
            self.b.emit(hw.VectorStore, pointer=pointer, value=tile.at(row, column), mask=None)

        self.traversal.parts(tile, write)
        return self.stored(tile.type, place)

    def stored(self, type_: TileType, place: Place) -> Tile:
        """A tile that lies in memory of our own."""

        def at(row: Index, column: Index) -> Value:
            pointer = self.element_pointer(place, row, column)
            return self.b.value(hw.VectorLoad, tile.part_type(), pointer=pointer, mask=None)

        tile = Tile(type_, self.lanes_of(type_), at, self.load_element(place), place)
        return tile

    def load_element(self, place: Place) -> At:
        def element(row: Index, column: Index) -> Value:
            pointer = self.element_pointer(place, row, column)
            return self.b.value(hw.VectorLoad, place.element, pointer=pointer, mask=None)

        return element

    def element_of(self, tile: Tile, row: Index, column: Index) -> Value:
        """One element as a scalar. A tile without ``element`` has it at constant columns."""
        if tile.lanes == 1:
            return tile.at(row, column)
        if tile.element is not None:
            return tile.element(row, column)
        lane = column.offset % tile.lanes
        part = tile.at(row, Index(column.base, column.offset - lane))
        return self.b.value(hw.Extract, tile.dtype, vector=part, lane=lane)

    def element_pointer(self, place: Place, row: Index, column: Index) -> Value:
        b = self.b
        offset = b.add(b.mul(b.i64(row.offset), place.stride), b.i64(column.offset))
        pointer = place.pointer
        if row.base is not None:
            pointer = b.addptr(pointer, b.mul(row.base, place.stride))
        if column.base is not None:
            pointer = b.addptr(pointer, column.base)
        return b.addptr(pointer, offset)

    def number(self, index: Index) -> Value:
        """An index as an i64."""
        offset = self.b.i64(index.offset)
        return offset if index.base is None else self.b.add(index.base, offset)

    # --- element-wise ---------------------------------------------------------------------

    def _pointwise(self, op: Op) -> None:
        if not isinstance(op.result.type, TileType):
            self._copy(op)
            return
        fields = ops.fields_of(op)
        sources = {
            k: self.tiles.get(v, self.scalars.get(v))
            for k, v in fields.items()
            if isinstance(v, Value)
        }
        tiles = [t for t in sources.values() if isinstance(t, Tile)]
        attributes = {k: v for k, v in fields.items() if k not in sources}

        def at(row: Index, column: Index) -> Value:
            parts = {k: t.at(row, column) if isinstance(t, Tile) else t for k, t in sources.items()}
            return self.b.value(type(op), tile.part_type(), **parts, **attributes)

        def element(row: Index, column: Index) -> Value:
            parts: dict[str, Any] = {
                k: self.element_of(t, row, column) if isinstance(t, Tile) else t
                for k, t in sources.items()
            }
            if isinstance(op, ops.Binary):
                return self.b.binary(op.kind, parts["lhs"], parts["rhs"])
            if isinstance(op, ops.Cast):
                return self.b.cast(parts["operand"], tile.dtype)
            return self.b.value(type(op), tile.dtype, **parts, **attributes)

        tile = Tile(
            op.result.type,
            self.lanes_of(op.result.type),
            at,
            element if affine.cheap(op) and all(t.anywhere for t in tiles) else None,
            static=any(t.static for t in tiles),
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
        self._uniform(op.result, lambda type_: self.b.constant(number, type_))

    def on_splat(self, op: ops.Splat) -> None:
        scalar = self.scalars[op.operand]
        if isinstance(op.operand.type, PointerType):
            self.pointers[op.result] = memory.Pointers(self, scalar, (), 0)
            return

        def make(type_: Type) -> Value:
            return self.splat(scalar, type_.lanes if isinstance(type_, VectorType) else 1)

        self._uniform(op.result, make)

    def splat(self, scalar: Value, lanes: int) -> Value:
        assert isinstance(scalar.type, DType)
        if lanes == 1:
            return scalar
        return self.b.value(ops.Splat, VectorType(lanes, scalar.type), operand=scalar)

    def _uniform(self, value: Value, make: Callable[[Type], Value]) -> None:
        """Nothing to compute: not worth a register per part."""
        type_ = value.type
        assert isinstance(type_, TileType) and isinstance(type_.element, DType)
        part, one = Tile(type_, self.lanes_of(type_), _nowhere).part_type(), type_.element
        self.tiles[value] = Tile(
            type_, self.lanes_of(type_), lambda *_: make(part), lambda *_: make(one)
        )

    def on_arange(self, op: ops.Arange) -> None:
        type_ = op.result.type
        assert isinstance(type_, TileType)

        def element(_: Index, column: Index) -> Value:
            first = Index(column.base, op.start + column.offset)
            return self.b.cast(self.number(first), I32)

        def at(row: Index, column: Index) -> Value:
            if tile.lanes == 1:
                return element(row, column)
            first = op.start + column.offset
            numbers = tuple(range(first, first + tile.lanes))
            steps = self.b.value(ops.Constant, tile.part_type(), value=numbers)
            if column.base is None:
                return steps
            return self.b.add(self.splat(self.b.cast(column.base, I32), tile.lanes), steps)

        tile = Tile(type_, self.lanes_of(type_), at, element)
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
            return dataclasses.replace(source, type=type_)
        last = source.type.shape[-1]
        if not source.anywhere and source.rows * last > 1:
            source = self.materialize(source)

        def at(row: Index, _: Index) -> Value:
            r, lane = memory.split(self, row, last) if source.rows > 1 else (FIRST, row)
            return self.element_of(source, r, lane)

        return Tile(type_, 1, at, at, late=source.late)

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
        splats = source.type.shape[-1] == 1 < shape[-1]
        result = Tile(type_, lanes, _nowhere)
        if source.prepare and result.rows != source.rows:
            source = self.materialize(source)  # its chunks of rows are not the result's
        if source.static and source.rows > 1 and result.rows > result.chunk:
            source = self.materialize(source)  # its rows are asked for by a loop

        def at(row: Index, column: Index) -> Value:
            inner = memory.source_row(self, source.type.shape, shape, row)
            if splats:
                return self.splat(source.at(inner, FIRST), lanes)
            return source.at(inner, column)

        def element(row: Index, column: Index) -> Value:
            inner = memory.source_row(self, source.type.shape, shape, row)
            return self.element_of(source, inner, FIRST if splats else column)

        return dataclasses.replace(
            result,
            at=at,
            element=element if source.anywhere else None,
            static=source.static and source.rows > 1,
            prepare=source.prepare,
            late=source.late,
        )

    def on_reshape(self, op: ops.Reshape) -> None:
        rearrange.reshape(self, op)

    def on_permute(self, op: ops.Permute) -> None:
        rearrange.permute(self, op)

    def on_reduce(self, op: ops.Reduce) -> None:
        if op.axis < len(shape_of(op.operand.type)) - 1:
            rearrange.reduce(self, op)
        else:
            reductions.reduce(self, op)

    def on_combine(self, op: ops.Combine) -> None:
        combine.lower(self, op)

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

        def at(row: Index, column: Index) -> Value:
            order = tuple(i & -8 | i >> 1 & 3 | (i & 1) << 2 for i in range(source.lanes))
            vector = source.at(row, column)
            return self.b.value(hw.Shuffle, vector.type, vector=vector, other=None, lanes=order)

        tile = Tile(source.type, source.lanes, at, prepare=source.prepare, late=source.late)
        self.define(op.result, tile)

    def on_atomic(self, op: ops.Atomic) -> None:
        effects.atomic(self, op)

    def on_compare_exchange(self, op: ops.CompareExchange) -> None:
        effects.compare_exchange(self, op)

    def on_prefetch(self, op: hw.Prefetch) -> None:
        self.b.emit(hw.Prefetch, pointer=self.scalars[op.pointer], locality=op.locality)

    def on_print(self, op: ops.Print) -> None:
        effects.print_values(self, op)

    def on_load_int4(self, op: ops.LoadInt4) -> None:
        """Read by the dots that use it."""

    def on_dot(self, op: ops.Dot) -> None:
        if len(shape_of(op.lhs.type)) == 3:
            dot_batched.lower(self, op)
        elif element_of(op.rhs.type) != U4:
            dot_dense.lower(self, op)
        elif op.lowering == "amx":
            dot_amx.lower(self, op)
        else:
            method = Int8Dot if element_of(op.lhs.type) == I8 else Int4Dot
            dot_vector.lower(self, op, method(self, op))

    # --- control (amxq.passes.control) ----------------------------------------------------

    def on_for(self, op: ops.For) -> None:
        control.for_loop(self, op)

    def on_while(self, op: ops.While) -> None:
        control.while_loop(self, op)

    def on_if(self, op: ops.If) -> None:
        control.branch(self, op)


def _both(hooks: list[Callable[[Index], None] | None]) -> Callable[[Index], None] | None:
    present = [h for h in hooks if h is not None]
    if not present:
        return None

    def prepare(row: Index) -> None:
        for hook in present:
            hook(row)

    return prepare


def _nowhere(row: Index, column: Index) -> Value:
    raise AssertionError("a tile that only gives its shape")
