"""Generates ``decode``: from bytes at RIP to an instruction with its addresses computed.

The encodings (Intel SDM volume 2; which bits are ignored was asked of a Xeon, see
tests/emulator): optional 26/2E/36/3E (ignored), 64/65 (segment) and 67 (32-bit address)
prefixes, then a three-byte VEX prefix of map 0F38 with W = 0 and L = 0, then

======  ====  =========================================================
opcode  pp
======  ====  =========================================================
49      NP    memory /0: LDTILECFG; byte C0: TILERELEASE
49      66    memory /0: STTILECFG
49      F2    11:rrr:000: TILEZERO
4B      F2    SIB memory: TILELOADD;   66: TILELOADDT1;   F3: TILESTORED
5C      F3    registers: TDPBF16PS;    F2: TDPFP16PS
5E      F2    registers: TDPBSSD; F3: TDPBSUD; 66: TDPBUSD; NP: TDPBUUD
======  ====  =========================================================

VEX.X with a register operand, VEX.B of TILEZERO and VEX.R where there is no tile are
ignored, as on hardware. A tile number above 7 is decoded; executing it faults.
"""

from __future__ import annotations

from typing import Any

from amxq.emulator import layout as L
from amxq.emulator.emit import I1, I8, I32, I64, PTR, Emitter, Value, Variable

_NONE, _66, _F3, _F2 = range(4)
_TDP = {
    (0x5C, _F3): "TDPBF16PS",
    (0x5C, _F2): "TDPFP16PS",
    (0x5E, _F2): "TDPBSSD",
    (0x5E, _F3): "TDPBSUD",
    (0x5E, _66): "TDPBUSD",
    (0x5E, _NONE): "TDPBUUD",
}
_MEMORY = {
    (0x49, _NONE): "LDTILECFG",
    (0x49, _66): "STTILECFG",
    (0x4B, _F2): "TILELOADD",
    (0x4B, _66): "TILELOADDT1",
    (0x4B, _F3): "TILESTORED",
}
_LONGEST = 15


