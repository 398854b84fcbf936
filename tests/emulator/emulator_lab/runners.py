"""Runs cases: on whatever answers tile instructions in this process, or by ``emulate``."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, NamedTuple

import numpy as np

from emulator_lab import arena, cases
from emulator_lab import assembler as a
from emulator_lab.probe import Probe

_GREG = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)
_SIGNALS = {1: (4, 2), 2: (11, 128), 3: (7, 128), 4: (11, 0)}


class Outcome(NamedTuple):
    """How a case ended. Addresses of #UD are RIP and so not kept; code 0: not known."""

    signal: int
    code: int
    address: int
    rip: int
    digest: bytes  # of everything that the program can have written, tiles included
    memory: bytes


class Runner:
    """Base: prepares memory, runs the program, then dumps the tiles that are left."""

    def __init__(self) -> None:
        self.arena = arena.Arena()
        self.probe = Probe()

    def execute(self, program: bytes, registers: dict[int, int]) -> tuple[int, int, int, int]:
        """(signal, code, address, rip offset), zeros when it reached its end."""
        fault = self.probe.run(program, registers)
        if fault is None:
            return 0, 0, 0, 0
        return fault.signal, fault.code, 0 if fault.signal == 4 else fault.address, fault.rip

    def run(self, case: cases.Case, seed: int, dump: bool = True) -> Outcome:
        self.arena.fill(seed % 16)
        for offset, content in case.memory.items():
            self.arena.high[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        registers = dict(case.registers)
        for register in case.fs:
            registers[register] = (registers[register] - arena.fs_base()) % 2**64
        self.execute(a.tilerelease(), {})
        ended = self.execute(case.program, registers)
        if dump:
            here = {a.RDI: arena.HIGH, a.RSI: arena.HIGH, a.RDX: 64}
            for program in (cases.dump_program(), *map(cases.dump_tile, range(8))):
                self.execute(program, here)
        memory = self.arena.writable()
        return Outcome(*ended, hashlib.sha256(memory).digest()[:8], memory)


class DirectRunner(Runner):
    """Calls the emulator's ``emulate`` on a made-up context: no signals, any machine."""

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self._machine = machine
        self._emulate = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(
            machine.emulate
        )

    def execute(self, program: bytes, registers: dict[int, int]) -> tuple[int, int, int, int]:
        body = self.probe.place(program, registers)
        context, fault = (ctypes.c_uint64 * 128)(), (ctypes.c_uint64 * 2)()
        for register, value in registers.items():
            context[5 + _GREG[register]] = value % 2**64
        start = self.probe.base + body
        context[5 + 16] = start
        while context[5 + 16] != start + len(program):
            result = self._emulate(ctypes.byref(context), ctypes.byref(fault))
            if result != 1:
                kind = fault[0] if result == 2 else 1
                signal, code = _SIGNALS[kind]
                return signal, code, fault[1] if kind == 4 else 0, context[5 + 16] - start
        return 0, 0, 0, 0
