"""Figures as Markdown tables, and summaries of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of a not empty sequence lies, no interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; its columns are the keys, in the order they first appear."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        return number(value) if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(cell(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)
