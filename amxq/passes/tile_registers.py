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


def depth_of_tile(depth: int) -> int:
    """k of one tile step of a bf16 dot that deep: 32, or less where 32 does not divide it."""
    return next(k for k in (32, 16, 8) if depth % k == 0)


def row_tiles(rows: int) -> tuple[int, ...]:
    """Rows of the one or two tiles of rows of a chunk."""
    rows = min(rows, CHUNK)
    return (rows,) if rows <= MAX_ROWS else (MAX_ROWS, rows - MAX_ROWS)


def shapes(rows: int, k: int) -> tuple[Shape, ...]:
    """The registers that a bf16 dot of ``rows`` rows needs: C row by row, then A, then B."""
    tiles = row_tiles(rows)
    c = [(r, 64) for r in tiles for _ in range(2)]
    a = [(r, 2 * k) for r in tiles]
    return (*c, *a, (k // 2, 64), (k // 2, 64))


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
