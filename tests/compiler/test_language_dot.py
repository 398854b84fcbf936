"""``tl.dot`` on every target, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import CompilationError

EPS = 2.0**-24


def check(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None) -> None:
    """fp32 sums in any order: at most one rounding a term."""
    want = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    if start is not None:
        want += start
        size += start.abs()
    bound = (a.shape[1] + 2) * EPS * size + 1e-30
    assert ((got.double() - want).abs() <= bound).all()


@amxq.jit
def dense(a, b, acc, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [K, N])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, N])
    x = left.load([0, 0])
    if acc is None:
        target.store([0, 0], tl.dot(x, right.load([0, 0], boundary_check=())))
    else:
        start = tl.make_tensor_descriptor(acc, [M, N], [N, 1], [M, N])
        target.store([0, 0], tl.dot(x, right.load([0, 0]), start.load([0, 0])))


@pytest.mark.parametrize(
    "shape", [(1, 16, 8), (5, 3, 7), (17, 48, 32), (33, 32, 24), (48, 80, 32), (64, 64, 48)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_dots(on_each: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    acc = torch.randn(m, n) if m % 2 else None
    out = torch.full((m, n), torch.nan)
    dense[(1,)](a, b, acc, out, M=m, N=n, K=k)
    check(out, a, b, acc)


@amxq.jit
def packed(a, pairs, out, N, SIGN: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    """Blocks of 32 columns of a · SIGN · b, b in pairs of k, [panels, 16 · K]."""
    n = tl.program_id(0) * 32
    x = tl.make_tensor_descriptor(a, [M, K], [K, 1], [M, K]).load([0, 0], boundary_check=())
    panels = tl.make_tensor_descriptor(pairs, [N // 16, 16 * K], [16 * K, 1], [2, 16 * K])
    block = panels.load([n // 16, 0], boundary_check=())
    if SIGN < 0:
        block = -block
    lines = tl.reshape(block, (K, 16, 2)).permute(0, 2, 1)
    y = tl.reshape(tl.reshape(lines, (2, K, 16)).permute(1, 0, 2), (K, 32))
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, 32])
    target.store([0, n], tl.dot(x, y, target.load([0, n])))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("shape", [(1, 32, 2), (5, 64, 10), (17, 96, 32), (40, 32, 64)])
def test_pairs_that_are_unpacked(on_each: str, shape: tuple[int, int, int], sign: int) -> None:
    """Where they lie, or computed first."""
    m, n, k = shape
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    pairs = b.view(k // 2, 2, n // 16, 16).permute(2, 0, 3, 1).contiguous()
    start = torch.randn(m, n)
    out = start.clone()
    packed[(n // 32,)](a, pairs, out, n, SIGN=sign, M=m, K=k)
    check(out, a, sign * b, start)


@amxq.jit
def converted(a, out, TYPE: tl.constexpr):
    n = tl.arange(0, 16)
    x = tl.load(a + n[:, None] * 16 + n[None, :])
    tl.store(out + n[:, None] * 16 + n[None, :], tl.dot(x, x, out_dtype=TYPE))


@pytest.mark.parametrize("to", [None, tl.float64, tl.float32, tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_are_converted(on: str, dtype: torch.dtype, to: Any) -> None:
    """The result's memory takes anything: values tell what they were converted to."""
    a = torch.randn(16, 16, dtype=torch.float64).to(dtype)
    out, total = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 16, dtype=torch.float64)
    if to == tl.float64 and dtype != torch.float64:
        with pytest.raises(CompilationError, match="out_dtype of dot is the type f64"):
            converted[(1,)](a, out, to)
        return
    converted[(1,)](a, out, to)
    converted[(1,)](a, total, None)
    kinds = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
    assert torch.equal(out, total.to(kinds.get(to, torch.float64)).double())
    want = a.double() @ a.double()
    assert (total - want).abs().max() < (1e-12 if dtype == torch.float64 else 1e-4)


@amxq.jit
def transposed(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    rows = b + n[:, None] * K + k[None, :]
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(rows)
    tl.store(rows, y * 0)  # what the dot multiplies was read before
    product = tl.dot(x, tl.trans(y)) + tl.dot(x, (y + y).T)
    tl.store(out + m[:, None] * N + n[None, :], product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (5, 48, 32), (64, 128, 64), (32, 20, 16)], ids=str)
def test_transposed_operands(on_each: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(r, k, generator=generator).to(dtype) for r in (m, n))
    before, out = b.double(), torch.zeros(m, n)
    transposed[(1,)](a, b, out, M=m, N=n, K=k)
    want = 3 * a.double() @ before.T
    bound = 3 * (a.double().abs() @ before.abs().T) * (k + 2) * 2.0**-24
    assert ((out - want).abs() <= bound).all()
    assert (b == 0).all()


@amxq.jit
def chained(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + rows[:, None] * K + depth[None, :])
    y = tl.load(b + depth[:, None] * N + columns[None, :])
    total = tl.zeros((M, N), tl.float32)
    for i in range(3):
        total = tl.dot((x * 2).to(tl.float32), y + i, total)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


