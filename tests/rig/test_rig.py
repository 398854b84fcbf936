"""AMX code on an implementation of AMX that this project did not write (``make amx-rig``).

Everything must agree bit for bit but what the rig is known to do otherwise: NaN payloads, TDPBSUD
and STTILECFG (its README.md), and sums of two numbers of opposite sign, which it flushes to zero
below 2**-125 where hardware does so below 2**-126 (found by these tests: 35 of 400 random dots near
underflow; hardware agrees with the emulator on all 400, Emerald Rapids, 2026-11-30).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.rig.conftest import ROOT, Rig, emulated

pytestmark = pytest.mark.amx_rig


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def differs(got: np.ndarray, want: np.ndarray, floats: bool) -> np.ndarray:
    """Where two arrays of 32-bit words differ, apart from what the rig is known to do."""
    different = got != want
    if not floats:
        return different
    with np.errstate(invalid="ignore", over="ignore"):
        error = got.view(np.float32).astype(np.float64) - want.view(np.float32)
    return different & ~(is_nan(got) & is_nan(want)) & ~(np.abs(error) < 2.0**-124)


def compare_cases(got: Path, want: Path) -> None:
    """Two answers to ``guest.py cases``; the disagreement with the fewest different lanes."""
    with np.load(got) as rig, np.load(want) as emulator:
        assert set(rig) == set(emulator)
        for family in rig:
            wrong = differs(rig[family], emulator[family], family != "integer")
            counts = wrong.sum(1)
            assert not counts.any(), (
                f"{family}: {np.count_nonzero(counts)} of {len(counts)} cases differ, the smallest "
                f"is {np.where(counts, counts, 999).argmin()} in {np.min(counts[counts > 0])} lanes"
            )


def test_dots_of_random_shapes_and_values(rig: Rig, payload: Path, tmp_path: Path) -> None:
    """Rig = emulator; the emulator = recorded hardware is tests/emulator."""
    rig.run(payload, tmp_path / "rig", "cases", "rig")
    emulated(tmp_path / "emulator", "cases", "emulator")
    compare_cases(tmp_path / "rig" / "cases.npz", tmp_path / "emulator" / "cases.npz")


def test_fp16_dots(rig: Rig, payload: Path, tmp_path: Path) -> None:
    """TDPFP16PS on a Granite Rapids: rig = emulator. No hardware here has it."""
    rig.run(payload, tmp_path / "rig", "fp16", "rig", cpu="gnr")
    emulated(tmp_path / "emulator", "fp16", "emulator")
    compare_cases(tmp_path / "rig" / "cases.npz", tmp_path / "emulator" / "cases.npz")


def test_the_answers_of_hardware(rig: Rig, payload: Path, tmp_path: Path) -> None:
    """Rig = the record of a Xeon (tests/amx/data): results of dots, and signals of faults."""
    rig.run(payload, tmp_path, "record")
    data = ROOT / "tests" / "amx" / "data"
    with np.load(tmp_path / "record.npz") as rig_answers, np.load(data / "dots.npz") as record:
        results = [x for x in record if x.endswith("/result") and not x.startswith("tdpbsud")]
        assert len(rig_answers) == len(results) > 0
        cases = sorted(rig_answers, key=lambda case: rig_answers[case].size)  # smallest first
        for case in cases:
            want = record[f"{case.replace(':', '/')}/result"].view(np.uint32)
            wrong = differs(rig_answers[case], want, case.startswith("tdpbf16ps"))
            assert not wrong.any(), f"{case}: {np.argwhere(wrong)[0]} of {wrong.sum()} lanes"
    faults = json.loads((tmp_path / "faults.json").read_text())
    recorded = json.loads((data / "hardware.json").read_text())["faults"]
    assert faults == {name: recorded[name] for name in faults}


def test_detection_and_permission(rig: Rig, payload: Path, tmp_path: Path) -> None:
    """Linux there always permits AMX: that it is asked for cannot be shown, only that asking
    works."""
    rig.run(payload, tmp_path, "system")
    seen = json.loads((tmp_path / "system.json").read_text())
    assert seen["hardware"] and seen["usable"] and seen["permission"] is True
    assert seen["targets"][0] == "amx"
    assert "Linux's permission" in seen["doctor"] and "granted" in seen["doctor"]


@pytest.mark.parametrize("cpu", ["spr", "gnr"])
def test_kernels_on_real_weights(rig: Rig, payload: Path, tmp_path: Path, cpu: str) -> None:
    """Objects compiled here, run there on one and on two threads: all memory that they leave is
    what the emulator's run left."""
    rig.run(payload, tmp_path, "launches", cpu, cpu=cpu)
    launches = payload / "tests" / "rig" / "launches"
    index = json.loads((launches / "index.json").read_text())
    for launch in [one for one in index if one["cpu"] == cpu]:
        stem = launch["stem"]
        with np.load(launches / f"{stem}.npz") as here, np.load(tmp_path / f"{stem}.npz") as there:
            for i in range(launch["regions"]):
                for threads in (1, 2):
                    got, want = there[f"threads{threads}:{i}"], here[f"after{i}"]
                    wrong = np.flatnonzero(got != want)
                    assert not wrong.size, (
                        f"{launch['what']}, {launch['kernel']} on {threads} threads: argument "
                        f"{i} differs in {wrong.size} bytes, first at {wrong[0]}"
                    )
