"""Scenarios: installing, handing on, faults, forks, threads."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from amxq import emulator
from amxq.emulator import layout, process, signals
from emulator_lab import arena
from emulator_lab import assembler as a
from emulator_lab.probe import Probe, compile_ir, libc, set_action

FULL = dict.fromkeys(range(8), (16, 64))
UD2 = b"\x0f\x0b"
_MAIN = {a.RDI: arena.HIGH, a.RSI: arena.HIGH + 0x1000, a.RCX: arena.HIGH + 0x8000, a.R8: 64}


def _load_config() -> bytes:
    return a.memory("LDTILECFG", 0, a.Mem(a.RDI))


def _load(tile: int, disp: int = 0) -> bytes:
    return a.memory("TILELOADD", tile, a.Mem(a.RSI, a.R8, disp=disp))


def _store(tile: int, disp: int = 0) -> bytes:
    return a.memory("TILESTORED", tile, a.Mem(a.RCX, a.R8, disp=disp))


def _arena(shapes: dict[int, tuple[int, int]] = FULL) -> arena.Arena:
    place = arena.Arena()
    place.fill(1)
    place.high[:64] = np.frombuffer(a.config(shapes), np.uint8)
    return place


def lifecycle() -> dict[str, Any]:
    """install, install, uninstall, install: states, warnings, counts."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("amxq.emulator").addHandler(handler)
    out: dict[str, Any] = {"before": [emulator.is_installed(), sum(emulator.counts().values())]}
    default = signals.current_action().handler
    threads = [threading.Thread(target=emulator.install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out["installed"] = emulator.is_installed()
    out["records"] = len(records), records[0] if records else ""
    emulator.uninstall()
    emulator.uninstall()
    out["uninstalled"] = emulator.is_installed(), signals.current_action().handler == default
    emulator.install()
    out["again"] = emulator.is_installed(), len(records)
    return out


def run_of_instructions() -> dict[str, Any]:
    """One trap for many instructions; counts; also at a page's end."""
    place, probe = _arena(), Probe()
    emulator.install()
    body = a.tilezero(0) + _load(1) + _load(2, 1024)
    body += 3 * (a.tdp("TDPBSSD", 0, 1, 2) + a.tdp("TDPBF16PS", 3, 1, 2)) + _store(0)
    probe.run(_load_config(), _MAIN)
    before, traps = emulator.counts(), emulator.traps()
    fault = probe.run(body, _MAIN)
    counted = {k: v - before[k] for k, v in emulator.counts().items() if v != before[k]}
    out: dict[str, Any] = {"fault": fault, "counts": counted, "traps": emulator.traps() - traps}
    expected = place.high[0x8000:0x8400].copy()
    same = []
    for at in range(4096 - 140, 4096, 3):
        place.high[0x8000:0x8400] = 0
        same.append(
            probe.run(body, _MAIN, at) is None
            and bool((place.high[0x8000:0x8400] == expected).all())
        )
    out["page ends"] = all(same)
    return out


def mxcsr() -> dict[str, bool]:
    """Rounding up, exceptions unmasked: neither used nor changed by TDPBF16PS."""
    place, probe = _arena({0: (16, 64), 1: (16, 64), 2: (16, 64)}), Probe()
    emulator.install()
    rng = np.random.RandomState(5)
    bits = rng.standard_normal(1024).astype(np.float32).view(np.uint32) >> 16
    place.high[0x1000:0x1800] = bits.astype(np.uint16).view(np.uint8)
    place.high[0x100:0x104] = np.array([0x5F80], np.uint32).view(np.uint8)  # round up
    body = _load_config() + a.tilezero(0) + _load(1) + _load(2, 1024) + a.tdp("TDPBF16PS", 0, 1, 2)
    body += _store(0)
    probe.run(body, _MAIN)
    want = place.high[0x8000:0x8400].copy()
    place.high[0x8000:0x8400] = 0
    ldmxcsr, stmxcsr = b"\x0f\xae\x97", b"\x0f\xae\x9f"  # [rdi + disp32]

    def move(opcode: bytes, disp: int) -> bytes:
        return opcode + disp.to_bytes(4, "little")

    body = move(stmxcsr, 0x108) + move(ldmxcsr, 0x100) + body
    probe.run(body + move(stmxcsr, 0x104) + move(ldmxcsr, 0x108), _MAIN)
    kept = place.high[0x104:0x108].view(np.uint32)[0] & 0xFFFF
    return {
        "same result": bool((place.high[0x8000:0x8400] == want).all()),
        "kept": int(kept) & ~0x3F == 0x5F80 & ~0x3F,
    }


def handed_on(siginfo: bool) -> dict[str, Any]:
    """UD2, then a tile fault: the previous handler gets both with their RIP."""
    _arena()
    probe = Probe()
    if not siginfo:
        set_action(signal.SIGILL, probe.handler, flags=0)
    emulator.install()
    registers = {**_MAIN}
    ud2 = probe.run(a.tilerelease() + _load_config() + a.tilezero(1) + UD2, registers)
    bad = probe.run(a.tilerelease() + _load_config() + a.tdp("TDPBSSD", 1, 1, 2), registers)
    assert ud2 is not None and bad is not None
    return {
        "ud2": [ud2.signal, ud2.code, ud2.rip, ud2.address - probe.base],
        "bad": [bad.signal, bad.code, bad.rip, bad.address - probe.base],
        "length": len(a.tilerelease() + _load_config()),
    }


def dies(how: str) -> str:
    """Ends by a signal, or returns what went wrong."""
    if how == "faulthandler":
        faulthandler.enable()
    _arena()
    probe = Probe(signals=())
    if how == "ignored ud2":
        signal.signal(signal.SIGILL, signal.SIG_IGN)
    if how == "ignored page":
        signal.signal(signal.SIGSEGV, signal.SIG_IGN)
    if how == "blocked page":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGSEGV])
    if how == "direct page":
        signals.can_copy_own_memory = lambda: False
    emulator.install()
    if how == "late faulthandler":
        faulthandler.enable()
        assert not emulator.is_installed()
        emulator.install()
        assert emulator.is_installed()
        assert probe.run(_load_config() + a.tilezero(0), _MAIN) is None
    if how == "sent":
        os.kill(os.getpid(), signal.SIGILL)
    elif how.endswith("page"):
        probe.run(_load_config() + _load(0), {**_MAIN, a.RSI: arena.HIGH + arena.UNMAPPED})
    elif how == "tile":
        probe.run(_load_config() + a.tilerelease() + a.tilezero(0), _MAIN)
    else:
        probe.run(UD2)
    return "still alive"


