"""Experts of a checkpoint: which layers belong together, and their weights as stacks.

Files hold experts one by one (``experts.N.gate_proj`` or ``w1``, …) or stacked
(``experts.gate_up_proj`` with a leading E). Packed, gate and up are one stack of matrices [2I, H]
and down another, [H, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from amxq.errors import CheckpointError, ShapeError
from amxq.quantization.packed import DEFAULT_ZERO, PANEL, PackedWeight
from amxq.quantization.packing import group_rows, pack, unpack_integers
from amxq.runtime import memory

_NAME = re.compile(r"(.+\.experts)(?:\.(\d{1,6}))?\.([a-z0-9_]+)")
_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up"}
_PARTS |= {"down_proj": "down", "gate_up_proj": "gate_up"}


@dataclass
class ExpertGroup:
    """The layers of one module of experts.

    Attributes:
        prefix: the module's name in the files, which ends with ``experts``.
        stacked: {part: layer}, parts being gate_up, gate, up and down, of tensors with a leading E.
        single: {part: {expert: layer}} of experts stored one by one.
    """

    prefix: str
    stacked: dict[str, str] = field(default_factory=dict)
    single: dict[str, dict[int, str]] = field(default_factory=dict)

    def layers(self) -> list[str]:
        """All names."""
        return [
            *self.stacked.values(),
            *(n for part in self.single.values() for n in part.values()),
        ]

    def sources(self, part: str, count: int) -> list[str] | str | None:
        """The layers of a part, one for each of ``count`` experts, or the one that holds all; None
        if the group has no such part.

        Raises:
            CheckpointError: some experts are not quantised, or there are others.
        """
        if part in self.stacked:
            return self.stacked[part]
        if part not in self.single:
            return None
        found = self.single[part]
        if set(found) != set(range(count)):
            wrong = sorted(set(found) ^ set(range(count)))[0]
            raise CheckpointError(
                f"{self.prefix!r} has {len(found)} quantised {part} matrices, expected {count}, "
                f"one for each expert; expert {wrong} is the first that differs. Experts run "
                f"together, so all of them are quantised, or none"
            )
        return [found[expert] for expert in range(count)]


def expert_part(name: str) -> tuple[str, int | None, str] | None:
    """(module of experts, expert or None for all, part) of a layer of experts; None for others.

    >>> expert_part("model.layers.0.mlp.experts.3.w1")
    ('model.layers.0.mlp.experts', 3, 'gate')
    """
    match = _NAME.fullmatch(name)
    if match is None or match[3] not in _PARTS:
        return None
    return match[1], None if match[2] is None else int(match[2]), _PARTS[match[3]]


def group_experts(layers: Iterable[str]) -> dict[str, ExpertGroup]:
    """{module of experts: its layers}; other layers are left out."""
    groups: dict[str, ExpertGroup] = {}
    for layer in layers:
        found = expert_part(layer)
        if found is None:
            continue
        prefix, expert, part = found
        group = groups.setdefault(prefix, ExpertGroup(prefix))
        if expert is None:
            group.stacked[part] = layer
        else:
            group.single.setdefault(part, {})[expert] = layer
    return groups


def stack_experts(weights: Iterable[PackedWeight], count: int) -> PackedWeight:
    """E weights [N, K] as one stack [E, N, K], for ``amxq.fused_moe``.

    Each weight is copied as it comes and let go, so that a generator needs the memory of the result
    and of one weight.

    Args:
        weights: ``count`` linear weights of one shape, group size and dtype of scales. Where their
            orders of input features differ, perm is [E, K].
        count: E.

    Raises:
        ShapeError: they differ, or there are more or fewer of them.
    """
    result: PackedWeight | None = None
    zeros = symmetric = None
    orders: list[torch.Tensor | None] = []
    number = 0
    for number, w in enumerate(weights, 1):
        if result is None:
            qweight, scales = (
                memory.empty((count, *t.shape), t.dtype) for t in (w.qweight, w.scales)
            )
            result = PackedWeight(qweight, scales, None, None)
            zeros = torch.empty((count, *w.scales.shape), dtype=torch.uint8, device="cpu")
            symmetric = True
        _check_alike(result, w, number, count)
        orders.append(w.perm)
        result.qweight[number - 1] = w.qweight
        result.scales[number - 1] = w.scales
        assert zeros is not None
        zeros[number - 1] = DEFAULT_ZERO if w.zeros is None else w.zeros
        symmetric = symmetric and w.zeros is None
    if result is None or number != count:
        raise ShapeError(f"{number} experts were given; expected {count}")
    perm = _stacked_order(orders, 8 * result.qweight.shape[-3])
    return result._replace(zeros=None if symmetric else zeros, perm=perm)


def _stacked_order(orders: list[torch.Tensor | None], K: int) -> torch.Tensor | None:
    """None, [K] where all are the same, or [E, K]."""
    if all(order is None for order in orders):
        return None
    natural = torch.arange(K, dtype=torch.int32, device="cpu")
    first, *rest = found = [natural if order is None else order for order in orders]
    if all(torch.equal(first, order) for order in rest):
        return first
    if len({len(order) for order in found}) > 1:
        raise ShapeError(
            f"experts have {sorted({len(order) for order in found})} input features; expected one K"
        )
    return torch.stack(found)


def _check_alike(stack: PackedWeight, w: PackedWeight, number: int, count: int) -> None:
    if number > count:
        raise ShapeError(f"more than {count} experts were given")
    mine = w.qweight.shape, w.scales.shape, w.scales.dtype
    if mine != (stack.qweight.shape[1:], stack.scales.shape[1:], stack.scales.dtype):
        raise ShapeError(
            f"expert {number - 1} is [{w.out_features}, {w.in_features}] with group size "
            f"{w.group_size} and {w.scales.dtype} scales; expert 0 is [{stack.out_features}, "
            f"{stack.in_features}] with {stack.group_size} and {stack.scales.dtype}"
        )


def concatenate(first: PackedWeight, second: PackedWeight) -> PackedWeight:
    """[N1, K] above [N2, K]: one weight [N1 + N2, K], or of experts [E, N1 + N2, K].

    Raises:
        ShapeError: they differ in E, K, group size, dtype of scales or order.
    """
    kinds = [(w.num_experts, w.in_features, w.group_size, w.scales.dtype) for w in (first, second)]
    orders = [w.perm for w in (first, second)]
    if kinds[0] != kinds[1]:
        raise ShapeError(
            f"(E, K, group size, dtype of scales) are {kinds[0]} and {kinds[1]}; expected the same"
        )
    if any(p is None for p in orders) != all(p is None for p in orders) or (
        orders[0] is not None and not torch.equal(*orders)  # type: ignore[arg-type]
    ):
        raise ShapeError("the two have different orders of input features (act order)")
    both = first, second
    zeros: list[torch.Tensor | None] = [None, None]
    if any(w.zeros is not None for w in both):
        full = [
            torch.full(w.scales.shape, DEFAULT_ZERO, dtype=torch.uint8, device="cpu") for w in both
        ]
        zeros = [f if w.zeros is None else w.zeros for f, w in zip(full, both, strict=True)]
    if first.out_features % PANEL:
        return _repacked(both, zeros)
    lead = -4, -2  # where panels and columns are
    joined = None if zeros[0] is None else torch.cat(zeros, lead[1])  # type: ignore[arg-type]
    return PackedWeight(
        torch.cat([w.qweight for w in both], lead[0]),
        torch.cat([w.scales for w in both], lead[1]),
        joined,
        first.perm,
    )


def is_paired(w13: PackedWeight) -> bool:
    """Whether gate and up are whole panels each."""
    return w13.out_features % (2 * PANEL) == 0


def paired(w13: PackedWeight, interleaved: bool) -> PackedWeight:
    """w13 [E, 2I, H] with gate above up, each padded to whole panels: [E, 2 · ceil32(I), H].

    This is what the kernels take: a panel of gate beside a panel of up. Rows are moved expert by
    expert; a w13 that is so already is returned as it is.

    Args:
        interleaved: rows are gate 0, up 0, gate 1, up 1, … instead of two halves.
    """
    if not interleaved and is_paired(w13):
        return w13
    count = w13.num_experts
    assert count is not None
    return stack_experts((_paired_one(w13, e, interleaved) for e in range(count)), count)


def pair_rows(rows: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[2I, ...] with gate above up, each padded with zeros to whole panels."""
    gate, up = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
    missing = -len(gate) % PANEL
    pad = rows.new_zeros((missing, *rows.shape[1:]))
    return torch.cat((gate, pad, up, pad))


