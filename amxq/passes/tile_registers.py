"""Which tile registers a dot uses, and how the eight of them are configured.

A dot [M, K] · [K, 32] is carried out in chunks of at most 32 rows: 2 columns of C tiles for one or
two tiles of rows, one A tile for each of those, two B tiles. So it takes at most 4 + 2 + 2
registers, and nothing is ever spilled:

    M          chunks                                     tiles of C and A
    1 … 16     M                                          M rows
    17 … 32    16 + (M - 16)                              16 rows, M - 16 rows
    33 …       16 + 16, …, the last one 16 + 16 or 16     16 rows

The last chunk of a large M ends at row M: rows that it shares with the chunk before are computed
twice, which costs nothing, as a multiplication takes 16 cycles whatever its rows (docs/amx.md).

A kernel has one configuration, loaded once a thread and launch. Dots of different shapes share it:
registers of the same shape are the same, and a dot that would need a ninth one uses vectors.
"""

from __future__ import annotations

from collections import Counter

from amxq.passes.tiles import CHUNK

Shape = tuple[int, int]
"""Rows and bytes a row of a tile register."""

REGISTERS = 8
MAX_ROWS = 16


def width_of_tile(row_bytes: int) -> int:
    """Bytes of a row of an A tile, for a dot whose a has ``row_bytes``: 64, or less where 64 does
    not divide them."""
    return next(w for w in (64, 32, 16, 8) if row_bytes % w == 0)


def row_tiles(rows: int) -> tuple[int, ...]:
    """Rows of the one or two tiles of rows of a chunk."""
    rows = min(rows, CHUNK)
    return (rows,) if rows <= MAX_ROWS else (MAX_ROWS, rows - MAX_ROWS)


def shapes(rows: int, width: int) -> tuple[Shape, ...]:
    """The registers that a dot of ``rows`` rows needs, whose A tiles have ``width`` bytes a row:
    C row by row, then A, then B."""
    tiles = row_tiles(rows)
    c = [(r, 64) for r in tiles for _ in range(2)]
    a = [(r, width) for r in tiles]
    return (*c, *a, (width // 4, 64), (width // 4, 64))


def united(config: tuple[Shape, ...], more: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
    """``config`` with registers for ``more`` too, or None where eight are not enough."""
    missing = Counter(more) - Counter(config)
    whole = (*config, *missing.elements())
    return whole if len(whole) <= REGISTERS else None


def numbers(config: tuple[Shape, ...], wanted: tuple[Shape, ...]) -> list[int]:
    """Different registers of these shapes, in their order."""
    free = list(range(len(config)))
    found = []
    for shape in wanted:
        number = next(n for n in free if config[n] == shape)
        free.remove(number)
        found.append(number)
    return found
