"""Who can take part in a measurement: one module each.

A module has

    unavailable() -> str                     why it cannot run here, empty if it can
    pack(problem) -> P                       the layer in the contestant's own form; once a copy
    size(packed: P) -> int                   bytes that a call has to read
    call(x: Tensor, packed: P) -> Tensor     bf16 [M, k] -> [M, n]; this is what is timed
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = ("amxq", "amxq_int8", "int4pack", "torch_bf16", "torch_bf16_packed")


def load(name: str) -> ModuleType:
    """The module of a contestant. Raises ValueError, naming the ones there are, for another."""
    if name not in NAMES:
        raise ValueError(f"no contestant {name!r}; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}")