@pytest.mark.parametrize("shape", [(4, 16, 8), (40, 48, 16)])
def test_operands_that_are_computed(on: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randint(-4, 4, (m, k)).float(), torch.randint(-4, 4, (k, n)).float()
    out = torch.zeros(m, n)
    chained[(1,)](a, b, out, M=m, N=n, K=k)
    assert torch.equal(out, sum((2 * a) @ (b + i) for i in range(3)))


# --- int4 -------------------------------------------------------------------------------


@amxq.jit
def int4(x, qweight, scales, zeros, acc, out, K, N, GROUP, M: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * 32
    a = tl.make_tensor_descriptor(x, [M, K], [K, 1], [M, BLOCK])
    w = tl.int4_tensor(qweight, scales, zeros, [K, N], GROUP, [BLOCK, 32])
    y = tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, 32])
    total = tl.zeros((M, 32), tl.float32)
    if acc is not None:
        total = tl.make_tensor_descriptor(acc, [M, N], [N, 1], [M, 32]).load([0, n])
    for k in range(0, K, BLOCK):
        total = tl.dot(a.load([0, k], boundary_check=()), w.load([k, n]), total)
    y.store([0, n], total)


def weight(n: int, k: int, group: int, zeros: bool) -> tuple[amxq.PackedWeight, torch.Tensor]:
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    s = torch.randn(n, k // group)
    z = torch.randint(0, 16, s.shape, dtype=torch.uint8) if zeros else None
    return amxq.pack(q, s, z, format="plain"), q


@pytest.mark.parametrize(
    ("m", "block", "with_acc"),
    [
        (1, 32, False),
        (3, 128, True),
        (9, 40, False),
        (16, 64, True),
        (17, 8, True),
        (24, 32, False),
        (33, 64, True),
        (47, 16, False),
        (64, 64, False),
        (100, 32, True),
    ],
)
def test_int4_integers(on_each: str, m: int, block: int, with_acc: bool) -> None:
    n, k = 40, 2 * block
    w, q = weight(n, k, block, False)
    x = torch.randn(m, k).bfloat16()
    acc = torch.randn(m, n) if with_acc else None
    out = torch.full((m, n), torch.nan)
    int4[(2,)](x, w.qweight, w.scales, None, acc, out, k, n, block, M=m, BLOCK=block)
    check(out, x, q.double().T - 8, acc)


@amxq.jit
def int8(x, qweight, scales, acc, out, K, N, GROUP, M: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * 32
    a = tl.make_tensor_descriptor(x, [M, K], [K, 1], [M, BLOCK])
    w = tl.int4_tensor(qweight, scales, None, [K, N], GROUP, [BLOCK, 32])
    y = tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, 32])
    total = tl.zeros((M, 32), tl.int32)
    if acc is not None:
        total = tl.make_tensor_descriptor(acc, [M, N], [N, 1], [M, 32]).load([0, n])
    for k in range(0, K, BLOCK):
        total = tl.dot(tl.int4_order(a.load([0, k])), w.load([k, n]), total)
    y.store([0, n], total)


