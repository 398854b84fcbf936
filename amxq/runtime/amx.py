"""Whether AMX can be used in this process, and the permission that Linux wants asked for.

Four things must hold before the first tile instruction, and each may fail by itself: the CPU
lists the features, CPUID offers tile palette 1 (some virtual machines offer 0), the system has
switched the tile registers on in XCR0, and this process has asked for them. The last is asked
for when AMX is first wanted, never at import: it makes the kernel check every thread's
signal stack.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from dataclasses import dataclass

from amxq.errors import TargetError
from amxq.runtime import cpu

FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_XCR0_TILE_BITS = 0b11 << 17  # XTILECFG and XTILEDATA
_XFEATURE_TILE_DATA = 18
_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_PERM = 0x1022
_ARCH_REQ_XCOMP_PERM = 0x1023
_AT_MINSIGSTKSZ = 51

_granted = False
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    # Linux hands the permission down to a forked child, so the answer stays true there; a
    # lock that another thread held at that moment would stay locked for ever.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True)
class Status:
    """Every step of finding out whether AMX can be used here.

    Attributes:
        missing_flags: AMX features that /proc/cpuinfo does not list.
        max_palette: largest tile palette, None when CPUID could not be asked.
        xcr0_tiles: whether the system has switched tile registers on, None when not known.
        permission: whether this process may use tile registers; None when not asked yet.
        reason: in plain words, why AMX cannot be used; empty when it can.
    """

    missing_flags: tuple[str, ...]
    max_palette: int | None
    xcr0_tiles: bool | None
    permission: bool | None
    reason: str

    @property
    def hardware(self) -> bool:
        """The CPU and the system offer AMX; only the process's permission is left to ask."""
        return not self.missing_flags and bool(self.max_palette) and bool(self.xcr0_tiles)

    @property
    def usable(self) -> bool:
        """AMX code may run, once :func:`ensure_permission` has been called."""
        return self.hardware and self.permission is not False and not self.reason


def hardware_status(flags: frozenset[str], facts: cpu.TileFacts) -> Status:
    """Judge a CPU's flags, palette and XCR0, without the process's permission."""
    missing = tuple(sorted(FLAGS - flags))
    tiles = None if facts.xcr0 is None else (facts.xcr0 & _XCR0_TILE_BITS) == _XCR0_TILE_BITS
    if missing:
        reason = f"the CPU does not list {', '.join(missing)} in /proc/cpuinfo"
    elif facts.max_palette is None or tiles is None:
        reason = facts.problem or "CPUID could not be asked"
    elif facts.max_palette < 1:
        reason = (
            "the CPU lists AMX but offers no tile palette (CPUID leaf 0x1D says 0), as some "
            "virtual machines do: every tile instruction would fault"
        )
    elif not tiles:
        reason = f"the system has not switched tile registers on (XCR0 is {facts.xcr0:#x})"
    else:
        reason = ""
    return Status(missing, facts.max_palette, tiles, None, reason)


def status(*, request: bool = False) -> Status:
    """Find out whether AMX can be used in this process.

    Args:
        request: also ask the system for permission if that has not been done; otherwise
            ``permission`` is True only if someone has asked already, else None.
    """
    found = hardware_status(cpu.flags(), cpu.tile_facts())
    if found.reason:
        return found
    permission: bool | None = True
    reason = ""
    if request:
        reason = _request()
        permission = not reason
    elif not (_granted or _already_permitted()):
        permission = None
    return Status(found.missing_flags, found.max_palette, found.xcr0_tiles, permission, reason)


def ensure_permission() -> None:
    """Make sure that this process may run tile instructions; cheap after the first time.

    Raises:
        TargetError: the CPU or the system does not offer AMX, or Linux refuses.
    """
    if _granted:
        return
    found = status(request=True)
    if found.reason:
        raise TargetError(f"AMX cannot be used in this process: {found.reason}")


def _already_permitted() -> bool:
    """Whether a library in this process (torch's oneDNN, say) or a parent has asked before."""
    mask = ctypes.c_uint64(0)
    failed = _arch_prctl(_ARCH_GET_XCOMP_PERM, ctypes.addressof(mask))
    return not failed and bool(mask.value >> _XFEATURE_TILE_DATA & 1)


def _request() -> str:
    """Ask once; a refusal is asked again next time, since its cause may have gone.

    Returns why it was refused, or an empty string.
    """
    global _granted
    with _lock:
        if not _granted:
            number = _arch_prctl(_ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA)
            if number:
                return explain_refusal(number)
            _granted = True
    return ""


def explain_refusal(number: int) -> str:
    """What the error number of a refused permission request means, and what to do."""
    if number == errno.ENOSPC:
        needed = _minimum_signal_stack()
        size = f" (it needs {needed} bytes and some more here)" if needed else ""
        return (
            f"Linux refused the permission because a thread's alternative signal stack is too "
            f"small for tile registers{size}; use AMX before the library that calls "
            "sigaltstack() with a fixed size, or turn it off (Python's faulthandler is one: "
            "run without -X faulthandler and PYTHONFAULTHANDLER)"
        )
    if number in (errno.EINVAL, errno.ENOSYS):
        return "this kernel has no permission call for tile registers; Linux 5.16 or newer has it"
    if number in (errno.EPERM, errno.EACCES):
        return (
            f"the permission call was blocked ({os.strerror(number)}), as a container's seccomp "
            "profile does; allow arch_prctl"
        )
    return f"Linux refused the permission for tile registers: {os.strerror(number)}"


def _arch_prctl(code: int, argument: int) -> int:
    """The system call; returns its error number, 0 for success."""
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    result = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), ctypes.c_ulong(argument)
    )
    return ctypes.get_errno() if result != 0 else 0


def _minimum_signal_stack() -> int:
    """AT_MINSIGSTKSZ: bytes of a signal frame on this CPU, 0 when the kernel does not say."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "getauxval"):
        return 0
    libc.getauxval.restype = ctypes.c_ulong
    return int(libc.getauxval(ctypes.c_ulong(_AT_MINSIGSTKSZ)))
