"""Which kernel runs a linear of given sizes, and on which grid.

All choices are made here: rows and depth of a block by target, and how the grid walks through
rows and panels. They never change a result's exactness, only its speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from amxq.ir.types import I32, Type
from amxq.ops.activations import split_count
from amxq.runtime import cpu
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import pointers
from amxq.runtime.targets import AMX_FP16, has_amx_fp16

PANEL = 32
MAX_BLOCK_K = 128
TILE_CYCLES = {
    False: {1: 226, 2: 226, 4: 226, 8: 226, 16: 226, 24: 266, 32: 282, 48: 414, 64: 547},
    True: {1: 80, 2: 112, 4: 96, 8: 101, 16: 132, 24: 206, 32: 192, 48: 256, 64: 320, 128: 577},
}
"""The cost of a block on target amx, by whether activations are int8 and by its rows: cycles of its
busiest unit for 128 k and 32 columns, by the table of instructions (``amxq explain``, which a test
compares). Up to 16 rows that is dequantising. 128 rows in bf16 would be twice those of 64: the same
speed and twice the code."""
ROWS_IN_PLACE = 16
"""Blocks up to here take activations as they are: to copy them costs more than it gives."""

Launch = tuple[Launchable, tuple[int, int, int], tuple[Any, ...]]
"""A kernel, its grid and its arguments."""


class Operands(NamedTuple):
    """What a kernel takes beside the activations.

    Attributes:
        scales: dtype of the weight's scales.
        zeros: whether it has zero points.
        bias: its dtype, or None.
        residual: whether something of the result's shape and dtype is added.
        table: whether there are several weights side by side.
    """

    scales: torch.dtype
    zeros: bool
    bias: torch.dtype | None = None
    residual: bool = False
    table: bool = False


@dataclass(frozen=True)
class Plan:
    """How a linear, or something like it, runs.

    Attributes:
        kernel: the compiled kernel.
        prepare: the kernel that brings activations into the form that ``kernel`` takes, or None
            where they are in it already.
        splits: bf16 numbers that one activation is the sum of.
        block_k: depth of a block; divides the group size.
        grid: (row blocks of a band, panels, bands).
        rows: of prepared activations, whole blocks.
        int8: whether the kernel takes activations in int8.
        sums: whether it takes sums of bf16 activations.
    """

    kernel: Launchable
    prepare: Launchable | None
    splits: int
    block_k: int
    grid: tuple[int, int, int]
    rows: int
    int8: bool = False
    sums: bool = False

    def run(
        self,
        x: torch.Tensor,
        weight: Sequence[int],
        result: Sequence[int],
        sizes: tuple[int, int, int, int],
    ) -> None:
        """Prepares x, contiguous rows of K, as the kernel wants it, and launches: see
        :meth:`launches`."""
        launches, _memory = self.launches(x.data_ptr(), weight, result, sizes)
        for kernel, grid, arguments in launches:
            kernel.launch(grid, arguments)

    def launches(
        self,
        given: int,
        weight: Sequence[int],
        result: Sequence[int],
        sizes: tuple[int, int, int, int],
    ) -> tuple[list[Launch], list[torch.Tensor]]:
        """What has to be launched, and memory for prepared activations that it needs.

        Args:
            given: address of contiguous rows of K.
            weight, result: addresses that the kernel takes before and after what belongs to x.
            sizes: M, N, K and the group size.
        """
        M, N, K, group = sizes
        rows, stride, blocks = M, K, K // self.block_k
        x, extra = given, tuple[int, ...]()
        launches: list[Launch] = []
        memory: list[torch.Tensor] = []
        if self.prepare is not None:
            rows = self.rows
            if self.int8:
                stride = padded_stride(K, torch.int8)
                memory.append(torch.empty((rows, stride), dtype=torch.int8, device="cpu"))
                factors = torch.empty((2, blocks, rows), dtype=torch.float32, device="cpu")
                extra = factors.data_ptr(), factors.data_ptr() + 4 * blocks * rows
                memory.append(factors)
            else:
                stride = padded_stride(K, torch.bfloat16)
                shape = self.splits * rows, stride
                memory.append(torch.empty(shape, dtype=torch.bfloat16, device="cpu"))
                if self.sums:
                    factors = torch.empty((rows, blocks), dtype=torch.float32, device="cpu")
                    extra = (factors.data_ptr(),)
                    memory.append(factors)
            x = memory[0].data_ptr()
            launches.append((self.prepare, (rows, 1, 1), (given, x, *extra, M, K, stride)))
        numbers = M, rows, stride, N, K, group, self.grid[0]
        launches.append((self.kernel, self.grid, (x, *weight, *extra, *result, *numbers)))
        return launches, memory


@functools.lru_cache(maxsize=4096)
def plan(
    M: int,
    K: int,
    panels: int,
    group: int,
    target: str,
    operands: Operands,
    y: torch.dtype,
    precision: str,
) -> Plan:
    """The plan for x [M, K] and panels of weights with a scale per ``group`` of K; K is padded to
    whole groups. ``y`` is the dtype of x and of the result."""
    return plan_of(int4_linear, M, K, panels, group, target, operands, y, precision)


def plan_of(
    compiled: Callable[..., Launchable],
    M: int,
    K: int,
    panels: int,
    group: int,
    target: str,
    operands: Operands,
    y: torch.dtype,
    precision: str,
) -> Plan:
    """The same for another kernel that takes activations as int4_linear does; ``compiled`` has the
    arguments of :func:`int4_linear`."""
    int8, block_k = precision == "int8", block_depth(group)
    block_m = block_rows(M, target, int8)
    grid = grid_of(M, K, panels, block_m)
    rows = -(-M // block_m) * block_m
    if int8:
        kernel = compiled(target, operands, y, 0, block_m, block_k)
        return Plan(kernel, quantize_int8(target, y, block_k), 1, block_k, grid, rows, int8=True)
    splits = split_count(y)
    if target == "amx" and y == torch.float16 and has_amx_fp16():
        target, splits = AMX_FP16.name, 1
    kernel, zeros = compiled(target, operands, y, splits, block_m, block_k), operands.zeros
    if splits == 1 and not zeros and block_m <= ROWS_IN_PLACE:
        return Plan(kernel, None, splits, block_k, grid, M)
    prepare = prepare_bf16(target, splits, block_k, y, zeros)
    return Plan(kernel, prepare, splits, block_k, grid, rows, sums=zeros)


def padded_stride(K: int, dtype: torch.dtype) -> int:
    """From row to row of prepared activations: an odd number of cache lines, so that the rows of
    a tile do not compete for the same ones of the first-level cache."""
    return 64 * (-(-K * dtype.itemsize // 64) | 1) // dtype.itemsize


def grid_of(M: int, K: int, panels: int, block_m: int) -> tuple[int, int, int]:
    """(row blocks of a band, panels, bands)."""
    blocks = -(-M // block_m)
    bands = max(1, min(blocks, M * K * 2 // band_bytes()))
    row_blocks = -(-blocks // bands)
    return row_blocks, panels, -(-blocks // row_blocks)


@functools.cache
def band_bytes() -> int:
    """Activations of one band: they stay in half of a core's L2 cache while panels stream by."""
    return next((c.bytes // 2 for c in cpu.caches() if c.level == 2), 1 << 20)


def block_rows(M: int, target: str, int8: bool) -> int:
    """Rows that one program computes."""
    if target != "amx":
        return -(-M // -(-M // 8))  # at most 8 rows, all blocks as full as possible
    if M <= 16:
        return M  # one tile of rows
    return cheapest(M, int8)


def cheapest(M: int, int8: bool) -> int:
    """Rows of the blocks on target amx in which M rows cost least."""
    costs = TILE_CYCLES[int8]
    return min(costs, key=lambda rows: (-(-M // rows) * costs[rows], rows))


@functools.cache
def block_depth(group: int) -> int:
    """The largest divisor of the group up to MAX_BLOCK_K, whole AMX tiles (32) preferred."""
    divisors = [d for d in range(8, min(group, MAX_BLOCK_K) + 1, 8) if group % d == 0]
    return max(divisors, key=lambda d: (d % 32 == 0, d))


@functools.cache
def int4_linear(
    target: str, operands: Operands, y: torch.dtype, splits: int, block_m: int, block_k: int
) -> Launchable:
    """The compiled kernel for these types; launch it with the arguments in its order. ``splits``
    is 0 for activations in int8."""
    from amxq_kernels.int4_linear import int4_linear as kernel

    types, constants = activation_types(splits, operands.zeros, y)
    types |= {
        "qweight": torch.uint8,
        "scales": operands.scales,
        "zeros": torch.uint8 if operands.zeros else None,
        "table": torch.int64 if operands.table else None,
        "bias": operands.bias,
        "residual": y if operands.residual else None,
        "y": y,
    }
    return compile_with(kernel, types, constants | {"BLOCK_M": block_m, "BLOCK_K": block_k}, target)


def activation_types(
    splits: int, zeros: bool, x: torch.dtype
) -> tuple[dict[str, torch.dtype | None], dict[str, Any]]:
    """Types of what kernels get for activations of dtype x, and the constant that goes with them.
    They are int8 for no splits, else themselves or bf16 numbers that they are the sum of."""
    types = {
        "x": _parts_type(x, splits) if splits else torch.int8,
        "x_scales": None if splits else torch.float32,
        "sums": torch.float32 if zeros or not splits else None,
    }
    return types, {"SPLITS": splits or 1}


def compile_with(
    kernel: Any,
    pointer_types: Mapping[str, torch.dtype | None],
    constants: dict[str, Any],
    target: str,
) -> Launchable:
    """Compiles a kernel that takes pointers, some of which may be None, int32 and constants."""
    types: dict[str, Type] = {}
    constants = dict(constants)
    for name in kernel.kernel_source.parameters:
        if name in pointer_types:
            dtype = pointer_types[name]
            if dtype is None:
                constants[name] = None
            else:
                types[name] = pointers()[dtype]
        elif name not in constants:
            types[name] = I32
    compiled: Launchable = kernel.compile(types, constants, target)
    return compiled


def _parts_type(x: torch.dtype, splits: int) -> torch.dtype:
    """What kernels get for activations of this dtype: themselves, or bf16 numbers of that sum."""
    return x if splits == 1 else torch.bfloat16


@functools.cache
def quantize_int8(target: str, x: torch.dtype, block_k: int) -> Launchable:
    """The kernel that quantises activations of this dtype."""
    from amxq_kernels.int4_linear_int8 import quantize_int8 as kernel

    numbers = dict.fromkeys(("scales", "offsets"), torch.float32)
    return compile_with(
        kernel, {"x": x, "values": torch.int8} | numbers, {"BLOCK_K": block_k}, target
    )


@functools.cache
def prepare_bf16(target: str, splits: int, block_k: int, x: torch.dtype, zeros: bool) -> Launchable:
    """The kernel that splits activations of dtype x into bf16 numbers, and sums them for zeros."""
    from amxq_kernels.int4_linear import prepare_bf16 as kernel

    types = {"x": x, "parts": _parts_type(x, splits), "sums": torch.float32 if zeros else None}
    return compile_with(kernel, types, {"SPLITS": splits, "BLOCK_K": block_k}, target)


def bf16_parts(target: str, x: torch.Tensor) -> torch.Tensor:
    """bf16 [parts · M, K] of x [M, K], contiguous: part s of row m at row s · M + m."""
    (M, K), splits = x.shape, split_count(x.dtype)
    if splits == 1:
        return x
    parts = torch.empty((splits * M, K), dtype=torch.bfloat16, device="cpu")
    prepare = prepare_bf16(target, splits, block_depth(K), x.dtype, False)
    prepare.launch((M, 1, 1), (x.data_ptr(), parts.data_ptr(), M, K, K))
    return parts


@functools.cache
def block_sums(
    target: str, splits: int, block_k: int, x: torch.dtype = torch.bfloat16
) -> Launchable:
    """The kernel that sums activations over blocks of K, for asymmetric weights."""
    from amxq_kernels.int4_linear import block_sums as kernel

    constants = {"SPLITS": splits, "BLOCK_K": block_k}
    return compile_with(kernel, {"x": x, "sums": torch.float32}, constants, target)
