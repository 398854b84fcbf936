"""GPTQ and AWQ checkpoint words to the words of the packed layout, many matrices a launch.

The packed word of eight k of one column holds them in the order (0, 2, 4, 6, 1, 3, 5, 7), which
is also the order in which an AWQ word holds eight columns.
"""

import amxq.language as tl
from amxq.runtime.jit import jit


@jit
def pack_gptq(words, sources, packed, targets, K8, N, BLOCK: tl.constexpr, PAD: tl.constexpr):
    """int32 [K8, N], eight k in natural order, to int32 [ceil(N/32), K8, 32].

    sources, targets: int64, where each matrix begins, in words from ``words`` and ``packed`` on.
    A program takes BLOCK rows and 32 columns; programs walk along the rows, as the words lie.
    Columns beyond N become PAD. Grid: (panels, ceil(K8 / BLOCK), matrices).
    """
    panel, k = tl.program_id(0), tl.program_id(1) * BLOCK
    first = words + tl.load(sources + tl.program_id(2))
    w = tl.make_tensor_descriptor(first, [K8, N], [N, 1], [BLOCK, 32]).load([k, panel * 32])
    swap = (w ^ (w >> 4)) & 0x00F000F0  # nibbles 1 and 2 of each half
    w = w ^ swap ^ (swap << 4)
    swap = (w ^ (w >> 8)) & 0x0000FF00  # the two middle bytes
    w = w ^ swap ^ (swap << 8)
    w = tl.where((panel * 32 + tl.arange(0, 32) < N)[None, :], w, PAD)
    to = packed + tl.load(targets + tl.program_id(2)) + panel.to(tl.int64) * K8 * 32
    tl.make_tensor_descriptor(to, [K8, 32], [32, 1], [BLOCK, 32]).store([k, 0], w)


@jit
def touch(packed, words, PAGE: tl.constexpr):
    """Writes the first of every PAGE words of one panel of int32 [panels, words].

    The system puts a page of memory near the thread that writes it first. Launches split panels
    as those of linears do, so that is the thread which will read it. Grid: (panels,).
    """
    panel = packed + tl.program_id(0).to(tl.int64) * words
    for at in tl.range(0, words, PAGE):
        tl.store(panel + at, 0)


@jit
def pack_awq(words, sources, packed, targets, K8, N, BLOCK: tl.constexpr, PAD: tl.constexpr):
    """int32 [8 · K8, ceil(N/8)], eight columns a word, to int32 [ceil(N/32), K8, 32].

    The arguments and the grid are those of pack_gptq.
    """
    panel, k = tl.program_id(0), tl.program_id(1) * BLOCK
    columns = panel * 32 + tl.arange(0, 32)
    rows = k + tl.arange(0, BLOCK)
    width = (N + 7) // 8
    inside = (rows < K8)[:, None] & (columns < N)[None, :]
    shift = ((columns & 7) // 2 + (columns & 1) * 4) * 4
    first = words + tl.load(sources + tl.program_id(2))
    first += (rows * 8).to(tl.int64)[:, None] * width
    w = tl.zeros((BLOCK, 32), tl.int32)
    for r in tl.static_range(0, 8):
        eight = tl.load(first + (r * width + columns // 8)[None, :], mask=inside)
        w = w | (((eight >> shift[None, :]) & 15) << ((r // 2 + (r % 2) * 4) * 4))
    w = tl.where(inside, w, PAD)
    to = packed + tl.load(targets + tl.program_id(2)) + panel.to(tl.int64) * K8 * 32
    tl.make_tensor_descriptor(to, [K8, 32], [32, 1], [BLOCK, 32]).store([k, 0], w)
