"""Every environment variable that amxq reads, typed, in one place.

A knob is read when it is used, so a change of the environment counts from the next call
on. Code that needs a value on a hot path keeps its own copy and says when it refreshes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from amxq.errors import SettingError

T = TypeVar("T")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: its name, how its text is read, and what unset means."""

    name: str
    parse: Callable[[str], T]
    default: Callable[[], T]
    doc: str

    def get(self) -> T:
        """The value now. Raises SettingError, naming the variable, for text it cannot read."""
        text = os.environ.get(self.name, "")
        if not text:
            return self.default()
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{self.name}={text!r}: {error}") from None

    @contextmanager
    def scope(self, text: str | None) -> Iterator[None]:
        """Set (or, with None, unset) the variable inside a ``with`` block."""
        before = os.environ.get(self.name)
        self._write(text)
        try:
            yield
        finally:
            self._write(before)

    def _write(self, text: str | None) -> None:
        if text is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = text


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _count(text: str) -> int:
    # libgomp ends the process if it cannot create as many threads as it is asked for
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError("expected a whole number from 1 to 1024")
    return int(text)


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amxq"


TARGET: Knob[str | None] = Knob(
    "AMXQ_TARGET", str, lambda: None, "amx, avx512_bf16, avx512, avx2 or auto"
)
EMULATE = Knob("AMXQ_EMULATE", _flag, lambda: False, "run AMX code on CPUs without AMX, slowly")
INTERPRET = Knob("AMXQ_INTERPRET", _flag, lambda: False, "run kernels as Python on NumPy, slowly")
CACHE_DIR = Knob("AMXQ_CACHE_DIR", Path, _cache_home, "where compiled kernels are kept")
KERNEL_DUMP: Knob[Path | None] = Knob(
    "AMXQ_KERNEL_DUMP",
    lambda t: Path(t).expanduser(),
    lambda: None,
    "folder for every stage of every compiled kernel",
)
ALWAYS_COMPILE = Knob(
    "AMXQ_ALWAYS_COMPILE", _flag, lambda: False, "compile even if the cache has the object"
)
AUTOTUNE = Knob(
    "AMXQ_AUTOTUNE", _flag, lambda: True, "0: the first configuration that compiles, untimed"
)
PRINT_AUTOTUNING = Knob(
    "AMXQ_PRINT_AUTOTUNING", _flag, lambda: False, "print what every autotuning has found"
)
NUM_THREADS: Knob[int | None] = Knob(
    "AMXQ_NUM_THREADS", _count, lambda: None, "threads of a launch; unset: torch's own number"
)
HUGE_PAGES = Knob(
    "AMXQ_HUGE_PAGES", _flag, lambda: True, "ask for pages of 2 MB for packed weights"
)

ALL: tuple[Knob[Any], ...] = (
    TARGET,
    EMULATE,
    INTERPRET,
    CACHE_DIR,
    KERNEL_DUMP,
    ALWAYS_COMPILE,
    AUTOTUNE,
    PRINT_AUTOTUNING,
    NUM_THREADS,
    HUGE_PAGES,
)
