"""Object code to functions that can be called in this process.

A warm start loads an object from the cache without importing LLVM (150 ms): this is a linker
for the little that our objects contain. Their allocated sections are laid out in one mapping,
PC-relative references are resolved, and calls of C library functions (LLVM turns loops into
memset) go through stubs. The mapping is written first and made executable afterwards.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple

from amxq.errors import CacheError

_ALLOCATED = 2  # sh_flags: the section takes up memory
_NOBITS, _RELA, _SYMTAB = 8, 4, 2  # sh_type
_R_64, _R_PC32, _R_PLT32 = 1, 2, 4
_STUB = b"\xff\x25\x00\x00\x00\x00"  # jmp *(rip + 0), followed by the address
_STUB_BYTES = 16
_EXTERNALS = frozenset(("memset", "memcpy", "memmove", "fmod", "fmodf", "dprintf"))
_DAMAGE = (struct.error, LookupError, ValueError, ArithmeticError, OSError)


class DamagedObject(CacheError):
    """These bytes are not an object that amxq's compiler makes."""


@dataclass(frozen=True)
class Loaded:
    """The address of a kernel's entry point, see :mod:`amxq.codegen.llvm`; ``code`` keeps it
    mapped."""

    entry: int
    code: mmap.mmap


class _Section(NamedTuple):
    """An entry of the section header table (Elf64_Shdr)."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entsize: int


class _Symbol(NamedTuple):
    """An entry of the symbol table (Elf64_Sym)."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def load(name: str, image: bytes) -> Loaded:
    """Links the relocatable ELF object of kernel ``name`` into this process.

    Raises:
        DamagedObject: the object is not one that amxq's compiler makes.
        CacheError: the system refuses executable memory.
    """
    try:
        return _Linker(image).link(name)
    except _DAMAGE as problem:
        raise DamagedObject(f"the object of kernel {name!r} is damaged ({problem!r})") from None


def kernel_of(image: bytes) -> str:
    """The name of the kernel in an object, or an empty string if it is none of ours."""
    try:
        linker = _Linker(image)
        names = [linker.name_of(symbol) for symbol in linker.symbols]
    except _DAMAGE:
        return ""
    return next((n.removesuffix("_launch") for n in names if n.endswith("_launch")), "")


class _Linker:
    def __init__(self, image: bytes) -> None:
        self.image = image
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", image, 16) != (1, 62):
            raise ValueError("not a relocatable x86-64 ELF object")
        (table,) = struct.unpack_from("<Q", image, 40)
        (count,) = struct.unpack_from("<H", image, 60)
        shape = struct.Struct("<IIQQQQIIQQ")
        self.sections = [
            _Section(*shape.unpack_from(image, table + i * shape.size)) for i in range(count)
        ]
        symbols = [s for s in self.sections if s.type == _SYMTAB][0]
        shape = struct.Struct("<IBBHQQ")
        self.symbols = [
            _Symbol(*shape.unpack_from(image, symbols.offset + i * shape.size))
            for i in range(symbols.size // shape.size)
        ]
        self.strings = self._content(self.sections[symbols.link])

    def _content(self, section: _Section) -> bytes:
        data = self.image[section.offset : section.offset + section.size]
        if len(data) != section.size:
            raise ValueError("a section reaches past the end")
        return data

    def name_of(self, symbol: _Symbol) -> str:
        return self.strings[symbol.name : self.strings.index(b"\0", symbol.name)].decode()

    def link(self, name: str) -> Loaded:
        places: dict[int, int] = {}
        size = 0
        for i, section in enumerate(self.sections):
            if section.flags & _ALLOCATED and section.size:
                size = -(-size // max(section.align, 1)) * max(section.align, 1)
                places[i] = size
                size += section.size
        stubs: dict[str, int] = {}
        for symbol in self.symbols:
            if symbol.section == 0 and symbol.name:
                size = -(-size // _STUB_BYTES) * _STUB_BYTES
                stubs[self.name_of(symbol)] = size
                size += _STUB_BYTES
        code = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(code))
        for i, place in places.items():
            if self.sections[i].type != _NOBITS:
                content = self._content(self.sections[i])
                code[place : place + len(content)] = content
        for external, place in stubs.items():
            code[place : place + 14] = _STUB + struct.pack("<Q", _external(external))
        self._relocate(code, base, places, stubs)
        _make_executable(base, size)
        entries = {
            self.name_of(s): base + places[s.section] + s.value
            for s in self.symbols
            if s.section in places and s.name
        }
        return Loaded(entries[f"{name}_launch"], code)

    def _relocate(
        self, code: mmap.mmap, base: int, places: dict[int, int], stubs: dict[str, int]
    ) -> None:
        for section in self.sections:
            if section.type != _RELA or section.info not in places:
                continue
            start, limit = places[section.info], self.sections[section.info].size
            for offset, info, addend in struct.iter_unpack("<QQq", self._content(section)):
                symbol, kind = self.symbols[info >> 32], info & 0xFFFFFFFF
                if symbol.section in places:
                    target = places[symbol.section] + symbol.value
                else:
                    target = stubs[self.name_of(symbol)]
                width = 8 if kind == _R_64 else 4
                if offset + width > limit:
                    raise ValueError("a relocation lies outside of its section")
                place = start + offset
                if kind in (_R_PC32, _R_PLT32):
                    code[place : place + 4] = struct.pack("<i", target + addend - place)
                elif kind == _R_64:
                    code[place : place + 8] = struct.pack("<Q", base + target + addend)
                else:
                    raise ValueError(f"relocation type {kind}")


@functools.cache
def _external(name: str) -> int:
    """The address of a function of the C library."""
    if name not in _EXTERNALS:
        raise ValueError(f"it calls {name!r}")
    library = ctypes.CDLL("libm.so.6" if name.startswith("f") else None)
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _make_executable(base: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    protection = mmap.PROT_READ | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), protection) != 0:
        raise CacheError(
            f"the system refuses executable memory (mprotect: errno {ctypes.get_errno()}): amxq "
            "compiles kernels at run time and cannot work under this policy"
        )
