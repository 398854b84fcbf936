"""Mixture of experts on packed INT4 weights: out[m] = Σ_j weight[m, j] · expert[ids[m, j]](x[m]).

One assignment (m, j) is one *row* of work. Rows are sorted by expert and cut into blocks of at most
BLOCK_M rows of one expert; all blocks of one launch have the same BLOCK_M:

    sort_by_expert   one program: rows in the order of their experts, blocks by their size
    gather_rows      tokens in that order, for blocks so large that it is worth it
    gate_up          h = activation(x · Wgateᵀ, x · Wupᵀ), both panels in one program
    expert_linear    y = h · Wdownᵀ, fp32, one row for each assignment
    combine          out[m] = Σ_j weight[m, j] · y[row of (m, j)], in the order of j

A single token needs no sorting, and sum_experts is its expert_linear and combine in one.

Every number is computed by one program in one order: the same bits for any number of threads.
Programs run expert by expert, panel by panel, and through all blocks of an expert before the next
panel: each thread streams its share of an expert's weights once.
"""

import amxq.language as tl
from amxq.runtime.jit import jit
from amxq_kernels.int4_linear import product

NO_EXPERT = 1 << 40
RECORD = 4
"""Numbers that describe a block: expert, its first row, its last row + 1, its first block."""


@jit
def expert_of(ids, expert_map, i, bound):
    """The expert of assignment i: below 0 if there is none, too large if the id is wrong."""
    e = tl.load(ids + i).to(tl.int64)
    if expert_map is not None:
        inside = (e >= 0) & (e < bound)
        mapped = tl.load(expert_map + tl.where(inside, e, 0)).to(tl.int64)
        e = tl.where(inside, mapped, tl.where(e < 0, e, NO_EXPERT))
    return e


