"""What every test may use: the folder of shared facts, and skips for absent instruction sets."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

#: Markers of tests that run machine code of a target.
TARGET_MARKERS = ("amx", "avx512_bf16")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``../shared`` beside the repository; tests that need it are skipped without."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder ../shared beside the repository")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name, tests marked for a target that this CPU does not run."""
    from amxq.runtime.targets import available_targets

    available = available_targets()
    for item in items:
        for name in TARGET_MARKERS:
            if item.get_closest_marker(name) is not None and name not in available:
                item.add_marker(pytest.mark.skip(reason=f"this CPU does not run target {name}"))
