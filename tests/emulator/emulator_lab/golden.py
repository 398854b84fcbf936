"""Recorded answers of real AMX: which cases, and how they are kept and compared.

``data/answers.npz`` holds, per family of random programs, how each case ended (signal,
code, address, RIP) and a digest of all memory that it can have written; and the whole
result of some dot products on special values. ``data/answers.json`` says on what CPU and
when. Recorded by ``python -m emulator_lab.record`` on a machine with AMX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from emulator_lab import cases
from emulator_lab.runners import Outcome, Runner

DATA = Path(__file__).resolve().parent.parent / "data"
# family: (generator, number of cases, whether the tiles left over are dumped and compared)
FAMILIES: dict[str, tuple[Callable[[int], cases.Case], int, bool]] = {
    "dots": (cases.dot_case, 1500, False),
    "mixed": (cases.mixed_case, 1200, True),
    "plain": (lambda seed: cases.mixed_case(seed + 10**6, configs=False), 500, False),
}
SPECIAL = 96  # dot products kept whole


def outcomes(runner: Runner, family: str) -> Iterator[Outcome]:
    """Run every case of a family."""
    generate, number, dump = FAMILIES[family]
    for seed in range(number):
        yield runner.run(generate(seed), seed, dump)


def special_results(runner: Runner) -> np.ndarray:
    """[SPECIAL, 256] uint32: the 16 rows of 64 bytes where C was, for each special case."""
    results = []
    for seed in range(SPECIAL):
        outcome = runner.run(cases.special_case(seed), seed, False)
        part = outcome.memory[cases.C_AT : cases.C_AT + 1024]
        results.append(np.frombuffer(part, np.uint32))
    return np.array(results)


def compare(runner: Runner, family: str, *, codes: bool) -> list[str]:
    """Differences from the recorded answers, in words; ``codes``: si_code is known."""
    recorded = np.load(DATA / "answers.npz")
    ended, digests = recorded[f"{family}_ended"], recorded[f"{family}_digest"]
    wrong = []
    for seed, outcome in enumerate(outcomes(runner, family)):
        want = [int(v) for v in ended[seed]]
        got = list(outcome[:4])
        if not codes:
            want[1] = got[1] = 0
        if want != got:
            wrong.append(f"{family} {seed}: hardware ended {want}, here {got}")
        elif int.from_bytes(outcome.digest, "little") != int(digests[seed]):
            wrong.append(f"{family} {seed}: memory differs from hardware's")
    return wrong


def compare_special(runner: Runner) -> list[str]:
    """The same for the special values, naming the first lane that differs."""
    want, got = np.load(DATA / "answers.npz")["special"], special_results(runner)
    wrong = []
    for seed in np.flatnonzero((want != got).any(1)):
        lane = int(np.flatnonzero(want[seed] != got[seed])[0])
        wrong.append(
            f"special {seed}: row {lane // 16} column {lane % 16} is {got[seed, lane]:08x}, "
            f"hardware has {want[seed, lane]:08x}"
        )
    return wrong
