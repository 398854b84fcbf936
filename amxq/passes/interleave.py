"""Independent work, merged instruction by instruction.

A large result of a dot is produced in chunks of rows; chunk i + 1 is multiplied while chunk i is
scaled and accumulated:

    tiles of chunk 0
    tiles of chunk 1   ║ fp32 work on chunk 0
    …
                         fp32 work on chunk n - 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from amxq.ir.ops import Block, Op
from amxq.passes.tiles import CHUNK, Index

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def pipelined(
    v: Vectorizer,
    prepare: Callable[[Index], None],
    rows: int,
    body: Callable[[Index], None],
) -> None:
    """Calls ``body`` for all rows, chunk by chunk, each while the next one is produced."""
    prepare(Index(None, 0))
    for first in range(0, rows, CHUNK):
        consume, produce = Block(), Block()
        following = min(first + CHUNK, rows)
        with v.b.inside(consume):
            for r in range(first, following):
                body(Index(None, r))
        if following < rows:
            with v.b.inside(produce):
                prepare(Index(None, following))
        v.b.block.ops += interleaved(produce.ops, consume.ops)


def interleaved(first: list[Op], second: list[Op]) -> list[Op]:
    """Two independent sequences merged evenly, each in its own order."""
    if not first:
        return second
    merged: list[Op] = []
    done = 0
    for i, op in enumerate(first):
        upto = (i + 1) * len(second) // len(first)
        merged += [op, *second[done:upto]]
        done = upto
    return merged
