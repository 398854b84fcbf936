"""Puts this folder on the path: ``emulator_lab`` is what these tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True, scope="session")
def _needs_avx2() -> None:
    if " avx2 " not in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"):
        pytest.skip("the emulator needs a CPU with AVX2")
