"""A call of ``amxq.fused_moe`` for one token, as in decoding: two launches, and little around them.

Every assignment is a block of its own, so that nothing has to be sorted, and the sum over the
experts stays in registers.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from amxq.ops import expert_schedule as kernels
from amxq.ops import schedule
from amxq.ops.activations import ordered_rows, permuted, split_count
from amxq.ops.expert_checks import Activation, Sizes, wrong_id
from amxq.ops.expert_layer import RECORD, prepared
from amxq.ops.expert_schedule import Matrix
from amxq.ops.expert_weights import ExpertWeights
from amxq.ops.schedule import PANEL
from amxq.runtime.compiler import Launchable


def owners_of(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, sizes: Sizes
) -> list[tuple[int, int]]:
    """(expert, assignment) of those of one token that contribute. Raises ShapeError for a wrong
    id."""
    owners = []
    for slot, e in enumerate(topk_ids.tolist()[0]):
        if expert_map is not None and 0 <= e < sizes.ids:
            e = int(expert_map[e])
            if e >= sizes.E:
                raise wrong_id(topk_ids, expert_map, sizes, slot)
        elif e >= sizes.ids:
            raise wrong_id(topk_ids, expert_map, sizes, slot)
        if e >= 0:
            owners.append((e, slot))
    return owners


class _Plan(NamedTuple):
    """What does not depend on the token: kernels, and numbers in the order of their parameters."""

    splits: int
    first: Matrix
    second: Matrix
    gate_up: Launchable
    sum_experts: Launchable
    first_sizes: tuple[int, ...]
    constants: tuple[float, ...]
    second_sizes: tuple[int, ...]


def _plan(
    layer: ExpertWeights,
    target: str,
    act: Activation,
    int8: bool,
    dtype: torch.dtype,
    weights: torch.dtype,
    on_input: bool,
) -> _Plan:
    w13, w2, splits = layer.w13, layer.w2, 1 if int8 else split_count(dtype)
    first = w13.matrix._replace(int8=int8, weights=torch.float32 if on_input else None)
    second = w2.matrix._replace(int8=int8, weights=None if on_input else weights)
    limited = act.limit is not None
    return _Plan(
        splits,
        first,
        second,
        kernels.gate_up(target, first, True, act.kind, limited, splits, 1),
        kernels.sum_experts(target, second, splits, dtype),
        (w13.N // 2, layer.inner, layer.H, first.group_size),
        (act.limit or 0.0, act.alpha),
        (layer.H, layer.inner, second.group_size),
    )


def run(
    target: str,
    layer: ExpertWeights,
    owners: list[tuple[int, int]],
    act: Activation,
    int8: bool,
    x: torch.Tensor,
    perms: tuple[torch.Tensor | None, torch.Tensor | None],
    weights: torch.Tensor,
    on_input: bool,
    factor: float,
    out: torch.Tensor,
) -> None:
    """out [1, H] of x [1, H]; there is at least one owner, and no expert has an order of its own.

    Args:
        owners: from :func:`owners_of`.
        perms: of the two weights, int32 [H] and [I], or None.
        weights: [1, topk]; they multiply x if on_input, else the result.
    """
    key = target, act, int8, x.dtype, weights.dtype, on_input
    plan = layer.plans.get(key)
    if plan is None:
        plan = layer.plans[key] = _plan(layer, *key)
    count = len(owners)
    tables = array("i")  # blocks, slots, tokens, as sort_by_expert writes them
    for row, (e, _) in enumerate(owners):
        tables.extend((e, row, row + 1, row))
    tables.extend([slot for _, slot in owners])
    tables.extend(bytes(count))
    blocks = tables.buffer_info()[0]
    slots = blocks + 4 * RECORD * count
    if on_input:
        weights = weights.float()
    factors = (weights.data_ptr(),)

    values = x
    if perms[0] is not None or not x.is_contiguous():
        values = ordered_rows(x, perms[0], layer.H)
    if plan.splits > 1:
        values = schedule.bf16_parts(target, values)
    rows = prepared(target, plan.first, values, 1, plan.splits, 0)
    h = torch.empty((plan.splits * count, layer.inner), dtype=torch.bfloat16, device="cpu")
    arrays = (
        *rows.with_weight(layer.w13),
        *(factors if on_input else ()),
        h.data_ptr(),
        blocks,
        slots,
    )
    numbers = slots + 4 * count, 0, 1, rows.stride, count, *plan.first_sizes, *plan.constants
    plan.gate_up.launch((plan.first_sizes[0] // PANEL, count, 1), (*arrays, *numbers))

    if perms[1] is not None:
        h = permuted(h, perms[1])
    rows = prepared(target, plan.second, h, count, plan.splits, 0)
    arrays = (
        *rows.with_weight(layer.w2),
        *(() if on_input else factors),
        out.data_ptr(),
        blocks,
        slots,
    )
    numbers = count, rows.stride, *plan.second_sizes, factor
    plan.sum_experts.launch((-(-layer.H // PANEL), 1, 1), (*arrays, *numbers))
