"""LLVM text of loads, stores, gathers and scatters."""

from __future__ import annotations

from amxq.codegen.text import Text, code, in_memory, llvm_type, memory_type
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.types import I1, PointerType, Type, VectorType, scalar_of


class MemoryText(Text):
    """Operations that touch memory. A bool takes a byte there, and a bit elsewhere."""

    def on_addptr(self, op: ops.AddPtr) -> None:
        assert isinstance(op.pointer.type, PointerType)
        element = memory_type(op.pointer.type.element)
        offset = f"{llvm_type(op.offset.type)} {self.names[op.offset]}"
        self.define(op, f"getelementptr {element}, ptr {self.names[op.pointer]}, {offset}")

    def on_vector_load(self, op: hw.VectorLoad) -> None:
        type_ = op.result.type
        element = scalar_of(type_)
        stored = in_memory(type_)
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
            f"call {vector} @llvm.masked.load.v{lanes}{code(element)}.p0({pointer}, "
            f"i32 {element.bytes}, <{lanes} x i1> {mask}, {vector} zeroinitializer)"
        )
        self.declarations.add(
            f"declare {vector} @llvm.masked.load.v{lanes}{code(element)}.p0"
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
        return self.line(f"trunc {in_memory(type_)} {name} to {llvm_type(type_)}")

    def _to_memory(self, name: str, type_: Type) -> str:
        if scalar_of(type_) != I1:
            return name
        return self.line(f"zext {llvm_type(type_)} {name} to {in_memory(type_)}")

    def on_vector_store(self, op: hw.VectorStore) -> None:
        type_ = op.value.type
        element = scalar_of(type_)
        value = self._to_memory(self.names[op.value], type_)
        stored, pointer = in_memory(type_), f"ptr {self.names[op.pointer]}"
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
        name = f"llvm.masked.store.v{lanes}{code(element)}.p0"
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
        element, stored, n = type_.element, in_memory(type_), type_.lanes
        name = f"llvm.masked.gather.v{n}{code(element)}.v{n}p0"
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
        element, stored, n = type_.element, in_memory(type_), type_.lanes
        value = self._to_memory(self.names[op.value], type_)
        name = f"llvm.masked.scatter.v{n}{code(element)}.v{n}p0"
        self.declarations.add(f"declare void @{name}({stored}, <{n} x ptr>, i32, <{n} x i1>)")
        self.lines.append(
            f"  call void @{name}({stored} {value}, <{n} x ptr> {addresses}, "
            f"i32 {element.bytes}, <{n} x i1> {mask})"
        )

    def on_atomic(self, op: ops.Atomic) -> None:
        element = scalar_of(op.value.type)
        kind = {"exchange": "xchg"}.get(op.kind, op.kind)
        if element.is_float and kind in ("add", "min", "max"):
            kind = f"f{kind}"
        elif not element.is_signed and kind in ("min", "max"):
            kind = f"u{kind}"
        value = f"{llvm_type(element)} {self.names[op.value]}"
        self.define(op, f"atomicrmw {kind} ptr {self.names[op.pointer]}, {value} acq_rel")

    def on_compare_exchange(self, op: ops.CompareExchange) -> None:
        """Compares bits: LLVM takes integers only."""
        element = scalar_of(op.value.type)
        text, bits = llvm_type(element), f"i{element.bits}"
        expected, value = (
            self.line(f"bitcast {text} {self.names[v]} to {bits}") for v in (op.expected, op.value)
        )
        pointer = f"ptr {self.names[op.pointer]}"
        operands = f"{pointer}, {bits} {expected}, {bits} {value}"
        pair = self.line(f"cmpxchg {operands} acq_rel acquire")
        old = self.line(f"extractvalue {{ {bits}, i1 }} {pair}, 0")
        self.define(op, f"bitcast {bits} {old} to {text}")

    def on_prefetch(self, op: hw.Prefetch) -> None:
        pointer = ("ptr", self.names[op.pointer])
        args = [pointer, ("i32", "0"), ("i32", str(op.locality)), ("i32", "1")]
        self.call("llvm.prefetch.p0", "void", args)
