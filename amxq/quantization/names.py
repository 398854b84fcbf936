"""Lists of layer names, shortened for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def collapse(names: Iterable[str]) -> list[str]:
    """``layers.0.x, layers.1.x`` as ``layers.[0-1].x``: one entry for each kind of name.

    Names that differ in numbers only are of one kind. Where not all combinations of the numbers
    shown occur, the entry says how many do.
    """
    kinds: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in names:
        kind, numbers = split(name)
        kinds.setdefault(kind, []).append(numbers)
    return [_entry(kind, seen) for kind, seen in kinds.items()]


def split(name: str) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """A name's kind, its components with None for numbers, and the numbers."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal() and len(part) < 10]
    kind = tuple(None if i in numbers else part for i, part in enumerate(parts))
    return kind, tuple(int(parts[i]) for i in numbers)


def some(names: Iterable[str], most: int = 8) -> str:
    """The first kinds of names, and how many more there are."""
    kinds = collapse(names)
    more = f" and {len(kinds) - most} more kinds" if len(kinds) > most else ""
    return ", ".join(kinds[:most]) + more


def printable(text: str) -> str:
    """Names come from files: what a terminal would act on is shown as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _entry(kind: tuple[str | None, ...], seen: Sequence[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*seen, strict=True)]
    spans = map(_ranges, columns)
    text = printable(".".join(next(spans) if part is None else part for part in kind))
    possible = math.prod(map(len, columns))
    return text if len(set(seen)) == possible else f"{text} ({len(seen)} of {possible})"


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``[0-2,5]``, and a single number as itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "]"


def counted(number: int, what: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"
