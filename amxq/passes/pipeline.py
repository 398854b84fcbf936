"""The passes, in order. This list is the compiler's table of contents."""

from __future__ import annotations

from collections.abc import Callable

from amxq.ir.ops import Function
from amxq.ir.verifier import verify
from amxq.passes.carried_pointers import carry_distances
from amxq.passes.choose_dot import choose_dot
from amxq.passes.expand_math import expand_math
from amxq.passes.recurrences import carry_offsets
from amxq.passes.simplify import simplify
from amxq.passes.vectorize import vectorize

Observer = Callable[[str, Function], None]


def lower(function: Function, target: str, vector_bits: int, observe: Observer) -> None:
    """Lowers tile-IR in place to what :mod:`amxq.codegen.llvm` takes.

    ``observe`` sees the function after every pass, under the pass's name.
    """
    passes: tuple[tuple[str, Callable[[], None]], ...] = (
        ("carry_distances", lambda: carry_distances(function)),
        ("carry_offsets", lambda: carry_offsets(function)),
        ("choose_dot", lambda: choose_dot(function, target)),
        ("simplify", lambda: simplify(function)),
        ("vectorize", lambda: vectorize(function, vector_bits // 32)),
        ("expand_math", lambda: expand_math(function)),
        ("simplify_vectors", lambda: simplify(function)),
    )
    for name, run in passes:
        run()
        verify(function, name)
        observe(name, function)