@jit
def sort_by_expert(
    ids,
    expert_map,
    classes,
    sizes,
    found,
    next_row,
    blocks,
    slots,
    tokens,
    owners,
    rows,
    count,
    bound,
    experts,
    topk,
    most,
    CLASSES: tl.constexpr,
):
    """Counting sort of ``count`` assignments by expert, in one program.

    ids: int32 or int64 [count]. expert_map: int32 [bound] or None: what ids stand for.
    classes: int32 [most + 1]: number of rows of an expert → its class; sizes: int32 [CLASSES]:
    rows of a class's blocks.
    found: int32 [2 + CLASSES]: 1 + the last assignment with a wrong id (0: none); the number of
    rows; blocks of each class. next_row: int32 [experts + CLASSES], scratch.
    blocks: int32 [.., 4], class by class. slots: int32 [rows], the assignment of each row; tokens:
    slots // topk; owners: the expert; rows: int32 [count], the row of each assignment, or -1.
    """
    for e in tl.range(0, experts):
        tl.store(next_row + e, 0)
    bad = 0
    for i in tl.range(0, count):
        e = expert_of(ids, expert_map, i, bound)
        if e >= experts:
            bad = i + 1
        else:
            if e >= 0:
                tl.store(next_row + e, tl.load(next_row + e) + 1)
    tl.store(found, bad)

    for c in tl.static_range(CLASSES):
        tl.store(found + 2 + c, 0)
    for e in tl.range(0, experts):
        n = tl.load(next_row + e)
        c = tl.load(classes + tl.minimum(n, most))
        more = tl.cdiv(n, tl.load(sizes + c))
        tl.store(found + 2 + c, tl.load(found + 2 + c) + more)
    cursors = next_row + experts
    total = 0
    for c in tl.static_range(CLASSES):
        tl.store(cursors + c, total)
        total += tl.load(found + 2 + c)

    start = 0
    for e in tl.range(0, experts):
        n = tl.load(next_row + e)
        c = tl.load(classes + tl.minimum(n, most))
        first = tl.load(cursors + c)
        end = first + tl.cdiv(n, tl.load(sizes + c))
        for b in tl.range(first, end):
            block = blocks + b * RECORD
            tl.store(block, e)
            tl.store(block + 1, start)
            tl.store(block + 2, start + n)
            tl.store(block + 3, first)
        tl.store(cursors + c, end)
        tl.store(next_row + e, start)
        start += n
    tl.store(found + 1, start)

    for i in tl.range(0, count):
        e = expert_of(ids, expert_map, i, bound)
        if (e >= 0) & (e < experts):
            row = tl.load(next_row + e)
            tl.store(next_row + e, row + 1)
            tl.store(slots + row, i)
            tl.store(tokens + row, i // topk)
            tl.store(owners + row, e.to(tl.int32))
            tl.store(rows + i, row)
        else:
            tl.store(rows + i, -1)


@jit
def gather_rows(
    x, x_scales, x_offsets, tokens, y, y_scales, y_offsets, M, words, scales, BLOCK: tl.constexpr
):
    """y[s, r] = x[s, tokens[r]] for rows of 32-bit words, and the same of their scales.

    x: int32 [.., M, words]; y: int32 [.., rows, words]. x_scales, x_offsets: fp32 [scales, M], or
    None; y_scales, y_offsets: [scales, rows]. Grid: (rows, ..).
    """
    row, rows, part = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    token = tl.load(tokens + row)
    source = x + (part * M + token) * words
    target = y + (part * rows + row) * words
    for i in tl.range(0, words, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
    if x_scales is not None:
        for g in tl.range(0, scales):
            tl.store(y_scales + g * rows + row, tl.load(x_scales + g * M + token))
            tl.store(y_offsets + g * rows + row, tl.load(x_offsets + g * M + token))


@jit
def block_of(blocks, first_block, BLOCK_M: tl.constexpr):
    """(expert, first row, last row + 1, panel) of this program; grid (panels, blocks)."""
    block = blocks + (first_block + tl.program_id(1)) * RECORD
    start, end = tl.load(block + 1), tl.load(block + 2)
    first = tl.load(block + 3) - first_block
    count = tl.cdiv(end - start, BLOCK_M)
    local = (tl.program_id(1) - first) * tl.num_programs(0) + tl.program_id(0)
    return tl.load(block), start + local % count * BLOCK_M, end, local // count


@jit
def expert_weight(qweight, scales, zeros, expert, N, K, group_size, BLOCK_K: tl.constexpr):
    """The packed weight [N, K] of one of the stacked experts."""
    e = expert.to(tl.int64)
    groups = e * N * (K // group_size)
    qweight = qweight + e * tl.cdiv(N, 32) * (K * 16)
    scales = scales + groups
    if zeros is not None:
        zeros = zeros + groups
    return tl.int4_tensor(qweight, scales, zeros, [K, N], group_size, [BLOCK_K, 32])


@jit
def add_bias(tile, bias, expert, n, N):
    """tile + the bias of 32 columns from n on; bias [E, N] or None."""
    if bias is None:
        return tile
    own = bias + expert.to(tl.int64) * N
    return tile + tl.make_tensor_descriptor(own, [N], [1], [32]).load([n]).to(tl.float32)


@jit
def activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr):
    """The activation of an expert, element by element, in fp32; see amxq.fused_moe."""
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == "swiglu":
        return gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    tl.static_assert(ACTIVATION == "gelu_tanh")
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1.0 + tl.tanh(inner)) * up


@jit
def store_parts(h, tile, row, end, n, total, N, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Stores fp32 [BLOCK_M, 32] as SPLITS bf16 parts that add up to it; h: [SPLITS · total, N]."""
    for s in tl.static_range(SPLITS):
        part = tile.to(tl.bfloat16)
        to = h + s * (total.to(tl.int64) * N)
        out = tl.make_tensor_descriptor(to, [end, N], [N, 1], [BLOCK_M, 32])
        out.store([row, n], part)
        tile -= part.to(tl.float32)


@jit
def gate_up(
    x,
    qweight,
    scales,
    zeros,
    x_scales,
    sums,
    bias,
    weights,
    h,
    blocks,
    slots,
    tokens,
    first_block,
    M,
    stride,
    total,
    N,
    columns,
    K,
    group_size,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h = activation(x · Wgateᵀ, x · Wupᵀ) for one block of rows and 32 columns.

    x: bf16 [SPLITS · M, K] with sums, fp32 [M, K / BLOCK_K] or None, as for int4_linear; or int8
    [M, stride] with x_scales and, for sums, offsets, as quantize_int8 writes them. A row for each
    assignment, or, where tokens is not None, for each token.
    qweight, scales, zeros: stacked experts [E, 2N, K]; N is a multiple of 32. bias: [E, 2N] or
    None. weights: fp32, by assignment, or None: they multiply x.
    h: bf16 [SPLITS · total, columns], the first of N. Grid: (N / 32, blocks).
    """
    expert, row, end, panel = block_of(blocks, first_block, BLOCK_M)
    source, sources = row, None
    if tokens is not None:
        if BLOCK_M == 1:
            source = tl.load(tokens + row)
        else:
            own = row + tl.arange(0, BLOCK_M)
            sources = tl.load(tokens + own, mask=own < end, other=0).to(tl.int64)
    n = panel * 32
    w = expert_weight(qweight, scales, zeros, expert, 2 * N, K, group_size, BLOCK_K)
    sizes = (M, stride, K, group_size)
    gate = product(x, sources, x_scales, sums, w, source, n, sizes, SPLITS, BLOCK_M, BLOCK_K)
    up = product(x, sources, x_scales, sums, w, source, n + N, sizes, SPLITS, BLOCK_M, BLOCK_K)
    if weights is not None:
        mine = row + tl.arange(0, BLOCK_M)
        factor = tl.load(weights + tl.load(slots + mine, mask=mine < end), mask=mine < end)
        gate *= factor[:, None]
        up *= factor[:, None]
    gate = add_bias(gate, bias, expert, n, 2 * N)
    up = add_bias(up, bias, expert, n + N, 2 * N)
    store_parts(
        h,
        activated(gate, up, limit, alpha, ACTIVATION, LIMITED),
        row,
        end,
        n,
        total,
        columns,
        SPLITS,
        BLOCK_M,
    )


@jit
def expert_linear(
    x,
    qweight,
    scales,
    zeros,
    x_scales,
    sums,
    bias,
    y,
    blocks,
    first_block,
    M,
    stride,
    N,
    K,
    group_size,
    first_column,
    columns,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = x · Wᵀ + bias for one block of rows and 32 of the columns first_column, ….

    x: one row for each assignment. x and the others as for gate_up, with
    qweight … [E, N, K]. y: fp32 [M, columns]; first_column is a multiple of 32. Grid: (panels of
    ``columns`` columns, blocks).
    """
    expert, row, end, panel = block_of(blocks, first_block, BLOCK_M)
    n = first_column + panel * 32
    w = expert_weight(qweight, scales, zeros, expert, N, K, group_size, BLOCK_K)
    sizes = (M, stride, K, group_size)
    acc = product(x, None, x_scales, sums, w, row, n, sizes, SPLITS, BLOCK_M, BLOCK_K)
    acc = add_bias(acc, bias, expert, n, N)
    out = tl.make_tensor_descriptor(y, [end, columns], [columns, 1], [BLOCK_M, 32])
    out.store([row, panel * 32], acc)


@jit
def sum_experts(
    x,
    qweight,
    scales,
    zeros,
    x_scales,
    sums,
    bias,
    weights,
    y,
    blocks,
    slots,
    M,
    stride,
    N,
    K,
    group_size,
    factor,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = factor · Σ_r weights[r] · (x[r] · Wᵀ + bias), 32 of N columns of a single token.

    Arguments are those of expert_linear, with one row in each of M blocks; weights: by assignment,
    or None: all 1. y: [N]. Grid: (N / 32 rounded up,).
    """
    n = tl.program_id(0) * 32
    sizes = (M, stride, K, group_size)
    acc = tl.zeros((1, 32), tl.float32)
    for r in tl.range(0, M):
        expert = tl.load(blocks + r * RECORD)
        w = expert_weight(qweight, scales, zeros, expert, N, K, group_size, BLOCK_K)
        part = product(x, None, x_scales, sums, w, r, n, sizes, SPLITS, 1, BLOCK_K)
        part = add_bias(part, bias, expert, n, N)
        if weights is not None:
            part *= tl.load(weights + tl.load(slots + r)).to(tl.float32)
        acc += part
    tl.make_tensor_descriptor(y, [1, N], [N, 1], [1, 32]).store([0, n], acc * factor)


@jit
def combine(y, weights, rows, out, N, stride, topk, factor, BLOCK: tl.constexpr):
    """out[m] = factor · Σ_j weights[m, j] · y[rows[m, j]] in fp32; rows of -1 are left out.

    y: fp32 [.., N]. weights: [M, topk], or None: all 1. rows: int32 [M, topk]. out: N columns of
    rows that are ``stride`` elements apart. Grid: (N / BLOCK rounded up, M).
    """
    n, m = tl.program_id(0) * BLOCK, tl.program_id(1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(m * topk, m * topk + topk):
        row = tl.load(rows + i)
        if row >= 0:
            own = y + row.to(tl.int64) * N
            part = tl.make_tensor_descriptor(own, [N], [1], [BLOCK]).load([n])
            if weights is not None:
                part *= tl.load(weights + i).to(tl.float32)
            acc += part
    to = tl.make_tensor_descriptor(out + m.to(tl.int64) * stride, [N], [1], [BLOCK])
    to.store([n], acc * factor)
