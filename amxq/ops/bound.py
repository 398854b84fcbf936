"""Calls of weights that do not change: what can be checked once is checked once.

A call through torch's dispatcher with every tensor checked costs about twice as much as what is
left here (docs/performance.md), which a model with hundreds of small layers feels at every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from amxq.ops import schedule
from amxq.ops.checks import lazy
from amxq.runtime.targets import get_target

_KNOWN_SHAPES = 256


def observed(*tensors: torch.Tensor) -> bool:
    """Whether torch is compiling, tracing, transforming or differentiating forwards, a mode looks
    at what is called, or one of ``tensors`` is lazy: an operator of torch has to be called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or (torch._C._len_torch_function_stack() > 0 and _function_modes())
        or any(map(lazy, tensors))
    )


def _function_modes() -> bool:
    """Whether there is a mode other than torch's default device, which makes new tensors only."""
    stack = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in stack)


class Bound(Protocol):
    """y [..., N] = f(x [..., K]) + residual, of weights that were given before."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor: ...


class BoundCall:
    """One weight's kernel, whose activations :class:`schedule.Plan` prepares, for what decoding
    needs: contiguous bf16 activations without gradient. The tensors are whoever calls's to hold.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        weight: tuple[torch.Tensor, ...],
        bias: torch.Tensor | None,
        plan: Callable[[int, str, bool], schedule.Plan],
    ) -> None:
        """
        Args:
            sizes: N, K and the group size of weights that have been checked.
            weight: the tensors whose addresses the kernel takes, none of them lazy.
            bias: contiguous [N], of a dtype that kernels take and not lazy, or None.
            plan: for a number of rows, a target, and whether there is a residual.
        """
        self.N, self.K, self.group = sizes
        self._weight = tuple(t.data_ptr() for t in weight)
        self._bias = () if bias is None else (bias.data_ptr(),)
        self._plan = plan
        # by x's shape, target, and whether there is a residual: the plan, y's shape, M
        self._known: dict[
            tuple[torch.Size, str, bool], tuple[schedule.Plan, tuple[int, ...], int]
        ] = {}

    def serve(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | None:
        """The result, or None where the operator with all its checks has to be called."""
        if (
            type(x) is not torch.Tensor
            or x.dtype is not torch.bfloat16
            or not x.is_contiguous()
            or not x.is_cpu
            or (x.requires_grad and torch.is_grad_enabled())
            or observed(x)
        ):
            return None
        key = x.shape, get_target(), residual is not None
        known = self._known.get(key)
        if known is None:
            if not x.numel() or x.shape[-1] != self.K:
                return None
            if len(self._known) >= _KNOWN_SHAPES:
                self._known.clear()
            M = x.numel() // self.K
            known = self._plan(M, *key[1:]), (*x.shape[:-1], self.N), M
            self._known[key] = known
        plan, shape, M = known
        result = self._bias
        if residual is not None:
            if (
                type(residual) is not torch.Tensor
                or residual.dtype is not torch.bfloat16
                or residual.shape != shape
                or not residual.is_contiguous()
                or not residual.is_cpu
                or lazy(residual)
                or (residual.requires_grad and torch.is_grad_enabled())
            ):
                return None
            result = (*result, residual.data_ptr())
        y = x.new_empty(shape)
        if plan.prepare is not None:
            sizes = M, self.N, self.K, self.group
            plan.run(x, self._weight, (*result, y.data_ptr()), sizes)
            return y
        grid, K = plan.grid, self.K
        plan.kernel.launch(
            grid,
            (
                x.data_ptr(),
                *self._weight,
                *result,
                y.data_ptr(),
                M,
                M,
                K,
                self.N,
                K,
                self.group,
                grid[0],
            ),
        )
        return y

    def launches(
        self, x: int, y: int, residual: int | None = None
    ) -> tuple[list[schedule.Launch], list[torch.Tensor]]:
        """The same for one row at address x, with the result at y, as launches: see
        :meth:`schedule.Plan.launches`."""
        plan = self._plan(1, get_target(), residual is not None)
        result = (*self._bias, *(() if residual is None else (residual,)), y)
        return plan.launches(x, self._weight, result, (1, self.N, self.K, self.group))


def bound(call: BoundCall | None, general: Bound, *held: object) -> Bound:
    """``call`` where it serves, else ``general``, which is the same calculation for any x.
    ``held`` are kept alive: the memory that the call's addresses lead to."""
    if call is None:
        return general

    def either(
        x: torch.Tensor, residual: torch.Tensor | None = None, held: tuple[object, ...] = held
    ) -> torch.Tensor:
        y = call.serve(x, residual)
        return general(x, residual) if y is None else y

    return either
