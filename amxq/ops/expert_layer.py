"""One call of ``amxq.fused_moe``: the kernels of ``amxq_kernels.fused_moe`` that it launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from amxq.ops import expert_schedule as kernels
from amxq.ops import schedule
from amxq.ops.activations import bf16_parts, ordered_rows, permuted, split_count
from amxq.ops.expert_checks import Activation, Sizes, wrong_id
from amxq.quantization.packed import PackedWeight


class Rows(NamedTuple):
    """Activations as the kernels take them.

    Attributes:
        values: bf16 [splits · count + padding, K]: parts that add up to the activations. Blocks may
            read, and never use, rows beyond the last.
        number: how many rows there are.
    """

    values: torch.Tensor
    number: int


class ExpertLayer:
    """The steps of a call, in order: ``sort``, ``first``, ``second``, ``combine``.

    Attributes:
        total: how many assignments contribute, known after ``sort``.
    """

    def __init__(self, target: str, sizes: Sizes, act: Activation, dtype: torch.dtype) -> None:
        self.target, self.sizes, self.act = target, sizes, act
        self.splits = split_count(dtype)
        self.fused = not act.interleaved and sizes.inner % schedule.PANEL == 0
        """Whether gate and up panels pair up, so that one program can activate them."""
        self.total = 0

    def sort(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> int:
        """Sort the assignments by expert; returns how many contribute.

        Raises:
            ShapeError: an id is not an expert's.
        """
        sizes, cut = self.sizes, kernels.row_blocks(self.target)
        ids = topk_ids.contiguous()
        count, classes = ids.numel(), len(cut.sizes)
        mapped = None if expert_map is None else expert_map.to(torch.int32).contiguous()
        # one allocation: found, next_row, blocks, slots, tokens, rows
        arrays = torch.empty(2 + 2 * classes + sizes.E + 7 * count, dtype=torch.int32)
        found = arrays.data_ptr()
        next_row = found + 4 * (2 + classes)
        self._blocks = next_row + 4 * (sizes.E + classes)
        self._slots = self._blocks + 16 * count
        self._tokens = self._slots + 4 * count
        self._rows = self._tokens + 4 * count
        kernel = kernels.sort_by_expert(self.target, ids.dtype, mapped is not None)
        args = [t.data_ptr() for t in (ids, mapped) if t is not None]
        args += (cut.class_of.data_ptr(), cut.sizes_tensor.data_ptr(), found, next_row)
        args += (self._blocks, self._slots, self._tokens, self._rows)
        args += (count, sizes.ids, sizes.E, sizes.topk, kernels.MOST_ROWS)
        kernel.launch((1, 1, 1), args)
        wrong, self.total, *blocks = arrays[: 2 + classes].tolist()
        if wrong:
            raise wrong_id(topk_ids, expert_map, sizes, wrong - 1)
        self._arrays = arrays
        self._launches: list[tuple[int, int, int]] = []  # rows of a block, first block, blocks
        first = 0
        for size, number in zip(cut.sizes, blocks, strict=True):
            if number:
                self._launches.append((size, first, number))
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
        rows = self._rows_of(x, w13.perm)
        h = self._empty_rows(inner)
        limits = (0.0 if act.limit is None else act.limit, act.alpha)
        if not self.fused:
            y = self._product(rows, w13, bias, weights)
            kernel = kernels.activate(
                self.target, act.interleaved, act.kind, act.limit is not None, self.splits
            )
            args: tuple[float, ...] = (y.data_ptr(), h.values.data_ptr(), self.total, inner)
            kernel.launch((-(-inner // schedule.PANEL), self.total, 1), (*args, *limits))
            return h
        block_k, sums = self._block_sums(rows, w13)
        types = _types(w13, bias, weights)
        operands = _pointers(rows.values, w13, sums, bias, weights)
        for block_m, first, number in self._launches:
            kernel = kernels.gate_up(
                self.target,
                *types,
                self._in_place,
                act.kind,
                act.limit is not None,
                self.splits,
                block_m,
                block_k,
            )
            args = (*operands, h.values.data_ptr(), self._blocks, self._slots, self._tokens, first)
            args += (rows.number, self.total, inner, self.sizes.H, w13.group_size)
            kernel.launch((inner // schedule.PANEL, number, 1), (*args, *limits))
        return h

    def second(self, h: Rows, w2: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with the second matrices: fp32 [total, H]."""
        if w2.perm is not None:
            h = Rows(permuted(h.values, w2.perm), h.number)
        return self._product(h, w2, bias, None)

    def combine(
        self, y: torch.Tensor, weights: torch.Tensor | None, factor: float, out: torch.Tensor
    ) -> None:
        """Write the weighted sum over the experts of each token to out [M, H]."""
        M, H = out.shape
        kernel = kernels.combine(self.target, None if weights is None else weights.dtype, out.dtype)
        args = [t.data_ptr() for t in (y, weights) if t is not None]
        args += (self._rows, out.data_ptr(), H, self.sizes.topk)
        kernel.launch((-(-H // kernels.COMBINE_COLUMNS), M, 1), (*args, factor))

    # --- parts --------------------------------------------------------------------------

    def _rows_of(self, x: torch.Tensor, perm: torch.Tensor | None) -> Rows:
        """x with a row for each token where it is read in place, else one for each assignment."""
        M, H, splits = self.sizes.M, self.sizes.H, self.splits
        if splits > 1 or perm is not None or not x.is_contiguous():
            x = bf16_parts(ordered_rows(x, perm, H))
        if self._in_place:
            return Rows(x, M)
        rows = self._empty_rows(H)
        begin = (self._tokens - self._arrays.data_ptr()) // 4
        tokens = self._arrays[begin : begin + self.total]
        out = rows.values[: splits * self.total].view(splits, self.total, H)
        torch.index_select(x.view(splits, M, H), 1, tokens, out=out)
        return rows

    def _empty_rows(self, columns: int) -> Rows:
        padding = self._launches[-1][0] - 1
        shape = self.splits * self.total + padding, columns
        return Rows(torch.empty(shape, dtype=torch.bfloat16), self.total)

    def _product(
        self,
        rows: Rows,
        w: PackedWeight,
        bias: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product of each row with its expert's matrix: fp32 [total, N]."""
        N, K = w.out_features, rows.values.shape[1]
        y = torch.empty((self.total, N), dtype=torch.float32)
        block_k, sums = self._block_sums(rows, w)
        types = _types(w, bias, weights)
        operands = _pointers(rows.values, w, sums, bias, weights)
        for block_m, first, number in self._launches:
            kernel = kernels.expert_linear(self.target, *types, self.splits, block_m, block_k)
            args = (*operands, y.data_ptr(), self._blocks, self._slots, first)
            args += (rows.number, N, K, w.group_size)
            kernel.launch((-(-N // schedule.PANEL), number, 1), args)
        return y

    def _block_sums(self, rows: Rows, w: PackedWeight) -> tuple[int, torch.Tensor | None]:
        """The depth of a block of K, and the sums of blocks where zero points need them."""
        block_k = schedule._block_k(w.group_size)
        if w.zeros is None:
            return block_k, None
        K = rows.values.shape[1]
        padding = self._launches[-1][0] - 1
        sums = torch.empty((rows.number + padding, K // block_k), dtype=torch.float32)
        kernel = schedule.block_sums(self.target, self.splits, block_k)
        kernel.launch(
            (rows.number, 1, 1), (rows.values.data_ptr(), sums.data_ptr(), rows.number, K)
        )
        return block_k, sums


def _types(
    w: PackedWeight, bias: torch.Tensor | None, weights: torch.Tensor | None
) -> tuple[torch.dtype, bool, torch.dtype | None, bool]:
    return (
        w.scales.dtype,
        w.zeros is not None,
        None if bias is None else bias.dtype,
        weights is not None,
    )


def _pointers(x: torch.Tensor, w: PackedWeight, *more: torch.Tensor | None) -> list[int]:
    """Addresses in the order of the kernels' first parameters; what is absent is left out."""
    return [t.data_ptr() for t in (x, w.qweight, w.scales, w.zeros, *more) if t is not None]
