"""The rig: ../shared/amx-rig, built once into a folder outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD = ("amxq", "benchmarks/native.py", "tests/amx", "tests/emulator", "tests/rig")


class Rig:
    """A machine with AMX in software. Every run starts from its saved state and takes seconds."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program, self.folder = program, folder

    def build(self) -> str:
        """Builds what is missing; why that is not possible, or an empty string."""
        if (self.folder / "rig-default.json").exists():
            return ""
        packages = ("--pip", "numpy llvmlite", "--preload", "numpy llvmlite.binding")
        done = self._call("build", *packages, timeout=600)
        return "" if done.returncode == 0 else done.stderr[-500:]

    def run(self, payload: Path, out: Path, *arguments: str, cpu: str = "spr") -> None:
        """``guest.py`` with these arguments in the guest; its files come back to ``out``."""
        command = ("python3", "tests/rig/guest.py", *arguments, "/payload/out")
        place = ("--payload", str(payload), "--out", str(out), "--cpu", cpu, "--timeout", "400")
        done = self._call("run", *place, "--", *command, timeout=600)
        assert done.returncode == 0, f"{arguments} in the guest:\n{done.stdout}{done.stderr}"

    def _call(self, verb: str, *arguments: str, timeout: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.program), verb, "--dir", str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def rig(shared: Path) -> Rig:
    """Built on first use, in $AMXQ_RIG_DIR or the user's cache folder (1.5 GB)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = Rig(
        shared / "amx-rig" / "amx-rig", Path(os.environ.get("AMXQ_RIG_DIR") or home / "amxq-rig")
    )
    if not machine.program.exists():
        pytest.skip("needs ../shared/amx-rig")
    if problem := machine.build():
        pytest.skip(f"the rig cannot be built here: {problem}")
    return machine


@pytest.fixture(scope="session")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What goes into the guest: the package, the tests' programs, and recorded launches."""
    folder = tmp_path_factory.mktemp("payload")
    for name in PAYLOAD:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    launches = folder / "tests" / "rig" / "launches"
    program = [sys.executable, str(ROOT / "tests" / "rig" / "record_launches.py"), str(launches)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def emulated(out: Path, *arguments: str) -> None:
    """The same program on this machine, asked of the emulator."""
    program = [sys.executable, str(ROOT / "tests" / "rig" / "guest.py"), *arguments, str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
