"""Where the fixtures are: ``../shared`` beside the repository, when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of checkpoints, configurations and layers; skips by name without it."""
    folder = SHARED / "fixtures"
    if not folder.is_dir():
        pytest.skip("../shared/fixtures is not here")
    return folder


@pytest.fixture
def amx_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine runs AMX and that nobody asked for a target."""
    _machine(monkeypatch, ["amx", "avx512_bf16", "avx512", "avx2"], None)


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine runs AVX2 alone and that nobody asked for a target."""
    _machine(monkeypatch, ["avx2"], None)


def _machine(monkeypatch: pytest.MonkeyPatch, runs: list[str], requested: str | None) -> None:
    from amxq.runtime import targets

    monkeypatch.setattr(targets, "available_targets", lambda: runs)
    monkeypatch.setattr(targets, "get_target", lambda: runs[0])
    monkeypatch.setattr(targets, "requested_target", lambda: requested)
