"""Raw checkpoint tensors as arguments: packed at first use, and remembered."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from amxq.errors import LayoutError
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packing import format_of_raw, pack

_packed: dict[int, tuple[tuple[Any, ...], tuple[Any, ...], PackedWeight]] = {}
"""id of qweight → weak references to the triple, its state, and the packed form."""


def packed_once(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    perm: torch.Tensor | None,
) -> PackedWeight:
    """The packed form of a raw triple, remembered while its tensors live and are not written."""
    if perm is not None:
        raise LayoutError(
            "perm beside raw checkpoint tensors: pack them first, with amxq.pack(..., g_idx=…)"
        )
    given = (qweight, scales, zeros)
    if any(t is not None and t.is_inference() for t in given):
        # they do not count writes, so that a change would go unnoticed
        return pack(*given, format=format_of_raw(*given))
    key = id(qweight)
    state = tuple(_state(t) for t in given)
    found = _packed.get(key)
    if found is not None and found[1] == state:
        if all(t is None or ref() is t for ref, t in zip(found[0], given, strict=True)):
            return found[2]
    packed = pack(qweight, scales, zeros, format=format_of_raw(qweight, scales, zeros))
    owners = (
        weakref.ref(qweight, lambda _: _packed.pop(key, None)),
        *(None if t is None else weakref.ref(t) for t in (scales, zeros)),
    )
    _packed[key] = (owners, state, packed)
    return packed


def _state(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    """What changes when a tensor is written to (writes through ``.data`` or NumPy do not count)."""
    return None if tensor is None else (tensor.data_ptr(), tensor._version)
