"""Tiles that a loop moves by the same amount everywhere are carried as one number.

Before:  %r = for … inits=(%p) { ^(%i: i32, %q: tile<64x32xptr<f32>>)
             %n = addptr %q, splat %step
             yield %n }
After:   %d = for … inits=(0) { ^(%i: i32, %e: i64)
             %q = addptr %p, splat %e
             %f = add %e, %step
             yield %f }
         %r = addptr %p, splat %d

``ptrs += BLOCK`` of Triton's matmul is such a loop, ``offsets += BLOCK`` another; what the tile
was before the loop stays visible to the analysis of addresses. Tiles of pointers that are moved
by different amounts are carried as a tile of offsets.
"""

from __future__ import annotations

from typing import Any

from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import I64, DType, PointerType, TileType, Type, element_of, with_element

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
        """What is added each time: a scalar where all steps are the same everywhere, a tile for
        other pointers, else None."""
        uniform = [_uniform(self.defs, self.b, step) for _, step in steps]
        scalars = [x for x in uniform if x is not None]
        if len(scalars) == len(steps):
            values = scalars
        elif _pointers(arg):
            values = [step for _, step in steps]
        else:
            return None
        element = element_of(arg.type)
        zero = I64 if isinstance(element, PointerType) else element
        total = self._zero(values[0].type if values else zero)
        for (kind, _), value in zip(steps, values):
            total = self.b.binary(kind, total, value)
        return total

    def _zero(self, type_: Type) -> Value:
        with self.b.inside(self.outer):
            return self.b.constant(0, type_)

    def _moved(self, block: Block, start: Value, by: Value, result: Value) -> None:
        """Defines ``result`` as the tile ``start`` moved by ``by``."""
        b, type_ = self.b, start.type
        with b.inside(block):
            if not isinstance(by.type, TileType):
                element = by.type
                assert isinstance(element, DType)
                by = b.value(ops.Splat, with_element(type_, element), operand=by)
            fields: dict[str, Any] = {"pointer": start, "offset": by}
            cls: type[Op] = ops.AddPtr
            if not _pointers(start):
                cls, fields = ops.Binary, {"kind": "add", "lhs": start, "rhs": by}
            made = cls(results=(result,), loc=b.loc, **fields)
            block.ops.append(made)
            self.defs[result] = made


def _steps(defs: _Defs, arg: Value, value: Value) -> list[tuple[str, Value]] | None:
    """How a carried tile is moved in one iteration, as (add or sub, tile); None if otherwise."""
    found: list[tuple[str, Value]] = []
    if not isinstance(arg.type, TileType) or not (_pointers(arg) or _integers(arg)):
        return None
    while value is not arg:
        op = defs.get(value)
        if isinstance(op, ops.AddPtr):
            found.append(("add", op.offset))
            value = op.pointer
        elif isinstance(op, ops.Binary) and op.kind in ("add", "sub"):
            swapped = op.kind == "add" and op.rhs is arg
            found.append((op.kind, op.lhs if swapped else op.rhs))
            value = op.rhs if swapped else op.lhs
        else:
            return None
    return found


def _pointers(value: Value) -> bool:
    return isinstance(element_of(value.type), PointerType)


def _integers(value: Value) -> bool:
    element = element_of(value.type)
    return isinstance(element, DType) and not element.is_float


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
