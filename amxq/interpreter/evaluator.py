"""A builder whose operations are carried out at once: what each operation of tile-IR means.

The values it hands out are :class:`Evaluated`: a type, and the numbers of that type as an array.
Pointers are byte offsets into the :class:`Memory` of the argument that they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from amxq.interpreter import arithmetic
from amxq.interpreter.arithmetic import HELD, Array
from amxq.interpreter.memory import Memory
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Op, Value
from amxq.ir.types import (
    BF16,
    I8,
    U4,
    U8,
    DType,
    PointerType,
    TileType,
    Type,
    element_of,
    scalar_of,
    shape_of,
)

_OF_ELEMENTS = (ops.Constant, ops.Splat, *hw.POINTWISE)
_Op = TypeVar("_Op", bound=Op)


class Evaluated(Value):
    """A value whose numbers are known.

    Attributes:
        array: of the type's shape; a scalar's has no dimensions.
        memory: what a pointer points into, None for numbers.
    """

    __slots__ = ("array", "memory")

    def __init__(self, type_: Type, array: Array, memory: Memory | None = None) -> None:
        super().__init__(type_)
        self.array, self.memory = array, memory

    @classmethod
    def pointer(cls, type_: PointerType, memory: Memory) -> Evaluated:
        """The address of the first element."""
        return cls(type_, np.asarray(0, np.int64), memory)


class Beyond(Exception):
    """A combine_fn does what a compiled one could not."""


class Evaluator(Builder):
    """One program of the grid.

    Attributes:
        element: inside of a combine_fn the shape of what it is called with, else None.
    """

    element: tuple[int, ...] | None = None

    def __init__(self, grid: tuple[int, int, int]) -> None:
        super().__init__(Block())
        self.grid = grid
        self.program = (0, 0, 0)

    def emit(self, cls: type[_Op], *types: Type, **fields: Any) -> _Op:
        if self.element is not None and not (
            issubclass(cls, _OF_ELEMENTS) and {*map(shape_of, types)} <= {(), self.element}
        ):
            raise Beyond
        op = cls(results=tuple(Evaluated(t, _NOTHING) for t in types), loc=self.loc, **fields)
        with np.errstate(all="ignore"):
            result = getattr(self, f"on_{op.name}")(op)
        for value in op.results:
            assert isinstance(value, Evaluated)
            value.array = np.asarray(result)
            if isinstance(element_of(value.type), PointerType):
                (value.memory,) = {m for m in map(_memory, ops.operands(op)) if m is not None}
            assert value.array.shape == shape_of(value.type), op
        return op

    def branch_or_loop(self) -> None:
        """One that is decided at run time begins."""
        if self.element is not None:
            raise Beyond

    def known(self, value: Value) -> int | float | None:
        """Nothing: numbers at hand are not constants of the program."""
        return None

    def combine(
        self,
        kind: str,
        tiles: Sequence[Value],
        axis: int,
        reverse: bool,
        function: Callable[..., Sequence[Value]],
    ) -> tuple[Value, ...]:
        """Takes a slice at a time, as a tile of its own."""
        self.branch_or_loop()
        shape = shape_of(tiles[0].type)
        rest = (*shape[:axis], *shape[axis + 1 :])
        types = [scalar_of(x.type) for x in tiles]
        state: list[Value] = []
        states: list[list[Array]] = [[] for _ in tiles]
        for i in reversed(range(shape[axis])) if reverse else range(shape[axis]):
            new: list[Value] = [
                Evaluated(TileType(rest or (1,), t), _a(x).take(i, axis).reshape(rest or (1,)))
                for x, t in zip(tiles, types)
            ]
            self.element = rest or (1,)
            try:
                state = list(function(*state, *new)) if state else new
            finally:
                self.element = None
            for kept, value in zip(states, state):
                kept.append(_a(value).reshape(rest))
        if kind == "reduce":
            return tuple(Evaluated(_tile(rest, t), kept[-1]) for kept, t in zip(states, types))
        stacked = [np.stack(kept[::-1] if reverse else kept, axis) for kept in states]
        return tuple(Evaluated(_tile(shape, t), x) for x, t in zip(stacked, types))

    # --- values ---------------------------------------------------------------------------

    def on_constant(self, op: ops.Constant) -> Array:
        element = scalar_of(op.result.type)
        number = np.asarray(op.value, np.float64 if element.is_float else HELD[element])
        if element == BF16:
            number = arithmetic.round_bf16(number.astype(np.float32))
        return np.broadcast_to(number.astype(HELD[element]), shape_of(op.result.type))

    def on_arange(self, op: ops.Arange) -> Array:
        return np.arange(op.start, op.start + shape_of(op.result.type)[0], dtype=np.int32)

    def on_program_id(self, op: ops.ProgramId) -> Array:
        return np.asarray(self.program[op.axis], np.int32)

    def on_num_programs(self, op: ops.NumPrograms) -> Array:
        return np.asarray(self.grid[op.axis], np.int32)

    def on_multiple_of(self, op: ops.MultipleOf) -> Array:
        return _a(op.operand)

    # --- element-wise -----------------------------------------------------------------------

    def on_binary(self, op: ops.Binary) -> Array:
        element = scalar_of(op.result.type)
        return arithmetic.computed(element, arithmetic.BINARY[op.kind], _a(op.lhs), _a(op.rhs))

    def on_compare(self, op: ops.Compare) -> Array:
        return np.asarray(arithmetic.COMPARE[op.kind](_a(op.lhs), _a(op.rhs)))

    def on_unary(self, op: ops.Unary) -> Array:
        return arithmetic.unary(op.kind, _a(op.operand), scalar_of(op.result.type))

    def on_fma(self, op: hw.Fma) -> Array:
        return arithmetic.computed(
            scalar_of(op.result.type), arithmetic.fma, _a(op.a), _a(op.b), _a(op.c)
        )

    def on_cast(self, op: ops.Cast) -> Array:
        return arithmetic.cast(
            _a(op.operand), scalar_of(op.operand.type), scalar_of(op.result.type)
        )

    def on_select(self, op: ops.Select) -> Array:
        return np.where(_a(op.condition), _a(op.then), _a(op.other))

    # --- shape ------------------------------------------------------------------------------

    def on_splat(self, op: ops.Splat) -> Array:
        return np.broadcast_to(_a(op.operand), shape_of(op.result.type))

    def on_broadcast(self, op: ops.Broadcast) -> Array:
        return np.broadcast_to(_a(op.operand), shape_of(op.result.type))

    def on_expand_dims(self, op: ops.ExpandDims) -> Array:
        return np.expand_dims(_a(op.operand), op.axis)

    def on_reduce(self, op: ops.Reduce) -> Array:
        """Sums of floats are added up in float64 and rounded once."""
        x = _a(op.operand)
        if op.kind != "add":
            return np.asarray((np.fmax if op.kind == "max" else np.fmin).reduce(x, axis=op.axis))
        wide = np.float64 if x.dtype.kind == "f" else x.dtype
        return np.asarray(x.sum(axis=op.axis, dtype=wide)).astype(x.dtype)

    def on_permute(self, op: ops.Permute) -> Array:
        return np.asarray(_a(op.operand).transpose(op.order))

    def on_reshape(self, op: ops.Reshape) -> Array:
        return np.asarray(_a(op.operand).reshape(shape_of(op.result.type)))

    def on_bitcast(self, op: hw.Bitcast) -> Array:
        source, to = scalar_of(op.operand.type), scalar_of(op.result.type)
        stored = np.ascontiguousarray(arithmetic.to_memory(_a(op.operand), source))
        bits = stored.reshape(-1).view(arithmetic.memory_type(to)).reshape(_a(op.operand).shape)
        return arithmetic.from_memory(bits, to)

    def on_dot(self, op: ops.Dot) -> Array:
        """Products and sums of floats in float64, rounded once to float32."""
        wide = np.int32 if scalar_of(op.lhs.type) == I8 else np.float64
        a: Array = _a(op.lhs).astype(wide)
        b: Array = _a(op.rhs).astype(wide)
        if scalar_of(op.rhs.type) == U4:
            if scalar_of(op.lhs.type) == I8:
                b = b.reshape(-1, 8, b.shape[1])[:, _INT4_ORDER].reshape(b.shape)
            else:
                b = b - 8
        total = a @ b
        if op.acc is not None:
            total = total + _a(op.acc)
        return total.astype(HELD[scalar_of(op.result.type)])

    def on_int4_order(self, op: ops.Int4Order) -> Array:
        x = _a(op.operand)
        eights: Array = x.reshape(-1, 8)[:, _INT4_ORDER]
        return np.asarray(eights.reshape(x.shape))

    # --- memory -----------------------------------------------------------------------------

    def on_addptr(self, op: ops.AddPtr) -> Array:
        element = element_of(op.pointer.type)
        assert isinstance(element, PointerType)
        return np.asarray(_a(op.pointer) + _a(op.offset) * element.element.bytes)

    def on_load(self, op: ops.Load) -> Array:
        mask = None if op.mask is None else _a(op.mask)
        loaded = _pointee(op.pointer).load(_a(op.pointer), scalar_of(op.result.type), mask)
        return loaded if mask is None or op.other is None else np.where(mask, loaded, _a(op.other))

    def on_store(self, op: ops.Store) -> None:
        mask = None if op.mask is None else _a(op.mask)
        _pointee(op.pointer).store(_a(op.pointer), _a(op.value), scalar_of(op.value.type), mask)

    def on_load_block(self, op: ops.LoadBlock) -> Array:
        places, mask = _block(op, shape_of(op.result.type))
        return _pointee(op.base).load(places, scalar_of(op.result.type), mask)

    def on_store_block(self, op: ops.StoreBlock) -> None:
        places, mask = _block(op, shape_of(op.value.type))
        _pointee(op.base).store(places, _a(op.value), scalar_of(op.value.type), mask)

    def on_atomic(self, op: ops.Atomic) -> Array:
        combine = _ATOMIC[op.kind]
        return self._replaced(op, lambda i, x: combine(x, _a(op.value)[i]))

    def on_compare_exchange(self, op: ops.CompareExchange) -> Array:
        def chosen(i: tuple[int, ...], x: Array) -> Any:
            same = x.tobytes() == np.asarray(_a(op.expected)[i]).tobytes()
            return _a(op.value)[i] if same else x

        return self._replaced(op, chosen)

    @staticmethod
    def _replaced(
        op: ops.Atomic | ops.CompareExchange, new: Callable[[tuple[int, ...], Array], Any]
    ) -> Array:
        """Replaces elements in memory one after another, as a place may occur several times;
        returns what was there before."""
        memory, element = _pointee(op.pointer), scalar_of(op.value.type)
        old = np.zeros_like(_a(op.value))
        for i in np.ndindex(old.shape):
            if isinstance(op, ops.Atomic) and op.mask is not None and not _a(op.mask)[i]:
                continue
            place = np.asarray(_a(op.pointer)[i])
            before = np.array(memory.load(place, element))
            memory.store(place, np.asarray(new(i, before), before.dtype), element)
            old[i] = before
        return old

    def on_prefetch(self, op: hw.Prefetch) -> None:
        """Changes nothing but the time that a read takes."""

    def on_print(self, op: ops.Print) -> None:
        place = ", ".join(map(str, self.program))
        for i in np.ndindex(shape_of(op.values[0].type) if op.values else ()):
            index = f" idx ({', '.join(map(str, i))})" if i else ""
            shown = " ".join(f"{_a(v)[i]:g}" for v in op.values)
            print(f"pid ({place}){index} {op.prefix} {shown}")

    def on_load_int4(self, op: ops.LoadInt4) -> Array:
        """16-bit words [K/8, 2, 32] a panel: nibble i of word 2·c + p of half h belongs to row
        2·i + p and column 16·h + c."""
        depth, width = shape_of(op.result.type)
        k, n, k_blocks = (int(_a(v)) for v in (op.k, op.n, op.k_blocks))
        panels = []
        for panel in range(n // 32, n // 32 + width // 32):
            first = int(_a(op.base)) + (panel * k_blocks + k // 8) * 128
            packed = _pointee(op.base).load(first + np.arange(depth * 16), U8)
            words = packed.view(np.uint16).reshape(depth // 8, 2, 16, 2)
            nibbles = words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
            panels.append(nibbles.transpose(0, 4, 3, 1, 2).reshape(depth, 32))
        return np.concatenate(panels, 1).astype(np.uint8)


def _tile(shape: tuple[int, ...], element: DType) -> Type:
    return TileType(shape, element) if shape else element


_NOTHING = np.empty(0)
_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exchange": lambda x, y: y,
}
_INT4_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def _a(value: Value) -> Array:
    assert isinstance(value, Evaluated)
    return value.array


def _memory(value: Value) -> Memory | None:
    assert isinstance(value, Evaluated)
    return value.memory


def _pointee(pointer: Value) -> Memory:
    memory = _memory(pointer)
    assert memory is not None
    return memory


def _block(op: ops.LoadBlock | ops.StoreBlock, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Byte offsets of a block's elements, and which of them may be accessed."""
    assert isinstance(op.base.type, PointerType)
    places = np.full(shape, _a(op.base), np.int64)
    mask = np.ones(shape, np.bool_)
    for d, extent in enumerate(shape):
        index = _a(op.offsets[d]) + np.arange(extent)
        index = index.reshape(-1, *[1] * (len(shape) - 1 - d))
        places = places + index * _a(op.strides[d]) * op.base.type.element.bytes
        if d in op.checked:
            mask = mask & (index >= 0) & (index < _a(op.bounds[d]))
    return places, mask
