"""The Python examples of README.md and docs/ run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import write_checkpoint

from amxq import cli
from amxq.runtime import targets

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


def test_the_first_example_says_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "checkpoint-folder", chat=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(targets, "_choice", None)
    exec(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0], {})
    example = capsys.readouterr().out.splitlines()[-1]
    words = ("--prompt", "why is the sky blue", "--max-new-tokens", "8", "--target", "auto")
    assert cli.main(["generate", "checkpoint-folder", *words]) == 0
    assert capsys.readouterr().out == f"{example}\n"


def test_shares_of_the_roof_follow_from_the_tables() -> None:
    """docs/performance.md: what the paragraph below the tables of amxq.linear says of them."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    first = re.search(r"^\| 1 thread \|(.*)\| error \|$", text, re.MULTILINE)
    roof = re.search(
        r"TDPBF16PS ([\d.]+), TDPBSSD\s+([\d.]+),.*reading memory ([\d.]+) .*two threads ([\d.]+)",
        text,
        re.DOTALL,
    )
    assert first is not None and roof is not None
    tables = text[first.start() :]
    rows = re.findall(r"^\| amxq, (bf16|int8) \|(.*)\|$", tables, re.MULTILINE)[:4]
    columns = [int(re.findall(r"\d+", m)[-1]) for m in first[1].split("|")]
    us = [
        dict(
            zip(columns, (int(re.findall(r"\d+", c)[0]) for c in row.split("|")[:-1]), strict=True)
        )
        for _, row in rows
    ]
    products, memory = [float(r) * 1e12 for r in roof.groups()[:2]], map(float, roof.groups()[2:])
    gigabytes = 4096 * 4096 * (0.5 + 2 / 128) / 1e9
    one, two = (
        [gigabytes / (us[t + p][1] * 1e-6) / rate for p in (0, 1)]
        for t, rate in zip((0, 2), memory, strict=True)
    )
    tiles = [
        2 * 4096 * 4096 * m / (us[t + p][m] * 1e-6) / (threads * products[p])
        for m, t, threads in ((128, 0, 1), (512, 2, 2))
        for p in (0, 1)
    ]
    said = " ".join(text.split())
    for claim in (
        f"{one[0]:.0%} (bf16) and {one[1]:.0%} (int8) of the bandwidth, two to {two[0]:.0%}",
        f"{tiles[0]:.0%} of TDPBF16PS and {tiles[1]:.0%} of TDPBSSD",
        f"two threads to {tiles[2]:.0%} and {tiles[3]:.0%} of twice that",
    ):
        assert claim.replace("%", " %") in said, claim
