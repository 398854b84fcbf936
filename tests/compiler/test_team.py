"""Threads of a launch share its programs: each runs once, and nobody waits for a slow thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amxq
import amxq.language as tl


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@amxq.jit
def count(runs, work, result):
    """runs[program] += 1, after work[program] additions."""
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    program += tl.program_id(0)
    total = 0
    for i in range(0, tl.load(work + program)):
        total += i * i
    tl.store(result + program, total)
    tl.atomic_add(runs + program, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 7), st.integers(1, 3)),
    st.integers(1, 70),
    st.integers(0, 1 << 16),
)
def test_every_program_runs_once(grid: tuple[int, int, int], threads: int, seed: int) -> None:
    programs = grid[0] * grid[1] * grid[2]
    generator = torch.Generator().manual_seed(seed)
    work = torch.randint(0, 300, (programs,), dtype=torch.int32, generator=generator)
    work *= torch.rand(programs, generator=generator) < 0.2
    runs, result = torch.zeros(2, programs, dtype=torch.int32)
    torch.set_num_threads(threads)
    count[grid](runs, work, result)
    assert runs.tolist() == [1] * programs


@amxq.jit
def wait_for(flag, seen, setter, LIMIT: tl.constexpr):
    """Program 0 waits until the program ``setter`` has run, and says whether it has."""
    if tl.program_id(0) == 0:
        tries = 0
        while (tl.atomic_add(flag, 0) == 0) & (tries < LIMIT):
            tries += 1
        tl.store(seen, tl.atomic_add(flag, 0))
    if tl.program_id(0) == setter:
        tl.atomic_add(flag, 1)


def test_the_rest_of_a_slow_thread_is_taken_over() -> None:
    torch.set_num_threads(2)
    flag, seen = torch.zeros(2, 1, dtype=torch.int32)
    wait_for[(256,)](flag, seen, 127, LIMIT=1 << 28)  # the last program of the first's share
    assert seen.item() == 1


def test_an_empty_grid_bound() -> None:
    runs, work, result = torch.zeros(3, 4, dtype=torch.int32)
    compiled = count[(4,)](runs, work, result)
    compiled.bind((0, 1, 1), [t.data_ptr() for t in (runs, work, result)], 2)()
    assert runs.tolist() == [1] * 4


@amxq.jit
def ends_of(total, y, LAST: tl.constexpr):
    """Counts programs 0, and LAST by its place on both axes."""
    here = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if (here == 0) | (here == LAST):
        tl.atomic_add(y, 1)


@pytest.mark.slow
def test_more_programs_than_31_bits() -> None:
    torch.set_num_threads(2)
    grid = (1 << 16, (1 << 15) + 3)
    y = torch.zeros(1, dtype=torch.int32)
    ends_of[grid](0, y, LAST=grid[0] * grid[1] - 1)
    assert y.item() == 2
