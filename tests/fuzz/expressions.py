"""Random expressions of the kernel language, as source text: what :mod:`tests.fuzz.programs` makes
its statements of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from amxq.frontend.semantic import Semantic
from amxq.frontend.shapes import summed
from amxq.ir.types import BF16, DTYPES, F16, F32, F64, I1, I32, U4, DType

SPAN, LONG = 4096, 1 << 16
"""Elements that one program of the grid reads and writes, of ordinary and of long tiles."""
PROGRAMS = 2
OUTPUTS = 4
TYPES = [t for t in DTYPES.values() if t != U4]
NAMES = {t: {"bool": "int1", "uint": f"uint{t.bits}"}.get(t.kind, f"int{t.bits}") for t in TYPES}
NAMES |= {BF16: "bfloat16", F16: "float16", F32: "float32", F64: "float64"}
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65)
MATH = ("exp", "exp2", "log", "log2", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expr:
    """A piece of source with the type of its value."""

    text: str
    shape: Shape
    dtype: DType


@dataclass(frozen=True)
class Program:
    """Source of a module with ``kernel``, and the types of what it stores, output by output."""

    source: str
    outputs: tuple[DType, ...]
    data: str
    seed: int
    span: int = SPAN


PARAMETERS = [
    *(f"in_{t}" for t in TYPES),
    "dot_bf16",
    "dot_f16",
    "dot_f32",
    "dot_f64",
    "packed",
    "buffer_i32",
    "buffer_f32",
    *(f"out_{i}" for i in range(OUTPUTS)),
    "n",
    "big",
    "real",
]


def fits(shape: Shape, limit: Shape) -> bool:
    """Whether ``shape`` broadcasts to ``limit``."""
    padded = (1,) * (len(limit) - len(shape)) + shape
    return len(shape) <= len(limit) and all(a in (1, b) for a, b in zip(padded, limit))


def joined(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    return tuple(map(max, a, b))


def vectors(shape: Shape) -> int:
    """How many vectors of 16 lanes, or scalars, a tile is made of: what compiling it costs."""
    return math.prod(shape) // math.gcd(shape[-1], 16)


class Expressions:
    def __init__(self, draw: Callable[..., Any]) -> None:
        self._draw = draw
        self.lines: list[str] = []
        self.indent = "    "
        self.vars: list[Expr] = []
        self.count = 0
        self.shape: Shape = ()
        self.span = SPAN

    # --- choices --------------------------------------------------------------------------

    def pick(self, *options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def chance(self, percent: int) -> bool:
        return self.number(0, 99) >= 100 - percent  # shrinks towards no

    # --- names ----------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def let(self, value: Expr) -> Expr:
        """A new name for a value."""
        self.count += 1
        name = Expr(f"v{self.count}", value.shape, value.dtype)
        self.line(f"{name.text} = {value.text}")
        self.vars.append(name)
        return name

    # --- memory ---------------------------------------------------------------------------

    def offsets(self, shape: Shape, dense: bool = False) -> tuple[str, int]:
        """Distinct places for a tile's elements, and how many places they span."""
        order = list(range(len(shape)))
        if not dense and self.chance(15):
            order.reverse()
        wide = dense or self.span == LONG
        stride = 1 if wide or self.chance(70) else self.pick(2, 3)
        parts = []
        for d in reversed(order):
            index = ", ".join(":" if i == d else "None" for i in range(len(shape)))
            tile = f"tl.arange(0, {shape[d]})" + (f"[{index}]" if len(shape) > 1 else "")
            parts.append(tile if stride == 1 else f"{tile} * {stride}")
            stride *= shape[d]
        return " + ".join(parts), stride

    def load(self, shape: Shape, dtype: DType | None = None) -> Expr:
        dtype = dtype or self.pick(*TYPES)
        source = f"in_{dtype}"
        if len(shape) == 2 and self.chance(20):
            return self.let(self._block(source, shape, dtype))
        if self.chance(15):
            index = self.expression(1, shape, integer=True)
            return self.let(
                Expr(
                    f"tl.load({source} + (({index.text}).to(tl.int32) & {self.span - 1}))",
                    index.shape,
                    dtype,
                )
            )
        text, span = self.offsets(shape)
        start = self.number(0, 63)
        places = f"{source} + (pid * 1024 + {start} + {text})"
        if not self.chance(40):
            return self.let(Expr(f"tl.load({places})", shape, dtype))
        other = f", other={self.constant(dtype)}" if self.chance(50) else ""
        mask = f"({text}) < n" if self.chance(60) else self.condition(shape)
        return self.let(Expr(f"tl.load({places}, mask={mask}{other})", shape, dtype))

    def _block(self, source: str, shape: Shape, dtype: DType) -> Expr:
        rows, columns = self.number(1, 40), self.number(1, 60)
        stride = columns + self.number(0, 4)
        sizes = f"[{rows}, {columns}], [{stride}, 1], {list(shape)}"
        made = f"tl.make_tensor_descriptor({source}, {sizes})"
        first, second = self.number(-3, 12), self.number(-3, 12)
        return Expr(f"{made}.load([{first}, {second} + pid])", shape, dtype)

    def store(self, i: int, tile: Expr) -> DType:
        text, _ = self.offsets(tile.shape)
        mask = f", mask=({text}) < n + 30" if self.chance(30) else ""
        self.line(f"tl.store(out_{i} + (pid * {self.span} + {text}), {tile.text}{mask})")
        return tile.dtype

    def through_memory(self, depth: int) -> None:
        """Stores to a buffer and loads from it again, perhaps at other places."""
        dtype = self.pick(I32, F32)
        tile = self.expression(1, self.shape)
        one, _ = self.offsets(self.shape)
        other, _ = self.offsets(self.shape)
        buffer = f"buffer_{dtype} + (pid * {self.span} + "
        loaded = self.let(Expr(f"tl.load({buffer}{other}))", self.shape, dtype))
        self.line(f"tl.store({buffer}{one}), {tile.text})")
        if self.chance(50):
            self.let(Expr(f"tl.load({buffer}{other})) + {loaded.text}", self.shape, dtype))

    # --- expressions ----------------------------------------------------------------------

    def constant(self, dtype: DType) -> str:
        if dtype == I1:
            return str(self.number(0, 1))
        if dtype.is_float:
            return str(self.pick(0.5, 1.0, 2.0, -1.5, 3, 0.1, 1e4, -0.0))
        low = -(1 << dtype.bits - 1) if dtype.is_signed else 0
        high = low + (1 << dtype.bits) - 1
        return str(self.pick(1, 2, 3, 7, low, high, self.number(max(low, -99), min(high, 99))))

    def leaf(self, limit: Shape, integer: bool = False) -> Expr:
        found = [
            v for v in self.vars if fits(v.shape, limit) and not (integer and v.dtype.is_float)
        ]
        return self.pick(*reversed(found)) if found else Expr("n", (), I32)

    def expression(self, depth: int, limit: Shape, integer: bool = False) -> Expr:
        """A value whose shape broadcasts to ``limit``."""
        if depth == 0 or self.chance(10):
            return self.leaf(limit, integer)
        if integer:
            x = self.expression(depth - 1, limit, integer)
            y = self.leaf(limit, integer)
            return self.binary(x, y, self.pick("+", "-", "*", "&", "|", "^", "//", "%"))
        kind = self.pick(
            "binary", "binary", "binary", "constant", "unary", "cast", "cast", "extreme", "where",
            "compare", "math", "fma", "reduce", "rearranged", "bits", "clamped",
            "scan",
        )  # fmt: skip
        return getattr(self, f"_{kind}")(depth - 1, limit)

    def binary(self, x: Expr, y: Expr, operator: str) -> Expr:
        dtype = Semantic.promote(x.dtype, y.dtype)
        if dtype.is_float and operator in ("&", "|", "^", "<<", ">>", "//", "%"):
            operator = "+"
        if operator in ("//", "%") and y.text == "0":
            operator = "-"
        if operator == "/" and not dtype.is_float:
            dtype = F32
        elif dtype == I1 and operator not in ("&", "|", "^"):
            dtype = I32
        return Expr(f"({x.text} {operator} {y.text})", joined(x.shape, y.shape), dtype)

    def _operator(self) -> str:
        return self.pick("+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>")

    def _binary(self, depth: int, limit: Shape) -> Expr:
        x, y = self.expression(depth, limit), self.expression(depth, limit)
        return self.binary(x, y, self._operator())

    def _constant(self, depth: int, limit: Shape) -> Expr:
        x = self.expression(depth, limit)
        y = Expr(self.constant(x.dtype), (), x.dtype if x.dtype != I1 else I32)
        return self.binary(x, y, self._operator()) if self.chance(60) else self.binary(y, x, "-")

    def _unary(self, depth: int, limit: Shape) -> Expr:
        x = self.expression(depth, limit)
        if not x.dtype.is_float and self.chance(40):
            return Expr(f"(~{x.text})", x.shape, x.dtype)
        kind = self.pick("-", "tl.abs", "tl.sqrt", "tl.floor", "tl.ceil")
        if kind.startswith("tl.") and kind != "tl.abs" and not x.dtype.is_float:
            kind = "-"
        return Expr(f"{kind}({x.text})", x.shape, I32 if x.dtype == I1 else x.dtype)

    def _cast(self, depth: int, limit: Shape) -> Expr:
        x, to = self.expression(depth, limit), self.pick(*TYPES)
        return Expr(f"({x.text}).to(tl.{NAMES[to]})", x.shape, to)

    def _bits(self, depth: int, limit: Shape) -> Expr:
        x = self.expression(depth, limit)
        if x.dtype == I1:
            return x
        to = self.pick(*(t for t in TYPES if t.bits == x.dtype.bits))
        return Expr(f"({x.text}).to(tl.{NAMES[to]}, bitcast=True)", x.shape, to)

    def _clamped(self, depth: int, limit: Shape) -> Expr:
        x = self._float(self.expression(depth, limit))
        low, high = self.pick(-1.5, 0.0, 3), self.pick(4.0, 100)
        return Expr(f"tl.clamp({x.text}, {low}, {high})", x.shape, x.dtype)

    def _extreme(self, depth: int, limit: Shape) -> Expr:
        x, y = self.expression(depth, limit), self.expression(depth, limit)
        dtype = Semantic.promote(x.dtype, y.dtype)
        name = self.pick("maximum", "minimum")
        dtype = I32 if dtype == I1 else dtype
        return Expr(f"tl.{name}({x.text}, {y.text})", joined(x.shape, y.shape), dtype)

    def condition(self, limit: Shape) -> str:
        return self._compare(0, limit).text

    def _compare(self, depth: int, limit: Shape) -> Expr:
        x, y = self.expression(depth, limit), self.expression(depth, limit)
        sign = self.pick("<", "<=", "==", "!=", ">", ">=")
        return Expr(f"({x.text} {sign} {y.text})", joined(x.shape, y.shape), I1)

    def _where(self, depth: int, limit: Shape) -> Expr:
        c = self._compare(0, limit)
        x, y = self.expression(depth, limit), self.expression(depth, limit)
        shape = joined(c.shape, joined(x.shape, y.shape))
        text = f"tl.where({c.text}, {x.text}, {y.text})"
        return Expr(text, shape, Semantic.promote(x.dtype, y.dtype))

    def _float(self, x: Expr) -> Expr:
        return x if x.dtype.is_float else Expr(f"({x.text}).to(tl.float32)", x.shape, F32)

    def _math(self, depth: int, limit: Shape) -> Expr:
        x = self._float(self.expression(depth, limit))
        return Expr(f"tl.{self.pick(*MATH)}({x.text})", x.shape, x.dtype)

    def _fma(self, depth: int, limit: Shape) -> Expr:
        parts = [self._float(self.expression(depth if i == 0 else 0, limit)) for i in range(3)]
        dtype, shape = parts[0].dtype, parts[0].shape
        for part in parts[1:]:
            dtype, shape = Semantic.promote(dtype, part.dtype), joined(shape, part.shape)
        if dtype == F64 and self.span == LONG:
            return parts[0]  # the interpreter's fused float64 takes a second
        return Expr(f"tl.fma({', '.join(p.text for p in parts)})", shape, dtype)

    def _reduce(self, depth: int, limit: Shape) -> Expr:
        """Along one axis, which comes back with size 1."""
        x = self.expression(depth, limit)
        if not x.shape:
            return x
        kind = self.pick("sum", "max", "min", "argmax", "argmin")
        axis = self.number(-1, len(x.shape) - 1) % len(x.shape)
        dtype = I32 if kind.startswith("arg") else x.dtype
        if kind == "sum":
            dtype = summed(dtype)
        if self.chance(15):
            return Expr(f"tl.{kind}({x.text}, None)", (), dtype)
        if kind in ("max", "min") and self.chance(20):
            index = self.number(0, 1)
            made = f"tl.{kind}({x.text}, {axis}, return_indices=True, keep_dims=True)[{index}]"
            dtype = I32 if index else dtype
        else:
            made = f"tl.{kind}({x.text}, {axis}, keep_dims=True)"
        return Expr(made, tuple(1 if i == axis else n for i, n in enumerate(x.shape)), dtype)

    def _scan(self, depth: int, limit: Shape) -> Expr:
        """Running sums and products, and reductions by a function."""
        x = self.expression(depth, limit)
        if not x.shape or x.dtype == I1 or self.span == LONG:
            return x
        kind = self.pick("cumsum", "cumprod", "scan", "reduce", "pair")
        axis, reverse = self.number(-1, len(x.shape) - 1), self.chance(50)
        if kind.startswith("cum"):
            made = f"tl.{kind}({x.text}, {axis}, reverse={reverse})"
            return Expr(made, x.shape, summed(x.dtype))
        function = self.pick("added", "larger")
        if kind == "scan":
            made = f"tl.associative_scan({x.text}, {axis}, {function}, reverse={reverse})"
            return Expr(made, x.shape, x.dtype)
        shape = tuple(1 if i == axis % len(x.shape) else n for i, n in enumerate(x.shape))
        if kind == "reduce":
            return Expr(f"tl.reduce({x.text}, {axis}, {function}, keep_dims=True)", shape, x.dtype)
        number = f"({self.leaf((), integer=True).text}).to(tl.int32)"
        other = f"tl.zeros({list(x.shape)}, tl.int32) + {number}"
        made = f"tl.reduce(({x.text}, {other}), {axis}, both, keep_dims=True)[{self.number(0, 1)}]"
        return Expr(made, shape, I32 if made.endswith("[1]") else x.dtype)

    def _rearranged(self, depth: int, limit: Shape) -> Expr:
        if self.chance(50) and limit == self.shape:
            return self._moved(limit)
        x = self.expression(depth, limit)
        if len(x.shape) < 2:
            return x
        if self.chance(50):
            return Expr(f"tl.trans(tl.trans({x.text}))", x.shape, x.dtype)
        return Expr(f"tl.reshape(tl.ravel({x.text}), {list(x.shape)})", x.shape, x.dtype)

    def _moved(self, shape: Shape) -> Expr:
        """A tile that is loaded in another shape, or with its dimensions in another order."""
        dtype = self.pick(*TYPES)
        if len(shape) > 1 and self.chance(70):
            order = list(range(len(shape)))
            order[0], order[-1] = (
                (order[-1], order[0]) if self.chance(60) else (order[0], order[-1])
            )
            if len(shape) == 3 and self.chance(50):
                order = [order[1], order[2], order[0]]
            source = [0] * len(shape)
            for i, axis in enumerate(order):
                source[axis] = shape[i]
            text, _ = self.offsets(tuple(source))
            return Expr(f"tl.permute(tl.load(in_{dtype} + ({text})), {order})", shape, dtype)
        count = math.prod(shape)
        rows = self.pick(*(d for d in (1, 2, 3, 4, 5, 8, 16) if count % d == 0))
        text, _ = self.offsets((rows, count // rows))
        return Expr(f"tl.load(in_{dtype} + ({text})).reshape({list(shape)})", shape, dtype)
