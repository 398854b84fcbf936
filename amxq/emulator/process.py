"""Installing the emulator in this process, and asking what it did."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
from pathlib import Path

from amxq.emulator import layout as L
from amxq.emulator import signals
from amxq.emulator import state as S
from amxq.emulator.build import Machine, compile_machine
from amxq.errors import TargetError

_log = logging.getLogger("amxq.emulator")
_lock = threading.Lock()
_MAP_NORESERVE = 0x4000


class Emulator:
    """One compiled emulator with its tables. Never freed: a handler may still point to it."""

    def __init__(self, flags: frozenset[str], *, direct: bool) -> None:
        self.direct = direct
        self.machine: Machine = compile_machine(flags, direct=direct)
        self._maps = [_reserve(L.SLOTS * size) for size in (L.HEADER_BYTES, L.DATA_BYTES)]
        headers, tiles = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps)
        self.write(S.C_HEADERS, headers)
        self.write(S.C_TILES, tiles)

    def write(self, field: int, value: int) -> None:
        """Set a field of the control block."""
        ctypes.c_uint64.from_address(self.machine.control + field).value = value

    def read(self, field: int) -> int:
        return ctypes.c_uint64.from_address(self.machine.control + field).value

    def set_previous(self, action: signals.Action, *, first: bool) -> None:
        """Where SIGILLs go that are not ours; ``first`` for signals that a process sent."""
        start = S.C_FIRST if first else S.C_PREVIOUS
        for offset, value in ((8, action.flags), (16, action.mask), (0, action.handler)):
            self.write(start + offset, value)

    def previous(self) -> signals.Action:
        return signals.Action(
            self.read(S.C_PREVIOUS), self.read(S.C_PREVIOUS_FLAGS), self.read(S.C_PREVIOUS_MASK)
        )

    def totals(self) -> list[int]:
        """Executions by kind, then traps, summed over all threads that ever ran."""
        headers = memoryview(self._maps[0]).cast("Q")
        words = L.HEADER_BYTES // 8
        columns = [*range(L.H_COUNTS // 8, L.H_COUNTS // 8 + len(L.KINDS)), L.H_TRAPS // 8]
        return [sum(headers[column::words]) for column in columns]


def _reserve(size: int) -> mmap.mmap:
    """Zeroed private memory that costs nothing until it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, size, flags=flags)


_emulator: Emulator | None = None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# another thread may hold the lock while this one forks
os.register_at_fork(after_in_child=_renew_lock)


def _cpu_flags() -> frozenset[str]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise TargetError(
            f"the AMX emulator runs on x86-64 Linux, this is {platform.machine()} "
            f"{sys.platform}. Run without AMXQ_EMULATE"
        )
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    raise TargetError("/proc/cpuinfo lists no flags; the AMX emulator cannot tell the CPU's")


def install() -> None:
    """Run AMX instructions in software in this process, from now on and in all threads.

    Idempotent and thread-safe; children of fork inherit it, exec ends it. The first call
    compiles the handler (about half a second) and says once, as a warning, that the
    emulator is there. A call after another library has replaced the SIGILL handler puts
    the emulator back in front of it.

    Tile instructions that the CPU itself executes never reach the emulator: on a CPU with
    AMX, in a process that has asked Linux for permission, the hardware answers.

    Limits: a signal handler that interrupts a program between tile instructions and uses
    tiles itself changes the program's tiles (Linux saves and restores the real ones).

    Raises:
        TargetError: not x86-64 Linux, or a CPU without AVX2.
    """
    global _emulator
    with _lock:
        fresh = _emulator is None
        if _emulator is None:
            _emulator = Emulator(_cpu_flags(), direct=not signals.can_copy_own_memory())
        emulator = _emulator
        before = signals.current_action()
        if before.handler != emulator.machine.handler:
            emulator.set_previous(before, first=False)
            if not emulator.read(S.C_ENABLED):
                emulator.set_previous(before, first=True)
            emulator.write(S.C_ENABLED, 1)
            action = signals.emulator_action(emulator.machine.handler, direct=emulator.direct)
            signals.set_action(action)
        emulator.write(S.C_ENABLED, 1)
        if not fresh:
            return
    _log.warning(
        "AMX emulator installed: AMX instructions run in software in this process, about a "
        "thousand times slower than on hardware; for testing only."
    )
    if emulator.direct:
        _log.warning(
            "process_vm_readv is not allowed here: a bad address in a tile instruction will "
            "fault inside the emulator instead of at the instruction."
        )
    if signals.may_use_amx():
        _log.warning(
            "This process already has permission to use the CPU's own AMX: the hardware, not "
            "the emulator, will run its tile instructions."
        )


def is_installed() -> bool:
    """Whether SIGILL goes to the emulator now."""
    emulator = _emulator
    if emulator is None or not emulator.read(S.C_ENABLED):
        return False
    return signals.current_action().handler == emulator.machine.handler


def uninstall() -> None:
    """Put the previous SIGILL handler back. Does nothing when not installed.

    Where another library has put its handler in front, that one stays, and the emulator
    hands everything on that reaches it.
    """
    with _lock:
        emulator = _emulator
        if emulator is None:
            return
        emulator.write(S.C_ENABLED, 0)
        if signals.current_action().handler == emulator.machine.handler:
            signals.set_action(emulator.previous())


def counts() -> dict[str, int]:
    """Tile instructions executed in software since the first install(), by mnemonic.

    All threads together; all zero before. On a CPU with AMX without permission, LDTILECFG
    and TILERELEASE run in hardware and are counted when their effect is first seen, and
    STTILECFG is not seen at all.
    """
    totals = _emulator.totals() if _emulator is not None else [0] * (len(L.KINDS) + 1)
    return dict(zip(L.KINDS, totals[:-1], strict=True))


def traps() -> int:
    """SIGILLs that the emulator looked at; ``sum(counts().values()) / traps()`` is their run."""
    return _emulator.totals()[-1] if _emulator is not None else 0
