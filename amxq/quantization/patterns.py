"""Regular expressions of configurations, matched in bounded time.

A configuration comes with a checkpoint, so its patterns may be hostile, and Python's ``re``
backtracks: ``(a+)+$`` takes hours on a name of forty letters, and no look at a pattern tells in
advance. Here a pattern is matched by sets of positions: a set is an integer with bit p for position
p of the name, each part of a pattern maps the set of positions where it may begin to the set of
those where it may end, and repeats are run until the set stops growing. Whether a name matches is
all that is asked, so greediness does not matter, and the answer is that of ``re``.

Every part's evaluation is a step, and a match that needs more than ``MAX_STEPS`` is an error.
What needs more than sets is refused: references to groups, atomic groups, possessive repeats,
inline flags.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from amxq.errors import QuantizationConfigError

MAX_LENGTH = 16_384
MAX_STEPS = 200_000

# The tree of a pattern, as Python's own parser makes it.
_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}

# A part: the name, its characters' positions and the steps left, with a set → the set after it.
_Part = Callable[["_Text", int], int]


class Pattern:
    """A compiled pattern; ``re.match`` and ``re.search`` for yes and no.

    Args:
        text: the regular expression.
        where: what it is the key of, for messages.

    Raises:
        QuantizationConfigError: it is no regular expression, too long, or needs what is refused.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        if len(text) > MAX_LENGTH:
            raise self._error(f"has {len(text)} characters; expected at most {MAX_LENGTH}")
        try:
            tree = _PARSER.parse(text)
            if tree.state.flags & ~(re.UNICODE.value):
                raise _Refused("inline flags")
            self._part = _sequence(tree)
        except _Refused as refused:
            raise self._error(f"has {refused}, which amxq does not match") from None
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"is not a regular expression ({error})") from None

    def match(self, name: str) -> bool:
        """Whether the pattern matches at the start of `name`. Raises as :meth:`search`."""
        return self._ends(name, 1)

    def search(self, name: str) -> bool:
        """Whether the pattern matches anywhere in `name`.

        Raises:
            QuantizationConfigError: that takes more than ``MAX_STEPS`` steps.
        """
        return self._ends(name, (2 << len(name)) - 1)

    def _ends(self, name: str, starts: int) -> bool:
        text = _text(name)
        text.steps = MAX_STEPS
        try:
            return self._part(text, starts) != 0
        except (_OutOfSteps, RecursionError):
            raise self._error(f"takes more than {MAX_STEPS} steps on {name[:80]!r}") from None

    def _error(self, what: str) -> QuantizationConfigError:
        shown = self.text if len(self.text) <= 120 else self.text[:120] + "…"
        return QuantizationConfigError(
            f"{self.where} has the key {shown!r}, which {what}; correct it, write it without "
            f"nested repeats, or escape the characters that it means literally"
        )


class _Refused(Exception):
    """The pattern holds something that sets of positions cannot express."""


class _OutOfSteps(Exception):
    """One match took too long."""


