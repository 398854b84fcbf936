"""Generates ``execute``: one decoded instruction on one thread's tiles, with its checks.

What faults, and with what, was recorded from a Xeon (tests/emulator/data): #UD for every
use of tiles without a configuration, of a tile whose rows are zero, of a tile number above
7, for TDP operands that repeat or do not fit each other, and for TILELOADD/TILESTORED with
start_row beyond the tile or rows of a length that 4
does not divide; #GP for a configuration that is not legal. TILECFG.start_row is
ignored, then cleared, by the other instructions.
"""

from __future__ import annotations

from typing import Any

from amxq.emulator import layout as L
from amxq.emulator.emit import I8, I16, I32, I64, PTR, VOID, Emitter, Value

_CONFIG_BYTES = 64
_MAX_ROWS, _MAX_COLUMN_BYTES = 16, 64
# round to nearest, all exceptions masked, denormals are zero, flush to zero
_MXCSR = 0x9FC0


class _Thread:
    """The emitter beside the pointers that every instruction needs."""

    def __init__(self, f: Emitter, header: Value, tiles: Value, fault: Value) -> None:
        self.f, self.tiles, self.fault = f, tiles, fault
        self.config = f.at(header, L.H_CONFIG)

    def tile(self, number: Value) -> Value:
        return self.f.at(self.tiles, self.f.mul(number, self.f.const(L.TILE_BYTES)))

    def rows(self, number: Value) -> Value:
        offset = self.f.add(number, self.f.const(48))
        return self.f.zext(self.f.read(self.config, offset, I8), I64)

    def column_bytes(self, number: Value) -> Value:
        offset = self.f.add(self.f.shl(number, self.f.const(1)), self.f.const(16))
        return self.f.zext(self.f.read(self.config, offset, I16), I64)

    def start_row(self) -> Value:
        return self.f.zext(self.f.read(self.config, 1, I8), I64)

    def set_start_row(self, value: Value | int) -> None:
        value = self.f.const(value, I8) if isinstance(value, int) else self.f.trunc(value, I8)
        self.f.write(value, self.config, 1)

    def fail_if(self, condition: Value, kind: int) -> None:
        with self.f.when(condition):
            self.f.write(kind, self.fault, L.F_KIND)
            self.f.ret(self.f.const(L.STEP_FAULT))

    def need_tile(self, number: Value) -> None:
        """#UD unless this tile exists and is configured (all rows are 0 without palette)."""
        self.fail_if(self.f.lt(self.f.const(L.TILES - 1), number), L.FAULT_UD)
        self.fail_if(self.f.eq(self.rows(number), 0), L.FAULT_UD)

    def clear(self) -> None:
        self.f.fill(self.tiles, L.DATA_BYTES)

    def done(self) -> None:
        self.f.ret(self.f.const(L.STEP_DONE))


def emit_execute(module: Any) -> None:
    """``i64 execute(instruction, header, tiles, pid, fault)``: STEP_DONE or STEP_FAULT."""
    f = Emitter(module, "execute", I64, [PTR, PTR, PTR, I64, PTR])
    instruction, header, tiles, pid, fault = f.arguments
    t = _Thread(f, header, tiles, fault)
    kind, tile = f.read(instruction, L.I_KIND), f.read(instruction, L.I_TILE_C)

    def is_kind(*names: str) -> Value:
        return f.is_one_of(kind, [L.NUMBER[name] for name in names])

    def config_move(place: Value, call: int) -> None:
        zero, one = f.const(0), f.const(1)
        size = f.const(_CONFIG_BYTES)
        moved = f.call_named(
            "move_rows", instruction, place, zero, one, size, f.const(call), pid, fault
        )
        f.return_if(f.ne(moved, 1), f.const(L.STEP_FAULT))

    with f.when(is_kind(*(name for name in L.KINDS if name.startswith("TDP")))):
        _emit_dot(t, instruction, kind)
    with f.when(is_kind("TILELOADD", "TILELOADDT1", "TILESTORED")):
        _emit_tile_move(t, instruction, pid, is_kind("TILESTORED"))
    with f.when(is_kind("TILEZERO")):
        t.need_tile(tile)
        f.fill(t.tile(tile), L.TILE_BYTES)
        t.set_start_row(0)
        t.done()
    with f.when(is_kind("LDTILECFG")):
        wanted = f.space(_CONFIG_BYTES)
        config_move(wanted, L.SYS_READV)
        _emit_configure(t, wanted)
    with f.when(is_kind("STTILECFG")):
        config_move(t.config, L.SYS_WRITEV)
        t.done()
    f.fill(t.config, _CONFIG_BYTES)  # TILERELEASE
    t.clear()
    t.done()