@pytest.mark.parametrize(
    ("m", "block", "with_acc", "extreme"),
    [
        (1, 32, False, False),
        (3, 128, True, True),
        (9, 40, False, False),
        (17, 8, True, True),
        (64, 128, False, False),
        (96, 24, True, True),
    ],
)
def test_int8_times_int4_is_exact(
    on_each: str, m: int, block: int, with_acc: bool, extreme: bool
) -> None:
    n, k = 40, 2 * block
    w, q = weight(n, k, block, False)
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    if extreme:  # the largest pairs of products: 16 bits must hold them
        x = torch.where(torch.rand(m, 1) < 0.5, -128, 127).to(torch.int8).expand(m, k).contiguous()
        q = torch.full_like(q, 15)
        w = amxq.pack(q, torch.ones(n, k // block), None, format="plain")
    acc = torch.randint(-(2**31), 2**31, (m, n), dtype=torch.int32) if with_acc else None
    out = torch.full((m, n), -1, dtype=torch.int32)
    int8[(2,)](x, w.qweight, w.scales, acc, out, k, n, block, M=m, BLOCK=block)
    want = x.long() @ q.long().T + (0 if acc is None else acc)
    assert torch.equal(out, want.to(torch.int32))  # modulo 2^32


@amxq.jit
def reordered(x, y, M: tl.constexpr, K: tl.constexpr):
    a = tl.make_tensor_descriptor(x, [M, K], [K, 1], [M, K])
    out = tl.make_tensor_descriptor(y, [M, K], [K, 1], [M, K])
    out.store([0, 0], tl.int4_order(a.load([0, 0])))


@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64])
def test_int4_order(on: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul(50).to(dtype)
    y = torch.zeros_like(x)
    reordered[(1,)](x, y, *shape)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    assert torch.equal(y, x.view(shape[0], -1, 8)[..., order].reshape(shape))


@amxq.jit
def group_values(x, qweight, scales, zeros, s, z, K, N, GROUP):
    n, g = tl.program_id(0) * 32, tl.program_id(1)
    w = tl.int4_tensor(qweight, scales, zeros, [K, N], GROUP, [8, 32])
    y = tl.make_tensor_descriptor(s, [K // GROUP, N], [N, 1], [1, 32])
    y.store([g, n], w.scales([g, n]))
    if w.has_zeros:
        y = tl.make_tensor_descriptor(z, [K // GROUP, N], [N, 1], [1, 32])
        y.store([g, n], w.zeros([g, n]))


@pytest.mark.parametrize("n", [1, 32, 75])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_and_zeros_of_a_group(on: str, n: int, dtype: torch.dtype) -> None:
    q = torch.randint(0, 16, (n, 64), dtype=torch.uint8)
    scales = torch.randn(n, 4).to(dtype)
    zeros = torch.arange(4 * n).view(n, 4).remainder(16).to(torch.uint8)
    w = amxq.pack(q, scales, zeros, format="plain")
    s, z = torch.zeros(4, n), torch.zeros(4, n)
    group_values[(3 if n > 64 else 1, 4)](None, w.qweight, w.scales, w.zeros, s, z, 64, n, 16)
    assert torch.equal(s, scales.float().T)
    assert torch.equal(z, zeros.float().T - 8)


@amxq.jit
def two_uses(x, qweight, scales, out, K, M: tl.constexpr, BLOCK: tl.constexpr):
    """One dot consumed twice, one operand multiplied twice, and two shapes of dots."""
    a = tl.make_tensor_descriptor(x, [M, K], [K, 1], [M, BLOCK])
    w = tl.int4_tensor(qweight, scales, None, [K, 32], K, [BLOCK, 32])
    y = tl.make_tensor_descriptor(out, [4 * M, 32], [32, 1], [M, 32])
    q = w.load([0, 0])
    tile = a.load([0, 0], boundary_check=())
    part = tl.dot(tile, q)
    y.store([0, 0], part * 2)
    y.store([M, 0], part + 1)
    y.store([2 * M, 0], tl.dot(tile, q, part))
    one = tl.make_tensor_descriptor(x, [M, K], [K, 1], [1, BLOCK]).load([M - 1, 0])
    last = tl.make_tensor_descriptor(out, [4 * M, 32], [32, 1], [1, 32])
    last.store([3 * M, 0], tl.dot(one, w.load([0, 0])))


@pytest.mark.parametrize("m", [3, 64])
def test_results_and_operands_that_are_used_twice(on_each: str, m: int) -> None:
    w, q = weight(32, 64, 64, False)
    x = torch.randint(-8, 8, (m, 64)).bfloat16()
    out = torch.zeros(4 * m, 32)
    two_uses[(1,)](x, w.qweight, w.scales, out, 64, M=m, BLOCK=64)
    want = x.float() @ (q.float().T - 8)
    assert torch.equal(out[:m], 2 * want)
    assert torch.equal(out[m : 2 * m], want + 1)
    assert torch.equal(out[2 * m : 3 * m], 2 * want)
    assert torch.equal(out[3 * m], want[-1])
    assert not out[3 * m + 1 :].any()


@amxq.jit
def windowed(x, qweight, out, first, last, odd_only, K, M: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the blocks first, …, last - 1 of K; with ``odd_only`` the odd ones alone."""
    a = tl.make_tensor_descriptor(x, [M, K], [K, 1], [M, BLOCK])
    w = tl.int4_tensor(qweight, x, None, [K, 32], K, [BLOCK, 32])
    y = tl.make_tensor_descriptor(out, [M, 32], [32, 1], [M, 32])
    total = tl.zeros((M, 32), tl.float32)
    for k in range(first * BLOCK, last * BLOCK, BLOCK):
        part = tl.dot(a.load([0, k], boundary_check=()), w.load([k, 0]))
        if (k // BLOCK) % 2 >= odd_only:
            total += part
    y.store([0, 0], total)


@pytest.mark.parametrize(("m", "odd_only"), [(16, 0), (32, 1), (96, 0), (96, 1)])
def test_a_loop_dequantises_what_it_multiplies(on: str, m: int, odd_only: int) -> None:
    """On amx a block is dequantised one iteration ahead: also with no iteration, with one, and
    where the product is used in some iterations only."""
    block, blocks = 32, 5
    w, q = weight(32, block * blocks, block, False)
    x = torch.randint(-8, 8, (m, block * blocks)).bfloat16()
    for first, last in ((2, 2), (2, 3), (2, 5), (3, 2), (3, 5)):
        out = torch.full((m, 32), torch.nan)
        windowed[(1,)](x, w.qweight, out, first, last, odd_only, block * blocks, M=m, BLOCK=block)
        want = torch.zeros(m, 32)
        for i in range(first, last):
            if i % 2 >= odd_only:
                part = slice(i * block, (i + 1) * block)
                want += x[:, part].float() @ (q[:, part].float().T - 8)
        assert torch.equal(out, want), (first, last)
