"""Which kernels run a layer of experts: row blocks by target, and the compiled kernels.

As in :mod:`amxq.ops.schedule`, choices made here change speed only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from amxq.ir.types import F32, I32, U8, PointerType, Type
from amxq.ops import schedule
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers

MOST_ROWS = 1024
"""Experts with more rows are cut into blocks like experts with this many."""
GATHER_ROWS = 8
"""Larger blocks have their rows gathered before, once, instead of by each panel's program: those
of 32 and 48 rows took 39 to 55 % more time, of 8 about 8 % (Emerald Rapids, 2026-12-01)."""
COPY_WORDS = 256
COMBINE_COLUMNS = 128
BAND_BYTES = 8 << 20
"""Second products of one band of columns: they stay in caches until they are added up, and in
memory that the allocator keeps (fresh pages took 15 of 90 ms; Emerald Rapids, 2026-11-30)."""


@dataclass(frozen=True)
class RowBlocks:
    """How the rows of an expert are cut into blocks.

    Attributes:
        sizes: rows of a block, one size for each class.
        class_of: int32 [MOST_ROWS + 1]: number of rows → class.
        sizes_tensor: int32, ``sizes`` for the kernel.
    """

    sizes: tuple[int, ...]
    class_of: torch.Tensor
    sizes_tensor: torch.Tensor


@functools.cache
def row_blocks(target: str, int8: bool) -> RowBlocks:
    """The classes of a target.

    Vector targets pay for every row of a block, so blocks have at most 8 rows, as full as possible.
    On AMX dequantising outweighs some rows of padding: few blocks for each expert.
    """
    amx = target == "amx"
    sizes = tuple(schedule.TILE_CYCLES[int8]) if amx else tuple(range(1, 9))

    def size_of(rows: int) -> int:
        if amx:
            return schedule.cheapest(rows, int8)
        evenly = -(-rows // -(-rows // sizes[-1]))
        return next(size for size in sizes if size >= evenly)

    classes = [0, *(sizes.index(size_of(rows)) for rows in range(1, MOST_ROWS + 1))]
    return RowBlocks(
        sizes,
        torch.tensor(classes, dtype=torch.int32, device="cpu"),
        torch.tensor(sizes, dtype=torch.int32, device="cpu"),
    )


def band_columns(rows: int, columns: int) -> int:
    """Columns of one band of the second products, a multiple of COMBINE_COLUMNS."""
    bands = -(-rows * columns * 4 // BAND_BYTES)
    return -(-columns // (bands * COMBINE_COLUMNS)) * COMBINE_COLUMNS


class Matrix(NamedTuple):
    """What a kernel has to know of a stack of matrices.

    Attributes:
        scales, zeros, bias: dtype of the scales, whether there are zero points, dtype of a bias.
        weights: dtype of the routing weights that multiply the product.
        int8: whether activations are int8 instead of bf16.
        group_size: elements of K that share a scale.
    """

    scales: torch.dtype
    zeros: bool
    bias: torch.dtype | None
    weights: torch.dtype | None
    int8: bool
    group_size: int

    @property
    def block_k(self) -> int:
        """Depth of a block of K."""
        return schedule.block_depth(self.group_size)


@functools.cache
def sort_by_expert(target: str, ids: torch.dtype, mapped: bool, classes: int) -> Launchable:
    """The kernel that sorts assignments; launch each with the arguments in its order."""
    from amxq_kernels.fused_moe import sort_by_expert as kernel

    table = pointers()
    types: dict[str, Type] = {"ids": table[ids]}
    constants: dict[str, Any] = {"CLASSES": classes}
    _optional(types, constants, expert_map=torch.int32 if mapped else None)
    for name in ("classes", "sizes", "found", "next_row", "blocks", "slots"):
        types[name] = table[torch.int32]
    for name in ("tokens", "owners", "rows"):
        types[name] = table[torch.int32]
    types |= dict.fromkeys(("count", "bound", "experts", "topk", "most"), I32)
    return kernel.compile(types, constants, target)


@functools.cache
def gather_rows(target: str, int8: bool) -> Launchable:
    """The kernel that copies rows in the order of their experts, with their scales for int8."""
    from amxq_kernels.fused_moe import gather_rows as kernel

    table = pointers()
    types: dict[str, Type] = {"x": table[torch.int32]}
    constants: dict[str, Any] = {"BLOCK": COPY_WORDS}
    factors = torch.float32 if int8 else None
    _optional(types, constants, x_scales=factors, x_offsets=factors)
    types |= {"tokens": table[torch.int32], "y": table[torch.int32]}
    _optional(types, constants, y_scales=factors, y_offsets=factors)
    types |= dict.fromkeys(("M", "words", "scales"), I32)
    return kernel.compile(types, constants, target)


@functools.cache
def gate_up(
    target: str,
    matrix: Matrix,
    by_token: bool,
    activation: str,
    limited: bool,
    splits: int,
    block_m: int,
) -> Launchable:
    """The first matrices of experts with their activation."""
    from amxq_kernels.fused_moe import gate_up as kernel

    constants: dict[str, Any] = {
        "ACTIVATION": activation,
        "LIMITED": limited,
        "SPLITS": splits,
        "BLOCK_M": block_m,
        "BLOCK_K": matrix.block_k,
    }
    types = _operand_types(constants, matrix)
    _optional(types, constants, weights=torch.float32 if matrix.weights else None)
    types["h"] = pointers()[torch.bfloat16]
    types |= dict.fromkeys(("blocks", "slots"), pointers()[torch.int32])
    _optional(types, constants, tokens=torch.int32 if by_token else None)
    numbers = ("first_block", "M", "stride", "total", "N", "columns", "K", "group_size")
    types |= dict.fromkeys(numbers, I32)
    types |= {"limit": F32, "alpha": F32}
    return kernel.compile(types, constants, target)


@functools.cache
def expert_linear(target: str, matrix: Matrix, splits: int, block_m: int) -> Launchable:
    """The second matrices of experts."""
    from amxq_kernels.fused_moe import expert_linear as kernel

    constants: dict[str, Any] = {"SPLITS": splits, "BLOCK_M": block_m, "BLOCK_K": matrix.block_k}
    types = _operand_types(constants, matrix)
    types |= {"y": pointers()[torch.float32], "blocks": pointers()[torch.int32]}
    numbers = ("first_block", "M", "stride", "N", "K", "group_size", "first_column", "columns")
    types |= dict.fromkeys(numbers, I32)
    return kernel.compile(types, constants, target)


@functools.cache
def sum_experts(target: str, matrix: Matrix, splits: int, out: torch.dtype) -> Launchable:
    """The second matrices of the experts of one token, and their weighted sum."""
    from amxq_kernels.fused_moe import sum_experts as kernel

    constants: dict[str, Any] = {"SPLITS": splits, "BLOCK_K": matrix.block_k}
    types = _operand_types(constants, matrix)
    _optional(types, constants, weights=matrix.weights)
    types["y"] = pointers()[out]
    types |= dict.fromkeys(("blocks", "slots"), pointers()[torch.int32])
    types |= dict.fromkeys(("M", "stride", "N", "K", "group_size"), I32)
    types["factor"] = F32
    return kernel.compile(types, constants, target)


@functools.cache
def combine(target: str, weights: torch.dtype | None, out: torch.dtype) -> Launchable:
    """The weighted sum over the experts of a token."""
    from amxq_kernels.fused_moe import combine as kernel

    table = pointers()
    types: dict[str, Type] = {"y": table[torch.float32]}
    constants: dict[str, Any] = {"BLOCK": COMBINE_COLUMNS}
    _optional(types, constants, weights=weights)
    types |= {"rows": table[torch.int32], "out": table[out]}
    types |= {"N": I32, "stride": I32, "topk": I32, "factor": F32}
    return kernel.compile(types, constants, target)


def _operand_types(constants: dict[str, Any], matrix: Matrix) -> dict[str, Type]:
    """The arguments that both matrix kernels begin with; absent ones become constants."""
    table = pointers()
    types: dict[str, Type] = {
        "x": table[torch.int8 if matrix.int8 else torch.bfloat16],
        "qweight": PointerType(U8),
        "scales": table[matrix.scales],
    }
    _optional(
        types,
        constants,
        zeros=torch.uint8 if matrix.zeros else None,
        x_scales=torch.float32 if matrix.int8 else None,
        sums=torch.float32 if matrix.int8 or matrix.zeros else None,
        bias=matrix.bias,
    )
    return types


def _optional(
    types: dict[str, Type], constants: dict[str, Any], **given: torch.dtype | None
) -> None:
    for name, dtype in given.items():
        if dtype is None:
            constants[name] = None
        else:
            types[name] = pointers()[dtype]
