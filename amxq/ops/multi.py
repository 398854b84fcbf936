"""``amxq.multi_linear`` and ``torch.ops.amxq.multi_linear``: one x times several weights."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amxq.errors import AmxqError, DTypeError, LayoutError, ShapeError
from amxq.ops import linear as one
from amxq.ops import schedule
from amxq.ops.activations import ordered_rows
from amxq.ops.bound import BoundCall, bound, observed
from amxq.ops.checks import (
    PRECISIONS,
    check_activations,
    check_bias,
    check_devices,
    check_precision,
    check_weight,
    lazy,
)
from amxq.ops.gradient import differentiated, primal, refuse_tangents
from amxq.quantization.packed import PackedWeight
from amxq.runtime.targets import get_target

_library = torch.library.Library("amxq", "FRAGMENT")
_library.define(
    "multi_linear(Tensor x, Tensor[] qweights, Tensor[] scales, Tensor[]? zeros=None, "
    "Tensor? perm=None, *, Tensor? bias=None, str precision='bf16') -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def multi_linear(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    precision: str = "bf16",
) -> tuple[torch.Tensor, ...]:
    """``amxq.linear`` of one x with several weights in one launch: a layer's q, k and v.

    Each result has the bits that ``amxq.linear`` gives for its weight alone. Nothing of the
    weights is copied: they may lie anywhere, in a mapped file too.

    Args:
        x: [..., K] bf16, fp16 or fp32 on the CPU, any strides.
        weights: packed weights [N_i, K] of one K and group size, scales of one dtype, all with
            zero points or none, and with the same perm if they have one. Each has its own N.
        biases: for each weight [N_i] or None; or None: no biases.
        precision: "bf16" or "int8", see :func:`amxq.linear`.

    Returns:
        [..., N_i] in x's dtype for each weight: views of one tensor [..., ΣN_i], which is what
        ``torch.ops.amxq.multi_linear`` returns. Where x or a bias needs a gradient they are
        computed one by one.

    Raises:
        ShapeError, DTypeError, LayoutError: the tensors do not fit; nothing has run.
        ArgumentError: there is no such precision.
        TargetError: this CPU cannot run the target that was asked for.
    """
    weights = _as_weights(weights)
    y = _joined(x, weights, joint_bias(weights, biases), precision)
    widths = [w.out_features for w in weights]
    return y.split(widths, -1)  # type: ignore[no-any-return]


def bound_multi_linear(
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None,
    precision: str,
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """:func:`multi_linear` of these weights, for many calls: they are checked here only."""
    weights = _as_weights(weights)
    bias = joint_bias(weights, biases)
    copies = bias_copies(bias, weights, biases)
    fast, memory = bound_call(weights, bias, precision)
    widths = [w.out_features for w in weights]

    def general(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        assert residual is None
        return _joined(x, weights, joint_bias(weights, biases), precision)

    # general holds weights and biases
    call = general if copies is None else bound(fast, general, memory, bias)

    def split(x: torch.Tensor) -> Any:
        for copy in copies or ():
            copy()
        return call(x).split(widths, -1)

    return split


def bias_copies(
    joint: torch.Tensor | None,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None] | None,
) -> list[Callable[[], Any]] | None:
    """Calls that bring what has been written into the biases since to the tensor that
    :func:`joint_bias` has made of them; None where that takes more than copying memory."""
    copies: list[Callable[[], Any]] = []
    if joint is None or biases is None:
        return copies
    to = joint.data_ptr()
    for w, b in zip(weights, biases, strict=True):
        size = w.out_features * joint.element_size()
        if b is not None:
            if b.dtype is not joint.dtype or not b.is_contiguous() or lazy(b):
                return None
            copies.append(functools.partial(ctypes.memmove, to, b.data_ptr(), size))
        to += size
    return copies


def bound_call(
    weights: Sequence[PackedWeight], bias: torch.Tensor | None, precision: str
) -> tuple[BoundCall | None, tuple[torch.Tensor, ...]]:
    """The call of weights, which are checked, with their joint bias, if there can be one; and what
    has to live as long, beside weights and bias."""
    joint = _join(weights)
    _common_perm([w.perm for w in weights])
    check_precision(precision)

    def plan(M: int, target: str, residual: bool) -> schedule.Plan:
        kind = None if bias is None else bias.dtype
        return joint.plan(M, target, kind, torch.bfloat16, precision)

    sizes, memory = (joint.N, joint.K, joint.group), (*joint.first, joint.table)
    if weights[0].perm is not None:
        return None, memory  # activations are put into order first
    if any(map(lazy, itertools.chain(*weights, [bias]))):
        return None, memory
    return BoundCall(sizes, memory, bias, plan), memory


def _joined(
    x: torch.Tensor, weights: Sequence[PackedWeight], bias: torch.Tensor | None, precision: str
) -> torch.Tensor:
    """The results side by side."""
    qweights, scales, zeros, perms = (list(tensors) for tensors in zip(*weights, strict=True))
    if any((z is None) != (zeros[0] is None) for z in zeros):
        raise LayoutError("some weights have zeros and others have none; expected the same of all")
    try:
        perm, *others = perms
        known = not observed() or all(other is perm for other in others)
        if known:  # else there are no values to compare
            perm = _common_perm(perms)
        batched = torch._C._functorch.peek_interpreter_stack() is not None  # lists have no rule
        if not known or batched or differentiated(x, bias):
            _common_sizes(weights)
            widths = [w.out_features for w in weights]
            parts = [None] * len(weights) if bias is None else bias.split(widths)
            pairs = zip(weights, parts, strict=True)
            return torch.cat([one.linear(x, *w, bias=b, precision=precision) for w, b in pairs], -1)
        return primal(  # type: ignore[no-any-return]
            torch.ops.amxq.multi_linear,
            x,
            qweights,
            scales,
            None if zeros[0] is None else zeros,
            perm,
            bias=bias,
            precision=precision,
        )
    except (AttributeError, RuntimeError) as problem:  # of torch, before a kernel was reached
        if not isinstance(problem, AmxqError):
            given = {**_named(qweights, scales, zeros), "perm": perm, "bias": bias}
            given = {name: t for name, t in given.items() if t is not None}
            one.refuse({"x": x} | given, precision)
        raise


def _named(qweights: Sequence[Any], scales: Sequence[Any], zeros: Sequence[Any]) -> dict[str, Any]:
    """The weights' tensors, as messages call them."""
    kinds = (("qweight", qweights), ("scales", scales), ("zeros", zeros))
    return {f"{name} of weight {i}": t for name, ts in kinds for i, t in enumerate(ts)}


