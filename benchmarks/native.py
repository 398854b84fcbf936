"""Machine code from text, for measuring and recording what single instructions do.

This is the harness's own way to the hardware, apart from the compiler under test: LLVM IR
goes in (inline assembly allowed), callable functions come out.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import platform
from collections.abc import Callable, Sequence
from typing import Any

from amxq.runtime import cpu

_HUGE_PAGE = 2 << 20
_numbers = itertools.count()


def machine() -> dict[str, str]:
    """What tells this CPU from another; the keys are /proc/cpuinfo's, and ``kernel``."""
    info = cpu.parse_cpuinfo(cpu.CPUINFO.read_text(errors="replace"))
    wanted = ("vendor_id", "model name", "cpu family", "model", "stepping", "microcode")
    return {name: info.get(name, "unknown") for name in wanted} | {"kernel": platform.release()}


def compile_ir(
    text: str,
    functions: dict[str, Sequence[Any]],
    *,
    llvm_cpu: str = "sapphirerapids",
    features: str = "",
) -> dict[str, Callable[..., int]]:
    """Compile LLVM IR text in this process.

    Args:
        text: a module's functions; the target triple is set here.
        functions: name -> ctypes argument types; each returns i64.
        llvm_cpu, features: compiled for these; call the code only where its instructions exist.

    Returns:
        name -> callable; a call releases the GIL.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    triple = llvm.get_process_triple()
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm_cpu, features=features, opt=2
    )
    module = llvm.parse_assembly(text)
    module.triple = triple
    module.verify()
    builder = llvm.JITLibraryBuilder().add_ir(module)
    for name in functions:
        builder.export_symbol(name)
    library = builder.link(llvm.create_lljit_compiler(target), f"native{next(_numbers)}")

    callables: dict[str, Callable[..., int]] = {}
    for name, arguments in functions.items():
        function: Any = ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(library[name])
        function.library = library  # the code is unmapped with it
        callables[name] = function
    return callables


class Buffer:
    """Anonymous memory, 2 MB aligned, every page touched and not zero.

    Args:
        size: bytes.
        huge: ask for 2 MB pages; otherwise 4 KB pages are asked for.
    """

    def __init__(self, size: int, *, huge: bool = True) -> None:
        self._map = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        self.size = size
        ctypes.memset(self.address, 1, size)

    def fill(self, content: bytes) -> None:
        """Repeat ``content`` over the whole buffer."""
        for offset in range(0, self.size, len(content)):
            ctypes.memmove(self.address + offset, content, min(len(content), self.size - offset))
