"""Operations of tile-IR: immutable dataclasses with named operands, attributes and a location.

A field that holds a :class:`Value` (or a tuple of them) is an operand, a :class:`Block` is a
region, anything else is an attribute. Operations that give results build their ``Value``s with
:func:`build`, so that one operation object owns them.

The same arithmetic operations work on scalars, tiles and vectors: vectorisation changes types,
not names. Operations of the machine itself are in :mod:`amxq.ir.hardware`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from amxq.ir.types import Type


@dataclass(frozen=True)
class Location:
    """A place in a kernel's source: file, 1-based line, 0-based column."""

    file: str
    line: int
    column: int


UNKNOWN = Location("<unknown>", 0, 0)


class Value:
    """The result of one operation, or an argument of a block. Identity is what counts."""

    __slots__ = ("hint", "type")

    def __init__(self, type_: Type, hint: str = "") -> None:
        self.type = type_
        self.hint = hint

    def __repr__(self) -> str:
        return f"<Value {self.hint or hex(id(self))[-5:]} : {self.type}>"


@dataclass(eq=False)
class Block:
    """A list of operations with arguments; the last operation of a region's block is Yield."""

    args: tuple[Value, ...] = ()
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Op:
    """Base of all operations. ``effect`` says whether it may not be removed or moved."""

    results: tuple[Value, ...]
    loc: Location
    name: ClassVar[str] = "?"
    effect: ClassVar[bool] = False

    def __setattr__(self, name: str, value: object) -> None:
        """Fields are set once. ``dataclass(frozen=True)`` says the same, but takes 0.3 ms a class
        to set up, a quarter of a warm start altogether."""
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be changed: use replace")
        object.__setattr__(self, name, value)

    @property
    def result(self) -> Value:
        (value,) = self.results
        return value


_Op = TypeVar("_Op", bound=Op)


def build(cls: type[_Op], types: tuple[Type, ...], loc: Location, **fields: Any) -> _Op:
    """A new operation of class ``cls`` with fresh results of the given types."""
    return cls(results=tuple(Value(t) for t in types), loc=loc, **fields)


def operands(op: Op) -> Iterator[Value]:
    """The operation's own operands, in field order; not those of nested operations."""
    for name in _field_names(type(op)):
        value = getattr(op, name)
        if isinstance(value, Value):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Value))


def regions(op: Op) -> Iterator[Block]:
    for name in _field_names(type(op)):
        if isinstance(value := getattr(op, name), Block):
            yield value


def fields_of(op: Op) -> dict[str, Any]:
    """Name → value of every field but results and location."""
    return {n: getattr(op, n) for n in _field_names(type(op))}


_NAMES: dict[type[Op], tuple[str, ...]] = {}


def _field_names(cls: type[Op]) -> tuple[str, ...]:
    if cls not in _NAMES:
        names = tuple(f.name for f in dataclasses.fields(cls) if f.name not in ("results", "loc"))
        _NAMES[cls] = names
    return _NAMES[cls]


def walk(block: Block) -> Iterator[Op]:
    """Every operation in the block and in nested blocks, outer before inner."""
    for op in block.ops:
        yield op
        for region in regions(op):
            yield from walk(region)


def replace_operands(op: _Op, replace: Callable[[Value], Value]) -> _Op:
    """The operation with operands replaced (results kept); itself where nothing changes."""
    changed: dict[str, Any] = {}
    for name, value in fields_of(op).items():
        new = value
        if isinstance(value, Value):
            new = replace(value)
        elif isinstance(value, tuple):
            new = tuple(replace(v) if isinstance(v, Value) else v for v in value)
            new = value if all(a is b for a, b in zip(new, value)) else new
        if new is not value:
            changed[name] = new
    return dataclasses.replace(op, **changed) if changed else op


# --- values -----------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Constant(Op):
    """A number; for a tile or vector, the number in every element, or a tuple of lanes."""

    value: int | float | tuple[int, ...]
    name: ClassVar[str] = "constant"


@dataclass(eq=False, repr=False)
class Arange(Op):
    """start, start + 1, … as a tile of rank 1."""

    start: int
    name: ClassVar[str] = "arange"


@dataclass(eq=False, repr=False)
class ProgramId(Op):
    axis: int
    name: ClassVar[str] = "program_id"


