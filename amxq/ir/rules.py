"""What each operation of tile-IR must satisfy: one function an operation that returns what is
wrong with it, or None. :data:`RULES` is the table; an operation that is neither there nor in
:data:`amxq.ir.hardware_rules.HARDWARE_RULES` is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from amxq.ir import ops
from amxq.ir.hardware import POINTWISE
from amxq.ir.ops import Block, Op
from amxq.ir.types import (
    I1,
    I8,
    I32,
    I64,
    U4,
    U8,
    DType,
    PointerType,
    TileType,
    Type,
    VectorType,
    dot_element,
    element_of,
    shape_of,
    with_element,
)

Rule = Callable[[Any], "str | None"]


def number(type_: Type) -> DType | None:
    """The element of a scalar, tile or vector of numbers, None for pointers and int4 tiles."""
    element = element_of(type_)
    return element if isinstance(element, DType) and element != U4 else None


def like(type_: Type, other: Type) -> bool:
    """Whether two types differ in their elements at most."""
    return with_element(type_, I1) == with_element(other, I1)


def arrow(op: Op, *operands: ops.Value) -> str:
    return f"{', '.join(str(v.type) for v in operands)} -> {op.result.type}"


# --- values -----------------------------------------------------------------------------


def _constant(op: ops.Constant) -> str | None:
    type_, element = op.result.type, number(op.result.type)
    if element is None:
        return f"a constant of type {type_}"
    values = op.value if isinstance(op.value, tuple) else (op.value,)
    if isinstance(op.value, tuple):
        if not isinstance(type_, VectorType) or len(values) != type_.lanes:
            return "lanes do not match the vector"
    for value in values:
        if not (isinstance(value, float) if element.is_float else element.holds(value)):
            return f"{value!r} does not fit {element}"
    return None


def _arange(op: ops.Arange) -> str | None:
    fits = len(shape_of(op.result.type)) == 1 and element_of(op.result.type) == I32
    return None if fits else f"arange is {op.result.type}"


def _grid(op: ops.ProgramId | ops.NumPrograms) -> str | None:
    if op.axis not in (0, 1, 2):
        return f"axis {op.axis} of the grid"
    return None if op.result.type == I32 else f"it is an i32, not {op.result.type}"


def _multiple_of(op: ops.MultipleOf) -> str | None:
    fits = isinstance(op.operand.type, DType) and op.result.type == op.operand.type
    return None if fits and op.by > 0 else f"{arrow(op, op.operand)} by {op.by}"


def _binary(op: ops.Binary) -> str | None:
    if op.kind not in ops.BINARY:
        return f"unknown kind {op.kind}"
    if not op.lhs.type == op.rhs.type == op.result.type:
        return f"types differ: {arrow(op, op.lhs, op.rhs)}"
    element = number(op.lhs.type)
    if element is None:
        return f"needs numbers, got {op.lhs.type}"
    if op.kind in ("and", "or", "xor", "shl", "shr") and element.is_float:
        return f"{op.kind} needs integers, got {op.lhs.type}"
    return None


def _compare(op: ops.Compare) -> str | None:
    if op.kind not in ops.COMPARE or op.lhs.type != op.rhs.type or not number(op.lhs.type):
        return f"{op.kind} of {op.lhs.type} and {op.rhs.type}"
    return None if op.result.type == with_element(op.lhs.type, I1) else "result must be i1"


def _unary(op: ops.Unary) -> str | None:
    element = number(op.operand.type)
    if op.kind not in ops.UNARY:
        return f"unknown kind {op.kind}"
    if element is None or op.operand.type != op.result.type:
        return arrow(op, op.operand)
    if op.kind not in ("neg", "abs") and not element.is_float:
        return f"{op.kind} needs floats, got {op.operand.type}"
    return None


def _cast(op: ops.Cast) -> str | None:
    numbers = number(op.operand.type) and number(op.result.type)
    return None if numbers and like(op.operand.type, op.result.type) else arrow(op, op.operand)


def _select(op: ops.Select) -> str | None:
    if not op.then.type == op.other.type == op.result.type:
        return f"branches differ: {op.then.type}, {op.other.type}"
    if op.condition.type not in (I1, with_element(op.then.type, I1)):
        return f"condition is {op.condition.type}"
    return None


# --- shapes -----------------------------------------------------------------------------


def _splat(op: ops.Splat) -> str | None:
    fits = op.operand.type == element_of(op.result.type) and op.result.type != op.operand.type
    return None if fits else arrow(op, op.operand)


def _permute(op: ops.Permute) -> str | None:
    shape = shape_of(op.operand.type)
    element = number(op.operand.type)
    if sorted(op.order) == list(range(len(shape))) and shape and element:
        if op.result.type == TileType(tuple(shape[a] for a in op.order), element):
            return None
    return f"{arrow(op, op.operand)} by {op.order}"


def _reshape(op: ops.Reshape) -> str | None:
    shape, new = shape_of(op.operand.type), shape_of(op.result.type)
    same = number(op.operand.type) and element_of(op.operand.type) == element_of(op.result.type)
    fits = same and shape and new and math.prod(shape) == math.prod(new)
    return None if fits else arrow(op, op.operand)


def _expand_dims(op: ops.ExpandDims) -> str | None:
    shape, new = shape_of(op.operand.type), shape_of(op.result.type)
    same = element_of(op.operand.type) == element_of(op.result.type)
    if same and shape and new == (*shape[: op.axis], 1, *shape[op.axis :]):
        return None
    return f"{arrow(op, op.operand)} at axis {op.axis}"


def _broadcast(op: ops.Broadcast) -> str | None:
    shape, new = shape_of(op.operand.type), shape_of(op.result.type)
    same = element_of(op.operand.type) == element_of(op.result.type)
    fits = len(shape) == len(new) and all(i in (1, j) for i, j in zip(shape, new, strict=True))
    return None if same and shape and fits else arrow(op, op.operand)


def _reduce(op: ops.Reduce) -> str | None:
    if op.kind not in ("add", "min", "max"):
        return f"unknown kind {op.kind}"
    shape, element = shape_of(op.operand.type), number(op.operand.type)
    if not shape or element is None:
        return f"needs a tile of numbers, got {op.operand.type}"
    if not 0 <= op.axis < len(shape):
        return f"axis {op.axis} of {op.operand.type}"
    rest = (*shape[: op.axis], *shape[op.axis + 1 :])
    result = TileType(rest, element) if rest else element
    return None if op.result.type == result else arrow(op, op.operand)


def _combine(op: ops.Combine) -> str | None:
    if op.kind not in ("reduce", "scan"):
        return f"unknown kind {op.kind}"
    types = [x.type for x in op.operands]
    elements = [number(t) for t in types]
    shape = shape_of(types[0])
    same = all(elements) and all(shape_of(t) == shape for t in types)
    if not same or not 0 <= op.axis < len(shape):
        return f"axis {op.axis} of {', '.join(map(str, types))}"
    rest = shape if op.kind == "scan" else (*shape[: op.axis], *shape[op.axis + 1 :])
    if [r.type for r in op.results] != [TileType(rest, e) if rest else e for e in elements if e]:
        return f"{', '.join(map(str, types))} gives {', '.join(str(r.type) for r in op.results)}"
    if [a.type for a in op.body.args] != elements * 2:
        return "the arguments of the body are not two of each element"
    if not all(isinstance(x, (ops.Constant, *POINTWISE)) for x in op.body.ops[:-1]):
        return "the body does more than computing"
    return yields(op.body, [e for e in elements if e])


# --- multiplication ---------------------------------------------------------------------


def _dot(op: ops.Dot) -> str | None:
    lhs, rhs, out = op.lhs.type, op.rhs.type, op.result.type
    tiles = isinstance(lhs, TileType) and isinstance(rhs, TileType) and isinstance(out, TileType)
    if not tiles or len(shape_of(lhs)) not in (2, 3) or len(shape_of(lhs)) != len(shape_of(rhs)):
        return f"needs two tiles of rank 2 or 3, got {lhs} and {rhs}"
    (*batch, m, k), (*batch2, k2, n) = shape_of(lhs), shape_of(rhs)
    if op.transposed:
        k2, n = n, k2
    if op.packed:
        k2, n = n // 16, 16 * k2
    if k != k2 or batch != batch2 or out != TileType((*batch, m, n), dot_element(lhs)):
        return f"{lhs} times {rhs} gives {out}"
    if batch and element_of(rhs) == U4:
        return f"{lhs} times {rhs} is not defined"
    if element_of(lhs) == I8 and element_of(rhs) != U4:
        return f"{lhs} times {rhs} is not defined"
    if op.lowering not in ("", "amx", "vdpbf16ps", "fma", "vpdpbusd", "vpmaddubsw"):
        return f"unknown lowering {op.lowering}"
    return None if op.acc is None or op.acc.type == out else f"acc is {op.acc.type}"


def _int4_order(op: ops.Int4Order) -> str | None:
    shape = shape_of(op.operand.type)
    fits = op.operand.type == op.result.type and number(op.result.type) and shape
    return None if fits and shape[-1] % 8 == 0 else arrow(op, op.operand)


def _load_int4(op: ops.LoadInt4) -> str | None:
    shape = shape_of(op.result.type)
    if element_of(op.result.type) != U4 or len(shape) != 2 or shape[0] % 8 or shape[1] % 32:
        return f"needs tile<8·i x 32·j x u4>, got {op.result.type}"
    if op.base.type != PointerType(U8):
        return f"base is {op.base.type}"
    return None if op.k.type == op.n.type == op.k_blocks.type == I64 else "k, n, k_blocks are i64"


# --- memory -----------------------------------------------------------------------------


def _addptr(op: ops.AddPtr) -> str | None:
    pointer, offset = op.pointer.type, op.offset.type
    fits = isinstance(element_of(pointer), PointerType) and like(pointer, offset)
    if fits and element_of(offset) == I64 and op.result.type == pointer:
        return None
    return f"needs a pointer and i64: {arrow(op, op.pointer, op.offset)}"


def _access(op: ops.Load | ops.Store) -> str | None:
    value = op.result if isinstance(op, ops.Load) else op.value
    pointee = element_of(op.pointer.type)
    if not isinstance(pointee, PointerType) or pointee.element != element_of(value.type):
        return f"{op.pointer.type} does not address {value.type}"
    if shape_of(op.pointer.type) != shape_of(value.type):
        return f"shapes of {op.pointer.type} and {value.type} differ"
    if op.mask is not None and op.mask.type != with_element(value.type, I1):
        return f"mask is {op.mask.type}"
    if isinstance(op, ops.Load) and op.other is not None and op.other.type != value.type:
        return f"other is {op.other.type}"
    return None


def _atomic(op: ops.Atomic | ops.CompareExchange) -> str | None:
    if isinstance(op, ops.Atomic) and op.kind not in ops.ATOMIC:
        return f"unknown kind {op.kind}"
    pointee, element = element_of(op.pointer.type), number(op.value.type)
    if not isinstance(pointee, PointerType) or element is None or pointee.element != element:
        return f"{op.pointer.type} does not address {op.value.type}"
    if not like(op.pointer.type, op.value.type) or op.result.type != op.value.type:
        return arrow(op, op.pointer, op.value)
    if element.bits < 32:
        return f"atomic operations take 32 and 64 bits, got {element}"
    if isinstance(op, ops.CompareExchange):
        return None if op.expected.type == op.value.type else f"expected is {op.expected.type}"
    if element.is_float and op.kind in ("and", "or", "xor"):
        return f"{op.kind} needs integers, got {element}"
    if op.mask is not None and op.mask.type != with_element(op.value.type, I1):
        return f"mask is {op.mask.type}"
    return None


def _print(op: ops.Print) -> str | None:
    types = [v.type for v in op.values]
    if any(number(t) is None or not like(t, types[0]) for t in types):
        return f"prints {', '.join(map(str, types))}"
    return None if all(i.type == I64 for i in op.indices) else "indices are i64"


def _block_access(op: ops.LoadBlock | ops.StoreBlock) -> str | None:
    tile = op.result.type if isinstance(op, ops.LoadBlock) else op.value.type
    rank, element = len(shape_of(tile)), number(tile)
    if not rank or not rank == len(op.offsets) == len(op.strides) == len(op.bounds):
        return f"{tile} with {len(op.offsets)} offsets, {len(op.bounds)} bounds"
    if element is None or op.base.type != PointerType(element):
        return f"{op.base.type} does not address {tile}"
    if any(v.type != I64 for v in (*op.offsets, *op.strides, *op.bounds)):
        return "offsets, strides and bounds are i64"
    return None if all(0 <= d < rank for d in op.checked) else f"checked={op.checked}"


# --- control ----------------------------------------------------------------------------


def _for(op: ops.For) -> str | None:
    carried = [v.type for v in op.inits]
    if not (op.lower.type == op.upper.type == op.step.type == op.body.args[0].type):
        return "bounds, step and index differ in type"
    if not isinstance(op.lower.type, DType) or op.lower.type.kind != "int":
        return f"the index is {op.lower.type}"
    if [a.type for a in op.body.args[1:]] != carried or [r.type for r in op.results] != carried:
        return "carried types differ"
    return yields(op.body, carried)


def _while(op: ops.While) -> str | None:
    carried = [v.type for v in op.inits]
    arguments = ([a.type for a in op.test.args], [a.type for a in op.body.args])
    if any(types != carried for types in (*arguments, [r.type for r in op.results])):
        return "carried types differ"
    return yields(op.test, [I1]) or yields(op.body, carried)


def _if(op: ops.If) -> str | None:
    types = [r.type for r in op.results]
    if op.condition.type != I1:
        return f"condition is {op.condition.type}"
    return yields(op.then, types) or yields(op.other, types)


def yields(block: Block, types: list[Type]) -> str | None:
    """What is wrong with a block that must yield values of these types."""
    last = block.ops[-1] if block.ops else None
    if not isinstance(last, ops.Yield):
        return "region does not end with yield"
    return None if [v.type for v in last.values] == types else "yield does not match the results"


RULES: dict[type[Op], Rule] = {
    ops.Constant: _constant,
    ops.Arange: _arange,
    ops.ProgramId: _grid,
    ops.NumPrograms: _grid,
    ops.MultipleOf: _multiple_of,
    ops.Binary: _binary,
    ops.Compare: _compare,
    ops.Unary: _unary,
    ops.Cast: _cast,
    ops.Select: _select,
    ops.Splat: _splat,
    ops.ExpandDims: _expand_dims,
    ops.Broadcast: _broadcast,
    ops.Permute: _permute,
    ops.Reshape: _reshape,
    ops.Reduce: _reduce,
    ops.Combine: _combine,
    ops.Dot: _dot,
    ops.Int4Order: _int4_order,
    ops.LoadInt4: _load_int4,
    ops.AddPtr: _addptr,
    ops.Load: _access,
    ops.Store: _access,
    ops.Atomic: _atomic,
    ops.CompareExchange: _atomic,
    ops.Print: _print,
    ops.LoadBlock: _block_access,
    ops.StoreBlock: _block_access,
    ops.For: _for,
    ops.While: _while,
    ops.If: _if,
    ops.Yield: lambda op: None,
}
