"""GPTQ and AWQ checkpoint words to the words of the packed layout.

The packed word of eight k of one column holds them in the order (0, 2, 4, 6, 1, 3, 5, 7), which
is also the order in which an AWQ word holds eight columns: ``_place`` of an index.
"""

import amxq.language as tl
from amxq.runtime.jit import jit


@jit
def pack_gptq(words, packed, K8, N, BLOCK: tl.constexpr, PAD: tl.constexpr):
    """int32 [E, K8, N], eight k in natural order, to int32 [E, ceil(N/32), K8, 32].

    A program takes BLOCK rows and 32 columns; programs walk along the rows, as the words lie.
    Columns beyond N become PAD. Grid: (panels, ceil(K8 / BLOCK), E).
    """
    panel, k = tl.program_id(0), tl.program_id(1) * BLOCK
    expert = tl.program_id(2).to(tl.int64)
    source = tl.make_tensor_descriptor(words + expert * K8 * N, [K8, N], [N, 1], [BLOCK, 32])
    w = source.load([k, panel * 32])
    swap = (w ^ (w >> 4)) & 0x00F000F0  # nibbles 1 and 2 of each half
    w = w ^ swap ^ (swap << 4)
    swap = (w ^ (w >> 8)) & 0x0000FF00  # the two middle bytes
    w = w ^ swap ^ (swap << 8)
    w = tl.where((panel * 32 + tl.arange(0, 32) < N)[None, :], w, PAD)
    to = packed + (expert * tl.num_programs(0) + panel) * K8 * 32
    tl.make_tensor_descriptor(to, [K8, 32], [32, 1], [BLOCK, 32]).store([k, 0], w)


@jit
def pack_awq(words, packed, K8, N, BLOCK: tl.constexpr, PAD: tl.constexpr):
    """int32 [E, 8 · K8, ceil(N/8)], eight columns a word, to int32 [E, ceil(N/32), K8, 32].

    Grid and the rest as in pack_gptq.
    """
    panel, k = tl.program_id(0), tl.program_id(1) * BLOCK
    expert = tl.program_id(2).to(tl.int64)
    columns = panel * 32 + tl.arange(0, 32)
    rows = k + tl.arange(0, BLOCK)
    width = (N + 7) // 8
    inside = (rows < K8)[:, None] & (columns < N)[None, :]
    shift = ((columns & 7) // 2 + (columns & 1) * 4) * 4
    first = words + expert * K8 * 8 * width + (rows * 8).to(tl.int64)[:, None] * width
    w = tl.zeros((BLOCK, 32), tl.int32)
    for r in tl.static_range(0, 8):
        eight = tl.load(first + (r * width + columns // 8)[None, :], mask=inside)
        w = w | (((eight >> shift[None, :]) & 15) << ((r // 2 + (r % 2) * 4) * 4))
    w = tl.where(inside, w, PAD)
    to = packed + (expert * tl.num_programs(0) + panel) * K8 * 32
    tl.make_tensor_descriptor(to, [K8, 32], [32, 1], [BLOCK, 32]).store([k, 0], w)
