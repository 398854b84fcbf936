"""Rotary position embedding, as Llama's and its relatives' models define it."""

import amxq.language as tl
from amxq.runtime.jit import jit


@jit
def rotate_head(x, y, cos, sin, HALF: tl.constexpr):
    """y = x · cos + rotated(x) · sin for one head, rounded to its dtype after each operation."""
    columns = tl.arange(0, HALF)
    low, high = tl.load(x + columns), tl.load(x + HALF + columns)
    tl.store(y + columns, low * tl.load(cos + columns) - high * tl.load(sin + columns))
    cos, sin = tl.load(cos + HALF + columns), tl.load(sin + HALF + columns)
    tl.store(y + HALF + columns, high * cos + low * sin)


@jit
def rotate(
    q,
    k,
    cos,
    sin,
    rotated_q,
    rotated_k,
    T,
    q_heads,
    k_heads,
    q_stride,
    k_stride,
    angles,
    HALF: tl.constexpr,
):
    """All heads of one token.

    q, k: a token's heads side by side, tokens q_stride and k_stride elements apart. cos, sin:
    [angles, 2 · HALF], for token i those of row i % angles. rotated_q, rotated_k: [B, heads, T,
    2 · HALF]. All of one dtype. Grid: (B · T,).
    """
    token = tl.program_id(0)
    row = (token % angles) * 2 * HALF
    first, t = token // T, token % T
    for h in tl.range(0, q_heads):
        to = ((first * q_heads + h) * T + t).to(tl.int64) * 2 * HALF
        x = q + token.to(tl.int64) * q_stride + h * 2 * HALF
        rotate_head(x, rotated_q + to, cos + row, sin + row, HALF)
    for h in tl.range(0, k_heads):
        to = ((first * k_heads + h) * T + t).to(tl.int64) * 2 * HALF
        x = k + token.to(tl.int64) * k_stride + h * 2 * HALF
        rotate_head(x, rotated_k + to, cos + row, sin + row, HALF)
