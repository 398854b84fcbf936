"""Activations quantised to int8 at run time, and their product with a packed INT4 weight.

Each block of at most 128 activations of a row, within one group of the weight, has a scale of its
own: x ≈ scale · a with integers a from -127 to 127. The sum over a block is exact in int32, and
with d = (q - z) = q - 8 - (z - 8)

    sum d · x  ≈  scale · sum q · a + offset · (1 + (z - 8) / 8),    offset = -8 · scale · sum a

Every rounding is written down (fma), so the result has the same bits on every target.
"""

import amxq.language as tl
from amxq.runtime.jit import jit
from amxq_kernels.rows import block_at

LARGEST = 127.0
SMALLEST = 1e-36
"""Blocks without a larger activation count as zero: 127 / 1e-37 is no fp32 number any more."""
ROUND = 12582912.0
"""1.5 · 2^23: added to a number below 2^22 it leaves no bits for a fraction."""


@jit
def quantize_int8(x, values, scales, offsets, M, K, stride, BLOCK_K: tl.constexpr):
    """One row of x in int8, rounded to nearest even.

    x: [M, K], contiguous. values: int8 [rows, stride], columns in the order of ``tl.int4_order``.
    scales, offsets: fp32 [K / BLOCK_K, rows], NaN where the block has a NaN or an infinity.
    Grid: (rows,); rows beyond M repeat the last one.
    """
    rows, row = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    source = x + tl.minimum(row, M - 1) * K
    columns = tl.arange(0, BLOCK_K)
    for k in tl.range(0, K, BLOCK_K):
        block = tl.load(source + k + columns).to(tl.float32)
        largest = tl.max(tl.abs(block), 0)
        inverse = tl.where(largest > SMALLEST, LARGEST / largest, 0.0)
        a = tl.fma(block, inverse, ROUND) - ROUND
        # 0 · x is 0 for numbers, NaN for the others, which int8 cannot tell
        scale = largest / LARGEST + tl.sum(block * 0.0, 0)
        at = k // BLOCK_K * rows + row
        tl.store(scales + at, scale)
        tl.store(offsets + at, -8.0 * scale * tl.sum(a, 0))
        tl.store(values + row * stride + k + columns, tl.int4_order(a.to(tl.int8)))


@jit
def int8_product(
    x,
    rows,
    x_scales,
    x_offsets,
    stride,
    w,
    m,
    n,
    M,
    K,
    group_size,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, 32]: rows of x from m on, times 32 columns of the int4 tensor w from n on.

    x, x_scales, x_offsets: what :func:`quantize_int8` wrote, with the same BLOCK_K. rows: None, or
    the rows themselves, an int64 tile.
    """
    acc = tl.zeros((BLOCK_M, 32), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = block_at(x, rows, m, k, M, stride, BLOCK_M, BLOCK_K)
        part = tl.dot(a, w.load([k, n])).to(tl.float32)
        first = (k // BLOCK_K).to(tl.int64) * M
        offset = block_at(x_offsets + first, rows, m, 0, M, 1, BLOCK_M, 1)
        g = k // group_size
        if w.has_zeros:
            offset = offset * tl.fma(w.zeros([g, n]), 0.125, 1.0)
        part = tl.fma(part, block_at(x_scales + first, rows, m, 0, M, 1, BLOCK_M, 1), offset)
        acc = tl.fma(part, w.scales([g, n]), acc)
    return acc