def _cpu(
    x: torch.Tensor,
    qweights: list[torch.Tensor],
    scales: list[torch.Tensor],
    zeros: list[torch.Tensor] | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    refuse_tangents("multi_linear", x, bias)
    joint = _join(_packed(qweights, scales, zeros, perm))
    K = joint.K if perm is None else perm.shape[0]
    M = check_activations(x, K, joint.N, precision, bias)
    y = x.new_empty((*x.shape[:-1], joint.N))
    if M == 0:
        return y
    if bias is not None:
        bias = one.usable_bias(bias)
    plan = joint.plan(M, get_target(), None if bias is None else bias.dtype, y.dtype, precision)
    rows = x if perm is None and x.is_contiguous() else ordered_rows(x, perm, joint.K)
    weight = one.addresses(*joint.first, joint.table)
    plan.run(rows, weight, one.addresses(bias, y), (M, joint.N, joint.K, joint.group))
    return y


def _fake(
    x: torch.Tensor,
    qweights: list[torch.Tensor],
    scales: list[torch.Tensor],
    zeros: list[torch.Tensor] | None = None,
    perm: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    precision: str = "bf16",
) -> torch.Tensor:
    """Shapes and dtypes only, for tracing, or for a call with tensors on the meta device."""
    given = {"x": x, **_named(qweights, scales, zeros or ()), "perm": perm, "bias": bias}
    check_devices(given)
    weights = _packed(qweights, scales, zeros, perm)
    K = 8 * qweights[0].shape[1] if perm is None else perm.shape[0]
    N = sum(w.scales.shape[0] for w in weights)
    check_activations(x, K, N, precision, bias)
    return x.new_empty((*x.shape[:-1], N))


_library.impl("multi_linear", _cpu, "CPU")
torch.library.register_fake("amxq::multi_linear", _fake, lib=_library)


# --- several weights as one -------------------------------------------------------------


class _Joint(NamedTuple):
    """Weights side by side: N columns together, K padded to whole groups.

    Attributes:
        first: qweight, scales and, if there are any, zeros of the first weight.
        table: where the others are, panel by panel, as amxq_kernels.int4_linear says.
    """

    N: int
    K: int
    group: int
    first: tuple[torch.Tensor, ...]
    table: torch.Tensor

    def plan(
        self, M: int, target: str, bias: torch.dtype | None, y: torch.dtype, precision: str
    ) -> schedule.Plan:
        """See :func:`amxq.ops.schedule.plan`."""
        operands = schedule.Operands(
            self.first[1].dtype, len(self.first) == 3, bias, residual=False, table=True
        )
        panels = self.table.shape[0]
        return schedule.plan(M, self.K, panels, self.group, target, operands, y, precision)


def _as_weights(weights: object) -> tuple[PackedWeight, ...]:
    if not isinstance(weights, (list, tuple)) or isinstance(weights, PackedWeight):
        found = type(weights).__name__
        raise DTypeError(f"weights is a {found}; expected a list of amxq.PackedWeight")
    for w in weights:
        if not isinstance(w, PackedWeight):
            raise DTypeError(f"a weight is a {type(w).__name__}; expected an amxq.PackedWeight")
        for name, tensor in zip(w._fields, w, strict=True):
            absent = tensor is None and name in ("zeros", "perm")
            if not (absent or isinstance(tensor, torch.Tensor)):
                found = type(tensor).__name__
                raise DTypeError(f"{name} of a weight is a {found}; expected a torch.Tensor")
    if not weights:
        raise ShapeError("weights is empty; expected one or more")
    return tuple(weights)


def _packed(
    qweights: list[torch.Tensor],
    scales: list[torch.Tensor],
    zeros: list[torch.Tensor] | None,
    perm: torch.Tensor | None,
) -> list[PackedWeight]:
    count = len(qweights)
    if not count or len(scales) != count or (zeros is not None and len(zeros) != count):
        raise ShapeError(
            f"{count} qweights, {len(scales)} scales and "
            f"{'no' if zeros is None else len(zeros)} zeros; expected one of each for each weight"
        )
    each = [None] * count if zeros is None else zeros
    return [PackedWeight(q, s, z, perm) for q, s, z in zip(qweights, scales, each, strict=True)]


def _common_sizes(weights: Sequence[PackedWeight]) -> list[tuple[int, int, int]]:
    """K, N and groups of each. Raises ShapeError or LayoutError for weights that one launch cannot
    take."""
    sizes = [check_weight(*w) for w in weights]
    (K, _, G), head = sizes[0], weights[0]
    for (k, n, g), w in zip(sizes, weights, strict=True):
        if (k, g) != (K, G):
            raise ShapeError(
                f"weights [{n}, {k}] with {g} groups and [{sizes[0][1]}, {K}] with {G}; expected "
                "the same K and group size: call amxq.linear for each"
            )
        if w.scales.dtype != head.scales.dtype or (w.zeros is None) != (head.zeros is None):
            raise LayoutError(
                f"weights with {head.scales.dtype} scales and {_with(head.zeros)} zeros, and with "
                f"{w.scales.dtype} and {_with(w.zeros)}; expected the same kind"
            )
    return sizes


def _join(weights: Sequence[PackedWeight]) -> _Joint:
    """Raises what :func:`_common_sizes` raises."""
    sizes, head = _common_sizes(weights), weights[0]
    G = sizes[0][2]
    places = []
    for (_, n, _), w in zip(sizes, weights, strict=True):
        distances = []
        for tensor, origin in zip(w[:3], head[:3], strict=True):
            if tensor is not None and origin is not None:
                bytes_ = tensor.data_ptr() - origin.data_ptr()
                if bytes_ % tensor.element_size():
                    raise LayoutError("scales lie at an odd address; clone them")
                distances.append(bytes_ // tensor.element_size())
        places.append((n, *distances))
    padded = 8 * head.qweight.shape[1]
    first = tuple(t for t in head[:3] if t is not None)
    return _Joint(sum(n for _, n, _ in sizes), padded, padded // G, first, _table(tuple(places)))


def _with(zeros: torch.Tensor | None) -> str:
    return "no" if zeros is None else "with"


@functools.lru_cache(maxsize=1024)
def _table(places: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """int64 [panels, 6] of weights of which N and the distances of their tensors are given."""
    entries, start = [], 0
    for columns, qweight, scales, *zeros in places:
        away = qweight, scales, *(zeros or [0])
        entries += [(*away, start, columns, n) for n in range(0, columns, schedule.PANEL)]
        start += columns
    return torch.tensor(entries, device="cpu")


def _common_perm(perms: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    first = perms[0]
    for perm in perms[1:]:
        if perm is first:
            continue
        if perm is None or first is None or not torch.equal(perm, first):
            raise LayoutError(
                "the weights' perms differ: their act order is not the same; "
                "call amxq.linear for each"
            )
    return first


def joint_bias(
    weights: Sequence[PackedWeight], biases: Sequence[torch.Tensor | None] | None
) -> torch.Tensor | None:
    """The biases side by side, zeros for those that are None; None if all are."""
    if biases is None:
        return None
    if not isinstance(biases, (list, tuple)):
        raise DTypeError(f"biases is a {type(biases).__name__}; expected a list, or None")
    if len(biases) != len(weights):
        raise ShapeError(f"{len(biases)} biases for {len(weights)} weights; expected one for each")
    for w, b in zip(weights, biases, strict=True):
        if b is not None:
            one.refuse({"a bias": b}, PRECISIONS[0])
            check_bias(b, w.out_features)
            if b.device != w.scales.device:
                raise LayoutError(f"a bias is on {b.device}; expected a CPU tensor; use .cpu()")
    if all(b is None for b in biases):
        return None
    dtypes = {b.dtype for b in biases if b is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return torch.cat(
        [
            torch.zeros(w.out_features, dtype=dtype, device="cpu") if b is None else b.to(dtype)
            for w, b in zip(weights, biases, strict=True)
        ]
    )
