"""Generates ``move_rows``: copies rows between a tile and the program's memory.

The program's memory is touched through process_vm_readv and process_vm_writev on the
process itself: a bad address comes back as a short count instead of a SIGSEGV inside the
handler, with every row before it moved, which is what the hardware does (start_row then
says where to resume). Where a sandbox forbids these calls, rows are copied directly; a bad
address then still raises SIGSEGV with the right address, but at a RIP inside the emulator.
"""

from __future__ import annotations

from typing import Any

from amxq.emulator import layout as L
from amxq.emulator.emit import I1, I64, PTR, VOID, Emitter, Value

_ROW = 64
_PAGE = 4096
_MADV_POPULATE_WRITE = 23


def _row_address(f: Emitter, instruction: Value, row: Value) -> Value:
    offset = f.mul(row, f.read(instruction, L.I_STRIDE))
    effective = f.add(f.read(instruction, L.I_ADDRESS), offset)
    effective = f.and_(effective, f.read(instruction, L.I_MASK))
    return f.add(effective, f.read(instruction, L.I_SEGMENT_BASE))


def _is_canonical(f: Emitter, address: Value, bits: int) -> Value:
    shift = f.const(64 - bits)
    return f.eq(f.ashr(f.shl(address, shift), shift), address)


def emit_move_rows(module: Any, *, address_bits: int, direct: bool) -> None:
    """``i64 move_rows(instruction, tile, start, rows, bytes, call, pid, fault)``.

    Moves rows start..rows-1 (``bytes`` each, 64 apart in the tile) with the system call
    ``call``. Returns the first row not moved; fewer than ``rows`` means that the fault
    structure says why.
    """
    kinds = [PTR, PTR, I64, I64, I64, I64, I64, PTR]
    f = Emitter(module, "move_rows", I64, kinds)
    instruction, tile, start, rows, size, call, pid, fault = f.arguments
    stop = f.variable(start)
    local, remote = f.space(16 * 16), f.space(16 * 16)
    last = f.sub(size, f.const(1))
    with f.loop() as leave:
        row = stop.get()
        leave(f.icmp_unsigned(">=", row, rows))
        address = _row_address(f, instruction, row)
        end = f.add(address, last)
        good = f.and_(_is_canonical(f, address, address_bits), _is_canonical(f, end, address_bits))
        leave(f.not_(good))
        place = f.at(tile, f.mul(row, f.const(_ROW)))
        if direct:
            _emit_copy(f, place, f.inttoptr(address, PTR), size, call)
        else:
            entry = f.mul(f.sub(row, start), f.const(16))
            f.write(place, local, entry)
            f.write(size, f.at(local, entry), 8)
            f.write(address, remote, entry)
            f.write(size, f.at(remote, entry), 8)
        stop.set(f.add(row, f.const(1)))

    wanted = f.sub(stop.get(), start)
    if not direct:
        single = f.and_(f.eq(wanted, 1), f.eq(call, L.SYS_WRITEV))
        with f.when(single):
            _emit_try_second_page(f, local, remote)
        with f.when(f.ne(wanted, 0)):
            spaces = f.ptrtoint(local, I64), f.ptrtoint(remote, I64)
            moved = f.call_named(
                "syscall", call, pid, spaces[0], wanted, spaces[1], wanted, f.const(0)
            )
            moved = f.select(f.icmp_signed("<", moved, f.const(0)), f.const(0), moved)
            whole = f.add(start, f.udiv(moved, size))
            with f.when(f.lt(moved, f.mul(wanted, size))):
                f.write(L.FAULT_PAGE, fault, L.F_KIND)
                address = f.add(_row_address(f, instruction, whole), f.urem(moved, size))
                f.write(address, fault, L.F_ADDRESS)
                f.ret(whole)
    with f.when(f.lt(stop.get(), rows)):
        on_stack = f.ne(f.read(instruction, L.I_STACK), 0)
        f.write(f.select(on_stack, f.const(L.FAULT_SS), f.const(L.FAULT_GP)), fault, L.F_KIND)
        f.write(0, fault, L.F_ADDRESS)
    f.ret(stop.get())


def _emit_try_second_page(f: Emitter, local: Value, remote: Value) -> None:
    """Write the part of a single row that lies on a second page; a fault there ends it all.

    Hardware writes nothing of a row when its second page faults; the kernel would write the
    part on the first page.
    """
    _, _, start, _, size, call, pid, fault = f.arguments
    address, place = f.read(remote), f.read(local)
    boundary = f.add(f.or_(address, f.const(_PAGE - 1)), f.const(1))
    tail = f.sub(f.add(address, size), boundary)
    with f.when(f.icmp_signed(">", tail, f.const(0))):
        for span, base in (
            (local, f.add(place, f.sub(size, tail))),
            (remote, boundary),
        ):
            f.write(base, span)
            f.write(tail, span, 8)
        spaces = f.ptrtoint(local, I64), f.ptrtoint(remote, I64)
        one, zero = f.const(1), f.const(0)
        moved = f.call_named("syscall", call, pid, spaces[0], one, spaces[1], one, zero)
        with f.when(f.ne(moved, tail)):
            # the address is the row's own if its first page cannot be written either; asked
            # without writing (before Linux 5.14, which lacks this, it always is the row's)
            page, populate = f.and_(address, f.const(-_PAGE)), f.const(_MADV_POPULATE_WRITE)
            number = f.const(L.SYS_MADVISE)
            refused = f.call_named(
                "syscall", number, page, f.const(_PAGE), populate, zero, zero, zero
            )
            f.write(L.FAULT_PAGE, fault, L.F_KIND)
            f.write(f.select(f.eq(refused, 0), boundary, address), fault, L.F_ADDRESS)
            f.ret(start)
        f.write(place, local)
        f.write(size, local, 8)
        f.write(address, remote)
        f.write(size, remote, 8)


def emit_store_rows(module: Any) -> None:
    """``store_rows``, as move_rows: one row at a time where rows may cross a page."""
    f = Emitter(module, "store_rows", I64, [PTR, PTR, I64, I64, I64, I64, I64, PTR])
    instruction, tile, start, rows, size, call, pid, fault = f.arguments
    line = f.const(_ROW - 1)
    low = f.and_(_row_address(f, instruction, f.const(0)), line)
    ragged = f.ne(f.and_(f.read(instruction, L.I_STRIDE), line), 0)
    crossing = f.or_(ragged, f.lt(f.const(_ROW), f.add(low, size)))
    step = f.select(crossing, f.const(1), rows)
    row = f.variable(start)
    with f.loop() as leave:
        leave(f.icmp_unsigned(">=", row.get(), rows))
        end = f.add(row.get(), step)
        end = f.select(f.lt(rows, end), rows, end)
        row.set(
            f.call_named("move_rows", instruction, tile, row.get(), end, size, call, pid, fault)
        )
        leave(f.lt(row.get(), end))
    f.ret(row.get())


def _emit_copy(f: Emitter, tile_row: Value, memory: Value, size: Value, call: Value) -> None:
    kinds = [PTR, PTR, I64, I1]
    volatile = f.const(1, I1)
    with f.if_else(f.eq(call, L.SYS_READV)) as (load, store):
        with load:
            f.intrinsic("llvm.memcpy.p0.p0.i64", kinds, VOID, tile_row, memory, size, volatile)
        with store:
            f.intrinsic("llvm.memcpy.p0.p0.i64", kinds, VOID, memory, tile_row, size, volatile)
