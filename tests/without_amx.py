"""pytest plugin: AMX kernels run by the emulator, on any machine (``make test-emulated``).

    python -m pytest -p tests.without_amx tests/ops ...

The CPU's own AMX, if it has one, is hidden and its permission never asked for, so that every tile
instruction that touches data traps. Tests that run once for each target run for ``amx`` only. The
run fails if nothing was emulated, or if something in the process got the permission all the same.
"""

from __future__ import annotations

import os

import pytest

os.environ |= {
    "AMXQ_TARGET": "amx",
    "AMXQ_EMULATE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # torch would ask for the permission
}

from amxq import emulator  # noqa: E402
from amxq.emulator import signals  # noqa: E402
from amxq.runtime import cpu, targets  # noqa: E402

_flags = frozenset(flag for flag in cpu.flags() if not flag.startswith("amx"))
cpu.flags = lambda: _flags  # type: ignore[assignment]
targets.available_targets = lambda: ["amx"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    counts = emulator.counts()
    print(f"\nemulated: {sum(counts.values())} tile instructions in {emulator.traps()} traps")
    if signals.may_use_amx():
        print("the process had permission for the CPU's own AMX")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if not counts["TDPBF16PS"]:
        print("nothing was multiplied by the emulator")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
