"""Calls of weights that do not change: what can be checked once is checked once.

A call through torch's dispatcher with every tensor checked costs about twice as much as what is
left here (docs/performance.md), which a model with hundreds of small layers feels at every token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from amxq.ops import schedule
from amxq.runtime.targets import get_target


class BoundCall:
    """y [..., N] = f(x [..., K]) for a kernel that takes (x, *fixed, y, M, N, K, group, rows).

    It serves what decoding needs, contiguous bf16 activations without gradient, and hands
    everything else to ``general``, the operator with all its checks.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        fixed: tuple[torch.Tensor, ...],
        plan: Callable[[int, str], schedule.Plan],
        general: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """
        Args:
            sizes: N, K and the group size of weights that have been checked.
            fixed: the tensors whose addresses the kernel takes between x and y.
            plan: for a number of rows and a target.
            general: the same calculation for any x.
        """
        self.N, self.K, self.group = sizes
        self.fixed = fixed  # holds the memory
        self._addresses = tuple(t.data_ptr() for t in fixed)
        self._plan, self._general = plan, general
        self._plans: dict[tuple[int, str], schedule.Plan] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As the operator, errors included."""
        if (
            type(x) is not torch.Tensor
            or torch.compiler.is_compiling()
            or x.dtype is not torch.bfloat16
            or not x.is_contiguous()
            or not x.is_cpu
            or not x.numel()
            or x.shape[-1] != self.K
            or (x.requires_grad and torch.is_grad_enabled())
        ):
            return self._general(x)
        M = x.numel() // self.K
        key = (M, get_target())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key)
        y = x.new_empty((*x.shape[:-1], self.N))
        rows: tuple[int, ...] = (x.data_ptr(),)
        if plan.int8:
            rows, _held = plan.quantised(rows[0], M, self.K)
        plan.kernel.launch(
            plan.grid,
            (
                *rows,
                *self._addresses,
                y.data_ptr(),
                M,
                self.N,
                self.K,
                self.group,
                plan.grid[0],
            ),
        )
        return y