@dataclass(eq=False, repr=False)
class NumPrograms(Op):
    axis: int
    name: ClassVar[str] = "num_programs"


@dataclass(eq=False, repr=False)
class MultipleOf(Op):
    """The operand, an integer that is known to be a multiple of ``by``."""

    operand: Value
    by: int
    name: ClassVar[str] = "multiple_of"


# --- element-wise -----------------------------------------------------------------------

BINARY = ("add", "sub", "mul", "div", "mod", "min", "max", "and", "or", "xor", "shl", "shr")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
MATH = ("exp", "exp2", "log", "log2", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos")
"""Elementary functions; the pass expand_math leaves none of them."""
UNARY = ("neg", "abs", "sqrt", "floor", "ceil", *MATH)


@dataclass(eq=False, repr=False)
class Binary(Op):
    """``kind`` of BINARY; both operands and the result have one type. Integer division and
    remainder truncate towards zero, as C and Triton do; float min and max return the number
    where one side is NaN. Shifts count modulo the number of bits."""

    kind: str
    lhs: Value
    rhs: Value
    name: ClassVar[str] = "binary"


@dataclass(eq=False, repr=False)
class Compare(Op):
    """``kind`` of COMPARE; operands of one type, result i1 of the same shape."""

    kind: str
    lhs: Value
    rhs: Value
    name: ClassVar[str] = "compare"


@dataclass(eq=False, repr=False)
class Unary(Op):
    kind: str
    operand: Value
    name: ClassVar[str] = "unary"


@dataclass(eq=False, repr=False)
class Cast(Op):
    """Number conversion, round to nearest even; float to integer truncates."""

    operand: Value
    name: ClassVar[str] = "cast"


@dataclass(eq=False, repr=False)
class Select(Op):
    condition: Value
    then: Value
    other: Value
    name: ClassVar[str] = "select"


# --- shape ------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Splat(Op):
    """One scalar in every element of a tile or vector."""

    operand: Value
    name: ClassVar[str] = "splat"


@dataclass(eq=False, repr=False)
class ExpandDims(Op):
    """Inserts a dimension of size 1 at ``axis``."""

    operand: Value
    axis: int
    name: ClassVar[str] = "expand_dims"


@dataclass(eq=False, repr=False)
class Broadcast(Op):
    """Repeats dimensions of size 1; rank stays."""

    operand: Value
    name: ClassVar[str] = "broadcast"


@dataclass(eq=False, repr=False)
class Permute(Op):
    """Dimension i of the result is dimension ``order[i]`` of the operand."""

    operand: Value
    order: tuple[int, ...]
    name: ClassVar[str] = "permute"


@dataclass(eq=False, repr=False)
class Reshape(Op):
    """The same elements, row-major, in another shape."""

    operand: Value
    name: ClassVar[str] = "reshape"


@dataclass(eq=False, repr=False)
class Reduce(Op):
    """``kind`` "add", "min" or "max" over one axis (which disappears)."""

    kind: str
    operand: Value
    axis: int
    name: ClassVar[str] = "reduce"


@dataclass(eq=False, repr=False)
class Combine(Op):
    """Combines the elements along one axis of tiles of one shape, from the first to the last, or
    from the last to the first: ``body`` takes what came of the elements so far and the next ones,
    one of each tile, and yields what comes of both. ``kind`` "scan" gives that for every element,
    "reduce" for all (the axis disappears)."""

    kind: str
    operands: tuple[Value, ...]
    axis: int
    reverse: bool
    body: Block
    name: ClassVar[str] = "combine"


# --- memory -----------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class AddPtr(Op):
    """A pointer moved by a number of elements; scalar or tile of pointers."""

    pointer: Value
    offset: Value
    name: ClassVar[str] = "addptr"


@dataclass(eq=False, repr=False)
class Load(Op):
    """Loads through a pointer or a tile of pointers; masked-off elements give ``other``."""

    pointer: Value
    mask: Value | None
    other: Value | None
    name: ClassVar[str] = "load"


@dataclass(eq=False, repr=False)
class Store(Op):
    pointer: Value
    value: Value
    mask: Value | None
    name: ClassVar[str] = "store"
    effect: ClassVar[bool] = True


ATOMIC = ("add", "min", "max", "and", "or", "xor", "exchange")


@dataclass(eq=False, repr=False)
class Atomic(Op):
    """Replaces each element in memory by ``kind`` of ATOMIC of it and of the value, in one step
    for all threads; the result is what was there before, undefined where masked off."""

    kind: str
    pointer: Value
    value: Value
    mask: Value | None
    name: ClassVar[str] = "atomic"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class CompareExchange(Op):
    """Replaces each element that equals ``expected`` by ``value``, in one step for all threads;
    the result is what was there before."""

    pointer: Value
    expected: Value
    value: Value
    name: ClassVar[str] = "compare_exchange"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Print(Op):
    """Writes a line to the standard output for each element: the program's place in the grid,
    the element's in the tile, ``prefix`` and the values. ``indices`` are the element's place
    after vectorisation, before it they are empty."""

    prefix: str
    indices: tuple[Value, ...]
    values: tuple[Value, ...]
    name: ClassVar[str] = "print"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class LoadBlock(Op):
    """Loads a tile of a strided array: element (i, j) lies at
    base + (offsets[0] + i)·strides[0] + (offsets[1] + j)·strides[1]; the last stride is 1.
    ``bounds`` are the array's sizes; dimensions listed in ``checked`` give 0 outside."""

    base: Value
    offsets: tuple[Value, ...]
    strides: tuple[Value, ...]
    bounds: tuple[Value, ...]
    checked: tuple[int, ...]
    name: ClassVar[str] = "load_block"


@dataclass(eq=False, repr=False)
class StoreBlock(Op):
    """The counterpart of LoadBlock; elements outside in a checked dimension are not written."""

    base: Value
    value: Value
    offsets: tuple[Value, ...]
    strides: tuple[Value, ...]
    bounds: tuple[Value, ...]
    checked: tuple[int, ...]
    name: ClassVar[str] = "store_block"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class LoadInt4(Op):
    """A tile [BLOCK_K, 32·p] of a packed INT4 weight: ``base`` points at the panels
    [N/32][k_blocks][2][64 bytes], ``k`` (multiple of 8) and ``n`` (of 32) at its corner."""

    base: Value
    k: Value
    n: Value
    k_blocks: Value
    name: ClassVar[str] = "load_int4"


@dataclass(eq=False, repr=False)
class Int4Order(Op):
    """Columns 0, 4, 1, 5, 2, 6, 3, 7 of every 8: the order in which bytes cut out of packed INT4
    words lie."""

    operand: Value
    name: ClassVar[str] = "int4_order"


@dataclass(eq=False, repr=False)
class Dot(Op):
    """lhs [M, K] · rhs [K, N] (+ acc), or batches of them, in fp32, in fp64 where both are f64, in
    int32 where lhs is i8. An int4 rhs counts as
    its integers minus 8 beside bf16; beside i8, whose columns are in Int4Order, as they are.
    ``lowering`` is "" until the pass choose_dot writes one of its names, which also looks through
    a transposition: then rhs is [N, K] and ``transposed``. Or through the unpacking of pairs: then
    rhs is [N/16, 16·K], for every two k those of 16 columns after one another, and ``packed``."""

    lhs: Value
    rhs: Value
    acc: Value | None
    lowering: str
    transposed: bool = False
    packed: bool = False
    name: ClassVar[str] = "dot"


# --- control ----------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class For(Op):
    """for i in range(lower, upper, step), step > 0; the body's arguments are i and the carried
    values, its Yield gives the next ones, the results are the last ones."""

    lower: Value
    upper: Value
    step: Value
    inits: tuple[Value, ...]
    body: Block
    name: ClassVar[str] = "for"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class While(Op):
    """while test: body. Both regions take the carried values; ``test`` yields an i1, ``body`` the
    next values, the results are the last ones."""

    inits: tuple[Value, ...]
    test: Block
    body: Block
    name: ClassVar[str] = "while"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class If(Op):
    """Both regions yield values of the results' types."""

    condition: Value
    then: Block
    other: Block
    name: ClassVar[str] = "if"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Yield(Op):
    values: tuple[Value, ...]
    name: ClassVar[str] = "yield"
    effect: ClassVar[bool] = True


@dataclass(eq=False)
class Function:
    """A kernel: parameters (scalars and pointers) and a body that ends with an empty Yield.

    Attributes:
        tiles: configured AMX tiles as (rows, bytes per row), () when none are used.
    """

    name: str
    params: tuple[Value, ...]
    body: Block
    tiles: tuple[tuple[int, int], ...] = ()