class _Text:
    """One name: for every character the positions that hold it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.length = len(name)
        self.all = (1 << self.length) - 1
        self.steps = 0
        self.at: dict[str, int] = {}
        self.classes: dict[object, int] = {}
        for position, character in enumerate(name):
            self.at[character] = self.at.get(character, 0) | 1 << position

    def where(self, holds: Callable[[str], bool]) -> int:
        """The positions whose character is one that `holds`; found once for a name."""
        if holds not in self.classes:
            self.classes[holds] = sum(at for character, at in self.at.items() if holds(character))
        return self.classes[holds]

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _OutOfSteps


# A configuration's patterns are tried on one name after another.
_text = lru_cache(maxsize=8)(_Text)


def _sequence(tree: Iterable[tuple[Any, Any]]) -> _Part:
    parts = [_part(str(kind), value) for kind, value in tree]

    def run(text: _Text, starts: int) -> int:
        for part in parts:
            text.step()
            starts = part(text, starts)
            if not starts:
                return 0
        return starts

    return run


def _part(kind: str, value: Any) -> _Part:
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _one_character(_class(kind, value))
    if kind == "SUBPATTERN":
        _, added, removed, tree = value
        if added or removed:
            raise _Refused("inline flags")
        return _sequence(tree)
    if kind == "BRANCH":
        return _branch([_sequence(tree) for tree in value[1]])
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        return _repeat(*value)
    if kind == "AT":
        return _anchor(str(value))
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _look(value[0], value[1], wanted=kind == "ASSERT")
    raise _Refused({"GROUPREF": "a reference to a group"}.get(kind, f"the construct {kind}"))


def _class(kind: str, value: Any) -> Callable[[_Text], int]:
    """The positions of a name that a part of one character matches."""
    if kind == "LITERAL":
        character = chr(value)
        return lambda text: text.at.get(character, 0)
    if kind == "NOT_LITERAL":
        other = chr(value)
        return lambda text: text.all & ~text.at.get(other, 0)
    if kind == "ANY":
        return lambda text: text.all & ~text.at.get("\n", 0)
    negated = str(value[0][0]) == "NEGATE"
    tests = [_member(str(item), operand) for item, operand in value[negated:]]

    def holds(character: str) -> bool:
        return any(test(character) for test in tests) != negated

    return lambda text: text.where(holds)


def _member(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "LITERAL":
        return lambda character: ord(character) == value
    if kind == "RANGE":
        low, high = value
        return lambda character: low <= ord(character) <= high
    category = str(value)
    test = _CATEGORIES[category.replace("_NOT_", "_")]
    return (lambda character: not test(character)) if "_NOT_" in category else test


def _one_character(positions: Callable[[_Text], int]) -> _Part:
    return lambda text, starts: (starts & positions(text)) << 1


def _branch(alternatives: list[_Part]) -> _Part:
    def run(text: _Text, starts: int) -> int:
        ends = 0
        for alternative in alternatives:
            text.step()
            ends |= alternative(text, starts)
        return ends

    return run


def _repeat(least: int, most: Any, tree: Any) -> _Part:
    body = list(tree)
    unbounded = str(most) == "MAXREPEAT"
    if unbounded and len(body) == 1 and str(body[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return _run_of_characters(least, _class(str(body[0][0]), body[0][1]))
    part = _sequence(body)

    def run(text: _Text, starts: int) -> int:
        current = starts
        for _ in range(least):
            text.step()
            before, current = current, part(text, current)
            if not current or current == before:  # no further round can change it
                break
        ends = new = current
        rounds = 0
        while new and (unbounded or rounds < most - least):
            text.step()
            new = part(text, new) & ~ends  # what has been reached needs no second round
            ends |= new
            rounds += 1
        return ends

    return run


def _run_of_characters(least: int, positions: Callable[[_Text], int]) -> _Part:
    """``c*``, ``c+``: in a run of ones, adding a one carries to the run's end."""

    def run(text: _Text, starts: int) -> int:
        class_ = positions(text)
        for _ in range(least):
            text.step()
            starts = (starts & class_) << 1
            if not starts:
                return 0
        return (((starts & class_) + class_) ^ class_) | starts

    return run


def _anchor(kind: str) -> _Part:
    def run(text: _Text, starts: int) -> int:
        end = 1 << text.length
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return starts & 1
        if kind == "AT_END_STRING":
            return starts & end
        if kind == "AT_END":
            return starts & (end | (text.at.get("\n", 0) & end >> 1))
        word = text.where(_CATEGORIES["CATEGORY_WORD"])
        boundary = word ^ (word << 1)
        if kind == "AT_NON_BOUNDARY":
            # An empty text has no boundary in Python before 3.14, and no non-boundary either.
            return starts & ~boundary & (end | text.all) if text.length else 0
        return starts & boundary

    return run


def _look(direction: int, tree: Any, *, wanted: bool) -> _Part:
    """Lookahead and lookbehind: keeps the positions beside which the part matches, or not."""
    part = _sequence(tree)
    if direction < 0:
        low, high = tree.getwidth()
        if low != high:
            raise re.error("look-behind requires fixed-width pattern")

    def run(text: _Text, starts: int) -> int:
        if direction < 0:
            before = part(text, text.all | 1 << text.length)
            return starts & (before if wanted else ~before)
        kept = 0
        left = starts
        while left:
            one = left & -left
            left ^= one
            text.step()
            if (part(text, one) != 0) == wanted:
                kept |= one
        return kept

    return run
