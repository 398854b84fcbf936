"""One call of ``amxq.fused_moe``: the kernels of ``amxq_kernels.fused_moe`` that it launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from amxq.ops import expert_schedule as kernels
from amxq.ops import schedule
from amxq.ops.activations import bf16_parts, ordered_rows, permuted, split_count
from amxq.ops.expert_checks import Activation, Sizes, wrong_id
from amxq.ops.expert_schedule import Matrix
from amxq.ops.schedule import PANEL
from amxq.quantization.packed import PackedWeight


class Rows(NamedTuple):
    """Activations, a row for each assignment or for each token.

    Attributes:
        values: [splits · number + padding, K]; in precision "bf16" bf16 parts that add up to the
            activations. Blocks may read, and never use, rows beyond the last.
        number: how many rows there are.
    """

    values: torch.Tensor
    number: int


class Operands(NamedTuple):
    """What the matrix kernels begin with.

    Attributes:
        matrix: what has to be known of the weight to choose a kernel.
        tensors: in the order of the kernels' parameters, None for what is absent.
        stride: elements from one row of activations to the next.
    """

    matrix: Matrix
    tensors: tuple[torch.Tensor | None, ...]
    stride: int


class ExpertLayer:
    """The steps of a call, in order: ``sort``, ``first``, ``second``."""

    def __init__(
        self, target: str, sizes: Sizes, act: Activation, dtype: torch.dtype, precision: str
    ) -> None:
        self.target, self.sizes, self.act = target, sizes, act
        self.int8 = precision == "int8"
        self.splits = 1 if self.int8 else split_count(dtype)
        # whether gate and up panels pair up, so that one program can activate them
        self.fused = not act.interleaved and sizes.inner % PANEL == 0

    def sort(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> int:
        """Sort the assignments by expert; returns how many contribute.

        Raises:
            ShapeError: an id is not an expert's.
        """
        sizes, cut = self.sizes, kernels.row_blocks(self.target)
        ids = topk_ids.contiguous()
        count, classes = ids.numel(), len(cut.sizes)
        # beyond int32 an entry would wrap to an expert: E is as wrong, and told as the entry it is
        mapped = None
        if expert_map is not None:
            mapped = expert_map.clamp(-1, self.sizes.E).to(torch.int32).contiguous()
        # one allocation: found, next_row, blocks, slots, tokens, rows
        self._arrays = torch.empty(2 + 2 * classes + sizes.E + 7 * count, dtype=torch.int32)
        found = self._arrays.data_ptr()
        next_row = found + 4 * (2 + classes)
        self._blocks = next_row + 4 * (sizes.E + classes)
        self._slots = self._blocks + 16 * count
        self._tokens = self._slots + 4 * count
        self._rows = self._tokens + 4 * count
        args = [t.data_ptr() for t in (ids, mapped) if t is not None]
        args += (cut.class_of.data_ptr(), cut.sizes_tensor.data_ptr(), found, next_row)
        args += (self._blocks, self._slots, self._tokens, self._rows)
        args += (count, sizes.ids, sizes.E, sizes.topk, kernels.MOST_ROWS)
        kernel = kernels.sort_by_expert(self.target, ids.dtype, mapped is not None)
        kernel.launch((1, 1, 1), args)
        wrong, total, *blocks = self._arrays[: 2 + classes].tolist()
        if wrong:
            raise wrong_id(topk_ids, expert_map, sizes, wrong - 1)
        self.total = int(total)
        self._launches: list[tuple[int, int, int]] = []  # rows of a block, first block, blocks
        first = 0
        for size, number in zip(cut.sizes, blocks, strict=True):
            if number:
                self._launches.append((size, first, number))
                self._padding = size - 1
            first += number
        # one row for each expert: x is read where it lies
        self._in_place = self.fused and blocks[0] == self.total
        return self.total

    def first(
        self,
        x: torch.Tensor,
        w13: PackedWeight,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> Rows:
        """The activated product of x [M, H] with the first matrices, I columns; ``weights``, fp32
        [M, topk], multiply x."""
        act, inner = self.act, self.sizes.inner
        rows, h = self._rows_of(x, w13.perm), self._empty_rows(inner)
        limited, limit = act.limit is not None, act.limit or 0.0
        operands = self._operands(rows, w13, bias, weights)
        if not self.fused:
            y = torch.empty((self.total, 2 * inner), dtype=torch.float32)
            self._product(y, rows, w13, operands, 0, 2 * inner)
            kernel = kernels.activate(self.target, act.interleaved, act.kind, limited, self.splits)
            data = (y.data_ptr(), h.values.data_ptr(), self.total, inner, limit, act.alpha)
            kernel.launch((-(-inner // PANEL), self.total, 1), data)
            return h
        arrays = h.values.data_ptr(), self._blocks, self._slots, self._tokens
        matrix, sizes = operands.matrix, (rows.number, operands.stride, self.total, inner)
        numbers = *sizes, self.sizes.H, matrix.group_size, limit, act.alpha
        for block_m, first, number in self._launches:
            kernel = kernels.gate_up(
                self.target, matrix, self._in_place, act.kind, limited, self.splits, block_m
            )
            grid = inner // PANEL, number, 1
            kernel.launch(grid, (*_pointers(operands.tensors), *arrays, first, *numbers))
        return h

    def second(
        self,
        h: Rows,
        w2: PackedWeight,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """The product of h with the second matrices, added up over the experts of each token into
        out [M, H]; ``weights`` [M, topk] multiply it."""
        M, H = out.shape
        if w2.perm is not None:
            h = Rows(permuted(h.values, w2.perm), h.number)
        operands = self._operands(h, w2, bias, None)
        kernel = kernels.combine(self.target, None if weights is None else weights.dtype, out.dtype)
        band = kernels.band_columns(self.total, H)
        y = torch.empty((self.total, band), dtype=torch.float32)
        for column in range(0, H, band):
            columns = min(band, H - column)
            self._product(y, h, w2, operands, column, columns)
            pointers = _pointers((y, weights))
            to = out.data_ptr() + column * out.element_size()
            grid = -(-columns // kernels.COMBINE_COLUMNS), M, 1
            data = (*pointers, self._rows, to, columns, H, self.sizes.topk, factor)
            kernel.launch(grid, data)

    # --- parts --------------------------------------------------------------------------

    def _rows_of(self, x: torch.Tensor, perm: torch.Tensor | None) -> Rows:
        """x with a row for each token where it is read in place, else one for each assignment."""
        M, H, splits = self.sizes.M, self.sizes.H, self.splits
        x = ordered_rows(x, perm, H)
        if splits > 1:
            x = bf16_parts(x)
        if self._in_place:
            return Rows(x, M)
        rows = self._empty_rows(H, x.dtype)
        begin = (self._tokens - self._arrays.data_ptr()) // 4
        tokens = self._arrays[begin : begin + self.total]
        out = rows.values[: splits * self.total].view(splits, self.total, H)
        torch.index_select(x.view(splits, M, H), 1, tokens, out=out)
        return rows

    def _empty_rows(self, columns: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
        shape = self.splits * self.total + self._padding, columns
        return Rows(torch.empty(shape, dtype=dtype), self.total)

    def _operands(
        self,
        rows: Rows,
        w: PackedWeight,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> Operands:
        """The weight and its activations: in int8 with the scales and offsets of blocks, or in bf16
        with the sums of blocks where zero points need them."""
        matrix = Matrix(
            w.scales.dtype,
            w.zeros is not None,
            None if bias is None else bias.dtype,
            weights is not None,
            self.int8,
            w.group_size,
        )
        values, number = rows
        K, block_k = values.shape[1], matrix.block_k
        scales = sums = None
        stride, padded = K, number + self._padding
        if self.int8:
            stride = schedule.int8_stride(K)
            values = torch.empty((padded, stride), dtype=torch.int8)
            blocks = K // block_k * number + self._padding
            scales, sums = torch.empty((2, blocks), dtype=torch.float32)
            kernel = schedule.quantize_int8(self.target, rows.values.dtype, block_k)
            data = _pointers((rows.values, values, scales, sums))
            kernel.launch((number, 1, 1), (*data, number, K, stride))
        elif matrix.zeros:
            sums = torch.empty((padded, K // block_k), dtype=torch.float32)
            kernel = schedule.block_sums(self.target, self.splits, block_k)
            kernel.launch((number, 1, 1), (*_pointers((values, sums)), number, K))
        tensors = values, w.qweight, w.scales, w.zeros, scales, sums, bias, weights
        return Operands(matrix, tensors, stride)

    def _product(
        self,
        y: torch.Tensor,
        rows: Rows,
        w: PackedWeight,
        operands: Operands,
        column: int,
        columns: int,
    ) -> None:
        """Writes columns of the product of each row with its expert's matrix, [total, columns],
        to the beginning of y."""
        N, K = w.out_features, rows.values.shape[1]
        arrays = y.data_ptr(), self._blocks, self._slots
        matrix = operands.matrix
        numbers = rows.number, operands.stride, N, K, matrix.group_size, column, columns
        for block_m, first, number in self._launches:
            kernel = kernels.expert_linear(self.target, matrix, self.splits, block_m)
            grid = -(-columns // PANEL), number, 1
            kernel.launch(grid, (*_pointers(operands.tensors), *arrays, first, *numbers))


def _pointers(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Addresses in the order of a kernel's parameters; what is absent is left out."""
    return [t.data_ptr() for t in tensors if t is not None]
