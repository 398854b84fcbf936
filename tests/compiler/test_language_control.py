"""Control flow: loops and what they carry, branches, calls, compile-time evaluation."""

from __future__ import annotations

import pytest
import torch

import amxq
import amxq.language as tl

SIZES = [16, 7, 528]
"""A vector register, an odd size, and a tile that lives in memory."""


@amxq.jit
def carried(x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    steps = 0
    factor = 1.0
    for i in tl.range(0, n):
        total += tl.load(x + i * N + at) * factor
        factor = factor * 2.0
        steps += 2
    tl.store(out + at, total + steps)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_loop_carries_tiles_and_scalars(on: str, size: int, n: int) -> None:
    x, out = torch.randint(-9, 9, (5, size)).float(), torch.zeros(size)
    carried[(1,)](x, out, n, N=size)
    want = sum((x[i] * 2**i for i in range(n)), torch.zeros(size)) + 2 * n
    assert torch.equal(out, want)


@amxq.jit
def swapped(x, y, n, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    for _ in range(n):
        a, b = b, a + b
    tl.store(x + at, a)
    tl.store(y + at, b)


@pytest.mark.parametrize("size", SIZES)
def test_carried_tiles_may_change_places(on: str, size: int) -> None:
    x, y = torch.arange(size), torch.arange(size) * 3
    a, b = x.clone(), y.clone()
    for _ in range(7):
        a, b = b, a + b
    swapped[(1,)](x, y, 7, N=size)
    assert torch.equal(x, a) and torch.equal(y, b)


@amxq.jit
def mixed_rows(x, out, n, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tile = tl.load(x + at)
    for _ in range(n):
        tile = tile - tl.max(tile, 1)[:, None] + tl.sum(tile, 1)[:, None]
    tl.store(out + at, tile)


@pytest.mark.parametrize("shape", [(2, 16), (40, 16)])
def test_a_carried_tile_that_depends_on_whole_rows(on: str, shape: tuple[int, int]) -> None:
    x, out = torch.randint(-3, 3, shape).int(), torch.zeros(shape, dtype=torch.int32)
    mixed_rows[(1,)](x, out, 3, M=shape[0], N=shape[1])
    want = x
    for _ in range(3):
        want = want - want.amax(1, keepdim=True) + want.sum(1, keepdim=True, dtype=torch.int32)
    assert torch.equal(out, want)


@amxq.jit
def nested(out, n, m, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.int32)
    for i in range(1, n):
        inner = tl.zeros((N,), tl.int32)
        for j in range(i, m, 2):
            inner += j * at
            if j == 3:
                inner += 1000
        total = total * 3 + inner
    tl.store(out + at, total)


@pytest.mark.parametrize("size", SIZES)
def test_loops_nest(on: str, size: int) -> None:
    at, total = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    out = torch.zeros(size, dtype=torch.int32)
    nested[(1,)](out, 5, 9, N=size)
    for i in range(1, 5):
        inner = torch.zeros_like(total)
        for j in range(i, 9, 2):
            inner += j * at + (1000 if j == 3 else 0)
        total = total * 3 + inner
    assert torch.equal(out, total.int())


@amxq.jit
def bounds(out, start, stop, STEP: tl.constexpr):
    a = 0
    for i in range(start, stop, STEP):
        a = a * 10 + i
    b = 0
    for _ in tl.range(start=start, stop=stop, step=STEP):
        b += 1
    c = 0
    for i in range(stop):
        c += i
    d = 0
    for i in tl.static_range(7, 1, -2):
        d = d * 10 + i
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)


def test_ranges(on: str) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    bounds[(1,)](out, 2, 9, STEP=3)
    assert out.tolist() == [258, 3, 36, 753]
    bounds[(1,)](out, 9, 2, STEP=3)
    assert out.tolist() == [0, 0, 1, 753]


@amxq.jit
def wide_bounds(out, start, stop):
    count = 0
    for _ in range(start, stop):
        count += 1
    tl.store(out, count)


def test_a_loop_over_64_bit_numbers(on: str) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    wide_bounds[(1,)](out, (1 << 40) - 3, (1 << 40) + 4)
    assert out.item() == 7


@amxq.jit
def branches(out, flag, N: tl.constexpr):
    at = tl.arange(0, N)
    tile = at * 1
    number = 5
    same = 7
    if flag > 2:
        tile = tile + 10
        number = 6
        same = 8
    elif flag > 1:
        tile = tile * 2
        same = 8
    else:
        tl.store(out + N, flag)
        same = 8
    tl.static_assert(same == 8)
    tl.store(out + at, tile + number)


@pytest.mark.parametrize("size", SIZES)
def test_branches_at_run_time(on: str, size: int) -> None:
    at = torch.arange(size)
    for flag, want in ((3, at + 16), (2, at * 2 + 5), (1, at + 5)):
        out = torch.zeros(size + 1, dtype=torch.int64)
        branches[(1,)](out, flag, N=size)
        assert torch.equal(out[:-1], want)
        assert out[-1] == (1 if flag == 1 else 0)


@amxq.jit
def conditions(out, a, b):
    tl.store(out, 1 if a > 0 else 2)
    if a > 0 and b > 0:
        tl.store(out + 1, 1)
    if a > 0 or b > 0:
        tl.store(out + 2, 1)
    if not a > 0:
        tl.store(out + 3, 1)
    tl.store(out + 4, b if a > b else a)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_conditions(on: str, a: int, b: int) -> None:
    out = torch.zeros(5, dtype=torch.int32)
    conditions[(1,)](out, a, b)
    want = [1 if a > 0 else 2, a > 0 and b > 0, a > 0 or b > 0, a <= 0, min(a, b)]
    assert out.tolist() == [int(w) for w in want]


@amxq.jit
def optional(x, out, scale, MODE: tl.constexpr, N: tl.constexpr = 16):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    if scale is not None:
        value *= scale
    if MODE == "negate":
        value = -value
    elif MODE == "early":
        tl.store(out + at, value + 1)
        return
    tl.store(out + at, value)


def test_arguments_that_are_none_and_early_return(on: str) -> None:
    x, out = torch.arange(16.0), torch.zeros(16)
    optional[(1,)](x, out, None, MODE="copy")
    assert torch.equal(out, x)
    optional[(1,)](x, out, 2.0, MODE="negate")
    assert torch.equal(out, -2 * x)
    optional[(1,)](x, out, 3.0, MODE="early")
    assert torch.equal(out, 3 * x + 1)


@amxq.jit
def scaled(tile, factor, offset=1):
    """Called by other kernels."""
    if factor is None:
        return tile
    return tile * factor, offset


@amxq.jit
def twice(pointer, N: tl.constexpr):
    at = pointer + tl.arange(0, N)
    tile = tl.load(at)
    for _ in tl.static_range(2):
        tile, more = scaled(tile, factor=2)
        tile += more
    tl.store(at, scaled(tile, None))


@amxq.jit
def calls(x, n):
    for i in range(n):
        twice(x + i * 16, N=16)


def test_calls_of_other_jit_functions(on: str) -> None:
    x = torch.arange(48)
    want = (x * 2 + 1) * 2 + 1
    calls[(1,)](x, 3)
    assert torch.equal(x, want)


OFFSETS = (3, 1, 2)


@amxq.jit
def at_compile_time(out, SHAPE: tl.constexpr, DTYPE: tl.constexpr):
    tl.static_assert(len(OFFSETS) == 3 and max(2, SHAPE[0]) >= 2, "sizes")
    tl.static_assert(~5 == -6 and not 0 and -(3) < +2 and 7 // 2 == 3 and 2 << 3 == 16)
    tl.static_assert(tl.cdiv(7, 2) == 4)
    for i in tl.static_range(len(OFFSETS)):
        tl.store(out + i, (tl.zeros(SHAPE, DTYPE) + OFFSETS[i]).sum(1).sum(0))


def test_constants_are_evaluated_by_the_compiler(on: str) -> None:
    out = torch.zeros(3)
    at_compile_time[(1,)](out, SHAPE=(2, 8), DTYPE=tl.float32)
    assert out.tolist() == [48.0, 16.0, 32.0]


def test_static_print(capsys: pytest.CaptureFixture[str]) -> None:
    @amxq.jit
    def shows(x, N: tl.constexpr):
        tl.static_print("tile", tl.load(x + tl.arange(0, N)), N)

    shows.warmup(torch.bfloat16, N=32, target="avx2")
    assert capsys.readouterr().out == "tile tile<32xbf16> 32\n"


def test_constants_that_compare_equal_are_told_apart() -> None:
    seen = []
    for value in (1, 1.0, True, 0.0, -0.0):
        out = torch.zeros(1)
        store_constant[(1,)](out, VALUE=value)
        seen.append((out.item(), str(out.item())))
    assert [text for _, text in seen] == ["1.0", "1.0", "1.0", "0.0", "-0.0"]


@amxq.jit
def store_constant(out, VALUE: tl.constexpr):
    tl.store(out, VALUE)


def test_kernels_compile_once_for_each_signature() -> None:
    x = torch.zeros(32)
    first = store_constant[(1,)](x, VALUE=3)
    assert store_constant[(1,)](x[16:], VALUE=3) is first
    assert store_constant[(1,)](x.double(), VALUE=3) is not first
    assert store_constant[(1,)](x, VALUE=4) is not first


@amxq.jit
def count_steps(out, n, step):
    count = 0
    for _ in range(0, n, step):
        count += 1
    tl.store(out, count)


@pytest.mark.parametrize(("step", "want"), [(0, 5), (-3, 5), (2, 3), (7, 1)])
def test_a_loop_ends_whatever_its_step(on: str, step: int, want: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    count_steps[(1,)](out, 5, step)
    assert out.item() == want
