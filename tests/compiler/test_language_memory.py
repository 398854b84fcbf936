"""Memory: pointers, masks, gathers and scatters, descriptors, and the grid."""

from __future__ import annotations

import math

import pytest
import torch

import amxq
import amxq.language as tl

DTYPES = (
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
GUARD = 7
"""Fills what must not be written."""


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = math.prod(shape)
    x = torch.arange(count, dtype=torch.int32) * 37 % 120
    return (x % 2 == 0 if dtype == torch.bool else x.to(dtype)).view(shape)


@amxq.jit
def masked_copy(x, y, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=OTHER)
    tl.store(y + at, value, mask=at < n + 3)


@amxq.jit
def prefetching_copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK
    tl.prefetch(x + at + BLOCK)
    tl.prefetch(x + (1 << 40))  # nothing is there
    for i in tl.range(0, BLOCK):
        tl.prefetch(y + at + i)
        tl.store(y + at + i, tl.load(x + at + i))


def test_prefetch_is_a_hint(on: str) -> None:
    x, y = numbers(torch.float32, 64), torch.zeros(64)
    prefetching_copy[(4,)](x, y, 64, BLOCK=16)
    assert torch.equal(x, y)
    if hasattr(compiled := prefetching_copy.warmup(x, y, 64, BLOCK=16), "asm"):
        assert compiled.asm["asm"].count("prefetcht0") >= 3


@amxq.jit
def prefetching_a_tile(x):
    tl.prefetch(x + tl.arange(0, 16))


def test_prefetch_takes_one_pointer() -> None:
    with pytest.raises(amxq.errors.CompilationError, match="one pointer"):
        prefetching_a_tile[(1,)](torch.zeros(16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 64, 12])
def test_masked_tails_of_every_type(on: str, dtype: torch.dtype, block: int) -> None:
    n = 2 * block - 5
    x = numbers(dtype, n)
    y = torch.full((3 * block,), GUARD).to(dtype)
    masked_copy[(3,)](x, y, n, BLOCK=block, OTHER=1)
    assert torch.equal(y[:n], x)
    assert (y[n : n + 3] == 1).all()
    assert torch.equal(y[n + 3 :], torch.full((3 * block - n - 3,), GUARD).to(dtype))


def test_masked_off_elements_are_not_touched(on: str) -> None:
    """A block that ends at the end of the address space's readable part would fault."""
    import ctypes
    import mmap

    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
    try:
        whole = torch.frombuffer(area, dtype=torch.float32, count=page // 4)
        tail = whole[-5:]
        tail.copy_(torch.arange(5.0))
        got = torch.zeros(16)
        masked_copy[(1,)](tail, got, 5, BLOCK=16, OTHER=0)
        assert got[:5].tolist() == [0, 1, 2, 3, 4]
        block_copy[(1,)](tail, got, 5, BLOCK=32)
        masked_copy[(1,)](got, tail, 2, BLOCK=16, OTHER=9)
        assert tail.tolist() == [0, 1, 9, 9, 9]
    finally:
        libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 3)


@amxq.jit
def block_copy(x, y, n, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n], [1], [BLOCK])
    target = tl.make_tensor_descriptor(y, [n], [1], [BLOCK])
    target.store([0], source.load([0]))


