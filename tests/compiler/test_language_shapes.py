"""Tiles as a whole: reductions along an axis, broadcasting, new dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from test_language_values import close, draw

import amxq
import amxq.language as tl

# --- along an axis ----------------------------------------------------------------------


@amxq.jit
def reduce_rows(x, total, low, high, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + rows[:, None] * N + columns[None, :])
    tl.store(total + rows, tl.sum(tile, 1))
    tl.store(low + rows, tile.min(1))
    tl.store(high + rows, tl.max(tile, axis=1))


@pytest.mark.parametrize(("m", "n"), [(1, 16), (4, 64), (3, 5), (40, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_reductions_of_rows(on: str, m: int, n: int, dtype: torch.dtype) -> None:
    x = draw(dtype, m * n, 14).view(m, n)
    total, low, high = (torch.zeros(m, dtype=dtype) for _ in range(3))
    reduce_rows[(1,)](x, total, low, high, M=m, N=n)
    close(low, x.amin(1))
    close(high, x.amax(1))
    bound = n * 2.0**-24 * x.abs().sum(1).double()
    assert ((total.double() - x.double().sum(1)).abs() <= bound).all()


@amxq.jit
def reduce_all(x, out, N: tl.constexpr):
    tile = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(tile, 0))
    tl.store(out + 1, tl.sum(tile > 0, 0).to(tl.float32))


@pytest.mark.parametrize("n", [1, 6, 32, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_a_vector_counts_bools(on: str, n: int, dtype: torch.dtype) -> None:
    x, out = draw(dtype, n, 15), torch.zeros(2)
    reduce_all[(1,)](x, out, N=n)
    assert abs(out[0].item() - x.double().sum()) <= 12 * 2.0**-24 * x.double().abs().sum()
    assert out[1].item() == (x > 0).sum()


@amxq.jit
def reduce_cube(x, out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    at = (a[:, None, None] * B + b[None, :, None]) * C + c[None, None, :]
    rows = a[:, None] * B + b[None, :]
    tl.store(out + rows, tl.sum(tl.load(x + at), 2))


@pytest.mark.parametrize("shape", [(2, 3, 16), (2, 4, 8), (4, 2, 5)])
def test_reduction_of_rank_three(on: str, shape: tuple[int, int, int]) -> None:
    x = draw(torch.int32, math.prod(shape), 16).view(shape)
    out = torch.zeros(shape[:2], dtype=torch.int32)
    reduce_cube[(1,)](x, out, A=shape[0], B=shape[1], C=shape[2])
    close(out, x.sum(2, dtype=torch.int32))


# --- shapes -----------------------------------------------------------------------------


@amxq.jit
def outer(x, y, out, M: tl.constexpr, N: tl.constexpr):
    a, b = tl.load(x + tl.arange(0, M)), tl.load(y + tl.arange(0, N))
    tile = a[:, None] * b[None, :] + tl.expand_dims(a, 1) - tl.broadcast_to(b, (M, N))
    tl.static_assert(tile.shape[0] == M and tile.shape[1] == N)
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N), tile)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 16), (5, 3), (33, 32), (64, 24)])
def test_broadcasting_of_any_size(on: str, m: int, n: int) -> None:
    x, y = draw(torch.int32, m, 17), draw(torch.int32, n, 18)
    out = torch.zeros(m, n, dtype=torch.int32)
    outer[(1,)](x, y, out, M=m, N=n)
    close(out, x[:, None] * y + x[:, None] - y)


@amxq.jit
def strided_cube(x, out, stride, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [A, B], [stride, 1], [A, B])
    cube = tile.load([0, 0], boundary_check=())[:, :, None] + tl.zeros((A, B, C), tl.float32)
    target = tl.make_tensor_descriptor(out, [A, B, C], [B * C, C, 1], [A, B, C])
    target.store([0, 0, 0], cube)


@pytest.mark.parametrize("shape", [(2, 3, 4), (8, 64, 4)])
def test_new_axis_of_a_strided_block(on: str, shape: tuple[int, int, int]) -> None:
    a, b, _ = shape
    x = draw(torch.float32, a * (b + 5), 19).view(a, b + 5)
    out = torch.zeros(shape)
    strided_cube[(1,)](x, out, b + 5, A=shape[0], B=b, C=shape[2])
    close(out, x[:, :b, None].expand(shape))