def _paired_one(w13: PackedWeight, expert: int, interleaved: bool) -> PackedWeight:
    w = PackedWeight(*(None if t is None else t[expert] for t in w13[:3]))  # type: ignore[arg-type]
    perm = w13.perm if w13.perm is None or w13.perm.dim() == 1 else w13.perm[expert]
    q, scales = unpack_integers(w), group_rows(w.scales).T
    points = None if w.zeros is None else pair_rows(group_rows(w.zeros).T, interleaved)
    packed = pack(
        pair_rows(q, interleaved),
        pair_rows(scales, interleaved),
        points,
        format="plain",
        group_size=w.group_size,
        allow_nonfinite=True,
    )
    return packed._replace(perm=perm)


def _repacked(
    both: tuple[PackedWeight, PackedWeight], zeros: list[torch.Tensor | None]
) -> PackedWeight:
    """As :func:`concatenate`, where the first weight ends inside of a panel."""
    K = 8 * both[0].qweight.shape[-3]
    q = torch.cat([unpack_integers(w) for w in both], -2)
    scales = torch.cat([group_rows(w.scales).transpose(-1, -2) for w in both], -2)
    points = None
    if zeros[0] is not None and zeros[1] is not None:
        points = torch.cat([group_rows(z).transpose(-1, -2) for z in zeros if z is not None], -2)
    packed = pack(q, scales, points, format="plain", group_size=K // scales.shape[-1])
    return packed._replace(perm=both[0].perm)
