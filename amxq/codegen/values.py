"""LLVM text of operations on scalars and vectors."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Op, Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I32,
    DType,
    PointerType,
    Type,
    VectorType,
    scalar_of,
    with_element,
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


_INT = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "mod": "frem"}
_CONTRACT = ("fadd", "fsub", "fmul")


class Emitter:
    """Lines of a function under construction, and the names of its values."""

    def __init__(self, parent: Emitter | None = None) -> None:
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

    def on_constant(self, op: ops.Constant) -> None:
        type_ = op.result.type
        element = scalar_of(type_)
        if isinstance(op.value, tuple):
            lanes = ", ".join(f"{llvm_type(element)} {literal(x, element)}" for x in op.value)
            self.names[op.result] = f"<{lanes}>"
        elif isinstance(type_, VectorType):
            one = f"{llvm_type(element)} {literal(op.value, element)}"
            self.names[op.result] = f"<{', '.join([one] * type_.lanes)}>"
        else:
            self.names[op.result] = literal(op.value, element)

    # --- arithmetic -----------------------------------------------------------------------

    def on_binary(self, op: ops.Binary) -> None:
        a, b, type_ = self.names[op.lhs], self.names[op.rhs], op.result.type
        self.names[op.result] = self.binary(op.kind, a, b, type_)

    def binary(self, kind: str, a: str, b: str, type_: Type) -> str:
        element = scalar_of(type_)
        if element in (BF16, F16):  # computed in fp32 and rounded once
            wide = with_element(type_, F32)
            x, y = self.convert(a, type_, F32), self.convert(b, type_, F32)
            return self.convert(self.binary(kind, x, y, wide), wide, element)
        text = llvm_type(type_)
        if kind in ("min", "max"):
            if element.is_float:
                return self.call(f"llvm.{kind}num.{_suffix(type_)}", text, [(text, a), (text, b)])
            name = ("s" if element.is_signed else "u") + kind
            return self.call(f"llvm.{name}.{_suffix(type_)}", text, [(text, a), (text, b)])
        if element.is_float:
            name = _FLOAT[kind]
            flag = " contract" if name in _CONTRACT else ""
            return self.line(f"{name}{flag} {text} {a}, {b}")
        if kind in _INT:
            return self.line(f"{_INT[kind]} {text} {a}, {b}")
        if kind in ("div", "mod"):
            name = ("s" if element.is_signed else "u") + {"div": "div", "mod": "rem"}[kind]
            return self.line(f"{name} {text} {a}, {self._divisor(a, b, type_)}")
        name = "shl" if kind == "shl" else "ashr" if element.is_signed else "lshr"
        return self.line(f"{name} {text} {a}, {b}")

    def _divisor(self, a: str, b: str, type_: Type) -> str:
        """``b``, or 1 where dividing by it would trap: 0, and -1 below the lowest number. Such
        lanes are common where a mask hides them."""
        text, bools = llvm_type(type_), llvm_type(with_element(type_, I1))
        traps = self.line(f"icmp eq {text} {b}, {_splat(0, type_)}")
        if scalar_of(type_).is_signed:
            lowest = self.line(
                f"icmp eq {text} {a}, {_splat(-(1 << scalar_of(type_).bits - 1), type_)}"
            )
            minus = self.line(f"icmp eq {text} {b}, {_splat(-1, type_)}")
            overflow = self.line(f"and {bools} {lowest}, {minus}")
            traps = self.line(f"or {bools} {traps}, {overflow}")
        return self.line(f"select {bools} {traps}, {text} {_splat(1, type_)}, {text} {b}")

    def on_compare(self, op: ops.Compare) -> None:
        element = scalar_of(op.lhs.type)
        a, b, type_ = self.names[op.lhs], self.names[op.rhs], op.lhs.type
        if element in (BF16, F16):
            a, b = self.convert(a, type_, F32), self.convert(b, type_, F32)
            type_ = with_element(type_, F32)
        if element.is_float:
            kind = {"ne": "une"}.get(op.kind, f"o{op.kind}")
            self.define(op, f"fcmp {kind} {llvm_type(type_)} {a}, {b}")
        else:
            sign = "s" if element.is_signed else "u"
            kind = op.kind if op.kind in ("eq", "ne") else f"{sign}{op.kind}"
            self.define(op, f"icmp {kind} {llvm_type(type_)} {a}, {b}")

    def on_unary(self, op: ops.Unary) -> None:
        a, type_ = self.names[op.operand], op.result.type
        element = scalar_of(type_)
        wide = with_element(type_, F32) if element in (BF16, F16) else type_
        if wide is not type_:
            a = self.convert(a, type_, F32)
        text = llvm_type(wide)
        if op.kind == "neg":
            a = self.line(
                f"fneg {text} {a}" if element.is_float else f"sub {text} {_zero(wide)}, {a}"
            )
        elif op.kind == "abs" and not element.is_float:
            if element.is_signed:
                a = self.call(f"llvm.abs.{_suffix(wide)}", text, [(text, a), ("i1", "false")])
        else:
            name = {"abs": "fabs"}.get(op.kind, op.kind)
            a = self.call(f"llvm.{name}.{_suffix(wide)}", text, [(text, a)])
        if wide is not type_:
            a = self.convert(a, wide, element)
        self.names[op.result] = a

    def on_fma(self, op: hw.Fma) -> None:
        text = llvm_type(op.result.type)
        args = [(text, self.names[v]) for v in (op.a, op.b, op.c)]
        self.names[op.result] = self.call(f"llvm.fma.{_suffix(op.result.type)}", text, args)

    def on_select(self, op: ops.Select) -> None:
        c, x, y = (self.names[v] for v in (op.condition, op.then, op.other))
        text = llvm_type(op.result.type)
        self.define(op, f"select {llvm_type(op.condition.type)} {c}, {text} {x}, {text} {y}")

    def on_cast(self, op: ops.Cast) -> None:
        to = scalar_of(op.result.type)
        self.names[op.result] = self.convert(self.names[op.operand], op.operand.type, to)

    def convert(self, a: str, from_: Type, to: DType) -> str:
        """Number conversion of a scalar or vector."""
        source = scalar_of(from_)
        if source == to:
            return a
        text, target = llvm_type(from_), llvm_type(with_element(from_, to))
        if source == BF16:
            wide = with_element(from_, I32)
            bits = self.line(f"zext {text} {a} to {llvm_type(wide)}")
            bits = self.line(f"shl {llvm_type(wide)} {bits}, {_splat(16, wide)}")
            f32 = with_element(from_, F32)
            a = self.line(f"bitcast {llvm_type(wide)} {bits} to {llvm_type(f32)}")
            return self.convert(a, f32, to)
        if to == BF16:
            return self._to_bf16(self.convert(a, from_, F32), with_element(from_, F32))
        if to == I1:
            kind = "fcmp une" if source.is_float else "icmp ne"
            return self.line(f"{kind} {text} {a}, {_zero(from_)}")
        if source.is_float and to.is_float:
            if {source, to} == {F16, F64}:
                return self.convert(self.convert(a, from_, F32), with_element(from_, F32), to)
            name = "fpext" if to.bits > source.bits else "fptrunc"
            return self.line(f"{name} {text} {a} to {target}")
        if source.is_float:
            name = "fptosi" if to.is_signed else "fptoui"
            suffix = f"{_suffix(with_element(from_, to))}.{_suffix(from_)}"
            return self.call(f"llvm.{name}.sat.{suffix}", target, [(text, a)])
        if to.is_float:
            name = "sitofp" if source.is_signed else "uitofp"
            return self.line(f"{name} {text} {a} to {target}")
        if to.bits == source.bits:
            return a
        name = "trunc" if to.bits < source.bits else ("sext" if source.is_signed else "zext")
        return self.line(f"{name} {text} {a} to {target}")

    def _to_bf16(self, a: str, type_: Type) -> str:
        """Round to nearest even in integer arithmetic: the same bits on every target, denormals
        kept (VCVTNEPS2BF16 flushes them), NaN stays NaN."""
        wide = with_element(type_, I32)
        i32 = llvm_type(wide)
        bits = self.line(f"bitcast {llvm_type(type_)} {a} to {i32}")
        high = self.line(f"lshr {i32} {bits}, {_splat(16, wide)}")
        odd = self.line(f"and {i32} {high}, {_splat(1, wide)}")
        bias = self.line(f"add {i32} {odd}, {_splat(0x7FFF, wide)}")
        rounded = self.line(f"add {i32} {bits}, {bias}")
        rounded = self.line(f"lshr {i32} {rounded}, {_splat(16, wide)}")
        quiet = self.line(f"or {i32} {high}, {_splat(0x40, wide)}")
        nan = self.line(f"fcmp uno {llvm_type(type_)} {a}, {a}")
        bool_type = llvm_type(with_element(type_, I1))
        chosen = self.line(f"select {bool_type} {nan}, {i32} {quiet}, {i32} {rounded}")
        return self.line(f"trunc {i32} {chosen} to {llvm_type(with_element(type_, BF16))}")

    # --- vectors --------------------------------------------------------------------------

    def on_splat(self, op: ops.Splat) -> None:
        assert isinstance(op.result.type, VectorType)
        self.names[op.result] = self.splat(self.names[op.operand], op.result.type)

    def splat(self, scalar: str, type_: VectorType) -> str:
        text, lanes = llvm_type(type_), type_.lanes
        one = self.line(f"insertelement {text} poison, {llvm_type(type_.element)} {scalar}, i64 0")
        return self.line(
            f"shufflevector {text} {one}, {text} poison, <{lanes} x i32> zeroinitializer"
        )

    def on_extract(self, op: hw.Extract) -> None:
        self.define(
            op, f"extractelement {llvm_type(op.vector.type)} {self.names[op.vector]}, i64 {op.lane}"
        )

    def on_insert(self, op: hw.Insert) -> None:
        vector = f"{llvm_type(op.vector.type)} {self.names[op.vector]}"
        scalar = f"{llvm_type(op.scalar.type)} {self.names[op.scalar]}"
        self.define(op, f"insertelement {vector}, {scalar}, i64 {op.lane}")

    def on_horizontal(self, op: hw.Horizontal) -> None:
        """Halves are combined until one lane is left."""
        type_ = op.vector.type
        assert isinstance(type_, VectorType)
        a, lanes = self.names[op.vector], type_.lanes
        while lanes > 1:
            text = llvm_type(VectorType(lanes, type_.element))
            half = lanes // 2
            if lanes % 2:
                raise AssertionError("a vector has a power of two lanes")
            parts = []
            for first in (0, half):
                index = ", ".join(f"i32 {first + i}" for i in range(half))
                parts.append(
                    self.line(f"shufflevector {text} {a}, {text} poison, <{half} x i32> <{index}>")
                )
            lanes = half
            a = self.binary(op.kind, parts[0], parts[1], VectorType(lanes, type_.element))
        one = llvm_type(VectorType(1, type_.element))
        self.define(op, f"extractelement {one} {a}, i64 0")

    def on_bitcast(self, op: hw.Bitcast) -> None:
        if isinstance(op.result.type, PointerType):
            self.names[op.result] = self.names[op.operand]
            return
        source = f"{llvm_type(op.operand.type)} {self.names[op.operand]}"
        self.define(op, f"bitcast {source} to {llvm_type(op.result.type)}")

    def on_vpermw(self, op: hw.Vpermw) -> None:
        text = "<32 x i16>"
        args = [(text, self.names[op.table]), (text, self.names[op.index])]
        self.names[op.result] = self.call("llvm.x86.avx512.permvar.hi.512", text, args)

    def on_vdpbf16ps(self, op: hw.Vdpbf16ps) -> None:
        wide, pairs = "<16 x float>", "<32 x bfloat>"
        a, b = (self.line(f"bitcast <32 x i16> {self.names[v]} to {pairs}") for v in (op.a, op.b))
        args = [(wide, self.names[op.acc]), (pairs, a), (pairs, b)]
        self.names[op.result] = self.call("llvm.x86.avx512bf16.dpbf16ps.512", wide, args)

    # --- memory ---------------------------------------------------------------------------

    def on_addptr(self, op: ops.AddPtr) -> None:
        assert isinstance(op.pointer.type, PointerType)
        element = memory_type(op.pointer.type.element)
        offset = f"{llvm_type(op.offset.type)} {self.names[op.offset]}"
        self.define(op, f"getelementptr {element}, ptr {self.names[op.pointer]}, {offset}")

    def on_vector_load(self, op: hw.VectorLoad) -> None:
        type_ = op.result.type
        element = scalar_of(type_)
        stored = _in_memory(type_)
        pointer, mask = f"ptr {self.names[op.pointer]}", op.mask
        if mask is None:
            loaded = self.line(f"load {stored}, {pointer}, align {element.bytes}")
        else:
            loaded = self._masked(type_, pointer, self.names[mask])
        self.names[op.result] = self._from_memory(loaded, type_)

    def _masked(self, type_: Type, pointer: str, mask: str) -> str:
        element = scalar_of(type_)
        lanes = type_.lanes if isinstance(type_, VectorType) else 1
        vector = f"<{lanes} x {memory_type(element)}>"
        mask = self._mask(mask, type_)
        loaded = self.line(
            f"call {vector} @llvm.masked.load.v{lanes}{_code(element)}.p0({pointer}, "
            f"i32 {element.bytes}, <{lanes} x i1> {mask}, {vector} zeroinitializer)"
        )
        self.declarations.add(
            f"declare {vector} @llvm.masked.load.v{lanes}{_code(element)}.p0"
            f"(ptr, i32, <{lanes} x i1>, {vector})"
        )
        if isinstance(type_, VectorType):
            return loaded
        return self.line(f"extractelement {vector} {loaded}, i64 0")

    def _mask(self, mask: str, type_: Type) -> str:
        """A mask as a vector, also for a scalar."""
        if isinstance(type_, VectorType):
            return mask
        return self.line(f"insertelement <1 x i1> poison, i1 {mask}, i64 0")

    def _from_memory(self, name: str, type_: Type) -> str:
        if scalar_of(type_) != I1:
            return name
        return self.line(f"trunc {_in_memory(type_)} {name} to {llvm_type(type_)}")

    def _to_memory(self, name: str, type_: Type) -> str:
        if scalar_of(type_) != I1:
            return name
        return self.line(f"zext {llvm_type(type_)} {name} to {_in_memory(type_)}")

    def on_vector_store(self, op: hw.VectorStore) -> None:
        type_ = op.value.type
        element = scalar_of(type_)
        value = self._to_memory(self.names[op.value], type_)
        stored, pointer = _in_memory(type_), f"ptr {self.names[op.pointer]}"
        if op.mask is None:
            self.lines.append(f"  store {stored} {value}, {pointer}, align {element.bytes}")
            return
        mask = self._mask(self.names[op.mask], type_)
        lanes = 1
        if isinstance(type_, VectorType):
            lanes = type_.lanes
        else:
            value = self.line(f"insertelement <1 x {stored}> poison, {stored} {value}, i64 0")
            stored = f"<1 x {stored}>"
        name = f"llvm.masked.store.v{lanes}{_code(element)}.p0"
        self.declarations.add(f"declare void @{name}({stored}, ptr, i32, <{lanes} x i1>)")
        self.lines.append(
            f"  call void @{name}({stored} {value}, {pointer}, i32 {element.bytes}, "
            f"<{lanes} x i1> {mask})"
        )

    def _addresses(self, op: hw.Gather | hw.Scatter, lanes: int) -> tuple[str, str]:
        assert isinstance(op.pointer.type, PointerType)
        element = memory_type(op.pointer.type.element)
        offsets = f"<{lanes} x i64> {self.names[op.offsets]}"
        addresses = self.line(f"getelementptr {element}, ptr {self.names[op.pointer]}, {offsets}")
        if op.mask is not None:
            return addresses, self.names[op.mask]
        return addresses, f"<{', '.join(['i1 true'] * lanes)}>"

    def on_gather(self, op: hw.Gather) -> None:
        type_ = op.result.type
        assert isinstance(type_, VectorType)
        addresses, mask = self._addresses(op, type_.lanes)
        element, stored, n = type_.element, _in_memory(type_), type_.lanes
        name = f"llvm.masked.gather.v{n}{_code(element)}.v{n}p0"
        self.declarations.add(f"declare {stored} @{name}(<{n} x ptr>, i32, <{n} x i1>, {stored})")
        loaded = self.line(
            f"call {stored} @{name}(<{n} x ptr> {addresses}, i32 {element.bytes}, "
            f"<{n} x i1> {mask}, {stored} zeroinitializer)"
        )
        self.names[op.result] = self._from_memory(loaded, type_)

    def on_scatter(self, op: hw.Scatter) -> None:
        type_ = op.value.type
        assert isinstance(type_, VectorType)
        addresses, mask = self._addresses(op, type_.lanes)
        element, stored, n = type_.element, _in_memory(type_), type_.lanes
        value = self._to_memory(self.names[op.value], type_)
        name = f"llvm.masked.scatter.v{n}{_code(element)}.v{n}p0"
        self.declarations.add(f"declare void @{name}({stored}, <{n} x ptr>, i32, <{n} x i1>)")
        self.lines.append(
            f"  call void @{name}({stored} {value}, <{n} x ptr> {addresses}, "
            f"i32 {element.bytes}, <{n} x i1> {mask})"
        )

    def on_prefetch(self, op: hw.Prefetch) -> None:
        pointer = ("ptr", self.names[op.pointer])
        args = [pointer, ("i32", "0"), ("i32", str(op.locality)), ("i32", "1")]
        self.call("llvm.prefetch.p0", "void", args)


def _in_memory(type_: Type) -> str:
    element = memory_type(scalar_of(type_))
    return f"<{type_.lanes} x {element}>" if isinstance(type_, VectorType) else element


def _code(element: DType) -> str:
    """The element as intrinsic names spell it."""
    if element == I1:
        return "i8"
    return element.name if element in (F16, F32, F64) else f"i{element.bits}"


def _suffix(type_: Type) -> str:
    element = scalar_of(type_)
    code = "i1" if element == I1 else _code(element)
    return f"v{type_.lanes}{code}" if isinstance(type_, VectorType) else code


def _splat(number: int, type_: Type) -> str:
    if not isinstance(type_, VectorType):
        return str(number)
    one = f"{llvm_type(type_.element)} {number}"
    return f"<{', '.join([one] * type_.lanes)}>"


def _zero(type_: Type) -> str:
    return "zeroinitializer" if isinstance(type_, VectorType) else literal(0, scalar_of(type_))
