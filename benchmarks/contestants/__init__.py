"""Who can take part in a measurement: one module each, for experts in the folder ``experts``.

A module has

    unavailable() -> str                     why it cannot run here, empty if it can
    pack(problem) -> P                       the layer in the contestant's own form; once a copy
    size(packed: P) -> int                   bytes that a call has to read
    call(x: Tensor, packed: P) -> Tensor     bf16 [M, k] -> [M, n]; this is what is timed;
                                             experts: call(x, topk_weights, topk_ids, packed)
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("amxq", "amxq_int8", "int4pack", "torch_bf16", "torch_bf16_packed")


EXPERTS = ("amxq", "amxq_int8", "torch_loop", "torch_grouped")


def load(name: str, kind: str = "linear") -> ModuleType:
    """The module of a contestant. Raises ValueError, naming the ones there are, for another."""
    names = EXPERTS if kind == "experts" else NAMES
    if name not in names:
        raise ValueError(f"no contestant {name!r}; there are: {', '.join(names)}")
    folder = f"{__name__}.experts" if kind == "experts" else __name__
    return importlib.import_module(f"{folder}.{name}")
