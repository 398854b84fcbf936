"""Root mean square normalisation, as Llama's and its relatives' models define it."""

import amxq.language as tl
from amxq.runtime.jit import jit


@jit
def rms_norm(x, weight, y, N, eps, BLOCK: tl.constexpr):
    """One row: y = weight · (x / sqrt(mean(x²) + eps)), the quotient rounded to x's dtype first.

    x, y: [M, N] of one dtype. weight: [N]. eps: fp32. Grid: (M,).
    """
    row = tl.program_id(0).to(tl.int64) * N
    source = tl.make_tensor_descriptor(x + row, [N], [1], [BLOCK])
    target = tl.make_tensor_descriptor(y + row, [N], [1], [BLOCK])
    factors = tl.make_tensor_descriptor(weight, [N], [1], [BLOCK])
    squares = tl.zeros((BLOCK,), tl.float32)
    for n in tl.range(0, N, BLOCK):
        part = source.load([n]).to(tl.float32)
        squares += part * part
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    for n in tl.range(0, N, BLOCK):
        part = source.load([n]).to(tl.float32) * scale
        target.store([n], part.to(target.dtype) * factors.load([n]))