class _Reader:
    """Reads the instruction byte by byte: a byte that it does not have is never touched."""

    def __init__(self, f: Emitter, code: Value) -> None:
        self._f, self._code = f, code
        self.position: Variable = f.variable(0)

    def peek(self) -> Value:
        """The next byte as i64."""
        return self._f.zext(self._f.read(self._code, self.position.get(), I8), I64)

    def skip(self, count: int) -> None:
        self.position.set(self._f.add(self.position.get(), self._f.const(count)))

    def byte(self) -> Value:
        value = self.peek()
        self.skip(1)
        return value

    def signed(self, kind: Any) -> Value:
        value = self._f.sext(self._f.read(self._code, self.position.get(), kind), I64)
        self.skip(kind.width // 8)
        return value


def _bits(f: Emitter, value: Value, low: int, count: int) -> Value:
    return f.and_(f.lshr(value, f.const(low)), f.const((1 << count) - 1))


def _register(f: Emitter, gregs: Value, number: Value) -> Value:
    """The register's value in the interrupted program."""
    index = f.zext(f.read(f.module.get_global("greg_of_register"), number, I8), I64)
    return f.read(gregs, f.shl(index, f.const(3)))


def emit_decode(module: Any) -> None:
    """``i64 decode(ptr ucontext, ptr instruction)``: the kind's number, 0 for other code."""
    f = Emitter(module, "decode", I64, [PTR, PTR])
    context, out = f.arguments
    gregs = f.at(context, L.GREGS)
    foreign = f.const(0)
    reader = _Reader(f, f.read(context, L.REG_RIP, PTR))

    segment, narrow = f.variable(0), f.variable(0, I1)
    with f.loop() as leave:
        prefix = reader.peek()
        leave(f.eq(prefix, 0xC4))
        legal = f.is_one_of(prefix, (0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x67))
        f.return_if(f.not_(legal), foreign)
        with f.when(f.is_one_of(prefix, (0x64, 0x65))):
            segment.set(prefix)
        with f.when(f.eq(prefix, 0x67)):
            narrow.set(1)
        reader.skip(1)
        f.return_if(f.lt(f.const(_LONGEST - 5), reader.position.get()), foreign)
    reader.skip(1)
    first = f.xor(reader.byte(), f.const(0xE0))  # R, X and B are stored inverted
    f.return_if(f.ne(_bits(f, first, 0, 5), 2), foreign)
    r, x, b = (f.shl(_bits(f, first, n, 1), f.const(3)) for n in (7, 6, 5))
    second = f.xor(reader.byte(), f.const(0x78))  # and so is vvvv
    f.return_if(f.ne(f.and_(second, f.const(0x84)), 0), foreign)  # W and L
    pp, vvvv = _bits(f, second, 0, 2), _bits(f, second, 3, 4)
    opcode = reader.byte()
    f.return_if(f.not_(f.is_one_of(opcode, (0x49, 0x4B, 0x5C, 0x5E))), foreign)
    modrm = reader.byte()
    mod, reg, rm = _bits(f, modrm, 6, 2), _bits(f, modrm, 3, 3), _bits(f, modrm, 0, 3)
    key = f.or_(f.shl(opcode, f.const(2)), pp)

    def number_of(table: dict[tuple[int, int], str]) -> Value:
        number = foreign
        for (code, prefix_bits), name in table.items():
            hit = f.eq(key, code << 2 | prefix_bits)
            number = f.select(hit, f.const(L.NUMBER[name]), number)
        return number

    def finish(kind: Value, tile: Value) -> None:
        f.return_if(f.lt(f.const(_LONGEST), reader.position.get()), foreign)
        f.write(kind, out, L.I_KIND)
        f.write(reader.position.get(), out, L.I_LENGTH)
        f.write(tile, out, L.I_TILE_C)
        f.ret(kind)

    with f.when(f.eq(mod, 3)):
        with f.when(f.eq(opcode, 0x49)):
            f.return_if(f.ne(vvvv, 0), foreign)
            release = f.and_(f.eq(pp, _NONE), f.eq(modrm, 0xC0))
            zero = f.and_(f.eq(pp, _F2), f.eq(rm, 0))
            kind = f.select(zero, f.const(L.NUMBER["TILEZERO"]), foreign)
            kind = f.select(release, f.const(L.NUMBER["TILERELEASE"]), kind)
            f.return_if(f.eq(kind, 0), foreign)
            finish(kind, f.or_(reg, r))
        kind = number_of(_TDP)
        f.return_if(f.eq(kind, 0), foreign)
        f.write(f.or_(rm, b), out, L.I_TILE_A)
        f.write(vvvv, out, L.I_TILE_B)
        finish(kind, f.or_(reg, r))

    kind = number_of(_MEMORY)
    f.return_if(f.or_(f.eq(kind, 0), f.ne(vvvv, 0)), foreign)
    is_config = f.eq(opcode, 0x49)
    wrong_form = f.select(is_config, f.ne(reg, 0), f.ne(rm, 4))
    f.return_if(wrong_form, foreign)
    _emit_address(f, reader, out, gregs, mod, rm, x, b, is_config, narrow, segment)
    finish(kind, f.or_(reg, r))


def _emit_address(
    f: Emitter,
    reader: _Reader,
    out: Value,
    gregs: Value,
    mod: Value,
    rm: Value,
    x: Value,
    b: Value,
    is_config: Value,
    narrow: Variable,
    segment: Variable,
) -> None:
    """ModRM, SIB and displacement: the address, and the index as the stride of tile moves."""
    address, stride, far, base = f.variable(0), f.variable(0), f.variable(0, I1), f.variable(rm)
    with f.when(f.eq(rm, 4)):
        sib = reader.byte()
        base.set(_bits(f, sib, 0, 3))
        index = f.or_(_bits(f, sib, 3, 3), x)
        with f.when(f.ne(index, 4)):
            stride.set(f.shl(_register(f, gregs, index), _bits(f, sib, 6, 2)))
    no_base = f.and_(f.eq(base.get(), 5), f.eq(mod, 0))
    relative = f.and_(no_base, f.ne(rm, 4))
    far.set(f.or_(no_base, f.eq(mod, 2)))
    stack = f.variable(0)
    with f.when(f.not_(no_base)):
        number = f.or_(base.get(), b)
        address.set(_register(f, gregs, number))
        stack.set(f.zext(f.is_one_of(number, (4, 5)), I64))  # RSP and RBP mean SS
    with f.when(f.eq(mod, 1)):
        address.set(f.add(address.get(), reader.signed(I8)))
    with f.when(far.get()):
        address.set(f.add(address.get(), reader.signed(I32)))
    with f.when(relative):
        end = f.add(f.read(gregs, L.REG_RIP - L.GREGS), reader.position.get())
        address.set(f.add(address.get(), end))
    with f.when(is_config):
        address.set(f.add(address.get(), stride.get()))
    segment_base = f.space(8)
    f.write(0, segment_base)
    with f.when(f.ne(segment.get(), 0)):
        stack.set(0)
        which = f.select(f.eq(segment.get(), 0x64), f.const(L.ARCH_GET_FS), f.const(L.ARCH_GET_GS))
        place = f.ptrtoint(segment_base, I64)
        zero = f.const(0)
        f.call_named("syscall", f.const(L.SYS_ARCH_PRCTL), which, place, zero, zero, zero, zero)
    f.write(address.get(), out, L.I_ADDRESS)
    f.write(stride.get(), out, L.I_STRIDE)
    f.write(f.read(segment_base), out, L.I_SEGMENT_BASE)
    f.write(f.select(narrow.get(), f.const(0xFFFFFFFF), f.const(-1)), out, L.I_MASK)
    f.write(stack.get(), out, L.I_STACK)
