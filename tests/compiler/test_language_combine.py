"""Reductions and scans by a function, running sums and products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl

SHAPES = [(1, 7, 1), (3, 5, 7), (2, 8, 32), (1, 1, 100)]


@amxq.jit
def added(x, y):
    return x + y


@amxq.jit
def better(x, i, y, j):
    """The larger number with its index, the first one of equals."""
    takes = (y > x) | ((y == x) & (j < i))
    return tl.where(takes, y, x), tl.where(takes, j, i)


@amxq.jit
def scans(x, sums, products, best, at, total, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
          AXIS: tl.constexpr):  # fmt: skip
    index = tl.arange(0, A * B * C)
    tile = tl.load(x + index).reshape(A, B, C)
    tl.store(sums + index, tl.associative_scan(tile, AXIS, added).ravel())
    tl.store(products + index, tile.cumprod(AXIS, reverse=True).ravel())
    high, place = tl.reduce((tile, index.reshape(A, B, C)), AXIS, better, keep_dims=True)
    tl.store(best + index, tl.broadcast_to(high, A, B, C).ravel())
    tl.store(at + index, tl.broadcast_to(place, A, B, C).ravel())
    tl.store(total, tl.reduce(tile, None, combine_fn=added))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", SHAPES)
def test_along_any_axis(on: str, shape: tuple[int, ...], axis: int) -> None:
    """Halves from -1 to 1: sums and products are exact."""
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(3)) / 2
    sums, products, best = (torch.zeros(shape) for _ in range(3))
    at, total = torch.zeros(shape, dtype=torch.int32), torch.zeros(1)
    scans[(1,)](x, sums, products, best, at, total, *shape, AXIS=axis)
    assert torch.equal(sums, x.cumsum(axis))
    assert torch.equal(products, x.flip(axis).cumprod(axis).flip(axis))
    assert torch.equal(best, x.amax(axis, keepdim=True).expand(shape))
    first = torch.arange(x.numel()).view(shape).where(x == best, x.numel())
    assert torch.equal(at, first.amin(axis, keepdim=True).expand(shape).int())
    assert total == x.sum()


@amxq.jit
def running(x, wide, narrow, halves, N: tl.constexpr):
    index = tl.arange(0, N)
    tile = tl.load(x + index)
    sums = tl.cumsum(tile)
    tl.static_assert(sums.dtype == tl.int32)
    tl.static_assert(tl.cumsum(tile.to(tl.bfloat16)).dtype == tl.float32)
    tl.store(wide + index, sums)
    tl.store(narrow + index, tl.cumsum(tile, 0, dtype=tl.int8))
    tl.store(halves + index, tl.cumprod(tile.to(tl.float16) / 64, 0))


def test_the_types_of_running_sums(on: str) -> None:
    x = torch.arange(30, 62, dtype=torch.int8)
    wide, narrow, halves = (torch.zeros(32, dtype=torch.int32) for _ in range(3))
    running[(1,)](x, wide, narrow, halves, N=32)
    assert torch.equal(wide, x.cumsum(0).int())
    assert torch.equal(narrow, x.cumsum(0, dtype=torch.int8).int())
    assert halves.sum() == 0


@amxq.jit
def affine(a, b, c, d):
    """One step x → a·x + b after another: an associative function that is not commutative."""
    return a * c, b * c + d


@amxq.jit
def recurrence(a, b, y, N: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    _, state = tl.associative_scan((tl.load(a + at), tl.load(b + at)), 0, affine)
    tl.store(y + at, state)


def test_a_linear_recurrence(on: str) -> None:
    g = torch.Generator().manual_seed(4)
    a, b = (torch.rand(37, 48, generator=g) for _ in range(2))
    y, want = torch.zeros(37, 48), torch.zeros(48, dtype=torch.float64)
    recurrence[(1,)](a, b, y, N=37, M=48)
    for i in range(37):
        want = want * a[i].double() + b[i].double()
        assert torch.allclose(y[i].double(), want, rtol=1e-5, atol=0)


# --- mistakes ---------------------------------------------------------------------------


@amxq.jit
def branches(x, y):
    if x > y:
        return x
    return y


@amxq.jit
def widens(x, y):
    return x + y.to(tl.float64)


@amxq.jit
def two(x, y):
    return x, y


def plain_python(x, y):
    return x


@amxq.jit
def mistaken(x, CASE: tl.constexpr):
    tile = tl.load(x + tl.arange(0, 8))
    if CASE == 0:
        tl.store(x, tl.reduce(tile, 0, branches))
    elif CASE == 1:
        tl.store(x, tl.reduce(tile, 0, widens))
    elif CASE == 2:
        tl.store(x, tl.reduce(tile, 0, two))
    elif CASE == 3:
        tl.store(x, tl.associative_scan((tile, tile[:, None]), 0, two)[0])
    elif CASE == 4:
        tl.store(x, tl.reduce(tile, 0, 3))
    elif CASE == 5:
        tl.store(x, tl.associative_scan(tile, None, added))
    elif CASE == 6:
        tl.store(x, tl.reduce(tile, 0, tl.maximum))
    elif CASE == 7:
        tl.store(x, tl.reduce(tile, 0, plain_python))
    elif CASE == 8:
        tl.store(x + tl.arange(0, 8), tl.cumsum(tile, 0, tl.program_id(0) > 0))
    elif CASE == 9:
        tl.store(x + tl.arange(0, 1), tl.sum(tile, 0, keep_dims=tl.program_id(0) > 0))
    elif CASE == 10:
        tl.store(x, tl.reduce(tile, 0, added, keep_dims=tl.program_id(0) > 0))


MESSAGES = [
    "branches does more than computing",
    "combine_fn returns .*f64.* where it takes .*f32",
    "combine_fn returns 2 values for 1 tiles",
    "different shapes: tile<8xf32>, tile<8x1xf32>",
    "combine_fn is the constant 3",
    "the axis is the constant None",
    "combine_fn is the function maximum",
    "combine_fn is the function plain_python",
    "reverse is i1.*, it must be a constant, True or False|reverse is .* must be a constant",
    "keep_dims is .* must be a constant",
    "keep_dims is .* must be a constant",
]


@pytest.mark.parametrize("case", range(len(MESSAGES)))
def test_mistakes(on: str, case: int) -> None:
    with pytest.raises(amxq.errors.CompilationError, match=MESSAGES[case]) as caught:
        mistaken[(1,)](torch.zeros(8), CASE=case)
    assert caught.value.line and caught.value.source_line


# --- dots of float64, and of batches ------------------------------------------------------


@amxq.jit
def products(a, b, c, y, A: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    left = tl.load(a + tl.arange(0, A * M * K)).reshape(A, M, K)
    right = tl.load(b + tl.arange(0, A * K * N)).reshape(A, K, N)
    at = tl.arange(0, A * M * N)
    acc = tl.load(c + at).reshape(A, M, N)
    for _ in range(2):
        acc = tl.dot(left, right, acc)
    tl.store(y + at, (acc + tl.dot(left, right)).ravel())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(2, 4, 16, 8), (3, 32, 32, 32), (4, 5, 7, 3)])
def test_batches(on_each: str, dtype: Any, batch: int, m: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(5)
    out = torch.float64 if dtype == torch.float64 else torch.float32
    a = torch.randn(batch, m, k, generator=g, dtype=torch.float64).to(dtype)
    b = torch.randn(batch, k, n, generator=g, dtype=torch.float64).to(dtype)
    c = torch.randn(batch, m, n, generator=g, dtype=torch.float64).to(out)
    y = torch.zeros_like(c)
    products[(1,)](a, b, c, y, batch, m, n, k)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    want = c.double() + 3 * (a.double() @ b.double())
    assert torch.allclose(y.double(), want, rtol=tolerance, atol=tolerance * k)


@amxq.jit
def plain(a, b, y, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, depth = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(a + rows * K + depth), tl.load(b + depth[:, None] * N + columns)
    tl.store(y + rows * N + columns, tl.dot(left, right))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 24, 5), (64, 48, 32)])
def test_float64(on: str, m: int, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(6)
    a, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((m, k), (k, n)))
    y = torch.zeros(m, n, dtype=torch.float64)
    plain[(1,)](a, b, y, m, n, k)
    assert torch.allclose(y, a @ b, rtol=1e-13, atol=1e-13 * k)
