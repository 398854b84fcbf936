"""pytest plugin: AMX kernels run by the emulator, on any machine (``make test-emulated``).

    python -m pytest -p tests.without_amx tests/ops ...

The CPU's own AMX, if it has one, is hidden and its permission never asked for, so that every tile
instruction that touches data traps. Tests that run once for each target run for ``amx`` only. The
run fails if nothing was emulated, or if something in the process got the permission all the same.
"""

from __future__ import annotations

import os
from typing import Any

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


_workers: list[tuple[int, int, bool]] = []
"""What each process of pytest-xdist has emulated, as :func:`_emulated` says it."""


def _emulated() -> tuple[int, int, bool]:
    """(TDPBF16PS emulated here, traps, whether the process may use the CPU's own AMX)."""
    return emulator.counts()["TDPBF16PS"], emulator.traps(), signals.may_use_amx()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error is None:
        _workers.append(tuple(node.workeroutput["emulated"]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["emulated"] = _emulated()
        return
    found = _workers or [_emulated()]
    products, traps = sum(w[0] for w in found), sum(w[1] for w in found)
    print(f"\nemulated: {products} TDPBF16PS, {traps} traps")
    if any(w[2] for w in found):
        print("a process had permission for the CPU's own AMX")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if not products:
        print("nothing was multiplied by the emulator")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
