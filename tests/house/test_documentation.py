"""The Python examples of README.md and docs/ run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[object]:
    """One parameter for each page that has examples; a page's examples run one after another."""
    found: list[object] = []
    for page in PAGES:
        blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
        if blocks:
            found.append(pytest.param("\n".join(blocks), id=str(page.relative_to(ROOT))))
    return found


@pytest.mark.parametrize("code", examples())
def test_examples_run(code: str, tmp_path: Path) -> None:
    # A file and not -c: kernels are compiled from their source text.
    write_checkpoint(tmp_path / "checkpoint-folder")
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
