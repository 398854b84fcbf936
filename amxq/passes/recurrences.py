"""Tiles of integers that a loop moves by the same amount everywhere are carried as one number.

Before:  %r = for … inits=(%t) { ^(%i: i32, %x: tile<64xi32>)
             %n = add %x, splat %step
             yield %n }
After:   %d = for … inits=(0) { ^(%i: i32, %e: i32)
             %x = add %t, splat %e
             %f = add %e, %step
             yield %f }
         %r = add %t, splat %d

``offsets += BLOCK`` is such a loop: what the tile was before it stays visible to the analysis of
addresses. Pointers are carried so by :mod:`amxq.passes.carried_pointers`.
"""

from __future__ import annotations

from typing import Any

from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import DType, PointerType, TileType, Type, element_of, scalar_of

_Defs = dict[Value, Op]


def carry_offsets(function: Function) -> None:
    _block(function.body, {r: op for op in ops.walk(function.body) for r in op.results})


def _block(block: Block, defs: _Defs) -> None:
    rewritten = Block()
    b = Builder(rewritten)
    for op in block.ops:
        for region in ops.regions(op):
            _block(region, defs)
        b.loc = op.loc
        if isinstance(op, ops.For):
            _Loop(op, b, defs).rewrite()
        else:
            rewritten.ops.append(op)
    block.ops[:] = rewritten.ops


class _Loop:
    """One loop; its replacement is appended to ``b``'s block."""

    def __init__(self, op: ops.For, b: Builder, defs: _Defs) -> None:
        self.op, self.b, self.outer, self.defs = op, b, b.block, defs

    def rewrite(self) -> None:
        op, b = self.op, self.b
        last = op.body.ops[-1]
        assert isinstance(last, ops.Yield)
        inits, args, results = list(op.inits), list(op.body.args), list(op.results)
        yields, head, after = list(last.values), Block(), Block()
        with b.inside(Block(ops=op.body.ops[:-1])) as body:
            for i, init in enumerate(op.inits):
                arg = args[i + 1]
                steps = _steps(self.defs, arg, yields[i])
                total = None if steps is None else self._total(steps, arg)
                if total is None:
                    continue
                inits[i] = self._zero(total.type)
                args[i + 1], results[i] = Value(total.type, arg.hint), Value(total.type)
                yields[i] = b.add(args[i + 1], total)
                self._moved(head, init, args[i + 1], arg)
                self._moved(after, init, results[i], op.results[i])
            b.emit(ops.Yield, values=tuple(yields))
        body.ops[:0] = head.ops
        body.args = tuple(args)
        fields = ops.fields_of(op) | {"inits": tuple(inits), "body": body}
        new = ops.For(results=tuple(results), loc=op.loc, **fields)
        self.defs.update(dict.fromkeys(results, new))
        b.block.ops += [new, *after.ops]

    def _total(self, steps: list[tuple[str, Value]], arg: Value) -> Value | None:
        """What is added each time, if it is the same everywhere."""
        total = self._zero(scalar_of(arg.type))
        for kind, step in steps:
            scalar = _uniform(self.defs, self.b, step)
            if scalar is None:
                return None
            total = self.b.binary(kind, total, scalar)
        return total

    def _zero(self, type_: Type) -> Value:
        with self.b.inside(self.outer):
            return self.b.constant(0, type_)

    def _moved(self, block: Block, start: Value, by: Value, result: Value) -> None:
        """Defines ``result`` as the tile ``start`` moved by ``by``."""
        with self.b.inside(block):
            tile = self.b.value(ops.Splat, start.type, operand=by)
        fields: dict[str, Any] = {"kind": "add", "lhs": start, "rhs": tile}
        made = ops.Binary(results=(result,), loc=self.b.loc, **fields)
        block.ops.append(made)
        self.defs[result] = made


def _steps(defs: _Defs, arg: Value, value: Value) -> list[tuple[str, Value]] | None:
    """How a carried tile is moved in one iteration, as (add or sub, tile); None if otherwise."""
    found: list[tuple[str, Value]] = []
    if not isinstance(arg.type, TileType) or isinstance(arg.type.element, PointerType):
        return None
    if arg.type.element.is_float:
        return None
    while value is not arg:
        op = defs.get(value)
        if not isinstance(op, ops.Binary) or op.kind not in ("add", "sub"):
            return None
        swapped = op.kind == "add" and op.rhs is arg
        found.append((op.kind, op.lhs if swapped else op.rhs))
        value = op.rhs if swapped else op.lhs
    return found


def _uniform(defs: _Defs, b: Builder, value: Value) -> Value | None:
    """The scalar that every element of a tile equals, if there is one."""
    op = defs.get(value)
    element = element_of(value.type)
    if not isinstance(value.type, TileType):
        return value
    if not isinstance(element, DType):
        return None
    if isinstance(op, ops.Constant) and not isinstance(op.value, tuple):
        return b.constant(op.value, element)
    if isinstance(op, (ops.Splat, ops.Broadcast, ops.ExpandDims)):
        return _uniform(defs, b, op.operand)
    if isinstance(op, ops.Cast):
        operand = _uniform(defs, b, op.operand)
        return None if operand is None else b.cast(operand, element)
    if isinstance(op, ops.Binary):
        lhs, rhs = _uniform(defs, b, op.lhs), _uniform(defs, b, op.rhs)
        return None if lhs is None or rhs is None else b.binary(op.kind, lhs, rhs)
    return None
