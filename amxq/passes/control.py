"""Vectorisation of loops and branches: what happens to the tiles that they carry.

A small carried tile becomes one loop-carried vector for each of its parts:

Before:  %r = for lower=%a upper=%b step=%c inits=(%t) { ^(%i: i32, %x: tile<2x16xf32>) … }
After:   %r0, %r1 = for lower=%a upper=%b step=%c inits=(%t0, %t1)
                       { ^(%i: i32, %x0: vec<16xf32>, %x1: vec<16xf32>) … }

A large one has a home in scratch memory: written before the loop, updated at the end of each
iteration, in place where every element depends on the same element only, read after the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amxq.ir import ops
from amxq.ir.hardware import POINTWISE
from amxq.ir.ops import Block, Op, Value
from amxq.ir.types import U4, PointerType, TileType, Type, element_of
from amxq.passes.aliases import writes
from amxq.passes.tiles import Place, Tile, positions, registers

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


@dataclass(eq=False)
class Loop:
    """A loop while its body is rewritten, for work that reaches over iterations.

    Attributes:
        op: the loop as it was.
        lower, upper, step: its scalars.
        before: the block that the loop will stand in.
        body: the new body.
        rest: operations that the body still has to hold, at its end if nowhere before.
        inits, nexts: further values that the loop carries.
    """

    op: ops.For
    lower: Value
    upper: Value
    step: Value
    before: Block
    body: Block
    rest: list[Op] = field(default_factory=list)
    inits: list[Value] = field(default_factory=list)
    nexts: list[Value] = field(default_factory=list)

    def carry(self, init: Value) -> Value:
        """A further carried value; the caller appends the next one to ``nexts``."""
        value = Value(init.type)
        self.inits.append(init)
        self.body.args += (value,)
        return value

    def invariant(self, *values: Value) -> bool:
        """Whether ``values`` of the old function are defined outside of the loop."""
        inside = set(self.op.body.args)
        for op in ops.walk(self.op.body):
            inside |= {*op.results, *(arg for region in ops.regions(op) for arg in region.args)}
        return inside.isdisjoint(values)

    @property
    def writes(self) -> bool:
        """Whether an iteration stores to memory of the user."""
        return writes(self.op)


def for_loop(v: Vectorizer, op: ops.For) -> None:
    lower, upper, step = (v.scalars[x] for x in (op.lower, op.upper, op.step))
    index, *args = op.body.args
    carried = _Carried(v, op.inits, tuple(args))
    v.scalars[index] = Value(lower.type, index.hint)
    body = Block((v.scalars[index], *carried.enter(tuple(args))))
    v.destinations |= _destinations(v, op, carried.homes)
    outer, v.loop = v.loop, Loop(op, lower, upper, step, v.b.block, body)
    carried.region(body, op.body, v.loop)
    inits = (*carried.inits, *v.loop.inits)
    v.loop = outer
    loop = v.b.emit(
        ops.For,
        *(x.type for x in inits),
        lower=lower,
        upper=upper,
        step=step,
        inits=inits,
        body=body,
    )
    _bind_results(v, op.results, carried.homes, list(loop.results)[: len(carried.inits)])


def while_loop(v: Vectorizer, op: ops.While) -> None:
    outer, v.loop = v.loop, None
    carried = _Carried(v, op.inits, op.body.args)
    test = Block(carried.enter(op.test.args))
    with v.b.inside(test):
        (condition,) = v.block(op.test)
        v.b.emit(ops.Yield, values=(v.scalars[condition],))
    body = Block(carried.enter(op.body.args))
    carried.region(body, op.body, None)
    v.loop = outer
    loop = v.b.emit(ops.While, *carried.types, inits=carried.inits, test=test, body=body)
    _bind_results(v, op.results, carried.homes, list(loop.results))


class _Carried:
    """What a loop carries: vectors and scalars, and homes in memory, by position."""

    def __init__(self, v: Vectorizer, inits: tuple[Value, ...], args: tuple[Value, ...]) -> None:
        self.v = v
        self.homes: dict[int, Place] = {}
        self.stored: dict[int, Tile] = {}
        parts: list[Value] = []
        for i, (init, arg) in enumerate(zip(inits, args, strict=True)):
            _check_carried(v, arg)
            if isinstance(init.type, TileType) and not v.tiles[init].small:
                self.homes[i] = v.scratch(init.type)
                self.stored[i] = v.materialize(v.tiles[init], self.homes[i])
            else:
                parts += _parts(v, init)
        self.inits = tuple(parts)
        self.types = tuple(p.type for p in parts)

    def enter(self, args: tuple[Value, ...]) -> tuple[Value, ...]:
        """Binds a region's arguments; returns those of the new block."""
        made = [Value(t) for t in self.types]
        left = list(made)
        for i, arg in enumerate(args):
            if i in self.homes:
                self.v.tiles[arg] = self.stored[i]
                continue
            parts = left[: _count(self.v, arg)]
            del left[: len(parts)]
            for part in parts:
                part.hint = arg.hint
            _bind(self.v, arg, parts)
        return tuple(made)

    def region(self, block: Block, source: Block, loop: Loop | None) -> None:
        """Rewrites a loop's body into ``block``, which yields the next values."""
        v = self.v
        with v.b.inside(block):
            values = v.block(source)
            _update_homes(v, source.args[len(source.args) - len(values) :], values, self.homes)
            last = [p for i, x in enumerate(values) if i not in self.homes for p in _parts(v, x)]
            if loop is not None:
                block.ops += loop.rest
                last += loop.nexts
            v.b.emit(ops.Yield, values=tuple(last))


