"""Loops, what happens while a kernel is compiled, hints, and printing."""

from __future__ import annotations

from typing import Any

from amxq.language.core import builtin


@builtin
def range(
    start: Any,
    stop: Any = None,
    step: Any = None,
    num_stages: int | None = None,
    loop_unroll_factor: int | None = None,
) -> Any:
    """A loop at run time, as Python's ``range``, which is the same here. Bounds are integer
    scalars; the step is positive (at run time one that is not counts as 1, so that loops end).
    Variables that the loop changes keep their shape and type. ``num_stages`` and
    ``loop_unroll_factor`` are taken for Triton's sake, without effect."""


@builtin
def static_range(start: int, stop: int | None = None, step: int = 1) -> Any:
    """A loop unrolled at compile time over constants: its index is one, and variables may change
    their types from turn to turn."""


@builtin
def static_assert(condition: bool, message: str = "") -> None:
    """A CompilationError unless the constant ``condition`` holds."""


@builtin
def static_print(*values: Any) -> None:
    """Prints constants, or the types of values, while the kernel is compiled."""


@builtin
def device_print(prefix: str, *values: Any) -> None:
    """Prints a line for each element while the kernel runs: the program's place in the grid, the
    element's place in the tile, ``prefix`` (a constant) and the values, scalars or tiles of one
    shape. Lines of one thread are in order, those of several threads are not."""


@builtin
def assume(condition: Any) -> None:
    """A promise to the compiler, which this version does not need."""


@builtin
def multiple_of(value: Any, values: Any) -> Any:
    """``value``, which is promised to be a multiple; the compiler finds out what it needs."""


@builtin
def max_contiguous(value: Any, values: Any) -> Any:
    """``value``, which is promised to have runs of neighbouring numbers; the compiler finds out
    what it needs."""


@builtin
def max_constancy(value: Any, values: Any) -> Any:
    """``value``, which is promised to have runs of equal numbers; the compiler finds out what it
    needs."""


@builtin
def debug_barrier() -> None:
    """Nothing: a program runs on one thread, in order."""


@builtin
def swizzle2d(i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any) -> Any:
    """A new pair (i, j) such that programs that run one after another share rows and columns:
    indices of a row-major [size_i, size_j] grid become those of groups of ``size_g`` rows, each
    traversed column by column."""