def sent_and_ignored() -> str:
    """SIGILL sent to a process that ignores it stays ignored."""
    signal.signal(signal.SIGILL, signal.SIG_IGN)
    emulator.install()
    os.kill(os.getpid(), signal.SIGILL)
    return "alive"


def sent_and_handled() -> int:
    """SIGILL sent to a process with a Python handler reaches that handler."""
    seen: list[int] = []
    signal.signal(signal.SIGILL, lambda number, frame: seen.append(number))
    emulator.install()
    os.kill(os.getpid(), signal.SIGILL)
    signal.getsignal(signal.SIGILL)
    return len(seen)


def repaired_page() -> dict[str, Any]:
    """A SIGSEGV handler maps what was missing and returns: the load goes on where it was."""
    place, probe = _arena(), Probe()
    edge = arena.HIGH + arena.WRITABLE
    engine = compile_ir(
        f"""
        declare i32 @mprotect(ptr, i64, i32)
        @calls = global i64 0
        define void @repair(i32 %sig, ptr %info, ptr %uc) {{
          %n = load i64, ptr @calls
          %m = add i64 %n, 1
          store i64 %m, ptr @calls
          %p = inttoptr i64 {edge} to ptr
          %r = call i32 @mprotect(ptr %p, i64 {arena.READABLE}, i32 3)
          ret void
        }}"""
    )
    set_action(signal.SIGSEGV, engine.get_function_address("repair"))
    emulator.install()
    source = edge - 0x200 - 64 * 5  # five rows before the page that may not be read
    libc.mprotect(edge, arena.READABLE, 0)
    program = _load_config() + _load(0, 0x200) + _store(0)
    fault = probe.run(program, {**_MAIN, a.RSI: source})
    calls = ctypes.c_int64.from_address(engine.get_global_value_address("calls")).value
    start = arena.WRITABLE - 64 * 5
    same = (place.high[0x8000:0x8400] == place.high[start : start + 1024]).all()
    # and a store to memory that is read-only until the handler has run
    libc.mprotect(edge, arena.READABLE, 1)
    fault2 = probe.run(_load_config() + _load(0) + _store(0, -0x40), {**_MAIN, a.RCX: edge})
    stored = place.high[arena.WRITABLE - 64 : arena.WRITABLE + 960] == place.high[0x1000:0x1400]
    calls2 = ctypes.c_int64.from_address(engine.get_global_value_address("calls")).value
    return {"load": [fault, calls, bool(same)], "store": [fault2, calls2, bool(stored.all())]}


