"""Lists of layer names, shortened."""

from __future__ import annotations

import pytest

from amxq.quantization.names import collapse, some


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0.x", "a.1.x", "a.3.x", "b"], ["a.[0-1,3].x", "b"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.1"], ["a.[0-1].e.[0-1]"]),
        (["a.0.e.0", "a.1.e.1"], ["a.[0-1].e.[0-1] (2 of 4)"]),
        (["lm_head"], ["lm_head"]),
        (["a..b", ".", ""], ["a..b", ".", ""]),
        (["a\x1b[2J.7"], ["a\\x1b[2J.7"]),
        (["a.12345678901"], ["a.12345678901"]),
        ([], []),
    ],
)
def test_collapse(names: list[str], expected: list[str]) -> None:
    assert collapse(names) == expected


def test_some_says_how_many_more() -> None:
    assert some(["a.0", "a.1", "b", "c"], 2) == "a.[0-1], b and 1 more kinds"
