"""Chooses for every dot the instructions that carry it out.

Before:  %p = dot lhs=%a rhs=%q lowering= : tile<32x32xf32>
After:   %p = dot lhs=%a rhs=%q lowering=amx : tile<32x32xf32>       (target amx)

"amx"        TDPBF16PS on tile registers: bf16 times int4, rows of a at most 16 or a multiple of 32
"vdpbf16ps"  bf16 pairs in vector registers: bf16 times int4
"fma"        fp32 fused multiply-add: everything else
"""

from __future__ import annotations

import dataclasses

from amxq.ir import ops
from amxq.ir.ops import Block, Function
from amxq.ir.types import U4, element_of, shape_of
from amxq.passes.tiles import CHUNK

AMX_MIN_ROWS = 1
"""From how many rows on tile registers win. Emerald Rapids, 2026-11-30: VDPBF16PS takes 2 cycles
there, so 64 packed bytes for one row cost 13.5 cycles with it, 7 with TDPBF16PS (docs/amx.md)."""


def choose_dot(function: Function, target: str) -> None:
    _block(function.body, target, set())


def _block(block: Block, target: str, configured: set[tuple[int, int]]) -> None:
    for i, op in enumerate(block.ops):
        for region in ops.regions(op):
            _block(region, target, configured)
        if isinstance(op, ops.Dot):
            block.ops[i] = dataclasses.replace(op, lowering=_lowering(op, target, configured))


def _lowering(op: ops.Dot, target: str, configured: set[tuple[int, int]]) -> str:
    if element_of(op.rhs.type) != U4 or target not in ("amx", "avx512_bf16"):
        return "fma"
    rows, depth = shape_of(op.lhs.type)
    shape = amx_shape(rows, depth)
    if target == "amx" and shape is not None and rows >= AMX_MIN_ROWS:
        # one tile configuration per kernel: a dot of another shape uses vectors
        if not configured or shape in configured:
            configured.add(shape)
            return "amx"
    return "vdpbf16ps"


def amx_shape(rows: int, depth: int) -> tuple[int, int] | None:
    """(rows of a and c tiles, k per tile) for a dot of ``rows`` x ``depth``, or None."""
    k = next(k for k in (32, 16, 8) if depth % k == 0)
    if rows <= 16:
        return rows, k
    return (16, k) if rows % CHUNK == 0 else None
