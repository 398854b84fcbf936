"""Memory of the project's own: packed weights on huge pages, where the system has them.

Reading weights from pages of 4 KB, a core spends much of its time on address translation. Fresh
pages of 2 MB are dear in a virtual machine that hands free ones back to its host, so weights are
written to small pages, and :func:`use_huge_pages` has the system join those afterwards.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from amxq import knobs

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 128  # two cache lines, which prefetchers fetch in pairs
_MADV_COLLAPSE = 25  # Linux 6.1


class _Chunk:
    """An anonymous mapping, handed out from its start on."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.size + _HUGE_PAGE, flags)
        start = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.used = -start % _HUGE_PAGE
        self.end = self.used + self.size


_lock = threading.Lock()
_current: _Chunk | None = None
_small: list[tuple[weakref.ref[mmap.mmap], int, int]] = []  # mapping, address, size of a tensor


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As torch.empty, in memory that :func:`use_huge_pages` knows.

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
            _small[:] = [one for one in _small if one[0]() is not None]
        offset = chunk.used
        chunk.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        data = torch.frombuffer(chunk.memory, dtype=torch.uint8, count=size, offset=offset)
        _small.append((weakref.ref(chunk.memory), data.data_ptr(), size))
    return data.view(dtype).view(tuple(shape))


def use_huge_pages() -> threading.Thread | None:
    """Put all tensors of :func:`empty` on huge pages, in a thread of lowest priority
    that sleeps nine tenths of the time.

    The contents stay as they are, and may be read and written meanwhile. Systems before Linux 6.1
    are only told that huge pages are welcome, and join small ones in their own time.

    Returns:
        The thread, which nobody has to wait for; None if there is nothing to do.
    """
    with _lock:
        tensors, _small[:] = _small[:], []
    if not tensors:
        return None
    thread = threading.Thread(target=_collapse, args=(tensors,), name="huge pages", daemon=True)
    thread.start()
    return thread


def _collapse(tensors: list[tuple[weakref.ref[mmap.mmap], int, int]]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
    madvise = ctypes.CDLL(None).madvise  # without the interpreter's lock, unlike mmap's own
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    last = None  # neighbours share pages
    for memory, address, size in tensors:
        held = memory()  # nobody unmaps it meanwhile
        if held is None:
            continue
        for page in range(address // _HUGE_PAGE * _HUGE_PAGE, address + size, _HUGE_PAGE):
            if page == last:
                continue
            last, start = page, time.perf_counter()
            if madvise(page, _HUGE_PAGE, _MADV_COLLAPSE):
                madvise(page, _HUGE_PAGE, mmap.MADV_HUGEPAGE)
            time.sleep(9 * (time.perf_counter() - start))  # who computes meanwhile has 9/10 of it


def several_nodes() -> bool:
    """Whether some of the memory is nearer to some of the cores."""
    return Path("/sys/devices/system/node/node1").exists()


def _wanted() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE") and knobs.HUGE_PAGES.get()
