"""The emulator against answers recorded from a Xeon (data/answers.json says which, when)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from emulator_lab import child
from emulator_lab.golden import DATA, FAMILIES, SPECIAL

from amxq.emulator import signals

needs_precise_faults = pytest.mark.skipif(
    not signals.can_copy_own_memory(), reason="process_vm_readv is forbidden here"
)


def test_recording_is_complete_and_small() -> None:
    about = json.loads((DATA / "answers.json").read_text(encoding="ascii"))
    assert about["cpu"]["vendor_id"] == "GenuineIntel"
    assert about["cases"] == {name: number for name, (_, number, _) in FAMILIES.items()}
    recorded = np.load(DATA / "answers.npz")
    assert recorded["special"].shape == (SPECIAL, 256)
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 200_000
    # every way to end is in it
    ended = np.concatenate([recorded[f"{name}_ended"][:, 0] for name in FAMILIES])
    assert set(ended.tolist()) == {0, 4, 7, 11}


@pytest.mark.parametrize("family", ["dots", "mixed", "plain"])
@needs_precise_faults
def test_same_as_hardware_without_signals(family: str) -> None:
    assert child.result("golden.called", family) == []


@needs_precise_faults
def test_same_as_hardware_compiled_for_avx2() -> None:
    assert child.result("golden.called", "dots", False) == []


def test_same_as_hardware_on_special_values() -> None:
    assert child.result("golden.called_special") == []
    assert child.result("golden.trapped_special") == []


@pytest.mark.parametrize("family", ["dots", "mixed", "plain"])
@needs_precise_faults
def test_same_as_hardware_with_signals(family: str) -> None:
    wrong = child.result("golden.trapped", family)
    if wrong is None:
        pytest.skip("this CPU's own AMX answers STTILECFG")
    assert wrong == []


def test_same_as_hardware_without_process_vm() -> None:
    assert child.result("golden.trapped_without_process_vm") == []


@pytest.mark.amx
@needs_precise_faults
def test_same_as_this_machines_amx() -> None:
    """Cases that are not recorded, on whatever AMX this machine has (AMX-FP16 too)."""
    first = 10**7
    hardware = child.result("golden.live", "hardware", first, 400)
    if not hardware:
        pytest.skip("this CPU has no AMX that a process may use")
    emulated = child.result("golden.live", "emulator", first, 400)
    wrong = [
        f"seed {first + i // 2} ({'dot' if i % 2 == 0 else 'mixed'}): hardware {h}, emulator {e}"
        for i, (h, e) in enumerate(zip(hardware, emulated, strict=True))
        if h != e
    ]
    assert wrong == []