def _destinations(v: Vectorizer, op: ops.For, homes: dict[int, Place]) -> dict[Value, Place]:
    """Dots whose result the loop carries, and whose sums start from what it carried before: they
    add up where it lies, if nothing else reads that."""
    found: dict[Value, Place] = {}
    last = op.body.ops[-1]
    assert isinstance(last, ops.Yield)
    for i, home in homes.items():
        arg, result = op.body.args[i + 1], last.values[i]
        dot = v.defs.get(result)
        if not isinstance(dot, ops.Dot) or dot.acc is None or v.uses.get(arg) != 1:
            continue
        reads = _reads(v, dot.acc)
        if reads.get(arg) and not any(v.uses[x] > 1 for x in _between(v, dot.acc, arg)):
            found[result] = home
    return found


def _between(v: Vectorizer, value: Value, arg: Value) -> list[Value]:
    """The values that ``value`` is computed from ``arg`` through, where ``arg`` has one use."""
    if value is arg:
        return []
    op = v.defs[value]
    inner = next(x for x in ops.operands(op) if arg in _reads(v, x))
    return [value, *_between(v, inner, arg)]


def branch(v: Vectorizer, op: ops.If) -> None:
    homes: dict[int, Place] = {}
    for i, result in enumerate(op.results):
        _check_carried(v, result)
        if isinstance(result.type, TileType) and not _template(v, result.type).small:
            homes[i] = v.scratch(result.type)
    blocks = []
    part_types: list[Type] = []
    for source in (op.then, op.other):
        block = Block()
        loop, v.loop = v.loop, None  # what a branch holds is not done in every iteration
        with v.b.inside(block):
            values = v.block(source)
            for i, place in homes.items():
                v.materialize(v.tiles[values[i]], place)
            parts = [p for i, x in enumerate(values) if i not in homes for p in _parts(v, x)]
            v.b.emit(ops.Yield, values=tuple(parts))
            part_types = [p.type for p in parts]
        v.loop = loop
        blocks.append(block)
    both = v.b.emit(
        ops.If,
        *part_types,
        condition=v.scalars[op.condition],
        then=blocks[0],
        other=blocks[1],
    )
    _bind_results(v, op.results, homes, list(both.results))


def _check_carried(v: Vectorizer, value: Value) -> None:
    if isinstance(value.type, TileType) and element_of(value.type) == U4:
        raise v.error(
            f"{value.hint} is a packed int4 tile, which loops and branches do not carry",
            "load it where it is used",
        )
    if isinstance(value.type, TileType) and isinstance(element_of(value.type), PointerType):
        raise v.error(
            f"{value.hint} is a tile of pointers, which loops and branches do not carry",
            "carry the offsets, and add the pointer where it is used",
        )


def _update_homes(
    v: Vectorizer, args: tuple[Value, ...], values: tuple[Value, ...], homes: dict[int, Place]
) -> None:
    """Writes the next values of carried large tiles, in place where that is safe: each element
    of the new tile depends on the same element of the old one only."""
    temporary: list[tuple[int, Tile]] = []
    for i in homes:
        others = {args[j] for j in homes if j != i}
        reads = _reads(v, values[i])
        safe = reads.get(args[i], True) and not any(o in reads for o in others)
        if v.tiles[values[i]].place == homes[i]:
            continue  # a dot has added up there
        if safe and not any(args[i] in _reads(v, values[j]) for j in homes if j != i):
            v.materialize(v.tiles[values[i]], homes[i])
        else:
            temporary.append((i, v.materialize(v.tiles[values[i]])))
    for i, tile in temporary:
        v.materialize(tile, homes[i])


def _reads(v: Vectorizer, value: Value) -> dict[Value, bool]:
    """Carried tiles that a lazily evaluated tile reads → whether at the same index only."""
    op = v.defs.get(value)
    if op is None:
        return {value: True}
    found: dict[Value, bool] = {}
    if isinstance(op, (*POINTWISE, ops.ExpandDims, ops.Broadcast)):
        same = isinstance(op, POINTWISE)
        for operand in ops.operands(op):
            for leaf, pointwise in _reads(v, operand).items():
                found[leaf] = found.get(leaf, True) and pointwise and same
    return found


def _template(v: Vectorizer, type_: TileType) -> Tile:
    return registers(type_, v.lanes_of(type_), [])


def _parts(v: Vectorizer, value: Value) -> list[Value]:
    """A carried value as scalars and vectors."""
    if not isinstance(value.type, TileType):
        return [v.scalars[value]]
    tile = v.tiles[value]
    return [tile.at(row, column) for row, column in positions(tile)]


def _count(v: Vectorizer, value: Value) -> int:
    """How many parts a carried value that is not at home in memory has."""
    if not isinstance(value.type, TileType):
        return 1
    tile = _template(v, value.type)
    return tile.rows * tile.columns


def _bind(v: Vectorizer, value: Value, parts: list[Value]) -> None:
    if isinstance(value.type, TileType):
        v.tiles[value] = registers(value.type, v.lanes_of(value.type), parts)
    else:
        v.scalars[value] = parts[0]


def _bind_results(
    v: Vectorizer, results: tuple[Value, ...], homes: dict[int, Place], parts: list[Value]
) -> None:
    """Binds each result to its home, or to as many of the parts as it is made of."""
    for i, result in enumerate(results):
        if i in homes:
            assert isinstance(result.type, TileType)
            v.tiles[result] = v.stored(result.type, homes[i])
            continue
        count = _count(v, result)
        _bind(v, result, parts[:count])
        del parts[:count]
