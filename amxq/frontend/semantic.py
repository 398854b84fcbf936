"""Typing rules: what an expression of the language means for operands of given types.

Operands are IR values or Python constants. Rules raise :class:`Mistake`; the AST walk adds
the place in the source. The interpreter reuses this layer, so nothing here looks at syntax.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    I1,
    I32,
    I64,
    U4,
    DType,
    PointerType,
    TileType,
    Type,
    dot_element,
    element_of,
    scalar_of,
    shape_of,
    with_element,
)

Operand = Value | int | float | bool


class Mistake(Exception):
    """A user's mistake, without its place. ``hint`` says what to do instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def describe(value: object) -> str:
    """A value as an error message names it."""
    if isinstance(value, (Value, DType)):
        return str(value.type) if isinstance(value, Value) else f"the type {value}"
    if isinstance(value, (tuple, list)):
        parts = (describe(x).removeprefix("the constant ") for x in value)
        return f"({', '.join(parts)}{',' * (len(value) == 1)})"
    if isinstance(value, (int, float, str, type(None))):
        return f"the constant {value!r}"
    kind = "module" if isinstance(value, ModuleType) else "function" if callable(value) else ""
    name = getattr(value, "__name__", type(value).__name__)
    return f"the {kind} {name}" if kind else f"a {type(value).__name__}"


def text_of(problem: BaseException) -> str:
    """An exception of Python's own, as an error message names it."""
    name = type(problem).__name__
    return f"{name}: {problem}" if str(problem) else name


UNASSIGNABLE = (
    "only names can be assigned to",
    "tiles do not change; write to memory with tl.store(pointer + offsets, value)",
)
_UNDEFINED = {
    "pow": ("the operator ** is not defined for tiles", "multiply, or use tl.exp2(y * tl.log2(x))"),
    "matmul": ("the operator @ is not defined for tiles", "use tl.dot(a, b)"),
}