def forked() -> dict[str, Any]:
    """The child keeps TILECFG and finds zero tiles; the parent keeps its tiles."""
    place, probe = _arena(), Probe()
    emulator.install()
    probe.run(_load_config() + _load(0), _MAIN)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        place.high[0x8000:0x8400] = 7
        fault = probe.run(_store(0), _MAIN)
        zero = fault is None and not bool(place.high[0x8000:0x8400].any())
        probe.run(_load_config() + _load(0, 64) + _store(0), _MAIN)
        own = bool((place.high[0x8000:0x8400] == place.high[0x1040:0x1440]).all())
        emulator.install()
        os.write(write, bytes([zero, own, emulator.is_installed()]))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    fault = probe.run(_store(0), _MAIN)
    kept = fault is None and (place.high[0x8000:0x8400] == place.high[0x1000:0x1400]).all()
    return {"child": list(os.read(read, 3)), "parent": bool(kept)}


def replaced() -> None:
    """exec: the new program starts without the emulator, and can install its own."""
    emulator.install()
    os.execv(sys.executable, [sys.executable, "-m", "emulator_lab.child", "process.fresh", "[]"])


def fresh() -> list[Any]:
    """Installed at the start, SIGILL's default action, a tile instruction after install()."""
    state = [emulator.is_installed(), signals.current_action().handler]
    place, probe = _arena(), Probe()
    emulator.install()
    probe.run(_load_config() + _load(0) + _store(0), _MAIN)
    return [*state, bool((place.high[0x8000:0x8400] == place.high[0x1000:0x1400]).all())]


def small_signal_stack() -> bool | None:
    """The handler runs on the program's stack: the smallest alternate one that Linux takes does
    not matter. None if Linux takes no small one."""
    memory = ctypes.create_string_buffer(4096)
    stack = (ctypes.c_uint64 * 3)(ctypes.addressof(memory), 0, 2048)  # ss_sp, ss_flags, ss_size
    if libc.sigaltstack(ctypes.byref(stack), None):
        return None
    return bool(fresh()[-1])


def ended_thread() -> list[bool]:
    """A thread that takes over an ended one's stack finds no configuration."""
    _arena()
    probe = Probe()
    emulator.install()
    signals_seen: list[int] = []
    ids: list[int] = []

    def use() -> None:
        fault = probe.run(a.tilezero(0), _MAIN)
        signals_seen.append(fault.signal if fault else 0)
        ids.append(arena.fs_base())
        probe.run(_load_config() + _load(0), _MAIN)

    for _ in range(5):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    return [signals_seen == [4] * 5, len(set(ids)) < 5]


def small_table() -> list[int]:
    """More threads over time than the table has entries: the dead ones make room."""
    layout.SLOTS = 4
    _arena()
    # a probe has one code page; threads take turns with it but live at the same time
    probe, turn = Probe(), threading.Lock()
    emulator.install()
    results: list[int] = []
    others = len(os.listdir("/proc/self/task"))

    def use(wait: threading.Barrier) -> None:
        with turn:
            results.append(probe.run(_load_config() + _load(0) + _store(0), _MAIN) is None)
        wait.wait()

    for size in (1, 2, 3, 4, 5):
        threading.stack_size(size * 1024 * 1024)  # other sizes, other control blocks
        barrier = threading.Barrier(3)
        group = [threading.Thread(target=use, args=(barrier,)) for _ in range(3)]
        for thread in group:
            thread.start()
        for thread in group:
            thread.join()
        while len(os.listdir("/proc/self/task")) > others:  # join returns before a thread is gone
            time.sleep(0.001)
    assert process._emulator is not None
    owners = memoryview(process._emulator._maps[0]).cast("Q")[:: layout.HEADER_BYTES // 8]
    return [len(results), sum(results), len(set(owners))]
