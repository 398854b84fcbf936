"""LLVM text: types, literals, and the lines of a function under construction."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from amxq.ir.ops import Op, Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    DType,
    PointerType,
    Type,
    VectorType,
    scalar_of,
)

# bf16 travels as its 16 bits: where a CPU lacks the type LLVM calls library functions for it
_FLOATS = {BF16: "i16", F16: "half", F32: "float", F64: "double"}


def llvm_type(type_: Type) -> str:
    if isinstance(type_, PointerType):
        return "ptr"
    if isinstance(type_, VectorType):
        return f"<{type_.lanes} x {llvm_type(type_.element)}>"
    assert isinstance(type_, DType), type_
    return _FLOATS.get(type_) or f"i{type_.bits}"


def memory_type(element: DType) -> str:
    """A bool takes a byte in memory."""
    return "i8" if element == I1 else llvm_type(element)


def literal(value: int | float, element: DType) -> str:
    """A number as LLVM writes it; floats as bit patterns."""
    if element == I1:
        return "true" if value else "false"
    if not element.is_float:
        return str(int(value))
    if element == BF16:
        (bits,) = struct.unpack("<I", _rounded("<f", value))
        return str((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)
    if element == F16:
        return f"0xH{struct.unpack('<H', _rounded('<e', value))[0]:04X}"
    if element == F32:
        value = struct.unpack("<f", _rounded("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _rounded(format: str, value: float) -> bytes:
    """A float in a narrower format; infinite where it does not fit, as a conversion gives it."""
    try:
        return struct.pack(format, value)
    except OverflowError:
        return struct.pack(format, math.copysign(math.inf, value))


def in_memory(type_: Type) -> str:
    element = memory_type(scalar_of(type_))
    return f"<{type_.lanes} x {element}>" if isinstance(type_, VectorType) else element


def code(element: DType) -> str:
    """The element as intrinsic names spell it."""
    if element == I1:
        return "i8"
    return element.name if element in (F16, F32, F64) else f"i{element.bits}"


def suffix(type_: Type) -> str:
    """The type as intrinsic names end with it."""
    element = scalar_of(type_)
    name = "i1" if element == I1 else code(element)
    return f"v{type_.lanes}{name}" if isinstance(type_, VectorType) else name


def splat_of(number: int | float, type_: Type) -> str:
    """A number in every lane, as a literal."""
    one = literal(number, scalar_of(type_))
    if not isinstance(type_, VectorType):
        return one
    return f"<{', '.join([f'{llvm_type(type_.element)} {one}'] * type_.lanes)}>"


def zero(type_: Type) -> str:
    return "zeroinitializer" if isinstance(type_, VectorType) else literal(0, scalar_of(type_))


class Text:
    """Lines of a function under construction, and the names of its values."""

    def __init__(self, parent: Text | None = None) -> None:
        self.lines: list[str] = []
        self.names: dict[Value, str] = parent.names if parent else {}
        self.declarations: set[str] = parent.declarations if parent else set()
        self._counter: list[int] = parent._counter if parent else [0]
        self.label = "program"

    def number(self) -> int:
        self._counter[0] += 1
        return self._counter[0]

    def line(self, text: str) -> str:
        """Appends an instruction; returns the name of its result."""
        name = f"%v{self.number()}"
        self.lines.append(f"  {name} = {text}")
        return name

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def branch(self, label: str) -> None:
        self.lines.append(f"  br label %{label}")
        self.start(label)

    def define(self, op: Op, text: str) -> None:
        self.define_value(op.result, text)

    def define_value(self, value: Value, text: str) -> None:
        self.names[value] = self.line(text)

    def call(self, function: str, result: str, args: list[tuple[str, str]]) -> str:
        """A call of an intrinsic, which is declared on the way."""
        types = ", ".join(t for t, _ in args)
        self.declarations.add(f"declare {result} @{function}({types})")
        given = ", ".join(f"{t} {a}" for t, a in args)
        if result == "void":
            self.lines.append(f"  call void @{function}({given})")
            return ""
        return self.line(f"call {result} @{function}({given})")

    # --- dispatch -------------------------------------------------------------------------

    def operation(self, op: Op) -> None:
        handler: Callable[[Any], None] = getattr(self, f"on_{op.name}")
        handler(op)
