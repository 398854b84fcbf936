"""How vectorisation holds a tile: as a function from (row, column) to a vector.

A tile [.., C] has R rows (the leading dimensions, flattened) of C / lanes vectors. Small tiles
are computed where they are defined and live in registers; large ones are computed where they
are consumed, part by part, or live in scratch memory. All answer ``tile.at(row, column)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from amxq.ir.ops import Value
from amxq.ir.types import DType, PointerType, TileType, Type, VectorType

REGISTER_VECTORS = 24
"""Tiles of at most this many vectors are kept in registers, of which there are 32 (AVX-512) or
16 (AVX2); LLVM spills what does not fit at a moment. Rows of more vectors are loops."""

CHUNK = 32
"""Rows of a large tile that are produced and consumed together: two rows of AMX tiles."""

UNROLL = 16
"""Vectors of a large tile that one iteration of a loop handles at most."""


@dataclass(frozen=True)
class Index:
    """A position along rows or columns: ``base`` (i64, known at run time, or None) plus a
    constant. Columns count elements and are multiples of the tile's lanes."""

    base: Value | None
    offset: int


FIRST = Index(None, 0)


@dataclass(frozen=True)
class Place:
    """Where a tile lies in memory: its first element, and elements from row to row."""

    pointer: Value
    stride: Value

    @property
    def element(self) -> DType:
        assert isinstance(self.pointer.type, PointerType)
        return self.pointer.type.element


At = Callable[[Index, Index], Value]


@dataclass(frozen=True)
class Tile:
    """A tile during vectorisation.

    Attributes:
        at: (row, column) → vector; a scalar where ``lanes`` is 1.
        element: (row, column) → one element as a scalar, for any position, where that takes
            scalar arithmetic only (offsets, masks); else None.
        place: set if it lies in memory, row by row.
        static: True if ``at`` takes constant positions only.
        prepare: called with the first row of a chunk of CHUNK rows before ``at`` is asked for
            rows of that chunk; None if nothing has to be done.
        late: True if ``at`` reads memory of the user or emits work when called, so that the tile
            must be consumed, or copied, before the memory behind it changes.
    """

    type: TileType
    lanes: int
    at: At
    element: At | None = None
    place: Place | None = None
    static: bool = False
    prepare: Callable[[Index], None] | None = None
    late: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.type.shape[:-1])

    @property
    def columns(self) -> int:
        """Vectors per row."""
        return self.type.shape[-1] // self.lanes

    @property
    def anywhere(self) -> bool:
        """Whether single elements can be had at positions known at run time."""
        return self.element is not None or (self.lanes == 1 and not self.static)

    @property
    def bytes(self) -> int:
        return math.prod(self.type.shape) * self.dtype.bytes

    @property
    def dtype(self) -> DType:
        assert isinstance(self.type.element, DType)
        return self.type.element

    @property
    def small(self) -> bool:
        return self.rows * self.columns <= REGISTER_VECTORS

    @property
    def chunk(self) -> int:
        """Rows that one iteration of a loop over rows handles; all of them where there is no
        loop. A divisor of ``rows``."""
        if self.small:
            return self.rows
        most = max(1, UNROLL // self.columns)
        return next(c for c in range(min(most, self.rows), 0, -1) if self.rows % c == 0)

    def part_type(self, element: DType | None = None) -> Type:
        """The type of ``at``'s result, optionally with another element."""
        element = element or self.dtype
        return element if self.lanes == 1 else VectorType(self.lanes, element)


def registers(type_: TileType, lanes: int, parts: list[Value], element: At | None = None) -> Tile:
    """A tile whose vectors are known, row-major."""
    columns = type_.shape[-1] // lanes

    def at(row: Index, column: Index) -> Value:
        if row.base is None and column.base is None:
            return parts[row.offset * columns + column.offset // lanes]
        assert element is not None and lanes == 1, "a tile in registers has constant positions"
        return element(row, column)

    return Tile(type_, lanes, at, element, static=element is None or lanes > 1)


def positions(tile: Tile) -> list[tuple[Index, Index]]:
    """Every (row, column) of a small tile's vectors, row-major."""
    return [
        (Index(None, r), Index(None, c * tile.lanes))
        for r in range(tile.rows)
        for c in range(tile.columns)
    ]
