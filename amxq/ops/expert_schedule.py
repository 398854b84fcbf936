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

MOST_ROWS = 256
"""Experts with more rows are cut into blocks like experts with this many."""
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
def row_blocks(target: str) -> RowBlocks:
    """The classes of a target.

    Vector targets pay for every row of a block, so blocks have at most 8 rows, as full as possible.
    On AMX dequantising outweighs some rows of padding: few sizes, and few blocks for each expert.
    """
    sizes = (1, 2, 4, 8, 16, 32, 48, 64) if target == "amx" else tuple(range(1, 9))

    def size_of(rows: int) -> int:
        evenly = -(-rows // -(-rows // sizes[-1]))
        return next(size for size in sizes if size >= evenly)

    classes = [0, *(sizes.index(size_of(rows)) for rows in range(1, MOST_ROWS + 1))]
    return RowBlocks(
        sizes,
        torch.tensor(classes, dtype=torch.int32),
        torch.tensor(sizes, dtype=torch.int32),
    )


def band_columns(rows: int, columns: int) -> int:
    """Columns of one band of the second products, a multiple of COMBINE_COLUMNS."""
    bands = -(-rows * columns * 4 // BAND_BYTES)
    return -(-columns // (bands * COMBINE_COLUMNS)) * COMBINE_COLUMNS


class Matrix(NamedTuple):
    """What a kernel has to know of a stack of matrices.

    Attributes:
        scales, zeros, bias: dtype of the scales, whether there are zero points, dtype of a bias.
        weighted: whether the routing weights multiply the product.
        int8: whether activations are int8 instead of bf16.
        group_size: elements of K that share a scale.
    """

    scales: torch.dtype
    zeros: bool
    bias: torch.dtype | None
    weighted: bool
    int8: bool
    group_size: int

    @property
    def block_k(self) -> int:
        """Depth of a block of K."""
        return schedule.block_depth(self.group_size)


@functools.cache
def sort_by_expert(target: str, ids: torch.dtype, mapped: bool) -> Launchable:
    """The kernel that sorts assignments; launch each with the arguments in its order."""
    from amxq_kernels.fused_moe import sort_by_expert as kernel

    table = pointers()
    types: dict[str, Type] = {"ids": table[ids]}
    constants: dict[str, Any] = {"CLASSES": len(row_blocks(target).sizes)}
    _optional(types, constants, expert_map=torch.int32 if mapped else None)
    for name in ("classes", "sizes", "found", "next_row", "blocks", "slots", "tokens", "rows"):
        types[name] = table[torch.int32]
    types |= dict.fromkeys(("count", "bound", "experts", "topk", "most"), I32)
    return kernel.compile(types, constants, target)


@functools.cache
def gate_up(
    target: str,
    matrix: Matrix,
    in_place: bool,
    activation: str,
    limited: bool,
    splits: int,
    block_m: int,
) -> Launchable:
    """The first matrices of experts with their activation."""
    from amxq_kernels.fused_moe import gate_up as kernel

    constants: dict[str, Any] = {
        "IN_PLACE": in_place,
        "ACTIVATION": activation,
        "LIMITED": limited,
        "SPLITS": splits,
        "BLOCK_M": block_m,
        "BLOCK_K": matrix.block_k,
    }
    types = _operand_types(constants, matrix)
    types["h"] = pointers()[torch.bfloat16]
    types |= dict.fromkeys(("blocks", "slots", "tokens"), pointers()[torch.int32])
    types |= dict.fromkeys(("first_block", "M", "stride", "total", "N", "K", "group_size"), I32)
    types |= {"limit": F32, "alpha": F32}
    return kernel.compile(types, constants, target)


@functools.cache
def expert_linear(target: str, matrix: Matrix, splits: int, block_m: int) -> Launchable:
    """One matrix of experts."""
    from amxq_kernels.fused_moe import expert_linear as kernel

    constants: dict[str, Any] = {"SPLITS": splits, "BLOCK_M": block_m, "BLOCK_K": matrix.block_k}
    types = _operand_types(constants, matrix)
    types["y"] = pointers()[torch.float32]
    types |= dict.fromkeys(("blocks", "slots"), pointers()[torch.int32])
    numbers = ("first_block", "M", "stride", "N", "K", "group_size", "first_column", "columns")
    types |= dict.fromkeys(numbers, I32)
    return kernel.compile(types, constants, target)


@functools.cache
def activate(
    target: str, interleaved: bool, activation: str, limited: bool, splits: int
) -> Launchable:
    """The activation alone, where gate and up cannot be paired panel by panel."""
    from amxq_kernels.fused_moe import activate as kernel

    table = pointers()
    types: dict[str, Type] = {"y": table[torch.float32], "h": table[torch.bfloat16]}
    types |= {"total": I32, "N": I32, "limit": F32, "alpha": F32}
    constants = {
        "INTERLEAVED": interleaved,
        "ACTIVATION": activation,
        "LIMITED": limited,
        "SPLITS": splits,
    }
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
        weights=torch.float32 if matrix.weighted else None,
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
