"""Appends operations to a block, with the source location and a little constant folding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from amxq.ir import ops
from amxq.ir.ops import Block, Op, Value
from amxq.ir.types import (
    I32,
    I64,
    DType,
    PointerType,
    TileType,
    Type,
    scalar_of,
    shape_of,
    with_element,
)

_Op = TypeVar("_Op", bound=Op)

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": min,
    "max": max,
}


class Builder:
    """The insertion point: a block, a location, and the constants known so far."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.loc = ops.UNKNOWN
        self._known: dict[Value, int | float] = {}

    @contextmanager
    def inside(self, block: Block) -> Iterator[Block]:
        """Append to ``block`` instead, within a ``with`` statement."""
        before, self.block = self.block, block
        try:
            yield block
        finally:
            self.block = before

    def emit(self, cls: type[_Op], *types: Type, **fields: Any) -> _Op:
        op = ops.build(cls, types, self.loc, **fields)
        self.block.ops.append(op)
        return op

    def value(self, cls: type[Op], type_: Type, **fields: Any) -> Value:
        return self.emit(cls, type_, **fields).result

    def loop(
        self,
        end: int,
        step: int,
        body: Callable[[Value, list[Value]], list[Value]],
        carried: Sequence[Value] = (),
    ) -> list[Value]:
        """A loop over an i64 from 0 to ``end``: ``body`` emits an iteration for the index and the
        carried values and returns the next ones. Returns the last ones."""
        block = Block((Value(I64), *(Value(x.type) for x in carried)))
        with self.inside(block):
            values = body(block.args[0], list(block.args[1:]))
            self.emit(ops.Yield, values=tuple(values))
        made = self.emit(
            ops.For,
            *(x.type for x in carried),
            lower=self.i64(0),
            upper=self.i64(end),
            step=self.i64(step),
            inits=tuple(carried),
            body=block,
        )
        return list(made.results)

    def combine(
        self,
        kind: str,
        tiles: Sequence[Value],
        axis: int,
        reverse: bool,
        function: Callable[..., Sequence[Value]],
    ) -> tuple[Value, ...]:
        """A reduction or a scan of ``tiles`` by ``function``, see :class:`amxq.ir.ops.Combine`."""
        elements, shape = [scalar_of(x.type) for x in tiles], shape_of(tiles[0].type)
        body = Block(tuple(Value(t) for t in elements * 2))
        with self.inside(body):
            self.emit(ops.Yield, values=tuple(function(*body.args)))
        rest = shape if kind == "scan" else (*shape[:axis], *shape[axis + 1 :])
        types = [TileType(rest, t) if rest else t for t in elements]
        fields = {"kind": kind, "axis": axis, "reverse": reverse, "body": body}
        return self.emit(ops.Combine, *types, operands=tuple(tiles), **fields).results

    # --- constants ------------------------------------------------------------------------

    def constant(self, value: int | float, type_: Type) -> Value:
        result = self.value(ops.Constant, type_, value=value)
        self._known[result] = value
        return result

    def i32(self, value: int) -> Value:
        return self.constant(value, I32)

    def i64(self, value: int) -> Value:
        return self.constant(value, I64)

    def known(self, value: Value) -> int | float | None:
        """The number a value is known to be (in every element), else None."""
        return self._known.get(value)

    # --- arithmetic -----------------------------------------------------------------------

    def binary(self, kind: str, lhs: Value, rhs: Value) -> Value:
        a, b = self.known(lhs), self.known(rhs)
        if isinstance(lhs.type, DType) and not lhs.type.is_float:
            if a is not None and b is not None and kind in _FOLD:
                folded = _FOLD[kind](a, b)
                if lhs.type.is_signed and lhs.type.holds(folded):
                    return self.constant(folded, lhs.type)
            if (kind in ("add", "sub") and b == 0) or (kind in ("mul", "div") and b == 1):
                return lhs
            if (kind == "add" and a == 0) or (kind == "mul" and a == 1):
                return rhs
            if kind == "mul" and 0 in (a, b):
                return self.constant(0, lhs.type)
        return self.value(ops.Binary, lhs.type, kind=kind, lhs=lhs, rhs=rhs)

    def add(self, lhs: Value, rhs: Value) -> Value:
        return self.binary("add", lhs, rhs)

    def sub(self, lhs: Value, rhs: Value) -> Value:
        return self.binary("sub", lhs, rhs)

    def mul(self, lhs: Value, rhs: Value) -> Value:
        return self.binary("mul", lhs, rhs)

    def cast(self, value: Value, element: DType) -> Value:
        """Number conversion to ``element``; the value itself where it has that type already."""
        if scalar_of(value.type) == element:
            return value
        known = self.known(value)
        if known is not None and isinstance(value.type, DType):
            if element.is_float or element.holds(known):
                return self.constant(float(known) if element.is_float else known, element)
        return self.value(ops.Cast, with_element(value.type, element), operand=value)

    def addptr(self, pointer: Value, offset: Value) -> Value:
        """``pointer`` moved by ``offset`` elements (scalar)."""
        assert isinstance(pointer.type, PointerType)
        if self.known(offset) == 0:
            return pointer
        return self.value(ops.AddPtr, pointer.type, pointer=pointer, offset=offset)
