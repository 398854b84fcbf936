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
from amxq.passes.tiles import Row

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def pipelined(
    v: Vectorizer,
    prepare: Callable[[Row], None],
    chunk: int,
    chunks: int,
    body: Callable[[Row], None],
) -> None:
    """Calls ``body`` for all rows, chunk by chunk, each while the next one is produced."""
    prepare(Row(None, 0))
    for i in range(chunks):
        consume, produce = Block(), Block()
        with v.b.inside(consume):
            for r in range(chunk):
                body(Row(None, i * chunk + r))
        if i + 1 < chunks:
            with v.b.inside(produce):
                prepare(Row(None, (i + 1) * chunk))
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
