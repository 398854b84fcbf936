"""Chooses for every dot the instructions that carry it out.

Before:  %p = dot lhs=%a rhs=%q lowering= : tile<32x32xf32>
After:   %p = dot lhs=%a rhs=%q lowering=amx : tile<32x32xf32>       (target amx)

A transposed right operand is taken from where it comes, as its rows are what is packed:

Before:  %t = permute operand=%k order=(1, 0) : tile<64x128xbf16>
         %p = dot lhs=%a rhs=%t lowering= : tile<32x128xf32>
After:   %p = dot lhs=%a rhs=%k lowering=amx transposed=True : tile<32x128xf32>

"amx"         TDPBF16PS, TDPBSSD or, with AMX-FP16, TDPFP16PS on tile registers: bf16, int8 or fp16
              times int4, any number of rows
"vdpbf16ps"   bf16 pairs in vector registers: bf16 times int4
"vpdpbusd"    quads of bytes in vector registers: int8 times int4
"vpmaddubsw"  the same in two steps, on CPUs without VNNI
"fma"         fp32 fused multiply-add: everything else

The function's tile configuration grows by what its AMX dots need (amxq.passes.tile_registers).
"""

from __future__ import annotations

import dataclasses
import linecache

from amxq.errors import CompilationError
from amxq.ir import ops
from amxq.ir.ops import Block, Function, Value
from amxq.ir.types import BF16, F16, I8, U4, element_of, scalar_of, shape_of
from amxq.passes.affine import Definitions
from amxq.passes.tile_registers import shapes, united, width_of_tile
from amxq.passes.tiles import CHUNK

AMX_MIN_ROWS = 1
"""From how many rows on tile registers win. Emerald Rapids, 2026-11-30: VDPBF16PS takes 2 cycles
there, so 64 packed bytes for one row cost 13.5 cycles with it, 7 with TDPBF16PS (docs/amx.md)."""
AMX_MIN_ROWS_INT8 = 3
"""The same of int8 times int4, for which VPDPBUSD takes weights from registers: up to two rows take
8 to 17 % less time from caches, and as much from memory (2026-12-01)."""


def choose_dot(function: Function, target: str) -> None:
    defs = {r: op for op in ops.walk(function.body) for r in op.results}
    _block(function.body, target, function, defs)


def _block(block: Block, target: str, function: Function, defs: Definitions) -> None:
    for i, op in enumerate(block.ops):
        for region in ops.regions(op):
            _block(region, target, function, defs)
        if isinstance(op, ops.Dot):
            lowering, source = _lowering(op, target, function), defs.get(op.rhs)
            block.ops[i] = op = dataclasses.replace(op, lowering=lowering)
            if isinstance(source, ops.Permute) and source.order == (1, 0) and _square(source):
                block.ops[i] = dataclasses.replace(op, rhs=source.operand, transposed=True)
            elif element_of(op.rhs.type) == BF16 and (pairs := _pairs(op, defs)) is not None:
                block.ops[i] = dataclasses.replace(op, rhs=pairs, packed=True)


def _pairs(op: ops.Dot, defs: Definitions) -> Value | None:
    """The tile [N/16, 16·K] that rhs [K, N] is unpacked from, if it is: see docs/language.md."""
    if len(shape_of(op.rhs.type)) != 2:
        return None
    depth, columns = shape_of(op.rhs.type)
    panels, value = columns // 16, op.rhs
    for order, shape in (
        ((1, 0, 2), (depth, panels, 16)),
        ((0, 2, 1), (panels * depth // 2, 2, 16)),
    ):
        reshape = defs.get(value)
        permute = defs.get(reshape.operand) if isinstance(reshape, ops.Reshape) else None
        if not isinstance(permute, ops.Permute) or permute.order != order:
            return None
        if shape_of(permute.result.type) != shape:
            return None
        value = permute.operand
    last = defs.get(value)
    if isinstance(last, ops.Reshape) and shape_of(last.operand.type) == (panels, 16 * depth):
        return last.operand
    return None


def _square(op: ops.Permute) -> bool:
    """Whether a tile consists of squares of 16 elements, that vectors can transpose."""
    return all(size % 16 == 0 for size in shape_of(op.result.type))


def _lowering(op: ops.Dot, target: str, function: Function) -> str:
    target, _, feature = target.partition("+")
    int8 = element_of(op.lhs.type) == I8
    fp16 = element_of(op.lhs.type) == F16 and element_of(op.rhs.type) == U4
    if fp16 and feature != "fp16":
        raise _refused(
            op,
            "fp16 times int4 runs on CPUs with AMX-FP16 only",
            'compile for "amx+fp16", or multiply the two bf16 numbers that it is the sum of',
        )
    if target not in ("amx", "avx512_bf16") or not _in_pairs(op):
        return "vpmaddubsw" if int8 else "fma"
    rows, depth = shape_of(op.lhs.type)[-2:]
    whole = element_of(op.rhs.type) == U4 or (depth % 4 == 0 and (rows <= CHUNK or rows % 16 == 0))
    small = int8 and element_of(op.rhs.type) == U4
    if target == "amx" and rows >= (AMX_MIN_ROWS_INT8 if small else AMX_MIN_ROWS) and whole:
        width = width_of_tile(depth * scalar_of(op.lhs.type).bytes)
        tiles = united(function.tiles, shapes(rows, width))
        if tiles is not None:
            function.tiles = tiles
            return "amx"
    if fp16:
        raise _refused(
            op,
            f"this dot of {rows} rows would need a ninth tile register beside the kernel's others",
            "use the same number of rows and depth in every dot of fp16 and int4",
        )
    return "vpdpbusd" if int8 else "vdpbf16ps"


def _in_pairs(op: ops.Dot) -> bool:
    """Whether the instructions for pairs of bf16, or for int8, can carry out a dot."""
    if element_of(op.rhs.type) == U4:
        return True
    depth, columns = shape_of(op.rhs.type)[-2:]
    return element_of(op.rhs.type) == BF16 and depth % 2 == 0 and columns % 16 == 0


def _refused(op: ops.Dot, message: str, hint: str) -> CompilationError:
    at = op.loc
    line = linecache.getline(at.file, at.line).rstrip("\n")
    return CompilationError(
        message, file=at.file, line=at.line, column=at.column, source_line=line, hint=hint
    )
