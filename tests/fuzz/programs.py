"""Random programs of the kernel language, as source text.

A program loads tiles of one shape and of shapes that broadcast to it, computes with them in
expressions, loops and branches, and stores what it has. It keeps to what the language defines:
indices stay in range, programs of the grid write to places of their own, what is undefined is not
looked at. Hypothesis draws every choice, so that it can make a failing program smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from amxq.ir.types import DTYPES, F32, F64, I32, I64, DType
from tests.fuzz.expressions import (
    LONG,
    NAMES,
    OUTPUTS,
    PARAMETERS,
    SIZES,
    TYPES,
    Expr,
    Expressions,
    Program,
    Shape,
    vectors,
)

LONG_SHAPES = ((32768,), (40000,), (33000,), (8, 4096), (128, 256), (300, 112), (2, 128, 128))
HEAD = f"""\
import amxq
import amxq.language as tl


@amxq.jit
def swapped(condition, x, y):
    if condition:
        return y, x
    return x, y


@amxq.jit
def added(x, y):
    return x + y


@amxq.jit
def larger(x, y):
    return tl.where(y > x, y, x)


@amxq.jit
def both(x, i, y, j):
    return tl.where(y > x, y, x), i + j * 3


@amxq.jit
def kernel({", ".join(PARAMETERS)}):
"""


class Generator(Expressions):
    def program(self) -> Program:
        long = self.chance(3)
        self.span = LONG if long else self.span
        self.shape = self.pick(*LONG_SHAPES) if long else self._shape()
        self.line("pid = tl.program_id(0)")
        self.vars += [Expr("n", (), I32), Expr("big", (), I64), Expr("real", (), F32)]
        self.vars.append(Expr("pid", (), I32))
        for _ in range(self.number(1, 3)):
            self.load(self.shape)
        for _ in range(self.number(1, 4)):
            self.statement(2)
            if self.chance(7):
                self._return()
        tiles = [v for v in self.vars if v.shape and v.text.startswith("v")][-OUTPUTS:]
        stored = [self.store(i, tile) for i, tile in enumerate(tiles)]
        source = HEAD + "\n".join(self.lines) + "\n"
        data, seed = self.pick("small", "wide", "special"), self.number(0, 3)
        return Program(source, tuple(stored), data, seed, self.span)

    def _shape(self) -> Shape:
        rank, limit = self.pick(1, 2, 2, 3), self.pick(8, 8, 8, 24, 40)
        while True:
            shape = tuple(self.pick(*SIZES) for _ in range(rank))
            if math.prod(shape) <= 1024 and vectors(shape) <= limit:
                return shape
            rank = max(1, rank - 1)

    # --- statements -----------------------------------------------------------------------

    def statement(self, depth: int) -> None:
        kinds = ["let", "let", "let", "load", "narrow", "through_memory", "atomic", "swap"]
        if len(self.shape) > 1:
            kinds += ["dot", "dot", "dot"]
        if self.span != LONG:
            kinds += ["block_pointer"]
        if depth:
            kinds += ["loop", "branch", "repeat", "pair"]
            if len(self.shape) == 2:
                kinds += ["matmul"]
        getattr(self, f"_{self.pick(*kinds)}")(depth)

    def _let(self, depth: int) -> None:
        self.let(self.expression(self.pick(3, 2), self.shape))

    def _load(self, depth: int) -> None:
        self.load(self.shape)

    def _narrow_shape(self) -> Shape:
        shape = tuple(1 if self.chance(50) else d for d in self.shape)
        return shape[self.number(0, len(shape) - 1) :]

    def _narrow(self, depth: int) -> None:
        """A tile some of whose dimensions are 1 or missing."""
        self.load(self._narrow_shape())

    def _through_memory(self, depth: int) -> None:
        self.through_memory(depth)

    def _return(self) -> None:
        """Ends one of the programs of the grid."""
        self.line(f"if {self.leaf(()).text} {self.pick('==', '<')} {self.pick(0, 1)}:")
        tile = self.leaf(self.shape)
        if tile.shape == self.shape and self.chance(50):
            text, _ = self.offsets(self.shape)
            self.line(f"    tl.store(buffer_f32 + (pid * {self.span} + {text}), {tile.text})")
        self.line("    return")

    # --- loops and branches ---------------------------------------------------------------

    def _variables(self) -> list[Expr]:
        return [v for v in reversed(self.vars) if v.text.startswith("v")]

    def _updates(self, depth: int) -> None:
        """Assignments to variables that exist, which keep their types."""
        for _ in range(self.number(1, 5)):
            v = self.pick(*self._variables())
            twins = [w for w in self._variables() if (w.shape, w.dtype) == (v.shape, v.dtype)]
            if len(twins) > 1 and self.chance(20):
                w = self.pick(*twins)
                self.line(f"{v.text}, {w.text} = {w.text}, {v.text}")
                continue
            e = self.expression(1, v.shape)
            operator = self.pick("+", "-", "*", "^") if not v.dtype.is_float else self.pick(*"+-*")
            update = self.binary(v, e, operator)
            self.line(f"{v.text} = ({update.text}).to(tl.{NAMES[v.dtype]})")
        if depth and self.chance(20):
            self.statement(depth - 1)

    def _inside(self, depth: int, first: str, *more: Expr) -> None:
        before, self.indent = (self.indent, list(self.vars)), self.indent + "    "
        self.lines.append(before[0] + first)
        self.vars += more
        self._updates(depth)
        self.indent, self.vars = before

    def _name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def _loop(self, depth: int) -> None:
        index = Expr(self._name("i"), (), I32)
        bounds = self.pick("0, 3", "1, n, 13", "0, pid + 1", "pid, 4, 2", "0, 0")
        kind = "tl.static_range(3)" if self.chance(15) else f"range({bounds})"
        self._inside(
            depth - 1, f"for {index.text} in {kind}:", *([] if "static" in kind else [index])
        )

    def _repeat(self, depth: int) -> None:
        left = self._name("left")
        self.line(f"{left} = {self.pick('0', 'pid + 1', '3')}")
        more = f" and {self._compare(0, ()).text}" if self.chance(30) else ""
        self._inside(depth - 1, f"while {left} > 0{more}:")
        self.line(f"    {left} -= 1")

    def _branch(self, depth: int) -> None:
        x = self.leaf(())
        self._inside(depth - 1, f"if {x.text} {self.pick('<', '>', '==')} {self.pick(0, 1, 37)}:")
        if self.chance(60):
            self._inside(depth - 1, "else:")

    # --- tuples and calls -----------------------------------------------------------------

    def _pair(self, depth: int) -> None:
        """A tuple that a loop carries."""
        x, y = self.pick(*self._variables()), self.pick(*self._variables())
        pair = self._name("pair")
        self.line(f"{pair} = ({x.text}, {y.text})")
        self.line(f"for {self._name('i')} in range({self.pick('0, 3', 'pid, 3')}):")
        parts = []
        for i, part in enumerate((x, y)):
            own = Expr(f"{pair}[{i}]", part.shape, part.dtype)
            new = self.binary(own, self.expression(1, part.shape), "+")
            parts.append(f"({new.text}).to(tl.{NAMES[part.dtype]})")
        if (x.shape, x.dtype) == (y.shape, y.dtype) and self.chance(50):
            parts.reverse()
        self.line(f"    {pair} = ({', '.join(parts)})")
        for i, part in enumerate((x, y)):
            self.let(Expr(f"{pair}[{i}]", part.shape, part.dtype))

    def _swap(self, depth: int) -> None:
        """A call that returns two values, early in one of the cases."""
        x = self.pick(*self._variables())
        y = self.expression(1, x.shape)
        other = f"({y.text} + {x.text}).to(tl.{NAMES[x.dtype]})"
        if y.dtype.is_float != x.dtype.is_float and not y.dtype.is_float:
            other = f"({y.text}).to(tl.{NAMES[x.dtype]}) + {x.text} * 0"
        if x.dtype.name == "i1":
            return
        condition = self._compare(0, ()).text if self.chance(80) else "True"
        first, second = self._name("v"), self._name("v")
        self.line(f"{first}, {second} = swapped({condition}, {x.text}, {other})")
        self.vars += [Expr(first, x.shape, x.dtype), Expr(second, x.shape, x.dtype)]

    # --- memory ---------------------------------------------------------------------------

    def _atomic(self, depth: int) -> None:
        """An atomic operation on places of the program's own, some of them twice."""
        shape, dtype = self._narrow_shape(), self.pick(I32, F32)
        if math.prod(shape) > 1024:
            shape = ()
        kinds = ["add", "max", "min", "xchg", "cas"] + ["and", "or", "xor"] * (dtype == I32)
        kind = self.pick(*kinds)
        value = self.expression(1, shape)
        text, _ = self.offsets(shape, dense=True) if shape else ("9", 1)
        if self.chance(30):
            text = f"({text} & 15)"
        places = f"buffer_{dtype} + (pid * {self.span} + {text})"
        if kind == "cas":
            old = f"tl.atomic_cas({places}, {self.constant(dtype)}, {value.text})"
        elif self.chance(40):
            mask = self.condition(shape)
            called = f"tl.atomic_{kind}({places}, {value.text}, mask={mask})"
            old = f"tl.where({mask}, {called}, 0)"
        else:
            old = f"tl.atomic_{kind}({places}, {value.text})"
        self.let(Expr(old, shape, dtype))

    def _block_pointer(self, depth: int) -> None:
        """A block pointer that is read, or moved and read, or written."""
        shape, rank = self.shape, len(self.shape)
        dtype = self.pick(*TYPES)
        sizes = [self.number(1, 12 if rank == 3 else 40) for _ in shape]
        order = list(range(rank))
        if rank == 2 and self.chance(30):
            order.reverse()
        strides, step = [0] * rank, self.pick(1, 1, 1, 2)
        for d in reversed(order):
            strides[d] = step
            step *= sizes[d] + self.number(0, 4)
        corner = [self.number(-3, 12) for _ in shape]
        by = [self.pick(0, 1, 2) for _ in shape]
        reach = [max(n, corner[d] + 2 * by[d] + shape[d]) * strides[d] for d, n in enumerate(sizes)]
        inside = sum(reach) < self.span
        checked = [d for d in range(rank) if not inside or corner[d] < 0 or self.chance(60)]
        write = self.chance(25)
        base = f"buffer_{(dtype := self.pick(I32, F32))} + pid * {self.span}" if write else ""
        block = self._name("block")
        made = f"{base or f'in_{dtype}'}, {sizes}, {strides}, {corner}, {list(shape)}, {order}"
        self.line(f"{block} = tl.make_block_ptr({made})")
        if write:
            value = self.expression(1, shape)
            self.line(f"tl.store({block}, {value.text}, boundary_check={checked})")
            return
        padding = self.pick('""', '"zero"', '"nan"') if dtype.is_float else '""'
        load = f"tl.load({block}, boundary_check={checked}, padding_option={padding})"
        v = self.let(Expr(load, shape, dtype))
        if depth and self.chance(50):
            self.line(f"for {self._name('i')} in range(2):")
            self.line(f"    {block} = tl.advance({block}, {by})")
            self.line(f"    {v.text} = ({v.text} + {load}).to(tl.{NAMES[dtype]})")

    # --- multiplication -------------------------------------------------------------------

    def _accumulator(self, dtype: DType) -> str:
        found = [v for v in self.vars if v.shape == self.shape and v.dtype == dtype]
        return f", {self.pick(*found).text}" if found and self.chance(40) else ""

    def _dot(self, depth: int) -> None:
        *batch, rows, columns = self.shape
        if columns == 32 and not batch and self.chance(60):
            k = 8 * self.number(1, 8)
            made = f"tl.int4_tensor(packed, dot_f32, None, [{k}, 64], {k}, [{k}, 32])"
            b, source = f"{made}.load([0, 32 * pid])", self.pick("dot_bf16", "in_i8")
        else:
            k = self.pick(1, 3, 4, 8, 16, *(17, 32, 64) * (self.span != LONG))
            source = self.pick("dot_bf16", "dot_f16", "dot_f32", "dot_f64")
            b = self._operand(source, (*batch, k, columns))
        a = self._operand(source, (*batch, rows, k))
        dtype = {"in_i8": I32, "dot_f64": F64}.get(source, F32)
        self.let(Expr(f"tl.dot({a}, {b}{self._accumulator(dtype)})", self.shape, dtype))

    def _operand(self, source: str, shape: Shape, more: Iterable[str] = ()) -> str:
        """A tile of numbers that are multiplied, as they lie in memory, turned, or computed."""
        dtype = DTYPES[source.split("_")[1]]
        kind = self.pick("plain", "plain", "computed", "turned", "columns", "masked", "block")
        start = " + ".join((str(self.number(0, 9)), *more))
        if kind == "block" and not more and len(shape) == 2:
            return self._block(source, shape, dtype).text
        turned = (*shape[:-2], shape[-1], shape[-2])
        text, _ = self.offsets(turned if kind == "turned" else shape, dense=True)
        if kind == "columns" and len(shape) == 2:
            rows, columns = shape
            text = f"tl.arange(0, {rows})[:, None] + tl.arange(0, {columns})[None, :] * {rows}"
        mask = f", mask=({text}) < n" if kind == "masked" else ""
        loaded = f"tl.load({source} + ({text} + {start}){mask})"
        if kind == "turned":
            return f"tl.trans({loaded})" if self.chance(50) else f"{loaded}.T"
        return f"({loaded} + pid).to(tl.{NAMES[dtype]})" if kind == "computed" else loaded

    def _matmul(self, depth: int) -> None:
        """A loop over blocks of k that carries the sums."""
        rows, columns = self.shape
        long = self.span == LONG
        k = self.pick(2, 8, 16, *(17, 32) * (not long))
        source = self.pick("dot_bf16", "dot_f16", "dot_f32", "dot_f64")
        dtype = F64 if source == "dot_f64" else F32
        zeros = f"tl.zeros({list(self.shape)}, tl.{NAMES[dtype]})"
        acc = self.let(Expr(zeros, self.shape, dtype)).text
        index = self._name("i")
        a = self._operand(source, (rows, k), [f"{index} * 8"])
        b = self._operand(source, (k, columns), [f"{index} * {columns}"])
        bounds = self.pick("0, 3", "pid, 4", *(["0, n, 16"] * (not long)))
        self.line(f"for {index} in range({bounds}):")
        if self.chance(30):
            by = self.pick("0.5", "real", f"tl.sum({acc}, 1)[:, None]")
            self.line(f"    {acc} = ({acc} * {by}).to(tl.{NAMES[dtype]})")
        sums = f"tl.dot({a}, {b}, {acc})" if self.chance(70) else f"{acc} + tl.dot({a}, {b})"
        self.line(f"    {acc} = {sums}")


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    return Generator(draw).program()
