"""y = x · Wᵀ (+ bias) for few rows of x, each row of W read once, as it lies, at memory speed.

The rows of a block of W are streams of their own, too short for processors to see in time that
they go on: each asks for the same place of the next block.
"""

import amxq.language as tl
from amxq.runtime.jit import jit

BLOCK_N = 4
LANES = 16


@jit
def dense_linear(x, weight, bias, y, N, K):
    """BLOCK_N elements of one row of y, added up in fp32.

    x: [M, K]. weight: [N, K]. bias: [N] or None. y: [M, N]. LANES divides K, and N is BLOCK_N at
    least. Grid: (M, blocks of N): what the first row of x has read, the next ones find in cache.
    """
    m = tl.program_id(0).to(tl.int64)
    # The last block may overlap its neighbour: both write the same values.
    first = tl.minimum(tl.program_id(1) * BLOCK_N, N - BLOCK_N)
    n = first + tl.arange(0, BLOCK_N)
    rows = weight + n[:, None].to(tl.int64) * K + tl.arange(0, LANES)[None, :]
    ahead = weight + (first + BLOCK_N).to(tl.int64) * K
    source = x + m * K + tl.arange(0, LANES)
    acc = tl.zeros((BLOCK_N, LANES), tl.float32)
    for k in tl.range(0, K, LANES):
        for i in tl.static_range(BLOCK_N):
            tl.prefetch(ahead + i * K + k)
        acc += tl.load(rows + k).to(tl.float32) * tl.load(source + k).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if bias is not None:
        total += tl.load(bias + n).to(tl.float32)
    tl.store(y + m * N + n, total)


@jit
def int8_weight_linear(x, weight, scales, bias, y, N, K, GROUP: tl.constexpr):
    """The same for int8 [N, K] with scales [N, K / GROUP]: W = weight · scale. GROUP divides K and
    is a multiple of LANES. Products are those of numbers that are exact in fp32."""
    m = tl.program_id(0).to(tl.int64)
    first = tl.minimum(tl.program_id(1) * BLOCK_N, N - BLOCK_N)
    n = first + tl.arange(0, BLOCK_N)
    rows = weight + n[:, None].to(tl.int64) * K + tl.arange(0, LANES)[None, :]
    ahead = weight + (first + BLOCK_N).to(tl.int64) * K
    factors = scales + n[:, None].to(tl.int64) * (K // GROUP)
    source = x + m * K + tl.arange(0, LANES)
    acc = tl.zeros((BLOCK_N, LANES), tl.float32)
    for k in tl.range(0, K, GROUP):
        for i in tl.static_range(BLOCK_N):
            tl.prefetch(ahead + i * K + k)
        part = tl.zeros((BLOCK_N, LANES), tl.float32)
        for j in tl.static_range(0, GROUP, LANES):
            a = tl.load(source + (k + j)).to(tl.float32)
            part += tl.load(rows + (k + j)).to(tl.float32) * a[None, :]
        acc += part * tl.load(factors + k // GROUP).to(tl.float32)
    total = tl.sum(acc, 1)
    if bias is not None:
        total += tl.load(bias + n).to(tl.float32)
    tl.store(y + m * N + n, total)