@amxq.jit
def copy_2d(x, y, m, n, sx, sy, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tile = tl.load(x + rows[:, None] * sx + columns[None, :], mask=inside, other=0.0)
    tl.store(y + rows[:, None] * sy + columns[None, :], tile + 1, mask=inside)


@pytest.mark.parametrize("block", [(1, 16), (4, 32), (3, 5), (48, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pointer_arithmetic_in_two_dimensions(
    on: str, block: tuple[int, int], dtype: torch.dtype
) -> None:
    bm, bn = block
    m, n = 2 * bm - 1 if bm > 1 else 2, 2 * bn - 3
    x = numbers(dtype, m, n + 6)
    y = torch.full((m + 2, n + 4), GUARD, dtype=dtype)
    copy_2d[(2, 2)](x, y, m, n, n + 6, n + 4, BM=bm, BN=bn)
    want = torch.full_like(y, GUARD)
    want[:m, :n] = x[:, :n] + 1
    assert torch.equal(y, want)


@amxq.jit
def transpose(x, y, m, n, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inside = (rows < m) & (columns < n)
    tile = tl.load(x + columns * m + rows, mask=inside)
    tl.store(y + rows * n + columns, tile, mask=inside)


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        (torch.float32, (36, 16)),
        (torch.bfloat16, (8, 16)),
        (torch.int8, (3, 16)),
        (torch.float64, (4, 8)),
    ],
)
def test_strided_loads_are_gathers(on: str, dtype: torch.dtype, block: tuple[int, int]) -> None:
    m, n = block[0] - 1, block[1] - 2
    x, y = numbers(dtype, n, m), torch.zeros(m, n, dtype=dtype)
    transpose[(1,)](x, y, m, n, BM=block[0], BN=block[1])
    assert torch.equal(y, x.T)


@amxq.jit
def permute(x, index, y, BLOCK: tl.constexpr, SCATTER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    where = tl.load(index + at)
    if SCATTER:
        tl.store(y + where, tl.load(x + at))
    else:
        tl.store(y + at, tl.load(x + where))


@pytest.mark.parametrize(
    ("dtype", "block"),
    [(torch.float32, 528), (torch.bfloat16, 40), (torch.int64, 16), (torch.bool, 24)],
)
def test_gather_and_scatter(on: str, dtype: torch.dtype, block: int) -> None:
    x = numbers(dtype, block)
    order = torch.randperm(block, generator=torch.Generator().manual_seed(0))
    for scatter in (False, True):
        got, want = torch.zeros(block, dtype=dtype), torch.zeros(block, dtype=dtype)
        permute[(1,)](x, order.int(), got, BLOCK=block, SCATTER=scatter)
        if scatter:
            want[order] = x
        else:
            want = x[order]
        assert torch.equal(got, want)


@amxq.jit
def gather_rows(x, index, y, stride, M: tl.constexpr, N: tl.constexpr):
    rows = tl.load(index + tl.arange(0, M))
    columns = tl.arange(0, N)
    tile = tl.load(x + rows[:, None] * stride + columns[None, :])
    tl.store(y + tl.arange(0, M)[:, None] * N + columns[None, :], tile)


@pytest.mark.parametrize(("m", "n"), [(4, 16), (40, 64)])
def test_rows_by_index(on: str, m: int, n: int) -> None:
    x = numbers(torch.float32, 100, n)
    index = torch.randint(0, 100, (m,), generator=torch.Generator().manual_seed(1))
    y = torch.zeros(m, n)
    gather_rows[(1,)](x, index, y, n, M=m, N=n)
    assert torch.equal(y, x[index])


@amxq.jit
def read_write(x, N: tl.constexpr):
    at = tl.arange(0, N)
    old = tl.load(x + at)
    doubled = old * 2
    tl.store(x + at, old + 100)
    new = tl.load(x + at)
    tl.store(x + N + at, doubled + new)


@pytest.mark.parametrize("n", [16, 528])
def test_loads_happen_before_later_stores(on: str, n: int) -> None:
    x = torch.arange(2 * n, dtype=torch.int32)
    old = x[:n].clone()
    read_write[(1,)](x, N=n)
    assert torch.equal(x[:n], old + 100)
    assert torch.equal(x[n:], old * 3 + 100)


@amxq.jit
def shift_in_place(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at + 1, tl.load(x + at))


@pytest.mark.parametrize("n", [16, 528])
def test_a_store_that_overlaps_its_own_load(on: str, n: int) -> None:
    x = torch.arange(n + 1, dtype=torch.int32)
    shift_in_place[(1,)](x, N=n)
    assert torch.equal(x, torch.cat((torch.zeros(1), torch.arange(n))).int())


@amxq.jit
def index_overwritten(index, x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    where = x + tl.load(index + at)
    tl.store(index + at, tl.zeros((N,), tl.int32))
    tl.store(y + at, tl.load(where))


@pytest.mark.parametrize("n", [16, 528])
def test_pointers_keep_the_indices_they_were_made_of(on: str, n: int) -> None:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(2)).int()
    x, y, index = torch.arange(float(n)), torch.zeros(n), order.clone()
    index_overwritten[(1,)](index, x, y, N=n)
    assert torch.equal(y, order.float()) and not index.any()


@amxq.jit
def one_address(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at * 0) + tl.load(x + 1 + tl.zeros((N,), tl.int64)))


def test_every_lane_from_one_address(on: str) -> None:
    y = torch.zeros(32)
    one_address[(1,)](torch.tensor([3.0, 4.0]), y, N=32)
    assert y.tolist() == [7.0] * 32


@amxq.jit
def narrow_index(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + 128 + at.to(tl.int8)))


def test_narrow_offsets_wrap(on: str) -> None:
    x, y = torch.arange(256.0), torch.zeros(256)
    narrow_index[(1,)](x, y, N=256)
    assert torch.equal(y, torch.cat((x[128:], x[:128])))


@amxq.jit
def backwards(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + N - 1 - at) + tl.load(x + (N - 1) - tl.arange(0, N)))


def test_negative_stride(on: str) -> None:
    x, y = torch.arange(48.0), torch.zeros(48)
    backwards[(1,)](x, y, N=48)
    assert torch.equal(y, 2 * x.flip(0))


# --- descriptors ------------------------------------------------------------------------


@amxq.jit
def block_2d(x, y, m, n, sx, i, j, BM: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [m, n], [sx, 1], [BM, BN])
    target = tl.make_tensor_descriptor(y, [BM, BN], [BN, 1], [BM, BN])
    tl.static_assert(source.dtype == tl.float32)
    target.store([0, 0], source.load([i, j], boundary_check=CHECK))


@pytest.mark.parametrize("corner", [(0, 0), (3, 5), (-2, 4), (4, -3), (100, 0), (0, 100), (-9, -9)])
@pytest.mark.parametrize("block", [(4, 16), (2, 3), (64, 32)])
def test_blocks_are_zero_outside_of_the_array(
    on: str, corner: tuple[int, int], block: tuple[int, int]
) -> None:
    m, n, (bm, bn) = 6, 20, block
    x = numbers(torch.float32, m, n + 3) + 1
    y = torch.full((bm, bn), float(GUARD))
    block_2d[(1,)](x, y, m, n, n + 3, *corner, BM=bm, BN=bn, CHECK=(0, 1))
    padded = torch.zeros(400, 400)
    padded[150 : 150 + m, 150 : 150 + n] = x[:, :n]
    i, j = corner[0] + 150, corner[1] + 150
    assert torch.equal(y, padded[i : i + bm, j : j + bn])


@pytest.mark.parametrize("check", [(), (0,), (1,)])
def test_unchecked_dimensions_read_what_is_there(on: str, check: tuple[int, ...]) -> None:
    x, y = numbers(torch.float32, 8, 32) + 1, torch.zeros(4, 16)
    block_2d[(1,)](x, y, 2, 10, 32, 0, 0, BM=4, BN=16, CHECK=check)
    want = x[:4, :16].clone()
    if 0 in check:
        want[2:] = 0
    if 1 in check:
        want[:, 10:] = 0
    assert torch.equal(y, want)


@amxq.jit
def store_2d(y, m, n, sy, i, j, BM: tl.constexpr, BN: tl.constexpr):
    target = tl.make_tensor_descriptor(y, [m, n], [sy, 1], [BM, BN])
    rows, columns = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    target.store([i, j], rows * 100 + columns)


@pytest.mark.parametrize("corner", [(0, 0), (2, 7), (-1, -2), (5, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_stores_stay_inside_of_the_array(
    on: str, corner: tuple[int, int], dtype: torch.dtype
) -> None:
    (i, j), m, n = corner, 5, 13
    y = torch.full((9, 16), GUARD, dtype=dtype)
    store_2d[(1,)](y[1:], m, n, 16, i, j, BM=4, BN=16)
    want = torch.full_like(y, GUARD)
    for r in range(4):
        for c in range(16):
            if 0 <= i + r < m and 0 <= j + c < n:
                want[1 + i + r, j + c] = 100 * r + c
    assert torch.equal(y, want)


@amxq.jit
def block_3d(x, y, a, b, c, i, j, k, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [a, b, c], [b * c, c, 1], [A, B, C])
    target = tl.make_tensor_descriptor(y, [A, B, C], [B * C, C, 1], [A, B, C])
    target.store([0, 0, 0], source.load([i, j, k]))


@pytest.mark.parametrize("block", [(2, 2, 16), (3, 40, 8)])
def test_blocks_of_rank_three(on: str, block: tuple[int, int, int]) -> None:
    x, y = numbers(torch.float32, 4, 5, 12) + 1, torch.zeros(block)
    block_3d[(1,)](x, y, 4, 5, 12, 2, -1, 3, A=block[0], B=block[1], C=block[2])
    padded = torch.zeros(200, 200, 200)
    padded[100:104, 100:105, 100:112] = x
    want = padded[102 : 102 + block[0], 99 : 99 + block[1], 103 : 103 + block[2]]
    assert torch.equal(y, want)


# --- the grid ---------------------------------------------------------------------------


@amxq.jit
def count(y, sizes):
    x, z = tl.program_id(0), tl.program_id(2)
    nx, ny, nz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    at = (z * ny + tl.program_id(1)) * nx + x
    tl.store(y + at, tl.load(y + at) + 1 + at)
    tl.store(sizes, nx)
    tl.store(sizes + 1, ny)
    tl.store(sizes + 2, nz)


@pytest.mark.parametrize("grid", [(5,), (3, 4), (2, 3, 5), (1, 1, 7), [4, 2]])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_program_runs_once(on: str, grid: tuple[int, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    total = math.prod(grid)
    y, sizes = torch.zeros(total, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    count[grid](y, sizes)
    assert torch.equal(y, torch.arange(1, total + 1, dtype=torch.int32))
    assert sizes.tolist() == [*grid, 1, 1][:3]


def test_a_grid_may_depend_on_the_arguments(on: str) -> None:
    x, y = torch.arange(100.0), torch.zeros(100)
    masked_copy[lambda meta: (amxq.cdiv(meta["n"], meta["BLOCK"]),)](x, y, 97, BLOCK=16, OTHER=0)
    assert torch.equal(y[:97], x[:97])


def test_an_empty_grid_runs_nothing(on: str) -> None:
    x, y = torch.ones(16), torch.zeros(16)
    masked_copy[(0,)](x, y, 4, BLOCK=16, OTHER=0)
    masked_copy[(3, 0, 2)](x, y, 4, BLOCK=16, OTHER=0)
    assert not y.any()
    masked_copy[(1,)](x, y, 4, BLOCK=16, OTHER=0)
    assert y.any()


@amxq.jit
def thread_number(y, N: tl.constexpr):
    total = tl.zeros((16,), tl.float32)
    for i in range(N):
        total += i
    tl.store(y + tl.program_id(0), tl.sum(total, 0))


def test_num_threads_limits_a_launch(on: str) -> None:
    torch.set_num_threads(2)
    y = torch.zeros(64)
    for threads in (1, 2, 64):
        y.zero_()
        thread_number[(64,)](y, N=10, num_threads=threads)
        assert y.tolist() == [45.0 * 16] * 64


def test_odd_addresses(on: str) -> None:
    """Tensors need be aligned to their elements only."""
    raw = torch.zeros(4 * 300 + 1, dtype=torch.uint8)[1:]
    x = raw[: 4 * 100].view(torch.uint8)
    y = torch.zeros(101, dtype=torch.bfloat16)[1:]
    source = numbers(torch.bfloat16, 101)[1:]
    masked_copy[(7,)](source, y, 97, BLOCK=16, OTHER=0)
    assert torch.equal(y[:97], source[:97])
    masked_copy[(7,)](x, raw[400:512], 97, BLOCK=16, OTHER=0)
