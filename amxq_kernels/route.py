"""Routing: which experts a token goes to, and with what weights."""

import amxq.language as tl
from amxq.runtime.jit import jit

NEVER = float("-inf")
WORST = -3.0e38
NOT_FOUND = 1 << 30


@jit
def largest(tile, numbers):
    """(largest element, the smallest of its ``numbers``) of a tile [G, S]."""
    top = tl.max(tl.max(tile, 1), 0)
    return top, tl.min(tl.min(tl.where(tile == top, numbers, NOT_FOUND), 1), 0)


@jit
def chosen_groups(choice, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP: tl.constexpr, TWO):
    """choice [GROUPS, SIZE] with -inf in all but TOP groups: those with the largest element, or,
    TWO, the largest sum of two elements."""
    inside = tl.arange(0, SIZE)[None, :]
    score = tl.max(choice, 1)
    if TWO:
        at = tl.min(tl.where(choice == score[:, None], inside, NOT_FOUND), 1)
        score += tl.max(tl.where(inside == at[:, None], NEVER, choice), 1)
    group = tl.arange(0, GROUPS)
    chosen = group < 0
    for _ in tl.static_range(TOP):
        best = tl.max(score, 0)
        at = tl.min(tl.where(score == best, group, NOT_FOUND), 0)
        chosen = chosen | (group == at)
        score = tl.where(group == at, NEVER, score)
    return tl.where(chosen[:, None], choice, NEVER)


@jit
def route(
    logits,
    bias,
    weights,
    ids,
    stride,
    topk,
    factor,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """The topk experts of one token, largest first, ties by number.

    logits: [M, GROUPS · SIZE], rows ``stride`` apart. bias: fp32 [GROUPS · SIZE] or None: added to
    the scores where experts are chosen. weights: fp32 [M, topk], the scores times ``factor``,
    RENORMALIZE: divided by their sum. ids: int32 [M, topk]. Grid: (M,).
    """
    m = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(logits + m * stride + expert).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if bias is not None:
        choice = score + tl.load(bias + expert)
    if TOP_GROUPS < GROUPS:
        choice = chosen_groups(choice, GROUPS, SIZE, TOP_GROUPS, SIGMOID)
    # Every expert is chosen once at most: those that are taken lie below what NaN counts as.
    choice = tl.where(choice == choice, tl.maximum(choice, WORST), WORST)
    total = 0.0
    for j in tl.range(m * topk, m * topk + topk):
        _, at = largest(choice, expert)
        weight = tl.sum(tl.sum(tl.where(expert == at, score, 0.0), 1), 0)
        total += weight
        tl.store(ids + j, at)
        tl.store(weights + j, weight)
        choice = tl.where(expert == at, NEVER, choice)
    if RENORMALIZE:
        factor = factor / (total + 1e-20)
    for j in tl.range(m * topk, m * topk + topk):
        tl.store(weights + j, tl.load(weights + j) * factor)