class Semantic:
    """The rules, bound to a builder that the results are appended to."""

    def __init__(self, builder: Builder) -> None:
        self.b = builder

    # --- conversion -----------------------------------------------------------------------

    def value(self, operand: Any, like: DType | None = None) -> Value:
        """An IR value; a Python number becomes a constant of type ``like`` or its own."""
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, bool):
            return self.b.constant(int(operand), I1)
        if isinstance(operand, int):
            if like is not None and like.is_float:
                return self.b.constant(float(operand), like)
            if like is None or like == I1:
                like = I32 if I32.holds(operand) else I64
            if not like.holds(operand):
                raise Mistake(
                    f"{operand} does not fit {like}", "convert the other operand to a wider type"
                )
            return self.b.constant(operand, like)
        if isinstance(operand, float):
            return self.b.constant(operand, like if like is not None and like.is_float else F32)
        raise Mistake(f"expected a number or a tile, got {describe(operand)}")

    def i64(self, operand: Operand) -> Value:
        value = self.value(operand, I64)
        if not isinstance(value.type, DType) or value.type.is_float:
            raise Mistake(f"expected an integer scalar, got {describe(value)}")
        return self.b.cast(value, I64)

    def cast(self, operand: Operand, dtype: object, bitcast: bool = False) -> Value:
        if not isinstance(dtype, DType):
            raise Mistake(f"{describe(dtype)} is not a type", "use tl.float32, tl.bfloat16, …")
        if not bitcast:
            return self.b.cast(numbers(self.value(operand, dtype)), dtype)
        value = numbers(self.value(operand))
        if scalar_of(value.type).bits != dtype.bits:
            raise Mistake(
                f"bitcast of {value.type} to {dtype}: the sizes differ",
                "a bitcast keeps the bits; convert numbers without bitcast=True",
            )
        if scalar_of(value.type) == dtype:
            return value
        return self.b.value(hw.Bitcast, with_element(value.type, dtype), operand=value)

    @staticmethod
    def promote(a: DType, b: DType) -> DType:
        """The common type of two operands (Triton's rules)."""
        if a == b:
            return a
        if a.is_float or b.is_float:
            if not (a.is_float and b.is_float):
                return a if a.is_float else b
            return F32 if {a, b} == {BF16, F16} else max(a, b, key=lambda t: t.bits)
        if a.kind == "bool" or b.kind == "bool":
            return b if a.kind == "bool" else a
        if a.bits != b.bits:
            return max(a, b, key=lambda t: t.bits)
        return a if a.kind == "uint" else b

    def common(self, x: Operand, y: Operand) -> tuple[Value, Value]:
        """Both operands as values of one type and shape."""
        like_x = scalar_of(x.type) if isinstance(x, Value) and numeric(x) else None
        like_y = scalar_of(y.type) if isinstance(y, Value) and numeric(y) else None
        for operand, like in ((x, like_y), (y, like_x)):
            if isinstance(operand, float) and like is not None and not like.is_float:
                like_x, like_y = (F32, like_y) if operand is x else (like_x, F32)
        a, b = numbers(self.value(x, like_y)), numbers(self.value(y, like_x))
        dtype = self.promote(scalar_of(a.type), scalar_of(b.type))
        return self.broadcast(self.b.cast(a, dtype), self.b.cast(b, dtype))

    # --- shapes ---------------------------------------------------------------------------

    def broadcast(self, a: Value, b: Value) -> tuple[Value, Value]:
        shape_a, shape_b = shape_of(a.type), shape_of(b.type)
        rank = max(len(shape_a), len(shape_b))
        full_a = (1,) * (rank - len(shape_a)) + shape_a
        full_b = (1,) * (rank - len(shape_b)) + shape_b
        shape = []
        for i, j in zip(full_a, full_b):
            if i != j and 1 not in (i, j):
                raise Mistake(
                    f"shapes {list(shape_a)} and {list(shape_b)} do not broadcast",
                    "dimensions must be equal or 1; add one with x[:, None]",
                )
            shape.append(max(i, j))
        return self.broadcast_to(a, tuple(shape)), self.broadcast_to(b, tuple(shape))

    def broadcast_to(self, value: Value, shape: tuple[int, ...]) -> Value:
        have = shape_of(value.type)
        if have == shape:
            return value
        type_ = TileType(shape, element_of(value.type))
        known = self.b.known(value)
        if not have:
            if known is not None:
                return self.b.constant(known, type_)
            return self.b.value(ops.Splat, type_, operand=value)
        while len(shape_of(value.type)) < len(shape):
            value = self.expand_dims(value, 0)
        have = shape_of(value.type)
        if len(have) != len(shape) or any(i not in (j, 1) for i, j in zip(have, shape)):
            raise Mistake(f"cannot broadcast shape {list(have)} to {list(shape)}")
        if have == shape:
            return value
        if known is not None:
            return self.b.constant(known, type_)
        return self.b.value(ops.Broadcast, type_, operand=value)

    def arange(self, start: object, end: object) -> Value:
        if not (isinstance(start, int) and isinstance(end, int) and start < end):
            raise Mistake(
                f"arange from {describe(start)} to {describe(end)}",
                "both are constants, start < end: annotate a parameter as tl.constexpr",
            )
        return self.b.value(ops.Arange, TileType((end - start,), I32), start=start)

    def expand_dims(self, value: Operand, axis: int) -> Value:
        value = self.value(value)
        shape = shape_of(value.type)
        if not shape:
            raise Mistake(f"expected a tile, got {describe(value)}")
        if isinstance(axis, int) and -len(shape) - 1 <= axis < 0:
            axis += len(shape) + 1
        if not isinstance(axis, int) or not 0 <= axis <= len(shape) or len(shape) == 3:
            raise Mistake(f"cannot insert axis {axis} into shape {list(shape)}")
        new = (*shape[:axis], 1, *shape[axis:])
        return self.b.value(
            ops.ExpandDims, TileType(new, element_of(value.type)), operand=value, axis=axis
        )

    # --- operators ------------------------------------------------------------------------

    def binary(self, kind: str, x: Operand, y: Operand) -> Value:
        if kind in ("add", "sub"):
            pointer = self._pointer_arithmetic(kind, x, y)
            if pointer is not None:
                return pointer
        if kind in _UNDEFINED:
            raise Mistake(*_UNDEFINED[kind])
        a, b = self.common(x, y)
        element = scalar_of(a.type)
        if kind in ("floordiv", "mod") and isinstance(y, int) and y == 0 and not element.is_float:
            raise Mistake(f"{'%' if kind == 'mod' else '//'} by the constant 0")
        if kind == "truediv":
            if not element.is_float:
                a, b = self.b.cast(a, F32), self.b.cast(b, F32)
            kind = "div"
        elif kind == "floordiv":
            if element.is_float:
                raise Mistake("// needs integers", "use / for floats")
            kind = "div"
        if kind in ("and", "or", "xor", "shl", "shr") and element.is_float:
            raise Mistake(f"bit operations need integers, got {a.type}")
        if element.kind == "bool" and kind not in ("and", "or", "xor"):
            a, b = self.b.cast(a, I32), self.b.cast(b, I32)
        return self.b.binary(kind, a, b)

    def _pointer_arithmetic(self, kind: str, x: Operand, y: Operand) -> Value | None:
        if kind == "add" and isinstance(y, Value) and not numeric(y):
            x, y = y, x
        if not isinstance(x, Value) or numeric(x):
            return None
        offset = self.value(y)
        if not numeric(offset) or scalar_of(offset.type).is_float:
            raise Mistake(f"cannot move a pointer by {describe(offset)}", "offsets are integers")
        if kind == "sub":
            offset = self.unary("neg", offset)
        pointer, offset = self.broadcast(x, offset)
        offset = self.b.cast(offset, I64)
        if isinstance(pointer.type, PointerType):
            return self.b.addptr(pointer, offset)
        return self.b.value(ops.AddPtr, pointer.type, pointer=pointer, offset=offset)

    def compare(self, kind: str, x: Operand, y: Operand) -> Value:
        a, b = self.common(x, y)
        return self.b.value(ops.Compare, with_element(a.type, I1), kind=kind, lhs=a, rhs=b)

    def unary(self, kind: str, x: Operand) -> Value:
        value = numbers(self.value(x))
        element = scalar_of(value.type)
        if kind not in ("neg", "abs") and not element.is_float:
            raise Mistake(f"{kind} needs floats, got {value.type}", "convert with .to(tl.float32)")
        if element.kind == "bool":
            value = self.b.cast(value, I32)
        known = self.b.known(value)
        if kind == "neg" and known is not None and (element.is_float or element.holds(-known)):
            return self.b.constant(-known, value.type)
        return self.b.value(ops.Unary, value.type, kind=kind, operand=value)

    def invert(self, x: Value) -> Value:
        """``~x``: all bits of an integer, or the opposite of a bool."""
        element = scalar_of(x.type) if numeric(x) else None
        if element is None or element.is_float:
            raise Mistake(f"~ needs integers, got {describe(x)}")
        ones = 1 if element == I1 else -1 if element.is_signed else (1 << element.bits) - 1
        return self.b.binary("xor", x, self.b.constant(ones, x.type))

    def negate(self, x: Value) -> Value:
        """``not x``: whether x is 0."""
        if not numeric(x):
            raise Mistake(f"not needs a number, got {describe(x)}")
        return self.invert(x) if scalar_of(x.type) == I1 else self.compare("eq", x, 0)

    def condition(self, x: Value) -> Value:
        """What an if or while decides by: an int1 scalar, or whether an integer is not 0."""
        if not isinstance(x.type, DType):
            raise Mistake(
                f"the condition is {describe(x)}, expected a scalar",
                "reduce it with tl.max or tl.sum, or choose elements with tl.where",
            )
        return x if x.type == I1 else self.compare("ne", x, 0)

    def boolean(self, kind: str, operands: Iterable[Any]) -> Any:
        """``a and b``, ``a or b``: constants decide while they can, the rest is computed."""
        result: Any = None
        for i, value in enumerate(operands):
            if isinstance(value, Value):
                result = self.binary(kind, result, value) if isinstance(result, Value) else value
                continue
            result = value if i == 0 or not isinstance(result, Value) else result
            if bool(value) != (kind == "and"):
                return value
        return result

    def where(self, condition: Operand, x: Operand, y: Operand) -> Value:
        cond = self.value(condition)
        if not numeric(cond) or scalar_of(cond.type) != I1:
            raise Mistake(f"the condition of where is {describe(cond)}, expected int1")
        a, b = self.common(x, y)
        cond, a = self.broadcast(cond, a)
        a, b = self.broadcast(a, b)
        return self.b.value(ops.Select, a.type, condition=cond, then=a, other=b)

    def index(self, x: object, entries: tuple[Any, ...]) -> Value:
        """``x[:, None]``: entries are ``slice(None)`` and None."""
        if not isinstance(x, Value) or not shape_of(x.type):
            pointer = isinstance(x, Value) and isinstance(x.type, PointerType)
            hint = "read memory with tl.load(pointer + offset)" if pointer else ""
            raise Mistake(f"{describe(x)} cannot be indexed", hint)
        if [e for e in entries if e is not None] != [slice(None)] * len(shape_of(x.type)):
            raise Mistake("tiles are indexed with : and None only", "as in x[:, None]")
        for axis, entry in enumerate(entries):
            if entry is None:
                x = self.expand_dims(x, axis)
        return x

    def int4_order(self, x: Operand) -> Value:
        x = numbers(self.value(x))
        shape = shape_of(x.type)
        if not shape or shape[-1] % 8:
            raise Mistake(
                f"int4_order of {describe(x)}: expected a tile whose rows are whole eights"
            )
        return self.b.value(ops.Int4Order, x.type, operand=x)

    def dot(self, a: Operand, b: Operand, acc: Operand | None, out_dtype: object = None) -> Value:
        a, b, acc = self.value(a), self.value(b), None if acc is None else self.value(acc)
        for name, tile in (("a", a), ("b", b)):
            if len(shape_of(tile.type)) not in (2, 3):
                raise Mistake(f"{name} of dot is {describe(tile)}, expected a tile of rank 2 or 3")
        left, right = str(element_of(a.type)), str(element_of(b.type))
        same = left == right and left in ("bf16", "f16", "f32", "f64")
        if not same and (left, right) not in (("bf16", "u4"), ("i8", "u4"), ("f16", "u4")):
            raise Mistake(
                f"dot of {left} and {right} is not defined",
                "use bf16 or int8 with int4, or two tiles of bf16, of f16, of f32 or of f64 "
                "(with AMX-FP16 also f16 with int4)",
            )
        (*batch, m, k), (*batch2, k2, n) = shape_of(a.type), shape_of(b.type)
        if k != k2 or batch != batch2:
            what = "inner dimensions" if batch == batch2 else "batches"
            if len(batch) != len(batch2):
                what = "ranks"
            shapes = f"{list(shape_of(a.type))} and {list(shape_of(b.type))}"
            raise Mistake(f"dot of {shapes}: the {what} differ")
        if batch and right == "u4":
            raise Mistake(f"dot of {describe(a)} and an int4 tile", "int4 tiles have rank 2")
        total = dot_element(a.type)
        type_ = TileType((*batch, m, n), total)
        shorter = [t for t in (BF16, F16, F32) if total.is_float and t.bits < total.bits]
        if out_dtype not in (None, total, *shorter):
            raise Mistake(
                f"out_dtype of dot is {describe(out_dtype)}",
                f"{left} adds up in {total}: expected {' or '.join(map(str, (total, *shorter)))}",
            )
        if acc is not None and acc.type != type_:
            raise Mistake(f"acc of dot is {describe(acc)}, expected {type_}")
        product = self.b.value(ops.Dot, type_, lhs=a, rhs=b, acc=acc, lowering="")
        return product if out_dtype is None else self.cast(product, out_dtype)

    # --- control --------------------------------------------------------------------------

    def bounds(self, lower: Operand, upper: Operand, step: Operand) -> tuple[Value, ...]:
        """The bounds and the step of a loop, in the type of its index; a step that is not positive
        at run time counts as 1."""
        if isinstance(step, int) and step < 1:
            raise Mistake(f"the step is {step}, it must be positive")
        values = [self.value(b) for b in (lower, upper, step)]
        if any(not isinstance(v.type, DType) or v.type.is_float for v in values):
            raise Mistake("the bounds of a loop are integer scalars")
        wide = I64 if any(scalar_of(v.type).bits == 64 for v in values) else I32
        low, up, by = (self.b.cast(v, wide) for v in values)
        if self.b.known(by) is None:  # a loop always ends
            by = self.b.binary("max", by, self.b.constant(1, wide))
        return low, up, by

    def static_range(self, lower: object, upper: object, step: object) -> range:
        if not (isinstance(lower, int) and isinstance(upper, int) and isinstance(step, int)):
            what = describe((lower, upper, step))
            raise Mistake(f"the bounds of tl.static_range are {what}, they must be constants")
        if step == 0:
            raise Mistake("the step of tl.static_range is 0")
        return range(lower, upper, step)

    def carried(self, name: str, x: Operand, type_: Type, where: str) -> Value:
        """What a variable is next in a loop, or in the other branch: it keeps its type."""
        value = self.value(x, type_ if isinstance(type_, DType) else None)
        if value.type != type_:
            raise Mistake(
                f"{name} changes its type {where}, from {type_} to {value.type}",
                f"convert with .to(), or start {name} with the type it ends with",
            )
        return value

    # --- memory ---------------------------------------------------------------------------

    def load(self, pointer: Value, mask: Operand | None, other: Operand | None) -> Value:
        pointee = self.pointee(pointer)
        type_ = with_element(pointer.type, pointee)
        mask_value = self.mask(mask, type_)
        other_value = None
        if mask_value is not None:
            filler = self.value(0 if other is None else other, pointee)
            other_value = self.broadcast_to(self.b.cast(filler, pointee), shape_of(type_))
        return self.b.value(ops.Load, type_, pointer=pointer, mask=mask_value, other=other_value)

    def store(self, pointer: Value, value: Operand, mask: Operand | None) -> None:
        pointee = self.pointee(pointer)
        type_ = with_element(pointer.type, pointee)
        stored = self.b.cast(numbers(self.value(value, pointee)), pointee)
        stored = self.broadcast_to(stored, shape_of(type_)) if shape_of(type_) else stored
        if stored.type != type_:
            raise Mistake(f"cannot store {describe(stored)} through {describe(pointer)}")
        self.b.emit(ops.Store, pointer=pointer, value=stored, mask=self.mask(mask, type_))

    def pointee(self, pointer: object) -> DType:
        if isinstance(pointer, Value):
            element = element_of(pointer.type)
            if isinstance(element, PointerType):
                return element.element
        raise Mistake(
            f"expected a pointer or a tile of pointers, got {describe(pointer)}",
            "tensors arrive as pointers: load(x + offsets)",
        )

    def mask(self, mask: Operand | None, type_: Any) -> Value | None:
        if mask is None:
            return None
        value = self.value(mask)
        if not numeric(value) or scalar_of(value.type) != I1:
            raise Mistake(f"mask is {describe(value)}, expected int1", "compare: offs < n")
        if shape_of(type_):
            return self.broadcast_to(value, shape_of(type_))
        if shape_of(value.type):
            raise Mistake(f"mask is {describe(value)}, but the pointer is a scalar")
        return value


def numbers(value: Value) -> Value:
    """The value itself, where arithmetic is defined for it."""
    if not numeric(value):
        raise Mistake(f"expected numbers, got {describe(value)}")
    if scalar_of(value.type) == U4:
        raise Mistake("a packed int4 tile is an operand of dot only", "multiply it with tl.dot")
    return value


def numeric(value: Value) -> bool:
    return isinstance(element_of(value.type), DType)
