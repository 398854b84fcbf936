"""The weights of a layer of experts as calls use them: checked and brought in order once."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from amxq.ops import expert_checks as checks
from amxq.ops.expert_schedule import Matrix
from amxq.quantization.experts import pair_rows, paired
from amxq.quantization.packed import PANEL, PackedWeight


class Stack(NamedTuple):
    """The stacked matrices [E, N, K] of all experts, which whoever calls keeps alive.

    Attributes:
        matrix: what has to be known to choose a kernel.
        N: rows of a matrix; for gate and up those of both, in whole panels.
        weight, bias: addresses of what is there of qweight, scales, zeros, and of bias.
    """

    matrix: Matrix
    N: int
    weight: tuple[int, ...]
    bias: tuple[int, ...]


class ExpertWeights:
    """Both matrices of all experts.

    Attributes:
        E, H, inner: the number of experts and their sizes.
        w13, w2: the matrices for the kernels.
        shared_order: whether no expert has an act order of its own.
        copied: whether anything is a copy of what was given, which may change.
        plans: what calls for one token have computed once.
    """

    def __init__(
        self,
        w13: PackedWeight,
        w2: PackedWeight,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        interleaved: bool,
    ) -> None:
        """Raises ShapeError, DTypeError or LayoutError if they do not belong together."""
        sizes = checks.check_weights(w13, w2, w13_bias, w2_bias, interleaved)
        self.E, self.H, self.inner = sizes
        self.plans: dict[Any, Any] = {}
        self.shared_order = all(w.perm is None or w.perm.dim() == 1 for w in (w13, w2))
        given = w13, w13_bias, w2_bias
        if interleaved or self.inner % PANEL:
            if w13_bias is not None:
                w13_bias = pair_rows(w13_bias.T, interleaved).T
            if w13.out_features == 2 * self.inner:
                w13 = paired(w13, interleaved)
        w13_bias, w2_bias = _plain(w13_bias), _plain(w2_bias)
        self._kept = [
            now for was, now in zip(given, (w13, w13_bias, w2_bias), strict=True) if was is not now
        ]
        self.copied = bool(self._kept)
        self.w13, self.w2 = _stack(w13, w13_bias), _stack(w2, w2_bias)


def _plain(bias: torch.Tensor | None) -> torch.Tensor | None:
    """A bias as kernels take it: fp32 sums are what it is added to."""
    if bias is None:
        return None
    return (bias.float() if bias.dtype is torch.float64 else bias).contiguous()


def _stack(w: PackedWeight, bias: torch.Tensor | None) -> Stack:
    kind = None if bias is None else bias.dtype
    matrix = Matrix(w.scales.dtype, w.zeros is not None, kind, None, False, w.group_size)
    weight = tuple(t.data_ptr() for t in w[:3] if t is not None)
    return Stack(matrix, w.out_features, weight, () if bias is None else (bias.data_ptr(),))


_Given = tuple[torch.Tensor | None, ...]
_known: dict[tuple[int, bool], tuple[list[Any], list[int], list[int], ExpertWeights]] = {}
"""(id of w13's qweight, interleaved) → weak references to the tensors given, their addresses, how
often they were written, what was made of them."""


def weights_of(
    w13: PackedWeight,
    w2: PackedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    interleaved: bool,
) -> ExpertWeights:
    """The weights, checked at first use and remembered while their tensors live and stay in place.

    Where values had to be copied, tensors are compared with their count of writes too (which writes
    through ``.data`` or NumPy do not raise).
    """
    given = (*w13, *w2, w13_bias, w2_bias)
    key = id(w13.qweight), interleaved
    found = _known.get(key)
    if found is not None:
        owners, addresses, before, weights = found
        same = [t is None if owner is None else owner() is t for owner, t in zip(owners, given)]
        if all(same) and addresses == [t.data_ptr() for t in given if t is not None]:
            if not weights.copied or before == versions(given):
                return weights
    weights = ExpertWeights(w13, w2, w13_bias, w2_bias, interleaved)
    if weights.copied and any(t is not None and t.is_inference() for t in given):
        return weights  # they do not count writes, so that a change would go unnoticed
    owners = [None if t is None else weakref.ref(t) for t in given]
    owners[0] = weakref.ref(w13.qweight, lambda _: _known.pop(key, None))
    addresses = [t.data_ptr() for t in given if t is not None]
    _known[key] = owners, addresses, versions(given) if weights.copied else [], weights
    return weights


def versions(given: _Given) -> list[int]:
    """How often each tensor that is there was written, but for writes through ``.data``."""
    return [t._version for t in given if t is not None]
