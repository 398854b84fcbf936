"""Just enough of an assembler for the emulator's tests: tile instructions and MOV imm64.

The encodings are written from the manual, apart from the emulator's decoder, so that a
mistake in one of them shows.
"""

from __future__ import annotations

from dataclasses import dataclass

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI = range(8)
R8, R9, R10, R11, R12, R13, R14, R15 = range(8, 16)

NONE, P66, PF3, PF2 = range(4)  # the VEX.pp field
TDP = {
    "TDPBF16PS": (0x5C, PF3),
    "TDPFP16PS": (0x5C, PF2),
    "TDPBSSD": (0x5E, PF2),
    "TDPBSUD": (0x5E, PF3),
    "TDPBUSD": (0x5E, P66),
    "TDPBUUD": (0x5E, NONE),
}
MEMORY = {
    "LDTILECFG": (0x49, NONE),
    "STTILECFG": (0x49, P66),
    "TILELOADD": (0x4B, PF2),
    "TILELOADDT1": (0x4B, P66),
    "TILESTORED": (0x4B, PF3),
}


@dataclass(frozen=True)
class Mem:
    """``[base + index * scale + disp]``; ``width`` forces the displacement to 1 or 4 bytes.

    ``rip`` makes it RIP-relative (LDTILECFG and STTILECFG only), ``sib`` forces a SIB byte.
    """

    base: int | None = None
    index: int | None = None
    scale: int = 1
    disp: int = 0
    width: int = 0
    rip: bool = False
    sib: bool = False


def vex(
    opcode: int,
    pp: int,
    *,
    r: int = 0,
    x: int = 0,
    b: int = 0,
    vvvv: int = 0,
    w: int = 0,
    length: int = 0,
    mmmmm: int = 2,
) -> bytes:
    """The three-byte VEX prefix and the opcode; r, x, b, vvvv as meant, not inverted."""
    first = (r ^ 1) << 7 | (x ^ 1) << 6 | (b ^ 1) << 5 | mmmmm
    second = w << 7 | (vvvv ^ 15) << 3 | length << 2 | pp
    return bytes([0xC4, first, second, opcode])


def modrm_memory(reg: int, mem: Mem) -> tuple[bytes, int, int]:
    """ModRM, SIB and displacement bytes, and the X and B bits they need."""
    if mem.rip:
        return bytes([reg << 3 | 5]) + mem.disp.to_bytes(4, "little", signed=True), 0, 0
    needs_sib = mem.sib or mem.index is not None or mem.base is None or mem.base & 7 == 4
    x = (mem.index or 0) >> 3
    b = (mem.base or 0) >> 3
    width = mem.width
    if mem.base is None:
        mod, width = 0, 4
    elif not width and mem.disp == 0 and mem.base & 7 != 5:
        mod = 0
    else:
        width = width or (1 if -128 <= mem.disp < 128 else 4)
        mod = 1 if width == 1 else 2
    out = bytes([mod << 6 | (reg & 7) << 3 | (4 if needs_sib else (mem.base or 0) & 7)])
    if needs_sib:
        index = 4 if mem.index is None else mem.index & 7
        base = 5 if mem.base is None else mem.base & 7
        out += bytes([(mem.scale.bit_length() - 1) << 6 | index << 3 | base])
    if width:
        out += mem.disp.to_bytes(width, "little", signed=True)
    return out, x, b


def memory(name: str, tile: int, mem: Mem) -> bytes:
    """LDTILECFG, STTILECFG (tile 0), TILELOADD, TILELOADDT1 or TILESTORED."""
    opcode, pp = MEMORY[name]
    tail, x, b = modrm_memory(tile & 7, mem)
    return vex(opcode, pp, r=tile >> 3, x=x, b=b) + tail


def tdp(name: str, c: int, a: int, b: int) -> bytes:
    """A dot product C += A * B on three tiles."""
    opcode, pp = TDP[name]
    return vex(opcode, pp, r=c >> 3, b=a >> 3, vvvv=b) + bytes([0xC0 | (c & 7) << 3 | a & 7])


def tilezero(tile: int) -> bytes:
    return vex(0x49, PF2, r=tile >> 3) + bytes([0xC0 | (tile & 7) << 3])


def tilerelease() -> bytes:
    return vex(0x49, NONE) + b"\xc0"


def mov(register: int, value: int) -> bytes:
    """MOV r64, imm64."""
    return bytes([0x48 | register >> 3, 0xB8 | register & 7]) + (value % 2**64).to_bytes(
        8, "little"
    )


def config(shapes: dict[int, tuple[int, int]], *, palette: int = 1, start_row: int = 0) -> bytes:
    """The 64 bytes for LDTILECFG: ``{tile: (rows, bytes per row)}``."""
    out = bytearray(64)
    out[0], out[1] = palette, start_row
    for tile, (rows, colsb) in shapes.items():
        out[16 + 2 * tile : 18 + 2 * tile] = colsb.to_bytes(2, "little")
        out[48 + tile] = rows
    return bytes(out)
