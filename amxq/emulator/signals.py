"""sigaction and a few system calls through ctypes, as glibc lays them out on x86-64."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from amxq.emulator import layout as L

_libc = ctypes.CDLL(None, use_errno=True)
_SYNCHRONOUS = (7, 8, 11)  # SIGBUS, SIGFPE, SIGSEGV


class _SigAction(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Action:
    """What a signal does: a handler's address (0 default, 1 ignore), flags and mask."""

    handler: int
    flags: int
    mask: int


def _call(new: ctypes.Structure | None) -> _SigAction:
    old = _SigAction()
    pointer = None if new is None else ctypes.byref(new)
    if _libc.sigaction(L.SIGILL, pointer, ctypes.byref(old)):
        number = ctypes.get_errno()
        raise OSError(number, f"sigaction(SIGILL): {os.strerror(number)}")
    return old


def current_action() -> Action:
    """What SIGILL does now."""
    old = _call(None)
    return Action(old.handler or 0, old.flags & 0xFFFFFFFF, old.mask[0])


def set_action(action: Action) -> None:
    """Make SIGILL do this, in the whole process."""
    new = _SigAction(handler=action.handler, flags=ctypes.c_int(action.flags).value)
    new.mask[0] = action.mask
    _call(new)


def emulator_action(handler: int, *, direct: bool) -> Action:
    """The action for our handler: all signals blocked while it runs.

    On the interrupted stack, not an alternate one: the handler needs less than 2 KiB, and
    alternate stacks (Python's faulthandler installs one) may be too small for a frame
    with AVX-512 state and a nested one. ``direct`` leaves the signals open that a bad
    address raises inside the handler.
    """
    mask = 2**64 - 1
    if direct:
        for number in _SYNCHRONOUS:
            mask &= ~(1 << (number - 1))
    return Action(handler, L.SA_SIGINFO | L.SA_RESTART, mask)


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def can_copy_own_memory() -> bool:
    """Whether process_vm_readv and process_vm_writev work on this process."""
    pid = ctypes.c_long(os.getpid())
    for number in (L.SYS_READV, L.SYS_WRITEV):
        here, there = ctypes.create_string_buffer(b"a", 1), ctypes.create_string_buffer(b"b", 1)
        local = _Span(ctypes.addressof(here), 1)
        remote = _Span(ctypes.addressof(there), 1)
        one, zero = ctypes.c_long(1), ctypes.c_long(0)
        moved = _libc.syscall(
            ctypes.c_long(number), pid, ctypes.byref(local), one, ctypes.byref(remote), one, zero
        )
        if moved != 1 or here.raw != there.raw:
            return False
    return True


def may_use_amx() -> bool:
    """Whether this process has Linux's permission for real tile data (it then never traps)."""
    permitted = ctypes.c_uint64()
    result = _libc.syscall(
        ctypes.c_long(L.SYS_ARCH_PRCTL),
        ctypes.c_long(L.ARCH_GET_XCOMP_PERM),
        ctypes.byref(permitted),
    )
    return result == 0 and bool(permitted.value >> 18 & 1)
