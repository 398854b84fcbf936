"""Runs AMX machine code on CPUs without AMX, exactly and slowly, for testing.

``install()`` puts a SIGILL handler in the process that executes tile instructions as a
Xeon does: same bits, same faults, tile state for each thread. The handler is machine code
that LLVM makes from what this package generates; no C compiler is needed, and it calls
nothing of Python.

=============  ==============================================================
layout.py      offsets in Linux's structures and in the tables
emit.py        structured code on llvmlite.ir
decode.py      bytes at RIP -> instruction and addresses
memory.py      rows between tiles and the program's memory
dot.py         the six dot products
execute.py     one instruction: checks and effect
state.py       tile state by thread
handler.py     the signal handler: run, hand on, deliver faults
build.py       all of it, compiled for this CPU
signals.py     sigaction and friends through ctypes
process.py     the public functions
=============  ==============================================================
"""

from __future__ import annotations

from amxq.emulator.process import counts, install, is_installed, traps, uninstall

__all__ = ["counts", "install", "is_installed", "traps", "uninstall"]
