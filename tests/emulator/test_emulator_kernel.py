"""A compiled AMX kernel under the emulator, and the arithmetic that no machine here has."""

from __future__ import annotations

from emulator_lab import child


def test_kernel_matches_numpy_bit_for_bit() -> None:
    seen = child.result("kernel.matmul", 64, 96, 160)
    assert seen["same"]
    steps = 2 * 3 * 5  # 32 x 32 x 32
    counts = seen["counts"]
    assert counts["TDPBF16PS"] == counts["TILELOADD"] == 4 * steps
    assert counts["TILEZERO"] == counts["TILESTORED"] == 4 * 2 * 3
    assert seen["traps"] < sum(counts.values()) / 3


def test_linear_of_64_1024_1024_takes_less_than_seconds() -> None:
    """0.05 s on a Xeon (Emerald Rapids, VM, 2026-11-30)."""
    seen = child.result("kernel.matmul", 64, 1024, 1024)
    assert seen["same"] and seen["seconds"] < 4


def test_threads_have_their_own_tiles() -> None:
    assert child.result("kernel.threads", 6) == [True] * 24


def test_half_precision_is_exact() -> None:
    assert child.result("kernel.half_precision", 300) == []


def test_half_precision_special_values() -> None:
    assert child.result("kernel.half_precision_special") == []
