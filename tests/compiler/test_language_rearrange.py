"""Tiles whose elements change rows: reductions along any axis, transposition, reshaping."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_language_values import DTYPES, draw

import amxq
import amxq.language as tl

SHAPES = [(1, 16, 1), (3, 5, 7), (2, 8, 32)]


@amxq.jit
def load_cube(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.load(x + tl.arange(0, A * B * C)).reshape(A, B, C)


@amxq.jit
def reduced(x, total, low, high, first, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
            AXIS: tl.constexpr):  # fmt: skip
    tile = load_cube(x, A, B, C)
    sums = tl.sum(tile, AXIS, keep_dims=True)
    R: tl.constexpr = sums.shape[0] * sums.shape[1] * sums.shape[2]
    at = tl.arange(0, R)
    tl.store(total + at, sums.ravel())
    high_tile, index = tl.max(tile, AXIS, return_indices=True)
    tl.store(low + at, tile.min(AXIS).reshape(R))
    tl.store(high + at, tl.reshape(high_tile, R))
    tl.store(first + at, index.reshape((R,)))
    tl.static_assert(index.dtype == tl.int32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", SHAPES)
def test_reductions_along_any_axis(on: str, shape: tuple[int, ...], axis: int) -> None:
    for dtype in (torch.float32, torch.int64):
        x = draw(dtype, torch.Size(shape).numel(), 3).view(shape).round()
        count = x.sum(axis).numel()
        total, low, high = (torch.zeros(count, dtype=dtype) for _ in range(3))
        first = torch.zeros(count, dtype=torch.int32)
        reduced[(1,)](x, total, low, high, first, *shape, AXIS=axis)
        assert torch.equal(low, x.amin(axis).flatten())
        assert torch.equal(high, x.amax(axis).flatten())
        want = (x == x.amax(axis, keepdim=True)).int().argmax(axis)
        assert torch.equal(first, want.int().flatten())
        assert torch.equal(total, x.sum(axis).flatten())  # whole numbers: exact in any order


@amxq.jit
def reduced_to_scalars(x, out, at, N: tl.constexpr, M: tl.constexpr):
    tile = tl.load(x + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :])
    tl.store(out, tl.sum(tile))
    tl.store(out + 1, tl.max(tile))
    tl.store(out + 2, tile.min())
    tl.store(at, tl.argmax(tile, None))
    tl.store(at + 1, tl.argmin(tile, axis=None))
    tl.static_assert(tl.sum(tile, keep_dims=True).shape == (1, 1))
    tl.static_assert(tl.argmin(tile, 1, keep_dims=True).shape == (N, 1))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (37, 5), (64, 48)])
def test_reductions_of_all_elements(on: str, n: int, m: int) -> None:
    x = draw(torch.float32, n * m, 4).view(n, m).round()
    out, at = torch.zeros(3), torch.zeros(2, dtype=torch.int32)
    reduced_to_scalars[(1,)](x, out, at, N=n, M=m)
    assert out.tolist() == [x.sum().item(), x.max().item(), x.min().item()]
    flat = x.flatten()
    assert (flat[at[0]], flat[at[1]]) == (x.max(), x.min())
    assert at[0] == (flat == x.max()).int().argmax()


@amxq.jit
def index_of_nan(x, out, N: tl.constexpr):
    tile = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.argmax(tile, 0))
    tl.store(out + 1, tl.argmin(tile, 0))


def test_an_index_is_never_that_of_nan_nor_out_of_range(on: str) -> None:
    x, out = torch.full((32,), torch.nan), torch.full((2,), -1, dtype=torch.int32)
    index_of_nan[(1,)](x, out, N=32)
    assert all(0 <= i < 32 for i in out.tolist())
    x[7] = 1.0
    index_of_nan[(1,)](x, out, N=32)
    assert out.tolist() == [7, 7]


@amxq.jit
def permuted(x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr):
    tile = tl.permute(load_cube(x, A, B, C), ORDER)
    tl.store(y + tl.arange(0, A * B * C), tile.ravel())


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("shape", SHAPES)
def test_permutations(on: str, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    y = torch.zeros_like(x)
    permuted[(1,)](x, y, *shape, ORDER=order)
    assert torch.equal(y.flatten(), x.permute(order).flatten())


@amxq.jit
def transposed(x, y, z, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(y + n[:, None] * M + m[None, :], tl.trans(tile))
    tl.store(z + n[:, None] * M + m[None, :], tile.T + tl.trans(tile, 1, 0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_transposition_of_every_type(on: str, dtype: torch.dtype) -> None:
    for m, n in ((4, 16), (33, 24), (7, 3)):
        x = draw(dtype, m * n, 5).view(m, n)
        y, z = torch.zeros(n, m, dtype=dtype), torch.zeros(n, m, dtype=dtype)
        transposed[(1,)](x, y, z, M=m, N=n)
        assert torch.equal(y, x.T)
        if dtype != torch.bool:
            assert torch.equal(z, x.T + x.T)


@amxq.jit
def bits(x, y, T: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.cast(tl.load(x + at), T, bitcast=True))
    tl.store(y, tl.load(x).to(T, bitcast=True))


@pytest.mark.parametrize(
    ("source", "target", "to"),
    [
        (torch.float32, torch.int32, tl.int32),
        (torch.int64, torch.float64, tl.float64),
        (torch.bfloat16, torch.int16, tl.int16),
        (torch.float16, torch.uint16, tl.uint16),
        (torch.uint8, torch.int8, tl.int8),
    ],
)
def test_bitcasts(on: str, source: torch.dtype, target: torch.dtype, to: object) -> None:
    for count in (32, 7):
        x, y = draw(source, count, 6), torch.zeros(count, dtype=target)
        bits[(1,)](x, y, T=to, N=count)
        assert torch.equal(y.view(source), x)


@amxq.jit
def first_places(x, out, N: tl.constexpr):
    tile = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.argmax(tile, 0))
    tl.store(out + 1, tl.argmin(tile, 0))


@pytest.mark.parametrize("n", [1, 4, 7, 33])
def test_places_among_nan_only(on: str, n: int) -> None:
    out = torch.full((2,), -1, dtype=torch.int32)
    first_places[(1,)](torch.full((n,), torch.nan), out, N=n)
    assert out.tolist() == [0, 0]
