"""What is known about integers: which are cheap to compute again, how a tile of offsets grows
along a row."""

from __future__ import annotations

import math
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


def lane_stride(defs: Definitions, value: Value, lanes: int) -> int | None:
    """By how much an integer tile grows from one element of a row to the next, if constant within
    every vector of ``lanes`` elements."""
    op = defs.get(value)
    if not isinstance(value.type, TileType) or value.type.shape[-1] == 1:
        return 0
    if isinstance(op, ops.Arange):
        return 1
    if isinstance(op, (ops.Splat, ops.Constant)):
        return 0
    if isinstance(op, ops.Cast):
        stride, element = lane_stride(defs, op.operand, lanes), scalar_of(op.operand.type)
        wraps = element.is_float or element.bits > scalar_of(op.result.type).bits
        return None if wraps and stride != 0 else stride
    if isinstance(op, ops.ExpandDims):
        return lane_stride(defs, op.operand, lanes)
    if isinstance(op, ops.Broadcast):
        return 0 if shape_of(op.operand.type)[-1] == 1 else lane_stride(defs, op.operand, lanes)
    if isinstance(op, ops.Binary):
        a, b = lane_stride(defs, op.lhs, lanes), lane_stride(defs, op.rhs, lanes)
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
        if op.kind == "mod" and a == 1 and b == 0:  # offsets % n of Triton's matmul
            aligned = multiple(defs, op.lhs) % lanes == multiple(defs, op.rhs) % lanes == 0
            return 1 if aligned else None
        return 0 if a == b == 0 else None
    return None


def multiple(defs: Definitions, value: Value) -> int:
    """A number that the first element of every row of an integer tile, or a scalar, is a multiple
    of: ``lanes`` neighbours from there on do not wrap in a remainder of such a number."""
    op = defs.get(value)
    if isinstance(op, ops.MultipleOf):
        return op.by
    if isinstance(op, ops.Constant) and isinstance(op.value, int):
        return abs(op.value) or _ANY
    if isinstance(op, ops.Arange):
        return op.start or _ANY
    if isinstance(op, ops.Binary):
        lhs, rhs = multiple(defs, op.lhs), multiple(defs, op.rhs)
        return lhs * rhs if op.kind == "mul" else math.gcd(lhs, rhs) if op.kind in _SUMS else 1
    if isinstance(op, (ops.Splat, ops.Cast, ops.Broadcast)):
        return multiple(defs, op.operand)
    if isinstance(op, ops.ExpandDims) and op.axis < len(shape_of(op.result.type)) - 1:
        return multiple(defs, op.operand)
    return 1


_SUMS = ("add", "sub", "mod")
_ANY = 1 << 62
"""0 is a multiple of everything."""


def _number(defs: Definitions, value: Value) -> int | None:
    op = defs.get(value)
    while isinstance(op, (ops.Cast, ops.Splat, ops.Broadcast, ops.ExpandDims)):
        op = defs.get(op.operand)
    return op.value if isinstance(op, ops.Constant) and isinstance(op.value, int) else None
