"""Long rows, large broadcasts, and pointers that a loop moves: what is not unrolled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amxq
import amxq.language as tl


@amxq.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@pytest.mark.parametrize("block", [1000, 65536])
def test_long_vectors(on: str, block: int) -> None:
    n = block + block // 3
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n + 16,), 7.0)
    add[(2,)](x, y, out, n, BLOCK=block)
    assert torch.equal(out[:n], x + y) and (out[n:] == 7).all()


def test_code_does_not_grow_with_the_tile() -> None:
    kinds = dict.fromkeys(("x", "y", "out"), torch.float32)
    short, long = (
        add.warmup(**kinds, n=tl.int32, BLOCK=b, target="avx512").asm["tir"]
        for b in (1024, 1 << 20)
    )
    assert short.count("\n") == long.count("\n") and "scratch" not in long


@amxq.jit
def softmax(x, out, stride, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tile = tl.load(x + row * stride + at, mask=at < n, other=-float("inf"))
    weight = tl.exp(tile - tl.max(tile, 0))
    tl.store(out + row * stride + at, weight / tl.sum(weight, 0), mask=at < n)


@pytest.mark.parametrize("n", [781, 5000])
def test_softmax_of_long_rows(on: str, n: int) -> None:
    x = torch.randn(3, n) * 4
    out = torch.zeros_like(x)
    softmax[(3,)](x, out, n, n, BLOCK=amxq.next_power_of_2(n))
    want = x.double().softmax(1)
    assert ((out - want).abs() <= 1e-6 * want + 1e-12).all()


def test_a_row_is_read_from_memory_once() -> None:
    kinds = dict.fromkeys(("x", "out"), torch.float32)
    compiled = softmax.warmup(**kinds, stride=tl.int32, n=tl.int32, BLOCK=4096, target="avx512")
    assert compiled.asm["tir"].split("// after vectorize")[1].split("//")[0].count(" mask=%") == 16


@amxq.jit
def reduce_rows(x, total, low, high, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + rows[:, None] * N + columns[None, :])
    tl.store(total + rows, tl.sum(tile, 1))
    tl.store(low + rows, tl.min(tile, 1))
    tl.store(high + rows, tl.max(tile, 1))


@pytest.mark.parametrize(("m", "n"), [(3, 1040), (1, 777), (40, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_reductions_of_long_rows(on: str, m: int, n: int, dtype: torch.dtype) -> None:
    x = torch.randint(-1000, 1000, (m, n)).to(dtype)
    total, low, high = (torch.zeros(m, dtype=dtype) for _ in range(3))
    reduce_rows[(1,)](x, total, low, high, M=m, N=n)
    assert torch.equal(total, x.sum(1, dtype=dtype))
    assert torch.equal(low, x.amin(1)) and torch.equal(high, x.amax(1))


@amxq.jit
def used_again(x, out, rounds, N: tl.constexpr):
    """A computed row that a loop, a branch and code after them use."""
    at = tl.arange(0, N)
    row = tl.exp(tl.load(x + at))
    total = tl.sum(row, 0)
    for i in range(rounds):
        tl.store(out + i * N + at, row + i)
    if rounds > 1:
        tl.store(out + rounds * N + at, row * total)
    tl.store(x + at, row)


@pytest.mark.parametrize("n", [64, 2048])
def test_kept_rows_are_what_they_were(on: str, n: int) -> None:
    x = torch.rand(n)
    e, out = x.exp(), torch.zeros(3, n)
    used_again[(1,)](x, out, 2, N=n)
    torch.testing.assert_close(out, torch.stack((e, e + 1, e * e.sum())), rtol=1e-5, atol=0)
    torch.testing.assert_close(x, e, rtol=1e-6, atol=0)


@amxq.jit
def outer_3d(x, y, z, out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    left = tl.load(x + a)[:, None, None] + tl.load(y + b)[None, :, None]
    at = (a[:, None, None] * B + b[None, :, None]) * C + c[None, None, :]
    pair = tl.load(z + a[:, None] * C + c[None, :])[:, None, :]
    tl.store(out + at, left * pair)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from((1, 5, 16, 64)))
@pytest.mark.parametrize("target", ["avx512", "avx2"])
def test_broadcasts_of_rank_three(target: str, a: int, b: int, c: int) -> None:
    if target not in amxq.available_targets():
        pytest.skip(f"this CPU does not run {target}")
    x, y, z, out = torch.randn(a), torch.randn(b), torch.randn(a, c), torch.zeros(a, b, c)
    with amxq.target(target):
        outer_3d[(1,)](x, y, z, out, A=a, B=b, C=c)
    assert torch.equal(out, (x[:, None, None] + y[None, :, None]) * z[:, None])


# --- what a loop moves ------------------------------------------------------------------


@amxq.jit
def moving(x, out, n, step, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    source = x + rows[:, None] * 1000 + columns[None, :]
    target = out + rows[:, None] * N + columns[None, :]
    offsets = columns
    total = tl.zeros((M, N), tl.float32)
    for _ in range(n):
        total += tl.load(source) * tl.load(x + offsets)[None, :]
        source += step * 2
        source -= step
        offsets += 16
    tl.store(target, total + tl.load(source) * 0)
    tl.store(out + M * N + columns, offsets)


@pytest.mark.parametrize(("m", "n"), [(2, 16), (40, 64), (3, 5)])
def test_pointers_and_offsets_that_a_loop_moves(on: str, m: int, n: int) -> None:
    x = torch.randint(-4, 4, (m, 1000)).float()
    out = torch.zeros(m * n + n)
    moving[(1,)](x, out, 5, 3, M=m, N=n)
    want = sum(x[:, 3 * i : 3 * i + n] * x[0, 16 * i : 16 * i + n] for i in range(5))
    assert torch.equal(out[: m * n].view(m, n), want)
    assert torch.equal(out[m * n :], torch.arange(n) + 80.0)


@amxq.jit
def moved_apart(x, out, n, M: tl.constexpr, N: tl.constexpr):
    """Each row by another amount, in a loop in a loop."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    source = x + rows[:, None] * 1000 + columns[None, :]
    total = tl.zeros((M, N), tl.float32)
    for _ in range(n):
        for _ in range(2):
            total += tl.load(source)
            source += rows[:, None]
        source += 7
    tl.store(out + rows[:, None] * N + columns[None, :], total)


