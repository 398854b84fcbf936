"""Blocks of activations."""

import amxq.language as tl
from amxq.runtime.jit import jit


@jit
def block_at(x, rows, m, k, M, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of x [M, ..], whose rows are ``stride`` elements apart, from column k on:
    the rows from m on, or, where ``rows`` is an int64 tile [BLOCK_M] and not None, those."""
    if rows is None:
        a = tl.make_tensor_descriptor(x, [M, k + BLOCK_K], [stride, 1], [BLOCK_M, BLOCK_K])
        return a.load([m, k], boundary_check=())
    return tl.load(x + rows[:, None] * stride + (k + tl.arange(0, BLOCK_K))[None, :])
