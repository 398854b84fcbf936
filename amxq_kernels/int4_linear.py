"""y = x · Wᵀ (+ bias) (+ residual) for packed INT4 weights W [N, K] = (q - z) · s.

The weight stays an integer in the multiplication: a bf16 activation times an integer from -8 to 7
is exact in fp32, so the sum over a block of K is rounded in fp32 only, and the group's scale is
applied to the sum. Zero points enter as a correction with the block's sum of activations:
sum (q - z) x = sum (q - 8) x - (z - 8) sum x.
With precision "int8" activations have been quantised first, see int4_linear_int8.py.
"""

import amxq.language as tl
from amxq.runtime.jit import jit
from amxq_kernels.int4_linear_int8 import int8_product
from amxq_kernels.rows import block_at

ENTRY = 6
"""Numbers that describe a panel of several weights: see :func:`int4_linear`."""


@jit
def int4_product(
    x,
    rows,
    w,
    sums,
    m,
    n,
    sizes,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """:func:`product` for activations in bf16."""
    M, stride, K, group_size = sizes
    acc = tl.zeros((BLOCK_M, 32), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        q = w.load([k, n])
        part = tl.dot(block_at(x, rows, m, k, M, stride, BLOCK_M, BLOCK_K), q)
        for s in tl.static_range(1, SPLITS):
            more = x + s * (M.to(tl.int64) * stride)
            part = tl.dot(block_at(more, rows, m, k, M, stride, BLOCK_M, BLOCK_K), q, part)
        g = k // group_size
        if w.has_zeros:
            total = block_at(sums, rows, m, k // BLOCK_K, M, K // BLOCK_K, BLOCK_M, 1)
            part -= total * w.zeros([g, n])
        acc += part * w.scales([g, n])
    return acc


@jit
def product(
    x,
    rows,
    x_scales,
    sums,
    w,
    m,
    n,
    sizes,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, 32]: rows of x, those from m on or, if not None, the tile ``rows``, times 32
    columns of the int4 tensor w from n on.

    x, x_scales, sums: as for :func:`int4_linear`. sizes: rows and stride of x, K, the group size.
    """
    M, stride, K, group_size = sizes
    if x_scales is not None:
        return int8_product(
            x, rows, x_scales, sums, stride, w, m, n, M, K, group_size, BLOCK_M, BLOCK_K
        )
    return int4_product(x, rows, w, sums, m, n, sizes, SPLITS, BLOCK_M, BLOCK_K)


@jit
def int4_linear(
    x,
    qweight,
    scales,
    zeros,
    table,
    x_scales,
    sums,
    bias,
    residual,
    y,
    M,
    rows,
    stride,
    N,
    K,
    group_size,
    row_blocks,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of BLOCK_M rows and 32 columns of y.

    x: bf16 [SPLITS · rows, stride], K columns of SPLITS parts that add up to the activations, the
    first M rows of which count; BLOCK_M rows at least. With sums, fp32 [rows, K / BLOCK_K], of
    blocks of x, or None where zeros is None. Both as prepare_bf16 writes them; without sums, x may
    be activations as they are.
    Or int8 [rows, stride] with x_scales and, for sums, offsets, as quantize_int8 writes them.
    qweight, scales, zeros: as in amxq.PackedWeight; zeros may be None.
    table: None, or int64 [panels, ENTRY] for several weights side by side. Of each panel: how far
    its weight's qweight, scales and zeros are from the first's, in elements; its weight's first
    column of y, and how many it has; and the panel's own first column within the weight.
    bias: [N] or None. residual: [M, N] or None. y: [M, N]. BLOCK_K divides group_size, which
    divides K.
    Grid: (row blocks within a band, panels of 32 columns, bands of rows): the rows of a band
    stay in cache while the panels stream by. row_blocks is the grid's first size.
    """
    block = tl.program_id(2) * row_blocks + tl.program_id(0)
    # The last block may overlap its neighbour: both write the same values.
    m = tl.minimum(block * BLOCK_M, rows - BLOCK_M)
    n, columns = tl.program_id(1) * 32, N
    if table is not None:
        entry = table + tl.program_id(1) * ENTRY
        qweight += tl.load(entry)
        scales += tl.load(entry + 1)
        if zeros is not None:
            zeros += tl.load(entry + 2)
        y += tl.load(entry + 3)
        if bias is not None:
            bias += tl.load(entry + 3)
        columns = tl.load(entry + 4).to(tl.int32)
        n = tl.load(entry + 5).to(tl.int32)
    w = tl.int4_tensor(qweight, scales, zeros, [K, columns], group_size, [BLOCK_K, 32])
    sizes = (rows, stride, K, group_size)
    acc = product(x, None, x_scales, sums, w, m, n, sizes, SPLITS, BLOCK_M, BLOCK_K)
    if bias is not None:
        acc += tl.make_tensor_descriptor(bias, [columns], [1], [32]).load([n]).to(tl.float32)
    if residual is not None:
        more = tl.make_tensor_descriptor(residual, [M, N], [N, 1], [BLOCK_M, 32])
        acc += more.load([m, n]).to(tl.float32)
    out = tl.make_tensor_descriptor(y, [M, columns], [N, 1], [BLOCK_M, 32])
    out.store([m, n], acc)


@jit
def prepare_bf16(x, parts, sums, M, K, stride, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row of x as SPLITS bf16 numbers each, which add up to it exactly.

    x: [M, K], contiguous: bf16, fp16 (two parts, or one on AMX-FP16) or fp32 (three). parts: bf16
    [SPLITS · rows, stride], part s of row m in row s · rows + m. sums: fp32 [rows, K / BLOCK_K],
    sums of x over blocks of K, or None. Grid: (rows,); rows beyond M repeat the last one.
    """
    rows, row = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    source = x + tl.minimum(row, M - 1) * K
    columns = tl.arange(0, BLOCK_K)
    for k in tl.range(0, K, BLOCK_K):
        block = tl.load(source + k + columns)
        rest = block.to(tl.float32)
        to = parts + row * stride + k + columns
        if sums is not None:
            tl.store(sums + row * (K // BLOCK_K) + k // BLOCK_K, tl.sum(rest, 0))
        if SPLITS == 1:
            tl.store(to, block)
        else:
            infinite = tl.abs(rest) == float("inf")
            for s in tl.static_range(SPLITS):
                # cutting the low bits off never overflows, and the remainder is exact
                high = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                tl.store(to + s * (rows * stride), high.to(tl.bfloat16))
                rest = tl.where(infinite, 0.0, rest - high)


@jit
def block_sums(x, sums, M, K, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of x over blocks of K: sums[m, j] = sum of x[s · M + m, j · BLOCK_K + i] over s and i.

    x: bf16 [SPLITS · M, K]; sums: fp32 [M, K / BLOCK_K]. Grid: (M,).
    """
    m = tl.program_id(0)
    a = tl.make_tensor_descriptor(x, [SPLITS * M, K], [K, 1], [1, BLOCK_K])
    for j in tl.range(0, K // BLOCK_K):
        total = tl.sum(a.load([m, j * BLOCK_K], boundary_check=()).to(tl.float32), 1)
        for s in tl.static_range(1, SPLITS):
            more = a.load([s * M + m, j * BLOCK_K], boundary_check=())
            total += tl.sum(more.to(tl.float32), 1)
        tl.store(sums + m.to(tl.int64) * (K // BLOCK_K) + j + tl.arange(0, 1), total)
