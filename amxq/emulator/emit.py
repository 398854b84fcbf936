"""A thin layer over llvmlite.ir for writing structured code: loops, early returns, variables.

Values are i64 unless said otherwise. Variables live in allocas of the entry block, which
LLVM turns into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
PTR = ir.PointerType()
VOID = ir.VoidType()
Value = Any  # llvmlite has no type annotations


class Emitter:
    """Builds one function; unknown attributes are llvmlite's IRBuilder methods."""

    def __init__(
        self, module: Any, name: str, result: Any, arguments: Sequence[Any], *, public: bool = False
    ) -> None:
        self.function = ir.Function(module, ir.FunctionType(result, list(arguments)), name)
        self.function.attributes.add("nounwind")
        if not public:
            self.function.linkage = "internal"
        self.module = module
        self._entry = self.function.append_basic_block("variables")
        start = self.function.append_basic_block("start")
        self._allocas = ir.IRBuilder(self._entry)
        self._allocas.position_before(self._allocas.branch(start))
        self.build = ir.IRBuilder(start)
        self.arguments = self.function.args

    def __getattr__(self, name: str) -> Any:
        return getattr(self.build, name)

    # values and memory
    def const(self, value: int, kind: Any = I64) -> Value:
        return ir.Constant(kind, value)

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """``pointer + offset`` bytes."""
        index = self.const(offset) if isinstance(offset, int) else offset
        place = self.build.gep(pointer, [index], source_etype=I8)
        place.type = PTR  # of a typed pointer llvmlite would make a typed one again
        return place

    def read(
        self, pointer: Value, offset: Value | int = 0, kind: Any = I64, align: int = 1
    ) -> Value:
        return self.build.load(self.at(pointer, offset), typ=kind, align=align)

    def write(self, value: Value | int, pointer: Value, offset: Value | int = 0) -> None:
        value = self.const(value) if isinstance(value, int) else value
        self.build.store(value, self.at(pointer, offset), align=1)

    def space(self, size: int) -> Value:
        """``size`` bytes on the stack, 64-byte aligned."""
        space = self._allocas.alloca(ir.ArrayType(I8, size))
        space.align = 64
        return self.at(space, 0)

    def variable(self, value: Value | int, kind: Any = I64) -> Variable:
        return Variable(self, self._allocas.alloca(kind), kind, value)

    def call_named(self, name: str, *arguments: Value) -> Value:
        return self.build.call(self.module.get_global(name), list(arguments))

    def intrinsic(self, name: str, kinds: Sequence[Any], result: Any, *arguments: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, list(kinds)), name)
        return self.build.call(function, list(arguments))

    def fill(self, pointer: Value, size: Value | int, byte: int = 0) -> None:
        """memset."""
        size = self.const(size) if isinstance(size, int) else size
        values = (pointer, self.const(byte, I8), size, self.const(0, I1))
        self.intrinsic("llvm.memset.p0.i64", [PTR, I8, I64, I1], VOID, *values)

    # comparisons; both sides i64 unless the value has another width
    def eq(self, a: Value, b: Value | int) -> Value:
        return self.build.icmp_unsigned("==", a, self._like(b, a))

    def ne(self, a: Value, b: Value | int) -> Value:
        return self.build.icmp_unsigned("!=", a, self._like(b, a))

    def lt(self, a: Value, b: Value | int) -> Value:
        return self.build.icmp_unsigned("<", a, self._like(b, a))

    def is_one_of(self, a: Value, values: Sequence[int]) -> Value:
        found = self.eq(a, values[0])
        for value in values[1:]:
            found = self.build.or_(found, self.eq(a, value))
        return found

    def _like(self, value: Value | int, other: Value) -> Value:
        return self.const(value, other.type) if isinstance(value, int) else value

    # control flow
    def when(self, condition: Value) -> Any:
        return self.build.if_then(condition)

    def return_if(self, condition: Value, result: Value) -> None:
        with self.build.if_then(condition):
            self.build.ret(result)

    @contextmanager
    def loop(self) -> Iterator[Callable[[Value], None]]:
        """Repeats its body until ``leave(condition)``, which it yields, is true."""
        body = self.function.append_basic_block("loop")
        after = self.function.append_basic_block("after")
        self.build.branch(body)
        self.build.position_at_end(body)

        def leave(condition: Value) -> None:
            stay = self.function.append_basic_block("stay")
            self.build.cbranch(condition, after, stay)
            self.build.position_at_end(stay)

        yield leave
        self.build.branch(body)
        self.build.position_at_end(after)

    @contextmanager
    def count(self, start: Value | int, stop: Value | int) -> Iterator[Value]:
        """``for i in range(start, stop)``."""
        i = self.variable(start)
        stop = self.const(stop) if isinstance(stop, int) else stop
        with self.loop() as leave:
            now = i.get()
            leave(self.build.icmp_unsigned(">=", now, stop))
            yield now
            i.set(self.build.add(now, self.const(1)))


class Variable:
    """A mutable value of an :class:`Emitter`."""

    def __init__(self, emitter: Emitter, place: Value, kind: Any, value: Value | int) -> None:
        self._emitter, self._place, self._kind = emitter, place, kind
        self.set(value)

    def get(self) -> Value:
        return self._emitter.build.load(self._place, typ=self._kind)

    def set(self, value: Value | int) -> None:
        if isinstance(value, int):
            value = self._emitter.const(value, self._kind)
        self._emitter.build.store(value, self._place)
