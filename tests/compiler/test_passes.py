"""Single passes on tile-IR text: every file of passes/ says which pass runs (``// RUN: pass
[argument]``) and has its expectations beside the operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amxq.ir.ops import Function
from amxq.ir.parser import parse_function
from amxq.ir.printer import print_function
from amxq.ir.verifier import verify
from amxq.passes.carried_pointers import carry_distances
from amxq.passes.choose_dot import choose_dot
from amxq.passes.expand_math import expand_math
from amxq.passes.recurrences import carry_offsets
from amxq.passes.simplify import simplify
from amxq.passes.vectorize import vectorize
from tests.compiler.filecheck import CheckError, check

FOLDER = Path(__file__).parent / "passes"
PASSES: dict[str, Callable[..., Any]] = {
    "carry_distances": carry_distances,
    "carry_offsets": carry_offsets,
    "simplify": simplify,
    "choose_dot": choose_dot,
    "vectorize": lambda function, lanes: vectorize(function, int(lanes)),
    "expand_math": expand_math,
}


def after(text: str, file: str) -> Function:
    function = parse_function(text, file)
    verify(function, "the parser")
    runs = [line.split("RUN:")[1].split() for line in text.splitlines() if "RUN:" in line]
    assert runs
    for name, *arguments in runs:
        PASSES[name](function, *arguments)
        verify(function, name)
    return function


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.tir")), ids=lambda f: f.stem)
def test_pass(file: Path) -> None:
    text = file.read_text()
    printed = print_function(after(text, str(file)))
    check(printed, text)
    assert print_function(parse_function(printed)) == printed


# --- the checker itself -------------------------------------------------------------------

TEXT = "a = 1 // not seen\nb = 2\n\nc = a\nc = a\nlast 12"


@pytest.mark.parametrize(
    "lines",
    [
        "CHECK: a = 1\nCHECK-NEXT: b = {{[0-9]}}\nCHECK-NEXT: c",
        "CHECK: [[X:\\w]] = 1\nCHECK-NOT: zzz\nCHECK-COUNT-2: c = [[X]]\nCHECK: last",
        "CHECK: a\nCHECK-SAME: = 1\nCHECK-NOT: last 123",
        "CHECK: a\nCHECK-SAME: = [[ONE:1]]\nCHECK-NOT: last [[ONE]]",
    ],
)
def test_what_the_checker_accepts(lines: str) -> None:
    check(TEXT, lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "there is no CHECK"),
        ("CHECK: seen", "line 1: CHECK: seen"),
        ("CHECK: a = 1\nCHECK-NEXT: c", "line 2: CHECK-NEXT: c"),
        ("CHECK: b\nCHECK: a = 1", "line 2"),
        ("CHECK: a\nCHECK-SAME: a", "CHECK-SAME"),
        ("CHECK: a\nCHECK-NOT: b\nCHECK: c", "CHECK-NOT: b"),
        ("CHECK: a\nCHECK-NOT: last", "is met by"),
        ("CHECK-COUNT-3: c = a", "CHECK: c = a"),
        ("CHECK: [[X]]", "has no value yet"),
    ],
)
def test_what_the_checker_refuses(lines: str, message: str) -> None:
    with pytest.raises(CheckError, match=message.replace("[", r"\[")):
        check(TEXT, lines)
