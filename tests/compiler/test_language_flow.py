"""While loops, early returns, tuples, and pointers that loops and branches change."""

from __future__ import annotations

import pytest
import torch

import amxq
import amxq.language as tl

WIDTH = tl.constexpr(16)


@amxq.jit
def collatz(x, steps, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    v = tl.load(x + pid)
    count = 0
    while v > 1:
        v = v // 2 if v % 2 == 0 else 3 * v + 1
        count += 1
    tl.store(steps + pid, count)


def test_while_and_early_return(on: str) -> None:
    x, steps = torch.arange(1, 13), torch.full((16,), -1, dtype=torch.int32)
    collatz[(16,)](x, steps, 12)
    assert steps.tolist() == [0, 1, 7, 2, 5, 8, 16, 3, 19, 6, 14, 9, -1, -1, -1, -1]


@amxq.jit
def newton(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    root, change = v, tl.zeros((N,), tl.float32) + 1
    while tl.max(change, 0) > 0:
        better = 0.5 * (root + v / root)
        change = tl.abs(better - root) - 1e-3
        root = better
    tl.store(y + at, root)


@pytest.mark.parametrize("size", [16, 7, 1024])
def test_while_carries_tiles(on: str, size: int) -> None:
    x, y = torch.linspace(1, 50, size), torch.zeros(size)
    newton[(1,)](x, y, N=size)
    torch.testing.assert_close(y, x.sqrt(), rtol=1e-4, atol=0)


@amxq.jit
def sign_and_size(v):
    if v > 0:
        return 1, (v, v)
    elif v < 0:
        return -1, (-v, v)
    return 0, (v, v)


@amxq.jit
def returns_in_every_case(x, out, more):
    sign, (size, same) = sign_and_size(tl.load(x))
    tl.store(out, sign)
    if not more:
        return
    tl.store(out + 1, size)
    if size == 4:
        tl.store(out + 2, same)
        return
    elif 4 < size <= 6:
        tl.store(out + 3, 1)
    tl.store(out + 4, max(size, 5, sign))


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("v", [3, 4, -4, 0, 6, -9])
def test_returns_in_branches(on: str, v: int, more: int) -> None:
    out = torch.zeros(5, dtype=torch.int32)
    returns_in_every_case[(1,)](torch.tensor([v], dtype=torch.int32), out, more)
    sign, size = (v > 0) - (v < 0), abs(v)
    want = [sign, 0, 0, 0, 0]
    if more:
        want[1] = size
        want[2:] = [v, 0, 0] if size == 4 else [0, int(4 < size <= 6), max(size, 5)]
    assert out.tolist() == want


@amxq.jit
def tuples_in_loops(out, n):
    pair = (0, 1)
    for _ in range(n):
        pair = (pair[1], pair[0] + pair[1])
    tl.store(out, pair[0])
    state = (tl.zeros((WIDTH,), tl.int32), pair)
    while state[1][0] > 1:
        state = (state[0] + 2, (state[1][0] // 2, n))
    tl.store(out + 1 + tl.arange(0, WIDTH), state[0])


def test_tuples_are_carried(on: str) -> None:
    out = torch.zeros(17, dtype=torch.int32)
    tuples_in_loops[(1,)](out, 10)
    assert out.tolist() == [55] + [10] * 16


@amxq.jit
def row_sums(x, out, n, stride, N: tl.constexpr, K: tl.constexpr):
    """Tiles of pointers and a scalar pointer that a loop moves, evenly and unevenly."""
    at = tl.arange(0, N)
    even, uneven, one = x + at, x + at * 2, x
    total = tl.zeros((N,), tl.float32)
    for i in range(n):
        total += tl.load(even) + 2 * tl.load(uneven) + 3 * tl.load(one)
        even += K
        uneven += at % 3
        one += stride
        if i == 1:
            even += 1
    tl.store(out + at, total)
    while n > 3:
        even -= 1
        n -= 1
    tl.store(out + N + at, tl.load(even))


@pytest.mark.parametrize("size", [16, 5, 600])
def test_pointers_are_carried(on: str, size: int) -> None:
    x, out = torch.randn(4 * size + 200).round(decimals=2), torch.zeros(2 * size)
    row_sums[(1,)](x, out, 5, 3, N=size, K=7)
    at = torch.arange(size)
    want = torch.zeros(size)
    for i in range(5):
        even = at + 7 * i + (i > 1)
        want += x[even] + 2 * x[at * 2 + i * (at % 3)] + 3 * x[3 * i]
    torch.testing.assert_close(out[:size], want)
    assert torch.equal(out[size:], x[at + 7 * 5 + 1 - 2])


@amxq.jit
def blocks(x, y, z, m, n, stride, one, M: tl.constexpr, N: tl.constexpr):
    rows = tl.make_block_ptr(x, (m, n), (stride, one), (0, 0), (M, N), (1, 0))
    turned = tl.make_block_ptr(x, (n, m), (one, stride), (0, 0), (N, M), (0, 1))
    out = tl.make_block_ptr(y, (m, n), (n, 1), (0, 0), (M, N), (1, 0))
    back = tl.make_block_ptr(z, (n, m), (1, n), (0, 0), (N, M), (0, 1))
    for _ in range(0, n, N):
        tl.store(out, tl.load(rows, boundary_check=(0, 1)) + 1, boundary_check=(0, 1))
        tile = tl.load(turned, boundary_check=(1, 0), padding_option="zero")
        tl.store(back, tile.to(z.dtype), boundary_check=(0, 1))
        rows, out = tl.advance(rows, (0, N)), tl.advance(out, [0, N])
        turned, back = tl.advance(turned, (N, 0)), tl.advance(back, (N, 0))


@pytest.mark.parametrize(("m", "n"), [(8, 32), (5, 23), (40, 33)])
def test_block_pointers(on: str, m: int, n: int) -> None:
    x = torch.randn(m, n + 3)[:, :n]
    y, z = torch.zeros(m, n), torch.zeros(m, n, dtype=torch.float64)
    blocks[(1,)](x, y, z, m, n, x.stride(0), 1, M=40, N=16)
    assert torch.equal(y, x + 1) and torch.equal(z, x.double())


@amxq.jit
def swizzled(out, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr):
    i, j = tl.swizzle2d(tl.program_id(0), tl.program_id(1), M, N, G)
    tl.store(out + i * N + j, tl.program_id(0) * N + tl.program_id(1))


def test_swizzled_grids_visit_every_place(on: str) -> None:
    out = torch.zeros(5, 4, dtype=torch.int32)
    swizzled[(5, 4)](out, M=5, N=4, G=2)
    assert out.flatten().sort().values.tolist() == list(range(20))
    assert out[:2].T.flatten().tolist() == list(range(8))
