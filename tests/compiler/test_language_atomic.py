"""Atomic operations, printing, and locks between programs."""

from __future__ import annotations

import pytest
import torch

import amxq
import amxq.language as tl

TYPES = (torch.int32, torch.int64, torch.uint32, torch.float32, torch.float64)


@amxq.jit
def histogram(bins, old, B: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(old + at, tl.atomic_add(bins + at % B, at + 1, mask=at % 3 != 0))


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_into_shared_places(on: str, dtype: torch.dtype) -> None:
    bins, old = torch.zeros(7, dtype=dtype), torch.full((100,), 5, dtype=dtype)
    histogram[(3,)](bins, old, B=7, N=100)
    at = torch.arange(100)[torch.arange(100) % 3 != 0]
    want = torch.zeros(7, dtype=torch.int64).index_add(0, at % 7, at + 1) * 3
    assert torch.equal(bins.long(), want)
    last = at[at % 7 == 4][-1]  # adds to a sum that lacks only its own number
    assert old[last].item() == want[4] - last - 1


@amxq.jit
def every_kind(x, out, lowest, highest, either, both, one, swapped):
    v = tl.load(x + tl.program_id(0))
    tl.atomic_add(out, v)
    tl.atomic_min(lowest, v)
    tl.atomic_max(highest, v)
    tl.atomic_or(either, v)
    tl.atomic_and(both, v, mask=v > 3)
    tl.atomic_xor(one, v)
    tl.store(swapped + tl.program_id(0), tl.atomic_xchg(swapped + 8, v))


def test_every_kind_of_atomic_operation(on: str) -> None:
    torch.set_num_threads(2)
    for dtype in (torch.int32, torch.int64):
        x = torch.tensor([9, 4, -7, 12, 5, 5], dtype=dtype)
        out, lowest, highest, either, one = torch.zeros(5, 1, dtype=dtype)
        both, swapped = torch.full((1,), -1, dtype=dtype), torch.zeros(9, dtype=dtype)
        every_kind[(6,)](x, out, lowest, highest, either, both, one, swapped)
        numbers = x.tolist()
        assert (out.item(), lowest.item(), highest.item()) == (28, -7, 12)
        assert either.item() == 9 | 4 | -7 | 12 | 5
        assert both.item() == 9 & 4 & 12 & 5
        assert one.item() == 9 ^ 4 ^ -7 ^ 12
        assert sorted(swapped.tolist()) == sorted([*numbers, 0, 0, 0])  # each seen by one


@amxq.jit
def with_a_lock(lock, total, n, N: tl.constexpr):
    at = tl.arange(0, N)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + at, tl.load(total + at) + n)
    tl.atomic_xchg(lock, 0)


def test_a_lock_keeps_programs_apart(on: str) -> None:
    torch.set_num_threads(2)
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1000)
    with_a_lock[(200,)](lock, total, 3, N=1000)
    assert (total == 600).all() and lock.item() == 0


@amxq.jit
def exchanges(x, old, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(old + at, tl.atomic_cas(x + at, 0.0, at + 0.5))


def test_exchanges_where_bits_are_equal(on: str) -> None:
    x = torch.tensor([0.0, 1.0, -0.0, 0.0])
    old = torch.zeros(4)
    exchanges[(1,)](x, old, N=4)
    assert x.tolist() == [0.5, 1.0, -0.0, 3.5]
    assert old.tolist() == [0.0, 1.0, -0.0, 0.0]


@amxq.jit
def shows(x):
    tl.device_print("100% of x:", tl.load(x + tl.arange(0, 2)[:, None] + tl.arange(0, 1)), -1)
    tl.device_print("once", 2.5)


def test_device_print(on: str, capfd: pytest.CaptureFixture[str]) -> None:
    shows[(2,)](torch.tensor([3.5, 7]))
    want = []
    for p in range(2):
        for i, x in enumerate(("3.5", "7")):
            want.append(f"pid ({p}, 0, 0) idx ({i}, 0) 100% of x: {x} -1")
        want.append(f"pid ({p}, 0, 0) once 2.5")
    assert capfd.readouterr().out.splitlines() == want
