"""Random programs do on every target what they do on the interpreter.

By default a hundred run, by ``make fuzz`` two thousand in two halves, with ``-m slow`` twenty
thousand new ones in ten parts. A program that fails is made smaller and printed; what
it shows becomes a kernel of tests/compiler/test_found_by_fuzzing.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from amxq.runtime.targets import available_targets
from tests.compiler.conftest import *  # noqa: F403
from tests.fuzz import runner
from tests.fuzz.expressions import Program
from tests.fuzz.programs import programs


def fuzz(count: int, number: int | None) -> None:
    """Checks ``count`` programs: always the same ones for a ``number``, new ones for None."""

    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(program=programs(), target=st.sampled_from(available_targets()))
    def agree(program: Program, target: str) -> None:
        runner.check(program, [target])

    (agree if number is None else seed(number)(agree))()


def test_a_hundred_programs() -> None:
    fuzz(100, 0)


@pytest.mark.fuzz
@pytest.mark.parametrize("half", [1, 2])
def test_a_thousand_programs(half: int) -> None:
    fuzz(1000, half)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_thousand_new_programs(part: int) -> None:
    fuzz(2000, None)


# --- the comparison itself ----------------------------------------------------------------

SOURCE = """\
import amxq
import amxq.language as tl


@amxq.jit
def kernel({parameters}):
    at = tl.arange(0, 8)
    x = tl.load(in_f32 + at)
    tl.store(out_0 + at, {value})
"""


def stored(value: str, data: str = "wide") -> Program:
    source = SOURCE.format(parameters=", ".join(runner.PARAMETERS), value=value)
    return Program(source, (runner.F32,), data, 0)


@pytest.mark.parametrize(
    "value", ["x * x + x", "tl.exp(tl.minimum(x, 9.0))", "x / 3.0", "tl.sum(x, 0)", "x * x - x * 3"]
)
def test_roundings_that_may_differ_are_allowed(value: str) -> None:
    runner.check(stored(value), available_targets())


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("x / 3.0", lambda y: np.nextafter(y, np.float32(np.inf))),
        ("x * x + x", lambda y: y * np.float32(1 + 2**-18)),
        ("x", lambda y: np.where(np.arange(y.size) == 5, np.nan, y)),
    ],
)
def test_other_differences_are_not(monkeypatch: pytest.MonkeyPatch, value: str, wrong: Any) -> None:
    plain = runner.run

    def changed(kernel: Any, program: Program) -> list[torch.Tensor]:
        results = plain(kernel, program)
        if not runner.knobs.INTERPRET.get():
            results[0] = torch.from_numpy(np.asarray(wrong(results[0].numpy()), np.float32))
        return results

    monkeypatch.setattr(runner, "run", changed)
    with pytest.raises(runner.Disagreement, match="result 0"):
        runner.check(stored(value), available_targets()[:1])


def test_batches_of_dots_are_disturbed_too() -> None:
    """The comparison once took operands to be matrices."""
    a = "tl.load(dot_bf16 + tl.arange(0, 2)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :])"
    product = f"tl.dot({a}, {a.replace('[None, None, :]', '[None, :, None]')})"
    runner.check(stored(f"tl.sum(tl.reshape({product}, [2]), 0) + x"), available_targets())
