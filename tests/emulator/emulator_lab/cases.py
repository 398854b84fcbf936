"""Random programs of tile instructions, the same for the same seed on every machine.

``dots``: one dot product on random shapes and values of every kind. ``mixed``: whatever
can be written with tile instructions, right or wrong: configurations, addressing forms,
prefixes, strides, bad addresses, tile numbers out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from emulator_lab import arena
from emulator_lab import assembler as a

CONFIG, DUMP = 0, 0x400  # offsets in the arena: what LDTILECFG reads, what a dump writes
C_AT, A_AT, B_AT = 0x1000, 0x2000, 0x3000
DOTS = ("TDPBF16PS", "TDPBSSD", "TDPBSUD", "TDPBUSD", "TDPBUUD")
_BF16 = np.array(
    [
        0,
        1,
        0x7F,
        0x80,
        0x81,
        0xFF,
        0x3F80,
        0x3F7F,
        0x7F7F,
        0x7F80,
        0x7F81,
        0x7FC1,
        0x7FFF,
        0x2000,
        0x1FFF,
        0x5F80,
        0x3F81,
        0x4049,
    ],
    np.uint16,
)
_FP32 = np.array(
    [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x3F800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00002,
        0x7FFFFFFF,
        0x33800000,
    ],
    np.uint32,
)


@dataclass
class Case:
    """Bytes to put in the arena, the program and its registers; ``fs`` are relative to FS."""

    program: bytes
    registers: dict[int, int]
    memory: dict[int, bytes] = field(default_factory=dict)
    fs: tuple[int, ...] = ()


def _bf16(rng: np.random.RandomState, count: int, kind: int) -> np.ndarray:
    """bf16 bit patterns: 0 bits, 1 normal, 2 specials, 3 near underflow, 4 small integers."""
    bits = rng.randint(0, 1 << 16, count).astype(np.uint16)
    if kind == 0:
        return bits
    if kind == 1:
        return (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
    if kind == 2:
        special = _BF16[rng.randint(0, len(_BF16), count)] | (bits & 0x8000)
        return np.where(rng.randint(0, 4, count) == 0, special, bits & 0xBFFF).astype(np.uint16)
    if kind == 3:
        exponent = rng.randint(58, 68, count).astype(np.uint16) << 7
        return ((bits & 0x807F) | exponent).astype(np.uint16)
    values = rng.randint(-15, 16, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _fp32(rng: np.random.RandomState, count: int, kind: int) -> np.ndarray:
    bits = rng.randint(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    if kind in (0, 2):
        special = _FP32[rng.randint(0, len(_FP32), count)] | (bits & 0x80000000)
        return np.where(rng.randint(0, 3, count) == 0, special, bits).astype(np.uint32)
    if kind == 3:
        return ((bits & 0x807FFFFF) | (rng.randint(0, 5, count).astype(np.uint32) << 23)).astype(
            np.uint32
        )
    return rng.standard_normal(count).astype(np.float32).view(np.uint32)


def dot_case(seed: int, names: tuple[str, ...] = DOTS) -> Case:
    """C += A * B with random shapes, tile numbers and values; C is dumped to C_AT."""
    rng = np.random.RandomState(seed)
    name = names[0] if rng.randint(2) else names[rng.randint(len(names))]
    rows, columns, depth = (int(rng.randint(1, 17)) for _ in range(3))
    if rng.randint(3) == 0:
        rows = columns = depth = 16
    c, ta, b = (int(t) for t in rng.permutation(8)[:3])
    kind = int(rng.randint(5))
    shapes = {c: (rows, 4 * columns), ta: (rows, 4 * depth), b: (depth, 4 * columns)}
    memory = {
        CONFIG: a.config(shapes),
        C_AT: _fp32(rng, 256, kind).tobytes(),
        A_AT: _bf16(rng, 512, kind).tobytes(),
        B_AT: _bf16(rng, 512, kind if rng.randint(4) else 1).tobytes(),
    }
    registers = {a.RDI: arena.HIGH + CONFIG, a.RSI: arena.HIGH, a.RDX: 64}
    program = a.memory("LDTILECFG", 0, a.Mem(a.RDI))
    for tile, offset in ((c, C_AT), (ta, A_AT), (b, B_AT)):
        program += a.memory("TILELOADD", tile, a.Mem(a.RSI, a.RDX, disp=offset))
    program += a.tdp(name, c, ta, b)
    program += a.memory("TILESTORED", c, a.Mem(a.RSI, a.RDX, disp=C_AT))
    return Case(program, registers, memory)


def special_case(seed: int) -> Case:
    """A full-size TDPBF16PS on NaN, infinities, denormals, zeros and the edges between."""
    rng = np.random.RandomState(seed)
    case = dot_case(seed)
    shapes = {0: (16, 64), 1: (16, 64), 2: (16, 64)}

    def values() -> bytes:
        sign = rng.randint(0, 2, 512).astype(np.uint16) << 15
        picked = _BF16[rng.randint(0, len(_BF16), 512)]
        # few NaN and infinities in a chain, so that other values are seen too
        rare = (picked & 0x7F80 == 0x7F80) & (rng.randint(0, 12, 512) != 0)
        return (np.where(rare, 0x3F80, picked) | sign).astype(np.uint16).tobytes()

    case.memory = {
        CONFIG: a.config(shapes),
        C_AT: _fp32(rng, 256, 2).tobytes(),
        A_AT: values(),
        B_AT: values(),
    }
    case.program = a.memory("LDTILECFG", 0, a.Mem(a.RDI))
    for tile, offset in ((0, C_AT), (1, A_AT), (2, B_AT)):
        case.program += a.memory("TILELOADD", tile, a.Mem(a.RSI, a.RDX, disp=offset))
    case.program += a.tdp("TDPBF16PS", 0, 1, 2)
    case.program += a.memory("TILESTORED", 0, a.Mem(a.RSI, a.RDX, disp=C_AT))
    return case


_BASES = (a.RAX, a.RCX, a.RBX, a.RBP, a.RSI, a.R8, a.R12, a.R13, a.R15)
_INDEXES = (a.RDX, a.R9, a.R14)
_STRIDES = (0, 1, 63, 64, 64, 64, 65, 128, 1024, 4096, -64, -3, 1 << 33, (1 << 33) + 64)


def _config(rng: np.random.RandomState) -> bytes:
    shapes = {}
    side, odd = int(rng.randint(1, 17)), rng.randint(4) == 0
    for tile in range(8):
        shapes[tile] = (16, 64) if odd else (side, 4 * side)
        if odd and rng.randint(2):
            shapes[tile] = (int(rng.randint(1, 17)), int(rng.randint(1, 65)))
        if rng.randint(12) == 0:
            del shapes[tile]
    start_row = 0 if rng.randint(4) else int(rng.choice([1, 3, 15, 16, 200]))
    content = bytearray(a.config(shapes, start_row=start_row))
    if rng.randint(16) == 0:
        content[rng.randint(64)] = rng.choice([0, 1, 2, 16, 17, 64, 65, 255])
    return bytes(content)


def _address(rng: np.random.RandomState, narrow: bool) -> int:
    base = arena.HIGH
    where = rng.randint(25) - 11
    if where < 9 or (narrow and where > 11):
        return base + int(rng.randint(0x1000, 0xC000))
    if where == 9:
        return base + int(rng.randint(arena.WRITABLE - 0x500, arena.WRITABLE + 0x40))
    if where == 10:
        edge = arena.WRITABLE + arena.READABLE
        return base + int(rng.randint(edge - 0x500, edge + 0x40))
    if where == 11:
        return base + int(rng.randint(arena.UNMAPPED, arena.UNMAPPED + 0x100))
    if where == 12:
        return int(
            rng.choice([0, 8, 0x7FFF_FFFF_F000 - 0x20, 0xFFFF_8000_0000_0000, 2**64 - 0x1000])
        )
    # not canonical with 48 or with 57 bits
    return int(rng.choice([0x0123_4567_89AB_CDEF, 0xF000_0000_0000_0000])) + int(rng.randint(64))


def mixed_case(seed: int, length: int = 8, configs: bool = True) -> Case:
    """Random instructions after a LDTILECFG; without ``configs`` no other one and no STTILECFG."""
    rng = np.random.RandomState(seed)
    registers: dict[int, int] = {a.RDI: arena.HIGH + CONFIG, a.R10: arena.HIGH + CONFIG + 0x40}
    memory = {CONFIG: _config(rng), CONFIG + 0x40: _config(rng)}
    program = a.memory("LDTILECFG", 0, a.Mem(a.RDI))
    bases, fs = list(rng.permutation(_BASES)), []
    for index in _INDEXES:
        registers[index] = int(rng.choice(_STRIDES)) % 2**64
    tiles = [int(t) for t in rng.randint(0, 8, 5)] + ([9] if rng.randint(8) == 0 else [])

    def tile() -> int:
        return int(rng.choice(tiles))

    for _ in range(length):
        what = rng.randint(12)
        prefix = bytes.fromhex(
            str(rng.choice(["", "", "", "2e", "3e", "67", "64", "65", "642e", "6564"]))
        )
        if what < 5 and bases:
            narrow = b"\x67" in prefix
            base = int(bases.pop())
            target = _address(rng, narrow)
            mem = a.Mem(
                base,
                int(rng.choice(_INDEXES)) if rng.randint(8) else None,
                scale=int(rng.choice([1, 1, 1, 2, 8])),
                disp=int(rng.choice([0, 0, 8, -64, 1000, -5000])),
                width=int(rng.choice([0, 4])),
                sib=True,
            )
            if prefix[-1:] == b"\x64" or prefix == b"\x64\x2e":
                fs.append(base)
            registers[base] = (target - mem.disp) % 2**64
            name = str(rng.choice(["TILELOADD", "TILELOADD", "TILESTORED", "TILELOADDT1"]))
            program += prefix + a.memory(name, tile(), mem)
        elif what < 8:
            c, left, right = (int(t) for t in rng.permutation(8)[:3])
            if rng.randint(4) == 0:
                c, left, right = (tile() for _ in range(3))
            program += prefix + a.tdp(DOTS[rng.randint(len(DOTS))], c, left, right)
        elif what == 8:
            program += prefix + a.tilezero(tile())
        elif what == 9 and rng.randint(6) == 0 and configs:
            program += a.tilerelease()
        elif what == 10 and configs:
            base = a.R10 if rng.randint(2) else a.RDI
            program += (
                a.memory("LDTILECFG", 0, a.Mem(base))
                if rng.randint(2)
                else a.memory("STTILECFG", 0, a.Mem(a.RDI, disp=0x80 + 0x40 * int(rng.randint(8))))
            )
        elif what == 11 and bases and configs:
            base = int(bases.pop())
            registers[base] = _address(rng, b"\x67" in prefix)
            if b"\x64" in prefix[-1:] or prefix == b"\x64\x2e":
                fs.append(base)
            name = str(rng.choice(["LDTILECFG", "STTILECFG"]))
            program += prefix + a.memory(name, 0, a.Mem(base, sib=bool(rng.randint(2))))
    return Case(program, registers, memory, tuple(fs))


def dump_program() -> bytes:
    """Stores TILECFG and every tile it can; run tile by tile, some may fault."""
    return a.memory("STTILECFG", 0, a.Mem(a.RDI, disp=DUMP))


def dump_tile(tile: int) -> bytes:
    return a.memory("TILESTORED", tile, a.Mem(a.RSI, a.RDX, disp=0x4000 + 0x400 * tile))
