"""Carries distances instead of pointers round loops and out of branches.

Before:  %q = for … inits=(%p) { ^(%i: i32, %a: tile<64xptr<f32>>)
           %n = addptr pointer=%a offset=%s                    (%s = splat %step)
           yield values=(%n) }
After:   %d = for … inits=(0) { ^(%i: i32, %e: i64)
           %a = addptr pointer=%p offset=splat %e
           yield values=(add %e, %step) }
         %q = addptr pointer=%p offset=splat %d

so that every pointer is a parameter plus offsets: contiguous accesses stay recognisable, and
accesses to one tensor can be compared. The distance is a scalar where all elements of a tile
move alike, else a tile. Pointers that do not start from the carried one are left alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import I64, PointerType, TileType, Type, element_of, scalar_of, with_element


def carry_distances(function: Function) -> None:
    _Rewriter().block(function.body)


@dataclasses.dataclass
class _Moved:
    """A carried pointer: where it starts from, and how the regions move it.

    Attributes:
        root: the pointer from outside.
        type: of the distance.
        steps: for each region that yields it, the offsets that it adds.
    """

    root: Value
    type: Type
    steps: list[list[Value]]


class _Rewriter:
    def __init__(self) -> None:
        self.defs: dict[Value, Op] = {}
        self.renamed: dict[Value, Value] = {}

    def block(self, block: Block) -> None:
        before, block.ops = block.ops, []
        for op in before:
            op = ops.replace_operands(op, lambda v: self.renamed.get(v, v))
            for region in ops.regions(op):
                self.block(region)
            if isinstance(op, (ops.For, ops.While)):
                self.loop(Builder(block), op)
            elif isinstance(op, ops.If):
                self.branch(Builder(block), op)
            else:
                block.ops.append(op)
            for made in block.ops[-1:]:
                self.defs.update(dict.fromkeys(made.results, made))

    # --- loops ----------------------------------------------------------------------------

    def loop(self, b: Builder, op: ops.For | ops.While) -> None:
        b.loc = op.loc
        skip = 1 if isinstance(op, ops.For) else 0  # the index
        moved: dict[int, _Moved] = {}
        for j, (init, arg) in enumerate(zip(op.inits, op.body.args[skip:])):
            chain = self._chain(_yielded(op.body)[j])
            if isinstance(element_of(init.type), PointerType) and chain[0] is arg:
                moved[j] = _Moved(init, self._distance(init.type, chain[1]), [chain[1]])
        if not moved:
            b.block.ops.append(op)
            return
        inits = list(op.inits)
        for j, move in moved.items():
            inits[j] = b.constant(0, move.type)
        fields: dict[str, Any] = {"inits": tuple(inits)}
        if isinstance(op, ops.While):
            fields["test"] = self._entered(op.test, 0, moved)
        fields["body"] = self._entered(op.body, skip, moved)
        self._yield_distances(fields["body"], moved, 0, skip)
        results = tuple(
            Value(moved[j].type, r.hint) if j in moved else r for j, r in enumerate(op.results)
        )
        b.block.ops.append(dataclasses.replace(op, results=results, **fields))
        self._results(b, op.results, results, moved)

    def _entered(self, block: Block, skip: int, moved: dict[int, _Moved]) -> Block:
        """A region that takes distances and begins with the pointers that they lead to."""
        args = list(block.args)
        start = Block()
        b = Builder(start)
        pointers: dict[Value, Value] = {}
        for j, move in moved.items():
            old = args[skip + j]
            args[skip + j] = Value(move.type, old.hint)
            pointers[old] = self._add(b, move.root, args[skip + j])
        _substitute(block, pointers)
        return Block(tuple(args), start.ops + block.ops)

    def _yield_distances(
        self, block: Block, moved: dict[int, _Moved], region: int, skip: int | None
    ) -> None:
        """Replaces the yielded pointers by distances from where they start; in a loop from
        ``skip`` on the block's arguments are the distances so far."""
        end = block.ops.pop()
        values = list(_yielded_of(end))
        b = Builder(block)
        b.loc = end.loc
        for j, move in moved.items():
            total = None if skip is None else block.args[skip + j]
            for step in move.steps[region]:
                part = step if isinstance(move.type, TileType) else self._scalar(b, step)
                total = part if total is None else b.add(total, part)
            values[j] = b.constant(0, move.type) if total is None else total
        b.emit(ops.Yield, values=tuple(values))

    def _results(
        self,
        b: Builder,
        old: tuple[Value, ...],
        new: tuple[Value, ...],
        moved: dict[int, _Moved],
    ) -> None:
        for j, move in moved.items():
            self.renamed[old[j]] = self._add(b, move.root, new[j])

    # --- branches ---------------------------------------------------------------------------

    def branch(self, b: Builder, op: ops.If) -> None:
        b.loc = op.loc
        moved: dict[int, _Moved] = {}
        for j, result in enumerate(op.results):
            if isinstance(element_of(result.type), PointerType):
                one, other = (self._chain(_yielded(x)[j]) for x in (op.then, op.other))
                if one[0] is other[0]:
                    type_ = self._distance(result.type, one[1] + other[1])
                    moved[j] = _Moved(one[0], type_, [one[1], other[1]])
        for region, block in enumerate((op.then, op.other)):
            if moved:
                self._yield_distances(block, moved, region, None)
        results = tuple(
            Value(moved[j].type, r.hint) if j in moved else r for j, r in enumerate(op.results)
        )
        b.block.ops.append(dataclasses.replace(op, results=results))
        self._results(b, op.results, results, moved)

    # --- offsets ----------------------------------------------------------------------------

    def _chain(self, pointer: Value) -> tuple[Value, list[Value]]:
        """The pointer that this one was moved from, and by what."""
        offsets: list[Value] = []
        while isinstance(op := self.defs.get(pointer), ops.AddPtr):
            offsets.append(op.offset)
            pointer = op.pointer
        return pointer, offsets

    def _distance(self, type_: Type, offsets: list[Value]) -> Type:
        if isinstance(type_, TileType) and not all(self._uniform(x) for x in offsets):
            return TileType(type_.shape, I64)
        return I64

    def _uniform(self, value: Value) -> bool:
        """Whether all elements are equal, because they come from one scalar."""
        op = self.defs.get(value)
        if not isinstance(value.type, TileType) or isinstance(op, (ops.Splat, ops.Constant)):
            return True
        return isinstance(op, (ops.Cast, ops.Broadcast)) and self._uniform(op.operand)

    def _scalar(self, b: Builder, value: Value) -> Value:
        """The one element of a uniform tile."""
        op = self.defs.get(value)
        if not isinstance(value.type, TileType):
            return value
        if isinstance(op, ops.Splat):
            return op.operand
        if isinstance(op, ops.Constant):
            assert not isinstance(op.value, tuple)
            return b.constant(op.value, scalar_of(value.type))
        assert isinstance(op, (ops.Cast, ops.Broadcast))
        return b.cast(self._scalar(b, op.operand), scalar_of(value.type))

    def _add(self, b: Builder, pointer: Value, distance: Value) -> Value:
        """``pointer``, a scalar or tile, moved by a distance; known to later rewriting."""
        if distance.type == I64 and isinstance(pointer.type, TileType):
            type_ = with_element(pointer.type, I64)
            splat = b.emit(ops.Splat, type_, operand=distance)
            self.defs[splat.result] = splat
            distance = splat.result
        moved = b.emit(ops.AddPtr, pointer.type, pointer=pointer, offset=distance)
        self.defs[moved.result] = moved
        return moved.result


def _yielded(block: Block) -> tuple[Value, ...]:
    return _yielded_of(block.ops[-1])


def _yielded_of(op: Op) -> tuple[Value, ...]:
    assert isinstance(op, ops.Yield)
    return op.values


def _substitute(block: Block, values: dict[Value, Value]) -> None:
    block.ops[:] = [ops.replace_operands(op, lambda v: values.get(v, v)) for op in block.ops]
    for op in block.ops:
        for region in ops.regions(op):
            _substitute(region, values)
