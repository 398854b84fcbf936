"""A small checker of text against expectations, after LLVM's FileCheck.

    // CHECK: text           a line after the last match contains it
    // CHECK-NEXT: text      the very next line does
    // CHECK-SAME: text      so does the rest of the line that matched last
    // CHECK-NOT: text       no line does between the matches before and after (or the end)
    // CHECK-COUNT-3: text   three lines, one after the other, as CHECK

In a text, ``{{…}}`` is a regular expression; ``[[NAME:…]]`` is one whose match is called NAME, and
``[[NAME]]`` is that match again. Runs of blanks count as one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"CHECK(-NEXT|-SAME|-NOT|-COUNT-(\d+))?:(.*)")
_PART = re.compile(r"\{\{(.+?)\}\}|\[\[(\w+)(?::(.+?))?\]\]")


class CheckError(AssertionError):
    """The text does not meet an expectation."""


@dataclass(frozen=True)
class _Check:
    kind: str
    pattern: str
    line: int


def check(text: str, expectations: str) -> None:
    """Raises CheckError for the first expectation (in comments of ``expectations``) that the
    text, without comments of its own, does not meet."""
    checks = _parse(expectations)
    if not any(c.kind != "-NOT" for c in checks):
        raise CheckError("there is no CHECK line")
    lines = [" ".join(line.split("//")[0].split()) for line in text.splitlines()]
    _Run([line for line in lines if line]).run(checks)


def _parse(text: str) -> list[_Check]:
    found: list[_Check] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (directive := _DIRECTIVE.search(line)) is None:
            continue
        suffix, count, pattern = directive.groups()
        kind = "" if count else suffix or ""
        found += [_Check(kind, " ".join(pattern.split()), number)] * int(count or 1)
    return found


class _Run:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.names: dict[str, str] = {}
        self.line, self.column = -1, 0  # of the last match's end

    def run(self, checks: list[_Check]) -> None:
        refused: list[_Check] = []
        for expected in checks:
            if expected.kind == "-NOT":
                refused.append(expected)
                continue
            before = self.line, self.column
            self._advance(expected)
            self._refuse(refused, before, self.line)
            refused = []
        self._refuse(refused, (self.line, self.column), len(self.lines))

    def _advance(self, expected: _Check) -> None:
        if expected.kind == "-SAME":
            candidates = [self.line]
        elif expected.kind == "-NEXT":
            candidates = [self.line + 1]
        else:
            candidates = list(range(self.line + 1, len(self.lines)))
        for number in candidates:
            start = self.column if expected.kind == "-SAME" else 0
            if 0 <= number < len(self.lines) and (found := self._search(expected, number, start)):
                self.names |= found.groupdict()
                self.line, self.column = number, found.end()
                return
        near = "\n  ".join(self.lines[max(self.line, 0) : self.line + 12])
        raise CheckError(
            f"line {expected.line}: CHECK{expected.kind}: {expected.pattern}\n"
            f"is not met after\n  {near}"
        )

    def _refuse(self, refused: list[_Check], before: tuple[int, int], until: int) -> None:
        for expected in refused:
            for number in range(before[0] + 1, until):
                if self._search(expected, number, 0):
                    raise CheckError(
                        f"line {expected.line}: CHECK-NOT: {expected.pattern}\nis met by\n"
                        f"  {self.lines[number]}"
                    )

    def _search(self, expected: _Check, number: int, start: int) -> re.Match[str] | None:
        pattern, at = "", 0
        for part in _PART.finditer(expected.pattern):
            pattern += re.escape(expected.pattern[at : part.start()])
            regex, name, named = part.groups()
            if regex:
                pattern += f"(?:{regex})"
            elif named:
                pattern += f"(?P<{name}>{named})"
            elif f"(?P<{name}>" in pattern:
                pattern += f"(?P={name})"
            elif name in self.names:
                # a name's text is a whole word: %1 is not found in %12
                pattern += re.escape(self.names[name]) + r"(?![\w.])"
            else:
                raise CheckError(f"line {expected.line}: [[{name}]] has no value yet")
            at = part.end()
        pattern += re.escape(expected.pattern[at:])
        return re.compile(pattern).search(self.lines[number], start)