def _emit_configure(t: _Thread, wanted: Value) -> None:
    """LDTILECFG with its 64 bytes read: check, store, clear all tiles."""
    f = t.f
    palette = f.read(wanted, 0, I8)
    with f.when(f.eq(palette, 0)):
        f.fill(t.config, _CONFIG_BYTES)
        t.clear()
        t.done()
    reserved = f.lshr(f.read(wanted, 0), f.const(16))
    for offset in (8, 32, 40, 56):
        reserved = f.or_(reserved, f.read(wanted, offset))
    bad = f.or_(f.ne(palette, 1), f.ne(reserved, 0))
    for number in range(L.TILES):
        columns = f.read(wanted, 16 + 2 * number, I16)
        rows = f.read(wanted, 48 + number, I8)
        bad = f.or_(bad, f.lt(f.const(_MAX_COLUMN_BYTES, I16), columns))
        bad = f.or_(bad, f.lt(f.const(_MAX_ROWS, I8), rows))
        bad = f.or_(bad, f.xor(f.eq(columns, 0), f.eq(rows, 0)))
    t.fail_if(bad, L.FAULT_GP)
    for offset in range(0, _CONFIG_BYTES, 8):
        f.write(f.read(wanted, offset), t.config, offset)
    t.clear()
    t.done()


def _emit_tile_move(t: _Thread, instruction: Value, pid: Value, is_store: Value) -> None:
    """TILELOADD, TILELOADDT1 and TILESTORED from start_row on."""
    f = t.f
    number = f.read(instruction, L.I_TILE_C)
    t.need_tile(number)
    rows, size, start = t.rows(number), t.column_bytes(number), t.start_row()
    t.fail_if(f.icmp_unsigned(">=", start, rows), L.FAULT_UD)
    t.fail_if(f.ne(f.and_(size, f.const(3)), 0), L.FAULT_UD)
    tile = t.tile(number)

    def clear_from(row: Value) -> None:
        offset = f.mul(row, f.const(64))
        f.fill(f.at(tile, offset), f.sub(f.const(L.TILE_BYTES), offset))

    with f.when(f.not_(is_store)):
        clear_from(start)
    moved = f.variable(0)
    for call, name, condition in (
        (L.SYS_READV, "move_rows", f.not_(is_store)),
        (L.SYS_WRITEV, "store_rows", is_store),
    ):
        with f.when(condition):
            arguments = (instruction, tile, start, rows, size, f.const(call), pid, t.fault)
            moved.set(f.call_named(name, *arguments))
    done = moved.get()
    with f.when(f.lt(done, rows)):
        with f.when(f.not_(is_store)):
            clear_from(done)  # a row that the fault cut short
        t.set_start_row(done)
        f.ret(f.const(L.STEP_FAULT))
    t.set_start_row(0)
    t.done()


def _emit_dot(t: _Thread, instruction: Value, kind: Value) -> None:
    f = t.f
    c, a, b = (f.read(instruction, field) for field in (L.I_TILE_C, L.I_TILE_A, L.I_TILE_B))
    for number in (c, a, b):
        t.need_tile(number)
    same = f.or_(f.eq(c, a), f.or_(f.eq(c, b), f.eq(a, b)))
    t.fail_if(same, L.FAULT_UD)
    columns, depth = t.column_bytes(c), t.column_bytes(a)
    ragged = f.ne(f.and_(f.or_(columns, depth), f.const(3)), 0)
    t.fail_if(ragged, L.FAULT_UD)
    pairs = f.lshr(depth, f.const(2))
    misfit = f.or_(f.ne(t.rows(c), t.rows(a)), f.ne(columns, t.column_bytes(b)))
    t.fail_if(f.or_(misfit, f.ne(t.rows(b), pairs)), L.FAULT_UD)
    arguments = (t.tile(c), t.tile(a), t.tile(b), t.rows(c), f.lshr(columns, f.const(2)), pairs)

    saved, wanted = f.space(4), f.space(4)
    f.intrinsic("llvm.x86.sse.stmxcsr", [PTR], VOID, saved)
    f.write(f.const(_MXCSR, I32), wanted)
    f.intrinsic("llvm.x86.sse.ldmxcsr", [PTR], VOID, wanted)
    for name in L.KINDS:
        if name.startswith("TDP"):
            with f.when(f.eq(kind, L.NUMBER[name])):
                f.call_named(name, *arguments)
    f.intrinsic("llvm.x86.sse.ldmxcsr", [PTR], VOID, saved)
    t.set_start_row(0)
    t.done()
