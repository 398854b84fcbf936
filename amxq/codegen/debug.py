"""Debug metadata: the source line that each instruction of a kernel comes from.

It is made for :func:`amxq.explain` only. LLVM emits the same instructions with and without it, but
takes longer, and an object would carry the paths of files.
"""

from __future__ import annotations

from amxq.ir.ops import Location

_HEAD = """\
!llvm.dbg.cu = !{{!0}}
!llvm.module.flags = !{{!5}}
!0 = distinct !DICompileUnit(language: DW_LANG_C99, file: !1, emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "{name}", directory: "")
!2 = distinct !DISubprogram(name: "{name}", file: !1, type: !3, unit: !0, spFlags: {flag})
!3 = !DISubroutineType(types: !4)
!4 = !{{}}
!5 = !{{i32 2, !"Debug Info Version", i32 3}}
"""


class LineTable:
    """Attaches places to lines of LLVM text as they are written, then gives their metadata."""

    def __init__(self) -> None:
        self._scopes: dict[str, int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._lines: list[str] = []

    def mark(self, lines: list[str], start: int, loc: Location) -> None:
        """Say that the instructions from ``lines[start]`` on, unless marked, come from ``loc``."""
        place = self._place(loc)
        for i in range(start, len(lines)):
            if lines[i].startswith("  ") and "!dbg" not in lines[i]:
                lines[i] += f", !dbg !{place}"

    def text(self, name: str) -> str:
        """The metadata; ``name`` is the kernel's."""
        return _HEAD.format(name=name, flag="DISPFlagDefinition") + "\n".join(self._lines) + "\n"

    def _place(self, loc: Location) -> int:
        scope = self._scopes.get(loc.file)
        if scope is None:
            file = self._add(f'!DIFile(filename: "{_quoted(loc.file)}", directory: "")')
            scope = self._add(f"!DILexicalBlockFile(scope: !2, file: !{file}, discriminator: 0)")
            self._scopes[loc.file] = scope
        place = self._places.get((scope, loc.line))
        if place is None:
            place = self._add(f"!DILocation(line: {loc.line}, scope: !{scope})")
            self._places[scope, loc.line] = place
        return place

    def _add(self, node: str) -> int:
        number = len(self._lines) + 6
        self._lines.append(f"!{number} = {node}")
        return number


def _quoted(text: str) -> str:
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
        for byte in text.encode(errors="surrogateescape")
    )