@pytest.mark.parametrize(("m", "n"), [(3, 16), (40, 32)])
def test_rows_that_move_by_different_amounts(on: str, m: int, n: int) -> None:
    x = torch.randint(-4, 4, (m, 1000)).float()
    out, want = torch.zeros(m, n), torch.zeros(m, n)
    moved_apart[(1,)](x, out, 3, M=m, N=n)
    for r in range(m):
        for i in range(6):
            at = i * r + 7 * (i // 2)
            want[r] += x[r, at : at + n]
    assert torch.equal(out, want)


@amxq.jit
def wrapped(x, out, n, stride, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) % n
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.load(x + at * stride))


@pytest.mark.parametrize("n", [48, 50, 16, 5])
@pytest.mark.parametrize("stride", [1, 3])
def test_remainders_and_strides(on: str, n: int, stride: int) -> None:
    x, out = torch.randn(n * stride), torch.zeros(96)
    wrapped[(3,)](x, out, n, stride, BLOCK=32)
    assert torch.equal(out, x[::stride][torch.arange(96) % n])


@pytest.mark.parametrize(("n", "gathers"), [(48, False), (50, True)])
def test_aligned_remainders_are_vector_loads(n: int, gathers: bool) -> None:
    kinds = dict.fromkeys(("x", "out"), torch.float32)
    compiled = wrapped.warmup(**kinds, n=n, stride=1, BLOCK=32, target="avx512")
    assert (" = gather " in compiled.asm["tir"]) is gathers


@amxq.jit
def gathered_rows(x, index, out, K, M: tl.constexpr, BLOCK: tl.constexpr):
    rows, k = tl.load(index + tl.arange(0, M)), tl.arange(0, BLOCK)
    inside = (rows >= 0)[:, None] & (k[None, :] < K)
    tile = tl.load(x + rows[:, None] * K + k[None, :], mask=inside, other=0.0)
    tl.store(out + tl.arange(0, M)[:, None] * K + k[None, :], tile, mask=k[None, :] < K)


@pytest.mark.parametrize(("m", "k"), [(4, 16), (40, 100), (3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_a_loaded_index(on: str, m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(50, k).to(dtype)
    index = torch.randint(-1, 50, (m,), dtype=torch.int32)
    out = torch.full((m, k), torch.nan, dtype=dtype)
    block = amxq.next_power_of_2(k)
    compiled = gathered_rows[(1,)](x, index, out, k, M=m, BLOCK=block)
    assert torch.equal(out, torch.where(index[:, None] >= 0, x[index.clamp(min=0)], 0))
    if on != "interpreter":
        assert " = gather " not in compiled.asm["tir"]
