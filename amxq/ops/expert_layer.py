"""One call of ``amxq.fused_moe``: the kernels of ``amxq_kernels.fused_moe`` that it launches."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from amxq.errors import LayoutError
from amxq.ops import expert_schedule as kernels
from amxq.ops import schedule
from amxq.ops.activations import ordered_rows, permuted, split_count
from amxq.ops.expert_checks import Activation, Sizes, wrong_id
from amxq.ops.expert_schedule import Matrix
from amxq.ops.expert_weights import Stack
from amxq.ops.schedule import PANEL

RECORD = 4
"""int32 numbers of a block, as the kernels have them."""


class Operands(NamedTuple):
    """Activations as the matrix kernels take them, a row for each assignment or for each token.

    Attributes:
        values: [splits · number + padding, K]: bf16 parts that add up to the activations, or int8
            [number + padding, stride]. Blocks may read, and never use, rows beyond the last.
        number: how many rows there are.
        stride: elements from one row to the next.
        factors: in int8 the scales and offsets of blocks of K; with zero points the blocks' sums.
        tokens: address of the rows that assignments have, or None where each has its own.
    """

    values: torch.Tensor
    number: int
    stride: int
    factors: tuple[torch.Tensor, ...]
    tokens: int | None = None

    def with_weight(self, stack: Stack) -> tuple[int, ...]:
        """Addresses in the order of the kernels' parameters."""
        factors = [t.data_ptr() for t in self.factors]
        return (self.values.data_ptr(), *stack.weight, *factors, *stack.bias)


