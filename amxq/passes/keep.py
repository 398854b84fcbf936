"""Which tiles are worth keeping in scratch memory.

    %x = load …            consumers: the reduction and %e       kept: memory is read once
    %m = reduce max %x
    %d = sub %x, %m        one consumer: %e
    %e = exp %d            consumers: the reduction, the store   kept: computed once
    %s = reduce add %e
    store %p, div %e, %s

A consumer of a tile is an operation that loops over its elements, or a kept tile that is
computed from it. Integers that are cheap to compute (offsets, masks) are computed again.
"""

from __future__ import annotations

import enum

from amxq.ir import ops
from amxq.ir.hardware import POINTWISE
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import I1, DType, TileType
from amxq.passes.affine import cheap


class Keep(enum.Enum):
    """When a kept tile is written: with its first consumer, or where it is defined because its
    consumers are in a loop."""

    FIRST = 1
    NOW = 2


def kept_values(function: Function) -> dict[Value, Keep]:
    """The kept tiles among those that are computed or loaded element by element."""
    where: dict[Op, Block] = {}
    users: dict[Value, list[Op]] = {}
    _collect(function.body, where, users)
    costly: dict[Value, bool] = {}
    for op in where:
        for result in op.results:
            costly[result] = isinstance(op, (ops.Load, ops.LoadBlock)) or (
                not cheap(op) and any(costly.get(x, True) for x in ops.operands(op))
            )
    kept: dict[Value, Keep] = {}
    consumers: dict[Value, set[Op]] = {}
    for op in reversed(where):
        if not isinstance(op, (*POINTWISE, ops.Load, ops.LoadBlock, ops.ExpandDims, ops.Broadcast)):
            continue
        found: set[Op] = set()
        for user in users.get(op.result, ()):
            inner = consumers.get(user.results[0]) if user.results else None
            found |= {user} if inner is None or user.result in kept else inner
        consumers[op.result] = found
        if not _keepable(op) or not costly[op.result]:
            continue
        if any(isinstance(user, ops.For) or where[user] is not where[op] for user in found):
            kept[op.result] = Keep.NOW
        elif len(found) > 1:
            kept[op.result] = Keep.FIRST
    return kept


def _keepable(op: Op) -> bool:
    if not isinstance(op.result.type, TileType):
        return False
    numbers = isinstance(op.result.type.element, DType) and op.result.type.element != I1
    return numbers and not isinstance(op, (ops.ExpandDims, ops.Broadcast))


def _collect(block: Block, where: dict[Op, Block], users: dict[Value, list[Op]]) -> None:
    for op in block.ops:
        where[op] = block
        for operand in ops.operands(op):
            users.setdefault(operand, []).append(op)
        for region in ops.regions(op):
            _collect(region, where, users)
