"""Runs small machine-code programs in this process and reports how they ended.

The same probe runs on real AMX (a process that asked for permission) and on the emulator,
so whatever it reports can be compared. Signals end a program, not the process: a handler
in machine code notes the fault and continues at the program's epilogue.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from dataclasses import asdict, dataclass

import llvmlite.binding as llvm
import numpy as np

from emulator_lab import arena
from emulator_lab.assembler import mov

_PUSH = bytes.fromhex("53 55 4154 4155 4156 4157")  # rbx rbp r12 r13 r14 r15
_POP = bytes.fromhex("415f 415e 415d 415c 5d 5b c3")
_LANDING = arena.CODE_BYTES - 64
_RECORDER = """
define void @record(i32 %sig, ptr %info, ptr %uc) {{
  %out = inttoptr i64 {out} to ptr
  %s64 = zext i32 %sig to i64
  store i64 %s64, ptr %out
{copies}
  %rip = getelementptr i8, ptr %uc, i64 168
  store i64 {landing}, ptr %rip
  ret void
}}
"""
# what is copied from siginfo and ucontext: (name, base, offset, type)
_FIELDS = [
    ("code", "%info", 8, "i32"),
    ("address", "%info", 16, "i64"),
    ("rip", "%uc", 168, "i64"),
    ("error", "%uc", 192, "i64"),
    ("trap", "%uc", 200, "i64"),
    ("cr2", "%uc", 216, "i64"),
    ("mxcsr", "fp", 24, "i32"),
]


@dataclass(frozen=True)
class Fault:
    """One signal: rip is an offset in the program, the address is as the kernel gave it."""

    signal: int
    code: int
    address: int
    rip: int
    error: int
    trap: int
    cr2: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class SigAction(ctypes.Structure):
    """glibc's struct sigaction on x86-64."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


libc = arena.libc


def set_action(number: int, handler: int, flags: int = 4) -> SigAction:
    """Install a raw handler (default flags: SA_SIGINFO); returns what was there."""
    new, old = SigAction(handler=handler, flags=flags), SigAction()
    if libc.sigaction(number, ctypes.byref(new), ctypes.byref(old)):
        raise OSError(ctypes.get_errno(), "sigaction")
    return old


def ask_for_amx() -> bool:
    """Ask Linux to let this process use real tile data; False when it will not."""
    return libc.syscall(158, 0x1023, 18) == 0


def compile_ir(text: str) -> llvm.ExecutionEngine:
    """Compile LLVM text for this CPU; the result must be kept alive."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class Probe:
    """A page of code and the handler that records faults in it."""

    def __init__(self, signals: tuple[int, ...] = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)):
        self.base = arena.CODE
        arena.map_fixed(
            self.base, arena.CODE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        )
        self._code = arena.array_at(self.base, arena.CODE_BYTES)
        self._record = (ctypes.c_int64 * 16)()
        self._landing = self.base + _LANDING
        self._write(_LANDING, _POP)
        copies = ["  %fpp = getelementptr i8, ptr %uc, i64 224", "  %fp = load ptr, ptr %fpp"]
        for i, (name, base, offset, kind) in enumerate(_FIELDS):
            base = "%fp" if base == "fp" else base
            copies.append(f"  %{name}p = getelementptr i8, ptr {base}, i64 {offset}")
            copies.append(f"  %{name}v = load {kind}, ptr %{name}p")
            copies.append(f"  %{name}o = getelementptr i64, ptr %out, i64 {i + 1}")
            copies.append(f"  store {kind} %{name}v, ptr %{name}o")
        self._engine = compile_ir(
            _RECORDER.format(
                out=ctypes.addressof(self._record), landing=self._landing, copies="\n".join(copies)
            )
        )
        self.handler = self._engine.get_function_address("record")
        for number in signals:
            set_action(number, self.handler)

    def _write(self, at: int, code: bytes) -> None:
        self._code[at : at + len(code)] = np.frombuffer(code, np.uint8)

    def place(self, program: bytes, registers: dict[int, int], at: int = 0) -> int:
        """Write the program behind a prologue that loads the registers; offset of its body."""
        start = _PUSH + b"".join(mov(r, v) for r, v in registers.items())
        whole = start + program + _POP
        if at + len(whole) > _LANDING:
            raise ValueError("program too long")
        self._write(at, whole)
        return at + len(start)

    def run(
        self, program: bytes, registers: dict[int, int] | None = None, at: int = 0
    ) -> Fault | None:
        """Run it; None when it reached its end, else the fault that stopped it."""
        body = self.place(program, registers or {}, at)
        self._record[:] = [0] * 16
        ctypes.CFUNCTYPE(None)(self.base + at)()
        if not self._record[0]:
            return None
        r = self._record
        return Fault(
            signal=r[0],
            code=ctypes.c_int32(r[1]).value,
            address=r[2] % 2**64,
            rip=r[3] - self.base - body,
            error=r[4],
            trap=r[5],
            cr2=r[6] % 2**64,
        )

    @property
    def mxcsr(self) -> int:
        """MXCSR of the interrupted program at the last fault."""
        return int(self._record[7])
