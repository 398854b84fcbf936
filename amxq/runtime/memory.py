"""Memory of the project's own: packed weights on huge pages, where the system has them.

Reading weights from pages of 4 KB, a core spends much of its time on address translation, and
the system's preparing of fresh ones takes longer than packing into them.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from amxq import knobs

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 128  # two cache lines, which prefetchers fetch in pairs


class _Chunk:
    """An anonymous mapping, handed out from its start on."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.size + _HUGE_PAGE, flags)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.used = -start % _HUGE_PAGE
        self.end = self.used + self.size


_lock = threading.Lock()
_current: _Chunk | None = None


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, in memory for which huge pages are asked.

    Tensors share mappings of 32 MB, one of which goes when its last tensor does; each has a
    storage of its own all the same. With ``AMXQ_HUGE_PAGES=0``, or where the system knows no
    huge pages, this is torch.empty.
    """
    global _current
    size = math.prod(shape) * dtype.itemsize
    if not size or not _wanted():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with _lock:
        chunk = _current
        if chunk is None or chunk.end - chunk.used < size:
            chunk = _Chunk(max(size, _CHUNK))
            if 2 * size <= _CHUNK:
                _current = chunk
        offset = chunk.used
        chunk.used += -(-size // _ALIGNMENT) * _ALIGNMENT
    data = torch.frombuffer(chunk.memory, dtype=torch.uint8, count=size, offset=offset)
    return data.view(dtype).view(tuple(shape))


def several_nodes() -> bool:
    """Whether some of the memory is nearer to some of the cores."""
    return Path("/sys/devices/system/node/node1").exists()


def _wanted() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE") and knobs.HUGE_PAGES.get()
