"""Attention of one token to those before it, with its rotation and its place in the cache."""

import amxq.language as tl
from amxq.runtime.jit import jit

BLOCK_T = 16
"""Tokens whose scores are computed together."""


@jit
def rotated(x, cos, sin, columns, HALF: tl.constexpr):
    """Both halves of one rotated head, rounded after each operation, as in
    :mod:`amxq_kernels.rotary`."""
    low, high = tl.load(x + columns), tl.load(x + HALF + columns)
    first = low * tl.load(cos + columns) - high * tl.load(sin + columns)
    second = high * tl.load(cos + HALF + columns) + low * tl.load(sin + HALF + columns)
    return first, second


@jit
def attended(low, high, keys, values, t, length, state, HALF: tl.constexpr, WHOLE: tl.constexpr):
    """``state`` (maximum, sum and both halves of the weighted sum of values) after BLOCK_T more
    tokens from t on, all of which are there where WHOLE."""
    top, total, first, second = state
    token, columns = t + tl.arange(0, BLOCK_T), tl.arange(0, HALF)
    at = token[:, None] * (2 * HALF) + columns[None, :]
    there = None
    if not WHOLE:
        there = (token < length)[:, None]
    score = tl.sum(tl.load(keys + at, mask=there).to(tl.float32) * low[None, :], 1)
    score += tl.sum(tl.load(keys + HALF + at, mask=there).to(tl.float32) * high[None, :], 1)
    if not WHOLE:
        score = tl.where(token < length, score, float("-inf"))
    best = tl.maximum(top, tl.max(score, 0))
    keep, weight = tl.exp(top - best), tl.exp(score - best)
    part = tl.load(values + at, mask=there).to(tl.float32)
    first = first * keep + tl.sum(part * weight[:, None], 0)
    part = tl.load(values + HALF + at, mask=there).to(tl.float32)
    second = second * keep + tl.sum(part * weight[:, None], 0)
    return best, total * keep + tl.sum(weight, 0), first, second


@jit
def attend_one(qkv, cos, sin, keys, values, y, length, stride, kv_heads, scale, HALF: tl.constexpr):
    """One head of the queries of one token.

    qkv: all its heads of queries, keys and values, side by side. cos, sin: [2 · HALF] of its
    position. keys, values: [kv_heads, .., 2 · HALF], heads ``stride`` elements apart, ``length``
    tokens of each; the new one is written behind them. y: the heads of the result, side by side.
    All of one dtype. Scores are multiplied by ``scale``; sums and weights are fp32.
    Grid: (heads,), those that share keys one after another.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    group = heads // kv_heads
    kv = head // group
    columns = tl.arange(0, HALF)
    low, high = rotated(qkv + head * (2 * HALF), cos, sin, columns, HALF)
    new = qkv + (heads + kv) * (2 * HALF)
    key_low, key_high = rotated(new, cos, sin, columns, HALF)
    new += kv_heads * (2 * HALF)
    value_low, value_high = tl.load(new + columns), tl.load(new + HALF + columns)
    keys += kv.to(tl.int64) * stride
    values += kv.to(tl.int64) * stride
    if head % group == 0:
        to = length.to(tl.int64) * (2 * HALF) + columns
        tl.store(keys + to, key_low)
        tl.store(keys + HALF + to, key_high)
        tl.store(values + to, value_low)
        tl.store(values + HALF + to, value_high)
    low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale
    # the new token comes first: its key and value are here already
    top = tl.sum(low * key_low.to(tl.float32) + high * key_high.to(tl.float32), 0)
    state = top, 1.0, value_low.to(tl.float32), value_high.to(tl.float32)
    whole = length // BLOCK_T * BLOCK_T
    for t in tl.range(0, whole, BLOCK_T):
        state = attended(low, high, keys, values, t, length, state, HALF, True)
    if whole < length:
        state = attended(low, high, keys, values, whole, length, state, HALF, False)
    _, total, first, second = state
    y += head * (2 * HALF)
    tl.store(y + columns, first / total)
    tl.store(y + HALF + columns, second / total)
