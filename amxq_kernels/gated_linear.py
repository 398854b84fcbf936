"""The first half of a gated feed-forward layer: y = activation(x · Wgateᵀ) · (x · Wupᵀ)."""

import amxq.language as tl
from amxq.runtime.jit import jit
from amxq_kernels.fused_moe import activated
from amxq_kernels.int4_linear import product


@jit
def gated_linear(
    x,
    gate_qweight,
    gate_scales,
    gate_zeros,
    up_qweight,
    up_scales,
    up_zeros,
    x_scales,
    sums,
    y,
    M,
    rows,
    stride,
    N,
    K,
    group_size,
    row_blocks,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of BLOCK_M rows and 32 columns of y, both products in fp32 until the end.

    Arguments and grid are those of :func:`amxq_kernels.int4_linear.int4_linear`, for two weights
    of the same shape and group size. ACTIVATION: as for the experts of amxq.fused_moe.
    """
    block = tl.program_id(2) * row_blocks + tl.program_id(0)
    m = tl.minimum(block * BLOCK_M, rows - BLOCK_M)
    n = tl.program_id(1) * 32
    w = tl.int4_tensor(gate_qweight, gate_scales, gate_zeros, [K, N], group_size, [BLOCK_K, 32])
    sizes = (rows, stride, K, group_size)
    gate = product(x, None, x_scales, sums, w, m, n, sizes, SPLITS, BLOCK_M, BLOCK_K)
    w = tl.int4_tensor(up_qweight, up_scales, up_zeros, [K, N], group_size, [BLOCK_K, 32])
    up = product(x, None, x_scales, sums, w, m, n, sizes, SPLITS, BLOCK_M, BLOCK_K)
    out = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BLOCK_M, 32])
    out.store([m, n], activated(gate, up, 0.0, 0.0, ACTIVATION, False))