def prepared(
    target: str, matrix: Matrix, values: torch.Tensor, number: int, splits: int, padding: int
) -> Operands:
    """Activations, bf16 parts or of any dtype for int8, as kernels take them for a matrix."""
    K, block_k = values.shape[1], matrix.block_k
    if matrix.int8:
        stride = schedule.padded_stride(K, torch.int8)
        quantised = torch.empty((number + padding, stride), dtype=torch.int8, device="cpu")
        scales, offsets = torch.empty(
            (2, K // block_k * number + padding), dtype=torch.float32, device="cpu"
        )
        kernel = schedule.quantize_int8(target, values.dtype, block_k)
        data = values.data_ptr(), quantised.data_ptr(), scales.data_ptr(), offsets.data_ptr()
        kernel.launch((number, 1, 1), (*data, number, K, stride))
        return Operands(quantised, number, stride, (scales, offsets))
    if not matrix.zeros:
        return Operands(values, number, K, ())
    sums = torch.empty((number + padding, K // block_k), dtype=torch.float32, device="cpu")
    kernel = schedule.block_sums(target, splits, block_k)
    kernel.launch((number, 1, 1), (values.data_ptr(), sums.data_ptr(), number, K))
    return Operands(values, number, K, (sums,))


class ExpertLayer:
    """The steps of a call, in order: ``sort``, ``first``, ``second``."""

    def __init__(
        self, target: str, sizes: Sizes, act: Activation, dtype: torch.dtype, int8: bool
    ) -> None:
        self.target, self.sizes, self.act, self.int8 = target, sizes, act, int8
        self.splits = 1 if int8 else split_count(dtype)

    def sort(self, topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> int:
        """Sort the assignments by expert; returns how many contribute.

        Raises:
            ShapeError: an id is not an expert's.
        """
        sizes, cut = self.sizes, kernels.row_blocks(self.target, self.int8)
        ids = topk_ids.contiguous()
        count, classes = ids.numel(), len(cut.sizes)
        # beyond int32 an entry would wrap to an expert: E is as wrong, and told as the entry it is
        mapped = None
        if expert_map is not None:
            mapped = expert_map.clamp(-1, sizes.E).to(torch.int32).contiguous()
        # one allocation: found, next_row, blocks, slots, tokens, owners, rows
        numbers = 2 + classes, sizes.E + classes, RECORD * count, count, count, count, count
        self._arrays = torch.empty(sum(numbers), dtype=torch.int32, device="cpu")
        ends = itertools.accumulate(numbers[:-1], initial=0)
        found, next_row, *rest = (self._arrays.data_ptr() + 4 * end for end in ends)
        args = [t.data_ptr() for t in (ids, mapped) if t is not None]
        args += (cut.class_of.data_ptr(), cut.sizes_tensor.data_ptr(), found, next_row, *rest)
        args += (count, sizes.ids, sizes.E, sizes.topk, kernels.MOST_ROWS)
        kernel = kernels.sort_by_expert(self.target, ids.dtype, mapped is not None, classes)
        kernel.launch((1, 1, 1), args)
        wrong, total, *blocks = self._arrays[: 2 + classes].tolist()
        if wrong:
            raise wrong_id(topk_ids, expert_map, sizes, wrong - 1)
        self.total = int(total)
        self._blocks, self._slots, self._tokens, self._owners, self._rows = rest
        self._launches: list[tuple[int, int, int]] = []  # rows of a block, first block, blocks
        first = 0
        for size, number in zip(cut.sizes, blocks, strict=True):
            if number:
                self._launches.append((size, first, number))
                self._padding = size - 1
            first += number
        return self.total

    def first(
        self, x: torch.Tensor, stack: Stack, perm: torch.Tensor | None, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """The activated product of x [M, H] with the first matrices, [splits · total + padding, I];
        ``weights``, fp32 [M, topk], multiply x."""
        act, inner, H = self.act, self.sizes.inner, self.sizes.H
        matrix = stack.matrix._replace(int8=self.int8, weights=_dtype(weights))
        by_token = by_row = self._of_tokens(x, perm, matrix)
        if self._launches[-1][0] > kernels.GATHER_ROWS:
            by_row = self._gathered(by_token, matrix)
        shape = self.splits * self.total + self._padding, inner
        h = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        on_input = () if weights is None else (weights.data_ptr(),)
        panels, limited, limit = stack.N // (2 * PANEL), act.limit is not None, act.limit or 0.0
        for block_m, first, number in self._launches:
            rows = by_row if block_m > kernels.GATHER_ROWS else by_token
            indirect = rows.tokens is not None
            kernel = kernels.gate_up(
                self.target, matrix, indirect, act.kind, limited, self.splits, block_m
            )
            arrays = (*rows.with_weight(stack), *on_input, h.data_ptr(), self._blocks, self._slots)
            tokens = (rows.tokens,) if rows.tokens is not None else ()
            numbers = first, rows.number, rows.stride, self.total, stack.N // 2, inner, H
            constants = matrix.group_size, limit, act.alpha
            kernel.launch((panels, number, 1), (*arrays, *tokens, *numbers, *constants))
        return h

    def second(
        self,
        h: torch.Tensor,
        stack: Stack,
        perm: torch.Tensor | None,
        weights: torch.Tensor | None,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """The product of h with the second matrices, added up over the experts of each token into
        out [M, H]; ``weights`` [M, topk] multiply it."""
        M, H = out.shape
        h = self._in_order(h, perm)
        matrix = stack.matrix._replace(int8=self.int8)
        rows = prepared(self.target, matrix, h, self.total, self.splits, self._padding)
        combine = kernels.combine(self.target, _dtype(weights), out.dtype)
        on_output = () if weights is None else (weights.data_ptr(),)
        band = kernels.band_columns(self.total, H)
        y = torch.empty((self.total, band), dtype=torch.float32, device="cpu")
        arrays = (*rows.with_weight(stack), y.data_ptr(), self._blocks)
        for column in range(0, H, band):
            columns = min(band, H - column)
            sizes = H, self.sizes.inner, matrix.group_size, column, columns
            for block_m, first, number in self._launches:
                kernel = kernels.expert_linear(self.target, matrix, self.splits, block_m)
                numbers = first, rows.number, rows.stride, *sizes
                kernel.launch((-(-columns // PANEL), number, 1), (*arrays, *numbers))
            to = out.data_ptr() + column * out.element_size()
            grid = -(-columns // kernels.COMBINE_COLUMNS), M, 1
            data = (y.data_ptr(), *on_output, self._rows, to, columns, H, self.sizes.topk, factor)
            combine.launch(grid, data)

    # --- parts --------------------------------------------------------------------------

    def _array(self, address: int) -> torch.Tensor:
        """One of the arrays that have an element for each assignment that contributes."""
        begin = (address - self._arrays.data_ptr()) // 4
        return self._arrays[begin : begin + self.total]

    def _of_tokens(self, x: torch.Tensor, perm: torch.Tensor | None, matrix: Matrix) -> Operands:
        """x with a row for each token; for each assignment if experts have orders of their own."""
        own = perm is not None and perm.dim() == 2
        number, tokens = self.sizes.M, self._tokens
        values = ordered_rows(x, None if own else perm, self.sizes.H)
        if own:
            number = self.total
            values = self._in_order(values.index_select(0, self._array(self._tokens)), perm)
            self._array(self._tokens).copy_(torch.arange(number, device="cpu"))
        if self.splits > 1:
            values = schedule.bf16_parts(self.target, values)
        rows = prepared(self.target, matrix, values, number, self.splits, self._padding)
        return rows._replace(tokens=tokens)

    def _in_order(self, values: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
        """[.., K], parts of rows of assignments, with columns in the order of perm, int32 [K], or
        of the expert of the row, [E, K]."""
        if perm is None:
            return values
        if perm.dim() == 1:
            return permuted(values, perm)
        order = perm.index_select(0, self._array(self._owners)).long()
        _, K = order.shape
        whole = len(values) // self.total * self.total  # what follows is never used
        ordered = torch.empty_like(values)
        try:
            parts = values[:whole].view(-1, self.total, K)
            torch.gather(parts, 2, order.expand_as(parts), out=ordered[:whole].view_as(parts))
        except (IndexError, RuntimeError) as problem:
            raise LayoutError(f"perm is no permutation of the features: {problem}") from None
        return ordered

    def _gathered(self, rows: Operands, matrix: Matrix) -> Operands:
        """The same with a row for each assignment."""
        assert rows.tokens is not None
        total, blocks = self.total, self.sizes.H // matrix.block_k
        shape = self.splits * total + self._padding, rows.stride
        values = torch.empty(shape, dtype=rows.values.dtype, device="cpu")
        factors: tuple[torch.Tensor, ...] = ()
        if self.int8:
            factors = (
                *torch.empty(
                    (2, blocks * total + self._padding), dtype=torch.float32, device="cpu"
                ),
            )
        kernel = kernels.gather_rows(self.target, self.int8)
        sources = [t.data_ptr() for t in (rows.values, *(rows.factors if self.int8 else ()))]
        targets = [t.data_ptr() for t in (values, *factors)]
        numbers = rows.number, rows.stride * values.element_size() // 4, blocks
        kernel.launch((total, self.splits, 1), (*sources, rows.tokens, *targets, *numbers))
        if self.int8:
            return Operands(values, total, rows.stride, factors)
        return prepared(self.target, matrix, values, total, self.splits, self._padding)


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
