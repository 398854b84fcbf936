"""Calls of weights that were seen before: ``amxq.linear`` checks a weight once while its tensors
live, and does not pass through torch's dispatcher again for what a bound call serves.

Both cost most where caches are cold, as they are after each weight of a model: at M = 1 a fifth of
the time of a 4096 x 4096 weight on two threads (docs/performance.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from amxq.ops.bound import BoundCall

_LIMIT = 4096
_KINDS = (torch.Tensor, torch.nn.Parameter)

Key = tuple[object, ...]

_calls: dict[Key, tuple[object, BoundCall, list[weakref.ref[torch.Tensor]]]] = {}
"""By precision and the tensors' ids: where they are, the call, and references that remove the
entry when the first tensor goes."""
_seen: set[Key] = set()


def find(precision: str, *tensors: torch.Tensor | None) -> BoundCall | None:
    """The call that was remembered for just these tensors, if they are where they were."""
    known = _calls.get((precision, *map(id, tensors)))
    if known is None:
        return None
    places, call, _ = known
    if places != _places(tensors):
        return None  # other memory has been put in place
    return call


def remember(
    make: Callable[..., BoundCall | None], precision: str, *tensors: torch.Tensor | None
) -> None:
    """Keeps the call that ``make`` returns for tensors that have been checked, if there is one:
    from the second time on, as what is used once is not worth it. It must not hold them."""
    key = (precision, *map(id, tensors))
    if key not in _seen:
        if len(_seen) >= _LIMIT:
            _seen.clear()
        _seen.add(key)
        return
    given = [t for t in tensors if t is not None]
    if any(type(t) not in _KINDS or not t.is_cpu for t in given):
        return
    call = make(precision, *tensors)
    if call is None:
        return
    if len(_calls) >= _LIMIT:
        _calls.clear()

    def forget(_: object) -> None:
        _calls.pop(key, None)

    references = [weakref.ref(t, forget) for t in given]
    _calls[key] = _places(tensors), call, references


def _places(tensors: tuple[torch.Tensor | None, ...]) -> object:
    return [(t.data_ptr(), t.shape) for t in tensors if t is not None]
