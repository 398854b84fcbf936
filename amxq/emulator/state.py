"""Generates ``find_thread``: the running thread's entry in the table of tile states.

A fixed table with open addressing, keyed by the FS base (the thread's control block, read
from FS:0 as the x86-64 ABI has it). An entry's first word holds FS base and thread id in
one 64-bit value, so claiming is one compare-and-swap. Entries are never freed; a control
block that the C library gives to a new thread shows by its thread id, and when the table is
full, entries whose thread is dead are taken over.

As under Linux, the child of a fork keeps TILECFG but its tiles are zero. Unlike under
Linux (6.18: a new thread inherits its creator's TILECFG, with zero tiles) a new thread
starts without a configuration, so that code which forgets to configure its workers fails.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from amxq.emulator import layout as L
from amxq.emulator.emit import I64, PTR, Emitter, Value

# fields of the control block, 8 bytes each; Python fills it in
(
    C_HEADERS,
    C_TILES,
    C_ENABLED,
    C_PREVIOUS,
    C_PREVIOUS_FLAGS,
    C_PREVIOUS_MASK,
    C_FIRST,
    C_FIRST_FLAGS,
    C_FIRST_MASK,
) = range(0, 72, 8)
CONTROL_BYTES = 72
_HASH = 0x9E3779B97F4A7C15
_ESRCH_RESULT = -1  # libc's syscall(); tgkill with signal 0 fails only for a dead thread


def control(f: Emitter, field: int, kind: Any = I64) -> Value:
    """A field of the control block."""
    return f.read(f.module.get_global("control"), field, kind)


def system_call(f: Emitter, number: int, *arguments: Value | int) -> Value:
    """libc's syscall(); pointers are passed as they are."""
    values = [f.const(a) if isinstance(a, int) else a for a in arguments]
    values = [f.ptrtoint(v, I64) if isinstance(v.type, ir.PointerType) else v for v in values]
    values += [f.const(0)] * (6 - len(values))
    return f.call_named("syscall", f.const(number), *values)


def emit_find_thread(module: Any) -> None:
    """``i64 find_thread(i64 tid)``: the entry's index, -1 when 4096 live threads use tiles."""
    f = Emitter(module, "find_thread", I64, [I64])
    (tid,) = f.arguments
    headers = control(f, C_HEADERS, PTR)
    fs_space = ir.PointerType(addrspace=257)
    fs_base = f.load(f.inttoptr(f.const(0), fs_space), typ=I64, align=8)
    block = f.lshr(fs_base, f.const(6))
    owner = f.or_(f.shl(block, f.const(L.TID_BITS)), tid)
    bits = L.SLOTS.bit_length() - 1
    home = f.lshr(f.mul(block, f.const(_HASH)), f.const(64 - bits))

    def entry(step: Value) -> tuple[Value, Value]:
        index = f.and_(f.add(home, step), f.const(L.SLOTS - 1))
        return index, f.at(headers, f.mul(index, f.const(L.HEADER_BYTES)))

    def claim(header: Value, seen: Value) -> Value:
        pair = f.cmpxchg(f.at(header, L.H_OWNER), seen, owner, "seq_cst", "seq_cst")
        return f.extract_value(pair, 1)

    def owner_of(header: Value) -> Value:
        return f.load_atomic(f.at(header, L.H_OWNER), "acquire", 8, typ=I64)

    with f.count(0, L.SLOTS) as step:
        index, header = entry(step)
        seen = owner_of(header)
        f.return_if(f.eq(seen, owner), index)
        mine = f.eq(f.lshr(seen, f.const(L.TID_BITS)), block)
        with f.when(f.or_(mine, f.eq(seen, 0))):
            with f.when(claim(header, seen)):
                f.call_named("adopt", header, index, tid, f.zext(mine, I64))
                f.ret(index)
    with f.count(0, L.SLOTS) as step:
        index, header = entry(step)
        seen = owner_of(header)
        dead_tid = f.and_(seen, f.const((1 << L.TID_BITS) - 1))
        pid = f.read(header, L.H_PID)
        alive = system_call(f, L.SYS_TGKILL, pid, dead_tid, 0)
        with f.when(f.eq(alive, _ESRCH_RESULT)):
            with f.when(claim(header, seen)):
                f.call_named("adopt", header, index, tid, f.const(0))
                f.ret(index)
    f.ret(f.const(-1))


def emit_adopt(module: Any) -> None:
    """``i64 adopt(header, index, tid, mine)``: put a claimed entry in its starting state."""
    f = Emitter(module, "adopt", I64, [PTR, I64, I64, I64])
    header, index, tid, mine = f.arguments
    pid = system_call(f, L.SYS_GETPID)
    # the thread that lived through a fork has its old control block and is its process's first
    before = f.read(header, L.H_PID)
    forked = f.and_(f.ne(mine, 0), f.and_(f.ne(before, pid), f.eq(pid, tid)))
    forked = f.and_(forked, f.ne(before, 0))
    with f.when(f.not_(forked)):
        f.fill(f.at(header, L.H_CONFIG), 64)
    f.write(pid, header, L.H_PID)
    tiles = control(f, C_TILES, PTR)
    f.fill(f.at(tiles, f.mul(index, f.const(L.DATA_BYTES))), L.DATA_BYTES)
    f.ret(f.const(0))
