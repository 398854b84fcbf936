"""Scenarios: the recorded answers of hardware, asked of the emulator in its three forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amxq import emulator
from amxq.emulator import process, signals
from emulator_lab import cases, golden
from emulator_lab.probe import ask_for_amx
from emulator_lab.runners import DirectRunner, Runner

# the recorded machine had 48-bit addresses
_flags = process._cpu_flags() - {"la57"}
process._cpu_flags = lambda: _flags


def _machine() -> Any:
    emulator.install()
    assert process._emulator is not None
    return process._emulator.machine


def _has(flag: str) -> bool:
    return f" {flag} " in Path("/proc/cpuinfo").read_text(encoding="ascii").replace("\n", " ")


def cpu_has_amx() -> bool:
    """Then LDTILECFG, STTILECFG and TILERELEASE do not trap in a process without permission."""
    return _has("amx_tile")


def called(family: str, avx512: bool = True) -> list[str]:
    """Without signals: ``emulate`` on made-up contexts; every machine, every instruction."""
    if not avx512:
        flags = frozenset(flag for flag in _flags if not flag.startswith("avx512"))
        process._cpu_flags = lambda: flags
    return golden.compare(DirectRunner(_machine()), family, codes=False)


def called_special() -> list[str]:
    """The same on special values."""
    return golden.compare_special(DirectRunner(_machine()))


def trapped(family: str) -> list[str] | None:
    """With signals, as programs use it; None where this machine cannot say."""
    if family == "mixed" and cpu_has_amx():
        return None  # STTILECFG does not trap and would show the emulator's mark
    runner = Runner()
    emulator.install()
    return golden.compare(runner, family, codes=True)


def trapped_special() -> list[str]:
    runner = Runner()
    emulator.install()
    return golden.compare_special(runner)


def trapped_without_process_vm() -> list[str]:
    """Where a sandbox forbids process_vm_readv; only programs that end well."""
    signals.can_copy_own_memory = lambda: False
    runner = Runner()
    emulator.install()
    return golden.compare(runner, "dots", codes=True) + golden.compare_special(runner)


def live(where: str, first: int, number: int) -> list[list[Any]]:
    """Outcomes of cases that were never recorded: ``where`` is "hardware" or "emulator"."""
    if where == "hardware":
        if not ask_for_amx():
            return []
        runner = Runner()
    else:
        runner = DirectRunner(_machine())
    names = (*cases.DOTS, "TDPFP16PS") if _has("amx_fp16") else cases.DOTS
    out = []
    for seed in range(first, first + number):
        for case, dump in ((cases.dot_case(seed, names), False), (cases.mixed_case(seed), True)):
            ended = runner.run(case, seed, dump)
            # emulate() does not say why an address is bad
            code = 0 if (ended.signal, ended.code) in ((11, 1), (11, 2)) else ended.code
            out.append([ended.signal, code, ended.address, ended.rip, ended.digest.hex()])
    return out
