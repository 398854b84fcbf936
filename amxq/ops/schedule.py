"""Which kernel runs a linear of given sizes, and on which grid.

All choices are made here: rows and depth of a block by target, and how the grid walks through
rows and panels. They never change a result's exactness, only its speed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from amxq.ir.types import I32, U8, PointerType, Type
from amxq.ops.activations import split_count
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers
from amxq.runtime.targets import AMX_FP16, has_amx_fp16

PANEL = 32
MAX_BLOCK_K = 128
BAND_BYTES = 1 << 20
"""Activations of one band: they stay in the L2 cache (1 to 2 MB a core) while panels stream by."""


@dataclass(frozen=True)
class Plan:
    """How one linear runs.

    Attributes:
        kernel: the compiled kernel.
        prepare: the kernel that runs before: for "int8" the one that quantises activations, for
            "bf16" the one that sums them, None where no zero points need that.
        splits: bf16 numbers that one activation is the sum of.
        block_k: depth of a block; divides the group size.
        grid: (row blocks of a band, panels, bands).
        int8: whether the kernel takes activations as :meth:`quantised` gives them.
    """

    kernel: Launchable
    prepare: Launchable | None
    splits: int
    block_k: int
    grid: tuple[int, int, int]
    int8: bool = False

    def quantised(self, x: int, M: int, K: int) -> tuple[tuple[int, ...], object]:
        """x [M, K], at an address, in int8: what the kernel takes for it, and what must live as
        long."""
        assert self.int8 and self.prepare is not None
        stride, blocks = int8_stride(K), K // self.block_k
        values = torch.empty((M, stride), dtype=torch.int8)
        scaling = torch.empty((2, blocks, M), dtype=torch.float32)
        first = scaling.data_ptr()
        addresses = (values.data_ptr(), first, first + 4 * blocks * M)
        self.prepare.launch((M, 1, 1), (x, *addresses, M, K, stride))
        return (*addresses, stride), (values, scaling)


@functools.lru_cache(maxsize=4096)
def plan(
    M: int,
    K: int,
    N: int,
    group: int,
    target: str,
    scales: torch.dtype,
    zeros: bool,
    bias: torch.dtype | None,
    y: torch.dtype,
    precision: str,
) -> Plan:
    """The plan for x [M, K] and a weight [N, K] with a scale per ``group`` of K; K is padded to
    whole groups. ``y`` is the dtype of x and of the result."""
    block_m, block_k, splits = block_rows(M, target, zeros), block_depth(group), split_count(y)
    grid = grid_of(M, K, N, block_m)
    if precision == "int8":
        kernel = int4_linear_int8(target, scales, zeros, bias, y, block_m, block_k)
        return Plan(kernel, quantize_int8(target, y, block_k), 1, block_k, grid, int8=True)
    if target == "amx" and y == torch.float16 and has_amx_fp16():
        target, splits = AMX_FP16.name, 1
    kernel = int4_linear(target, scales, zeros, bias, y, splits, block_m, block_k)
    sums = block_sums(target, splits, block_k, _parts_type(y, splits)) if zeros else None
    return Plan(kernel, sums, splits, block_k, grid)


def int8_stride(K: int) -> int:
    """Bytes from row to row of quantised activations: an odd number of cache lines, so that rows
    do not compete for the same ones of the cache."""
    return 64 * (-(-K // 64) | 1)


def grid_of(M: int, K: int, N: int, block_m: int) -> tuple[int, int, int]:
    """(row blocks of a band, panels, bands)."""
    blocks = -(-M // block_m)
    bands = max(1, min(blocks, M * K * 2 // BAND_BYTES))
    row_blocks = -(-blocks // bands)
    return row_blocks, -(-N // PANEL), -(-blocks // row_blocks)


def block_rows(M: int, target: str, zeros: bool) -> int:
    """Rows that one program computes."""
    if target == "amx":
        if M >= 32:
            # with zero points 128 rows take more than a second to compile
            return 128 if M >= 128 and not zeros else 64 if M >= 64 else 32
        return M  # one or two tiles of rows: a panel is dequantised once
    return -(-M // -(-M // 8))  # at most 8 rows, all blocks as full as possible


@functools.cache
def block_depth(group: int) -> int:
    """The largest divisor of the group up to MAX_BLOCK_K, whole AMX tiles (32) preferred."""
    divisors = [d for d in range(8, min(group, MAX_BLOCK_K) + 1, 8) if group % d == 0]
    return max(divisors, key=lambda d: (d % 32 == 0, d))


@functools.cache
def int4_linear(
    target: str,
    scales: torch.dtype,
    zeros: bool,
    bias: torch.dtype | None,
    y: torch.dtype,
    splits: int,
    block_m: int,
    block_k: int,
) -> Launchable:
    """The compiled kernel for these types; launch it with the arguments in its order."""
    from amxq_kernels.int4_linear import int4_linear as kernel

    weight, result, constants = _types(scales, zeros, bias, y)
    types = {"x": pointers()[_parts_type(y, splits)]} | weight
    if zeros:
        types["block_sums"] = pointers()[torch.float32]
    else:
        constants["block_sums"] = None
    constants |= {"SPLITS": splits, "BLOCK_M": block_m, "BLOCK_K": block_k}
    return kernel.compile(types | result, constants, target)


@functools.cache
def int4_linear_int8(
    target: str,
    scales: torch.dtype,
    zeros: bool,
    bias: torch.dtype | None,
    y: torch.dtype,
    block_m: int,
    block_k: int,
) -> Launchable:
    """The same for activations that :func:`quantize_int8` has quantised."""
    from amxq_kernels.int4_linear_int8 import int4_linear_int8 as kernel

    weight, result, constants = _types(scales, zeros, bias, y)
    table = pointers()
    types: dict[str, Type] = {
        "x": table[torch.int8],
        "x_scales": table[torch.float32],
        "x_offsets": table[torch.float32],
        "stride": I32,
    }
    constants |= {"BLOCK_M": block_m, "BLOCK_K": block_k}
    return kernel.compile(types | weight | result, constants, target)


def _parts_type(x: torch.dtype, splits: int) -> torch.dtype:
    """What kernels get for activations of this dtype: themselves, or bf16 numbers of that sum."""
    return x if splits == 1 else torch.bfloat16


def _types(
    scales: torch.dtype, zeros: bool, bias: torch.dtype | None, y: torch.dtype
) -> tuple[dict[str, Type], dict[str, Type], dict[str, Any]]:
    """Types of the weight's arguments, of the result's and the sizes, and what is None."""
    table = pointers()
    weight: dict[str, Type] = {"qweight": PointerType(U8), "scales": table[scales]}
    result: dict[str, Type] = {}
    constants: dict[str, Any] = {}
    if zeros:
        weight["zeros"] = PointerType(U8)
    else:
        constants["zeros"] = None
    if bias is not None:
        result["bias"] = table[bias]
    else:
        constants["bias"] = None
    result["y"] = table[y]
    sizes = dict.fromkeys(("M", "N", "K", "group_size", "row_blocks"), I32)
    return weight, result | sizes, constants


@functools.cache
def quantize_int8(target: str, x: torch.dtype, block_k: int) -> Launchable:
    """The kernel that quantises activations of this dtype."""
    from amxq_kernels.int4_linear_int8 import quantize_int8 as kernel

    table = pointers()
    types: dict[str, Type] = {"x": table[x], "values": table[torch.int8]}
    types |= dict.fromkeys(("scales", "offsets"), table[torch.float32])
    types |= dict.fromkeys(("M", "K", "stride"), I32)
    return kernel.compile(types, {"BLOCK_K": block_k}, target)


@functools.cache
def block_sums(
    target: str, splits: int, block_k: int, x: torch.dtype = torch.bfloat16
) -> Launchable:
    """The kernel that sums activations over blocks of K, for asymmetric weights."""
    from amxq_kernels.int4_linear import block_sums as kernel

    table = pointers()
    types: dict[str, Type] = {
        "x": table[x],
        "sums": table[torch.float32],
        "M": I32,
        "K": I32,
    }
    return kernel.compile(types, {"SPLITS": splits, "BLOCK_K": block_k}, target)
