"""What is known about integers: which are cheap to compute again, how a tile of offsets grows
along a row."""

from __future__ import annotations

from collections.abc import Mapping

from amxq.ir import ops
from amxq.ir.ops import Op, Value
from amxq.ir.types import TileType, scalar_of, shape_of

_CHEAP = ("add", "sub", "mul", "and", "or", "xor", "min", "max", "shl", "shr")

Definitions = Mapping[Value, Op]


def cheap(op: Op) -> bool:
    """Whether an element-wise operation is plain integer arithmetic: as fast to compute again,
    element by element, as to read from memory."""
    if isinstance(op, (ops.Constant, ops.Splat, ops.Arange, ops.ExpandDims, ops.Broadcast)):
        return True
    if isinstance(op, ops.Binary):
        return op.kind in _CHEAP and not scalar_of(op.result.type).is_float
    if isinstance(op, (ops.Compare, ops.Cast)):
        return not any(scalar_of(x.type).is_float for x in (*ops.operands(op), *op.results))
    return False


def lane_stride(defs: Definitions, value: Value) -> int | None:
    """By how much an integer tile grows from one element of a row to the next, if constant."""
    op = defs.get(value)
    if not isinstance(value.type, TileType) or value.type.shape[-1] == 1:
        return 0
    if isinstance(op, ops.Arange):
        return 1
    if isinstance(op, (ops.Splat, ops.Constant)):
        return 0
    if isinstance(op, ops.Cast):
        stride, element = lane_stride(defs, op.operand), scalar_of(op.operand.type)
        wraps = element.is_float or element.bits > scalar_of(op.result.type).bits
        return None if wraps and stride != 0 else stride
    if isinstance(op, ops.ExpandDims):
        return lane_stride(defs, op.operand)
    if isinstance(op, ops.Broadcast):
        return 0 if shape_of(op.operand.type)[-1] == 1 else lane_stride(defs, op.operand)
    if isinstance(op, ops.Binary):
        a, b = lane_stride(defs, op.lhs), lane_stride(defs, op.rhs)
        if a is None or b is None:
            return None
        if op.kind in ("add", "sub"):
            return a + b if op.kind == "add" else a - b
        if op.kind == "mul":
            left, right = _number(defs, op.lhs), _number(defs, op.rhs)
            if right is not None:
                return a * right
            if left is not None:
                return b * left
        return 0 if a == b == 0 else None
    return None


def _number(defs: Definitions, value: Value) -> int | None:
    op = defs.get(value)
    while isinstance(op, (ops.Cast, ops.Splat, ops.Broadcast, ops.ExpandDims)):
        op = defs.get(op.operand)
    return op.value if isinstance(op, ops.Constant) and isinstance(op.value, int) else None
