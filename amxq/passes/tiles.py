"""How vectorisation holds a tile: as a function from (row, vector number) to a vector.

A tile [.., C] has R rows (the leading dimensions, flattened) of C / lanes vectors. Small tiles
are computed where they are defined and live in registers; large ones are computed where they
are consumed, row by row, or live in scratch memory. Both answer ``tile.at(row, column)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from amxq.ir.ops import Value
from amxq.ir.types import DType, PointerType, TileType, Type, VectorType

REGISTER_VECTORS = 24
"""Tiles of at most this many vectors are kept in registers, of which there are 32 (AVX-512) or
16 (AVX2); LLVM spills what does not fit at a moment."""

CHUNK = 32
"""Rows of a large tile that are produced and consumed together: two rows of AMX tiles."""


@dataclass(frozen=True)
class Row:
    """A row index: ``base`` (i64, known at run time, or None) plus a constant."""

    base: Value | None
    offset: int


@dataclass(frozen=True)
class Place:
    """Where a tile lies in memory: its first element, and elements from row to row."""

    pointer: Value
    stride: Value

    @property
    def element(self) -> DType:
        assert isinstance(self.pointer.type, PointerType)
        return self.pointer.type.element


@dataclass(frozen=True)
class Tile:
    """A tile during vectorisation.

    Attributes:
        at: (row, vector number) → vector; a scalar where ``lanes`` is 1.
        place: set if it lies in memory, row by row.
        prepare: called with the first row of a chunk of CHUNK rows before ``at`` is asked for
            rows of that chunk; None if nothing has to be done.
        late: True if ``at`` reads memory or emits work when called, so that the tile must be
            consumed, or copied, before the memory behind it changes.
    """

    type: TileType
    lanes: int
    at: Callable[[Row, int], Value]
    place: Place | None = None
    prepare: Callable[[Row], None] | None = None
    late: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.type.shape[:-1])

    @property
    def columns(self) -> int:
        """Vectors per row."""
        return self.type.shape[-1] // self.lanes

    @property
    def dtype(self) -> DType:
        assert isinstance(self.type.element, DType)
        return self.type.element

    @property
    def small(self) -> bool:
        return self.rows * self.columns <= REGISTER_VECTORS

    def part_type(self, element: DType | None = None) -> Type:
        """The type of ``at``'s result, optionally with another element."""
        element = element or self.dtype
        return element if self.lanes == 1 else VectorType(self.lanes, element)


def registers(type_: TileType, lanes: int, parts: list[Value]) -> Tile:
    """A tile whose vectors are known, row-major."""
    columns = type_.shape[-1] // lanes

    def at(row: Row, column: int) -> Value:
        assert row.base is None, "a tile in registers has constant rows only"
        return parts[row.offset * columns + column]

    return Tile(type_, lanes, at)


def all_rows(tile: Tile) -> list[tuple[Row, int]]:
    """Every (row, vector number) of a small tile, row-major."""
    return [(Row(None, r), c) for r in range(tile.rows) for c in range(tile.columns)]
