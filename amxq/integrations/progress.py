"""A progress bar on a terminal's standard error; nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Counts layers; a context manager.

    Args:
        what: what is being done, for the bar.
        total: how many layers there are; None if that is not known.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except ImportError:  # comes with transformers; the bar is not worth an error
            return
        self._bar = tqdm(desc=what, total=total, unit=" layers", leave=False)

    def step(self, layer: str) -> None:
        """One more layer is done."""
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
