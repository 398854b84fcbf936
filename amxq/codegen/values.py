"""LLVM text of operations on scalars and vectors."""

from __future__ import annotations

from amxq.codegen.memory import MemoryText
from amxq.codegen.text import literal, llvm_type, splat_of, suffix, zero
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I32,
    I64,
    DType,
    PointerType,
    Type,
    VectorType,
    scalar_of,
    with_element,
)

_INT = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "mod": "frem"}
_CONTRACT = ("fadd", "fsub", "fmul")


class Emitter(MemoryText):
    """Everything that is not control flow or a tile register."""

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

    def on_multiple_of(self, op: ops.MultipleOf) -> None:
        self.names[op.result] = self.names[op.operand]

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
                return self._extreme(kind, a, b, type_)
            name = ("s" if element.is_signed else "u") + kind
            return self.call(f"llvm.{name}.{suffix(type_)}", text, [(text, a), (text, b)])
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
        count = self.line(f"and {text} {b}, {splat_of(element.bits - 1, type_)}")
        return self.line(f"{name} {text} {a}, {count}")

    def _extreme(self, kind: str, a: str, b: str, type_: Type) -> str:
        """The larger or smaller one; the number where one side is NaN. (LLVM narrows its maxnum
        of widened halves to one of halves, which becomes calls of fmaxf.) VMAXPS gives b where
        a is NaN, so b must not be one."""
        text, bools = llvm_type(type_), llvm_type(with_element(type_, I1))
        nan = self.line(f"fcmp uno {text} {b}, {b}")
        b = self.line(f"select {bools} {nan}, {text} {a}, {text} {b}")
        wins = self.line(f"fcmp {'ogt' if kind == 'max' else 'olt'} {text} {a}, {b}")
        return self.line(f"select {bools} {wins}, {text} {a}, {text} {b}")

    def _divisor(self, a: str, b: str, type_: Type) -> str:
        """``b``, or 1 where dividing by it would trap: 0, and -1 below the lowest number. Such
        lanes are common where a mask hides them."""
        text, bools = llvm_type(type_), llvm_type(with_element(type_, I1))
        traps = self.line(f"icmp eq {text} {b}, {splat_of(0, type_)}")
        if scalar_of(type_).is_signed:
            lowest = self.line(
                f"icmp eq {text} {a}, {splat_of(-(1 << scalar_of(type_).bits - 1), type_)}"
            )
            minus = self.line(f"icmp eq {text} {b}, {splat_of(-1, type_)}")
            overflow = self.line(f"and {bools} {lowest}, {minus}")
            traps = self.line(f"or {bools} {traps}, {overflow}")
        return self.line(f"select {bools} {traps}, {text} {splat_of(1, type_)}, {text} {b}")

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
                f"fneg {text} {a}" if element.is_float else f"sub {text} {zero(wide)}, {a}"
            )
        elif op.kind == "abs" and not element.is_float:
            if element.is_signed:
                a = self.call(f"llvm.abs.{suffix(wide)}", text, [(text, a), ("i1", "false")])
        else:
            name = {"abs": "fabs", "sqrt": "sqrt", "floor": "floor", "ceil": "ceil"}[op.kind]
            a = self.call(f"llvm.{name}.{suffix(wide)}", text, [(text, a)])
        if wide is not type_:
            a = self.convert(a, wide, element)
        self.names[op.result] = a

    def on_fma(self, op: hw.Fma) -> None:
        type_, element = op.result.type, scalar_of(op.result.type)
        wide = with_element(type_, F32) if element in (BF16, F16) else type_
        text = llvm_type(wide)
        values = (self.convert(self.names[v], type_, scalar_of(wide)) for v in (op.a, op.b, op.c))
        total = self.call(f"llvm.fma.{suffix(wide)}", text, [(text, v) for v in values])
        self.names[op.result] = self.convert(total, wide, element)

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
            bits = self.line(f"shl {llvm_type(wide)} {bits}, {splat_of(16, wide)}")
            f32 = with_element(from_, F32)
            a = self.line(f"bitcast {llvm_type(wide)} {bits} to {llvm_type(f32)}")
            return self.convert(a, f32, to)
        if to == BF16:
            return self._to_bf16(self.convert(a, from_, F32), with_element(from_, F32))
        if to == I1:
            kind = "fcmp une" if source.is_float else "icmp ne"
            return self.line(f"{kind} {text} {a}, {zero(from_)}")
        if source.is_float and to.is_float:
            if {source, to} == {F16, F64}:
                return self.convert(self.convert(a, from_, F32), with_element(from_, F32), to)
            name = "fpext" if to.bits > source.bits else "fptrunc"
            return self.line(f"{name} {text} {a} to {target}")
        if source.is_float:
            return self._to_int(a, from_, to)
        if to.is_float:
            name = "sitofp" if source.is_signed else "uitofp"
            return self.line(f"{name} {text} {a} to {target}")
        if to.bits == source.bits:
            return a
        name = "trunc" if to.bits < source.bits else ("sext" if source.is_signed else "zext")
        return self.line(f"{name} {text} {a} to {target}")

    def _to_int(self, a: str, from_: Type, to: DType) -> str:
        """Truncated; the nearest integer where ``to`` ends, 0 for NaN. As llvm.fptosi.sat, which
        takes vectors apart."""
        wide = with_element(from_, to if to.bits >= 32 else I32)
        high = (1 << to.bits - to.is_signed) - 1
        low = -high - 1 if to.is_signed else 0
        text, target, bools = (llvm_type(x) for x in (from_, wide, with_element(from_, I1)))
        name = "fptosi" if scalar_of(wide).is_signed else "fptoui"
        number = self.line(f"{name} {text} {a} to {target}")  # poison outside, and not selected
        for kind, bound, instead in (("oge", high + 1, high), ("olt", low, low), ("uno", 0, 0)):
            edge = splat_of(float(bound), from_)
            outside = self.line(f"fcmp {kind} {text} {a}, {edge}")
            other = f"{target} {splat_of(instead, wide)}"
            number = self.line(f"select {bools} {outside}, {other}, {target} {number}")
        return self.convert(number, wide, to)

    def _to_bf16(self, a: str, type_: Type) -> str:
        """Round to nearest even in integer arithmetic: the same bits on every target, denormals
        kept (VCVTNEPS2BF16 flushes them), NaN stays NaN."""
        wide = with_element(type_, I32)
        i32 = llvm_type(wide)
        bits = self.line(f"bitcast {llvm_type(type_)} {a} to {i32}")
        high = self.line(f"lshr {i32} {bits}, {splat_of(16, wide)}")
        odd = self.line(f"and {i32} {high}, {splat_of(1, wide)}")
        bias = self.line(f"add {i32} {odd}, {splat_of(0x7FFF, wide)}")
        rounded = self.line(f"add {i32} {bits}, {bias}")
        rounded = self.line(f"lshr {i32} {rounded}, {splat_of(16, wide)}")
        quiet = self.line(f"or {i32} {high}, {splat_of(0x40, wide)}")
        nan = self.line(f"fcmp uno {llvm_type(type_)} {a}, {a}")
        bool_type = llvm_type(with_element(type_, I1))
        chosen = self.line(f"select {bool_type} {nan}, {i32} {quiet}, {i32} {rounded}")
        return self.line(f"trunc {i32} {chosen} to {llvm_type(with_element(type_, BF16))}")

    # --- printing -------------------------------------------------------------------------

    def on_print(self, op: ops.Print) -> None:
        """One call of C's dprintf for the whole line, so that lines of threads do not mix."""
        args = [f"i32 %pid{axis}" for axis in range(3)]
        args += [f"i64 {self.names[i]}" for i in op.indices]
        formats = []
        for value in op.values:
            element = scalar_of(value.type)
            wide = F64 if element.is_float else I64
            formats.append("%g" if element.is_float else "%lld" if element.is_signed else "%llu")
            args.append(f"{llvm_type(wide)} {self.convert(self.names[value], value.type, wide)}")
        place = f" idx ({', '.join(['%lld'] * len(op.indices))})" if op.indices else ""
        prefix = op.prefix.replace("%", "%%")
        text = f"pid (%d, %d, %d){place} {prefix} {' '.join(formats)}\n\0".encode()
        name = f"@text{self.number()}"
        data = "".join(f"\\{byte:02X}" for byte in text)
        self.declarations.add(f'{name} = private constant [{len(text)} x i8] c"{data}"')
        self.declarations.add("declare i32 @dprintf(i32, ptr, ...)")
        given = ", ".join(["i32 1", f"ptr {name}", *args])
        self.line(f"call i32 (i32, ptr, ...) @dprintf({given})")

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

    def on_scalef(self, op: hw.Scalef) -> None:
        text = "<16 x float>"
        x, n = ((text, self.names[v]) for v in (op.x, op.n))
        args = [x, n, (text, "poison"), ("i16", "-1"), ("i32", "4")]
        self.names[op.result] = self.call("llvm.x86.avx512.mask.scalef.ps.512", text, args)

    def on_vpermw(self, op: hw.Vpermw) -> None:
        text = "<32 x i16>"
        args = [(text, self.names[op.table]), (text, self.names[op.index])]
        self.names[op.result] = self.call("llvm.x86.avx512.permvar.hi.512", text, args)

    def on_vdpbf16ps(self, op: hw.Vdpbf16ps) -> None:
        wide, pairs = "<16 x float>", "<32 x bfloat>"
        a, b = (self.line(f"bitcast <32 x i16> {self.names[v]} to {pairs}") for v in (op.a, op.b))
        args = [(wide, self.names[op.acc]), (pairs, a), (pairs, b)]
        self.names[op.result] = self.call("llvm.x86.avx512bf16.dpbf16ps.512", wide, args)

    def on_shuffle(self, op: hw.Shuffle) -> None:
        text = llvm_type(op.vector.type)
        other = self.names[op.other] if op.other else "poison"
        index = ", ".join(f"i32 {lane}" for lane in op.lanes)
        self.define(
            op,
            f"shufflevector {text} {self.names[op.vector]}, {text} {other}, "
            f"<{len(op.lanes)} x i32> <{index}>",
        )

    def on_vpdpbusd(self, op: hw.Vpdpbusd) -> None:
        # LLVM up to 21 knows the intrinsic with i32 operands only, later ones take those too
        text = "<16 x i32>"
        quads = [self.line(f"bitcast <64 x i8> {self.names[v]} to {text}") for v in (op.a, op.b)]
        args = [(text, name) for name in (self.names[op.acc], *quads)]
        self.names[op.result] = self.call("llvm.x86.avx512.vpdpbusd.512", text, args)

    def on_vpmaddubsw(self, op: hw.Vpmaddubsw) -> None:
        self._pairs(op, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx2.pmadd.ub.sw")

    def on_vpmaddwd(self, op: hw.Vpmaddwd) -> None:
        self._pairs(op, "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx2.pmadd.wd")

    def _pairs(self, op: hw.Vpmaddubsw | hw.Vpmaddwd, wide: str, narrow: str) -> None:
        text, type_ = llvm_type(op.a.type), op.result.type
        assert isinstance(type_, VectorType)
        name = wide if type_.lanes * type_.element.bits == 512 else narrow
        args = [(text, self.names[v]) for v in (op.a, op.b)]
        self.names[op.result] = self.call(name, llvm_type(type_), args)
