"""Memory at fixed addresses for the emulator's tests, so that two processes can be compared.

One region far above 4 GiB and one below it with the same low 32 bits (for instructions
with a 32-bit address), each: 64 KiB to read and write, 8 KiB to read only, 4 KiB without
access, nothing after. A page of code lies beside them.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

libc = ctypes.CDLL(None, use_errno=True)
LOW = 0x1000_0000
HIGH = 0x1000_0000_0000 + LOW
CODE = HIGH + 0x100_0000
CODE_BYTES = 64 * 1024
WRITABLE, READABLE, FORBIDDEN = 0x10000, 0x2000, 0x1000
UNMAPPED = WRITABLE + READABLE + FORBIDDEN  # offset of the first byte that is not there
_R, _W, _X = 1, 2, 4
_FLAGS = 0x2 | 0x20 | 0x100000  # private, anonymous, fixed without replacing

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.pthread_self.restype = ctypes.c_void_p


def map_fixed(address: int, size: int, protection: int) -> None:
    """Map anonymous memory exactly there, or raise."""
    got = libc.mmap(address, size, protection, _FLAGS, -1, 0)
    if got != address:
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes at {address:#x}")


def array_at(address: int, size: int) -> np.ndarray:
    """A uint8 view of memory."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def fs_base() -> int:
    """This thread's FS base."""
    return int(libc.pthread_self())


@functools.lru_cache(maxsize=32)
def _noise(seed: int) -> np.ndarray:
    content = np.random.RandomState(seed).bytes(WRITABLE + READABLE)
    return np.frombuffer(content, np.uint8)


class Arena:
    """The two regions, as uint8 arrays ``high`` and ``low`` of what can be read."""

    def __init__(self) -> None:
        views = []
        for base in (HIGH, LOW):
            map_fixed(base, UNMAPPED, _R | _W)
            views.append(array_at(base, WRITABLE + READABLE))
        self.high, self.low = views
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere; the same for the same seed, on every machine."""
        self._protect(_R | _W)
        self.high[:] = self.low[:] = _noise(seed)
        self._protect(_R)

    def _protect(self, readable: int) -> None:
        for base in (HIGH, LOW):
            libc.mprotect(base + WRITABLE, READABLE, readable)
            libc.mprotect(base + WRITABLE + READABLE, FORBIDDEN, 0)

    def writable(self) -> bytes:
        """What programs can have changed."""
        return self.high[:WRITABLE].tobytes() + self.low[:WRITABLE].tobytes()
