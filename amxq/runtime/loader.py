"""Object code to functions that can be called in this process."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any

from amxq.codegen.compile import binding

_lock = threading.Lock()
_session: Any = None
_numbers = itertools.count()


@dataclass(frozen=True)
class Loaded:
    """Addresses of a kernel's two entry points; ``tracker`` keeps the code mapped."""

    serial: int
    parallel: int
    tracker: Any


def load(name: str, image: bytes) -> Loaded:
    """Links an object made by :mod:`amxq.codegen.compile` into this process."""
    global _session
    llvm = binding()
    with _lock:
        if _session is None:
            _session = llvm.create_lljit_compiler()
        library = f"amxq.{name}.{next(_numbers)}"
        builder = llvm.JITLibraryBuilder()
        builder.add_object_img(image).add_current_process()
        builder.export_symbol(f"{name}_serial").export_symbol(f"{name}_parallel")
        tracker = builder.link(_session, library)
        return Loaded(tracker[f"{name}_serial"], tracker[f"{name}_parallel"], tracker)
