"""Tile-IR from text: the inverse of :mod:`amxq.ir.printer`, at any stage. The grammar, on one page:

    function  ::= "func" "@" NAME "(" [param ("," param)*] ")" ["tiles" tile+] "{" op* "}"
    param     ::= VALUE ":" type
    tile      ::= INT ":" INT "x" INT                     number, rows, bytes a row (AMX)
    op        ::= [VALUE ("," VALUE)* "="] body [":" type ("," type)*] region*
    body      ::= binary VALUE "," VALUE | compare VALUE "," VALUE | unary VALUE | NAME field*
    field     ::= NAME "=" (VALUE | "(" [VALUE ("," VALUE)*] ")" | attribute)
    attribute ::= NUMBER | "(" [NUMBER ("," NUMBER)*] ")" | WORD | STRING
    region    ::= "{" ["^" "(" param ("," param)* ")"] op* "}"
    type      ::= see amxq.ir.types

    binary, compare, unary: a kind of ops.BINARY, ops.COMPARE, ops.UNARY
    NAME: of an operation in amxq.ir.ops or amxq.ir.hardware, or of one of its fields, in any order;
          optional operands and False are left out; the regions are its blocks, in order
    VALUE ::= "%" letters, digits, "_", ".": defined once and before it is used
    STRING ::= as in JSON, for attributes that are not one word; "//" starts a comment

A parsed function is not verified: call :func:`amxq.ir.verifier.verify`. Operations are located at
their line and column of the text.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from typing import Any, NoReturn

from amxq.errors import TileIRError
from amxq.ir import hardware, ops
from amxq.ir.ops import Block, Function, Location, Op, Value
from amxq.ir.types import DTYPES, PointerType, TileType, Type, VectorType

_KINDS: dict[str, type[Op]] = {
    **dict.fromkeys(ops.BINARY, ops.Binary),
    **dict.fromkeys(ops.COMPARE, ops.Compare),
    **dict.fromkeys(ops.UNARY, ops.Unary),
}
_OPS: dict[str, type[Op]] = {
    cls.name: cls
    for module in (ops, hardware)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Op) and cls not in {Op, *_KINDS.values()}
}
_FIELDS = {
    cls: {f.name: str(f.type) for f in dataclasses.fields(cls) if f.name not in ("results", "loc")}
    for cls in _OPS.values()
}
_MAX_DEPTH = 64

_BLANK = re.compile(r"(?:\s+|//[^\n]*)*")
_WORD = re.compile(r"\w+")
_VALUE = re.compile(r"%([\w.]+)")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf\b|nan\b)")
_BOOL = re.compile(r"(?:True|False)\b")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_TYPE = re.compile(r"[\w<]+>*")
_TILE = re.compile(r"(\d+):(\d+)x(\d+)")
_SHAPED = re.compile(r"(tile|vec)<((?:\d{1,18}x)+)([\w<>]+)>")


def parse_function(text: str, file: str = "<tile-IR>") -> Function:
    """The function that ``text`` prints.

    Raises:
        TileIRError: the text is not of the grammar; names the line and column.
    """
    return _Parser(text, file).function()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.at = 0
        self.lines = [0, *(m.end() for m in re.finditer("\n", text))]
        self.values: dict[str, Value] = {}
        self.depth = 0

    # --- text -----------------------------------------------------------------------------

    def location(self, at: int) -> Location:
        line = bisect.bisect(self.lines, at)
        return Location(self.file, line, at - self.lines[line - 1])

    def error(self, message: str, at: int | None = None) -> NoReturn:
        place = self.location(self.at if at is None else at)
        raise TileIRError(
            message,
            file=self.file,
            line=place.line,
            column=place.column,
            source_line=self.text[self.lines[place.line - 1] :].split("\n", 1)[0],
        )

    def skip(self) -> int:
        """Past blanks and comments; where the next word starts."""
        found = _BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.at

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.skip())
        if found is not None:
            self.at = found.end()
        return found

    def need(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        return self.take(pattern) or self.error(f"expected {what}")

    def sign(self, text: str) -> bool:
        """Whether ``text`` stands here; it is taken."""
        found = self.text.startswith(text, self.skip())
        self.at += len(text) if found else 0
        return found

    def need_sign(self, text: str) -> None:
        if not self.sign(text):
            self.error(f"expected {text!r}")

    def listed(self, item: Any) -> tuple[Any, ...]:
        """Items between parentheses, separated by commas."""
        self.need_sign("(")
        found: list[Any] = []
        while not self.sign(")"):
            if found:
                self.need_sign(",")
            found.append(item())
        return tuple(found)

    # --- functions, blocks ----------------------------------------------------------------

    def function(self) -> Function:
        if self.need(_WORD, "func")[0] != "func":
            self.error("expected func")
        self.need_sign("@")
        name = self.need(_WORD, "the function's name")[0]
        params = self.listed(self.param)
        tiles: list[tuple[int, int]] = []
        if self.sign("tiles"):
            while (tile := self.take(_TILE)) is not None:
                number, rows, width = (self.integer(digits) for digits in tile.groups())
                if number != len(tiles):
                    self.error(f"expected tile {len(tiles)}", tile.start())
                tiles.append((rows, width))
        function = Function(name, params, self.region((), params_too=False), tuple(tiles))
        if self.skip() < len(self.text):
            self.error("expected the end of the text after the function")
        return function

    def param(self) -> Value:
        at, name = self.skip(), self.need(_VALUE, "a value")[1]
        self.need_sign(":")
        return self.define(name, self.type(), at)

    def region(self, args: tuple[Value, ...] = (), params_too: bool = True) -> Block:
        self.need_sign("{")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self.error(f"regions are nested more than {_MAX_DEPTH} deep")
        if params_too and self.sign("^"):
            args = self.listed(self.param)
        block = Block(args)
        while not self.sign("}"):
            block.ops.append(self.op())
        self.depth -= 1
        return block

    # --- operations -----------------------------------------------------------------------

    def op(self) -> Op:
        at = self.skip()
        names: list[tuple[str, int]] = []
        while (found := self.take(_VALUE)) is not None:
            names.append((found[1], found.start()))
            if not self.sign(","):
                self.need_sign("=")
                break
        name_at, name = self.skip(), self.need(_WORD, "an operation")[0]
        if name in _KINDS:
            cls, fields = _KINDS[name], self.positional(name)
        elif name in _OPS:
            cls = _OPS[name]
            fields = self.fields(cls, name_at)
        else:
            self.error(f"there is no operation {name}", name_at)
        types: list[Type] = []
        if self.sign(":"):
            types.append(self.type())
            while self.sign(","):
                types.append(self.type())
        if len(types) != len(names):
            self.error(f"{len(names)} results of {len(types)} types", name_at)
        # a region cannot see the results, so their names are bound after it
        fields |= {f: self.region() for f, kind in _FIELDS.get(cls, {}).items() if kind == "Block"}
        results = tuple(self.define(n, t, where) for (n, where), t in zip(names, types))
        return cls(results=results, loc=self.location(at), **fields)

    def positional(self, kind: str) -> dict[str, Any]:
        if kind in ops.UNARY:
            return {"kind": kind, "operand": self.value()}
        lhs = self.value()
        self.need_sign(",")
        return {"kind": kind, "lhs": lhs, "rhs": self.value()}

    def fields(self, cls: type[Op], at: int) -> dict[str, Any]:
        kinds, given = _FIELDS[cls], {}
        while (field := self.take(_WORD)) is not None:
            name = field[0]
            if name not in kinds or kinds[name] == "Block" or name in given:
                # without "=" it is the next operation
                if not self.text.startswith("=", self.skip()):
                    self.at = field.start()
                    break
                self.error(f"{cls.name} has no further field {name}", field.start())
            before = self.at
            if not self.sign("="):
                self.at = field.start()
                break
            given[name] = self.field(kinds[name], before)
        for name, kind in kinds.items():
            if kind in ("Value | None", "bool"):
                given.setdefault(name, False if kind == "bool" else None)
            elif name not in given and kind != "Block":
                self.error(f"{cls.name} misses the field {name}", at)
        return given

    def field(self, kind: str, at: int) -> Any:
        if kind in ("Value", "Value | None"):
            return self.value()
        if kind == "tuple[Value, ...]":
            return self.listed(self.value)
        if kind == "str":
            text = self.take(_STRING)
            return self.string(text) if text else self.need(_WORD, "a word or a string")[0]
        if kind == "bool":
            return self.need(_BOOL, "True or False")[0] == "True"
        if kind == "int":
            return self.number(whole=True)
        if kind == "tuple[int, ...]":
            return self.listed(lambda: self.number(whole=True))
        assert kind == "int | float | tuple[int, ...]", kind
        if self.text.startswith("(", self.skip()):
            return self.listed(lambda: self.number(whole=True))
        return self.number()

    # --- words ----------------------------------------------------------------------------

    def define(self, name: str, type_: Type, at: int) -> Value:
        if name in self.values:
            self.error(f"%{name} is defined twice", at)
        # what the printer adds to a name to make it unique is not part of the hint
        self.values[name] = Value(type_, "" if name[0].isdigit() else name.split(".")[0])
        return self.values[name]

    def value(self) -> Value:
        at, name = self.skip(), self.need(_VALUE, "a value")[1]
        return self.values.get(name) or self.error(f"%{name} is not defined", at)

    def string(self, text: re.Match[str]) -> str:
        try:
            return str(json.loads(text[0]))
        except ValueError:
            self.error("this is not a JSON string", text.start())

    def number(self, whole: bool = False) -> int | float:
        found = self.need(_NUMBER, "a number")
        text = found[0]
        if re.fullmatch(r"-?\d+", text):
            return self.integer(text)
        if whole:
            self.error("expected a whole number", found.start())
        return float(text)

    def integer(self, digits: str) -> int:
        if len(digits) > 20:
            self.error(f"the number {digits[:20]}… is too large", self.at - len(digits))
        return int(digits)

    def type(self) -> Type:
        at, text = self.skip(), self.need(_TYPE, "a type")[0]
        return _type(text) or self.error(f"{text} is not a type", at)


def _type(text: str) -> Type | None:
    if text in DTYPES:
        return DTYPES[text]
    shaped = _SHAPED.fullmatch(text)
    if shaped is None:
        element = DTYPES.get(text[4:-1])
        whole = text.startswith("ptr<") and text.endswith(">") and element is not None
        return PointerType(element) if whole and element is not None else None
    kind, sizes, rest = shaped.groups()
    inner, shape = _type(rest), tuple(map(int, sizes[:-1].split("x")))
    if kind == "tile" and not isinstance(inner, (TileType, VectorType, type(None))):
        return TileType(shape, inner) if len(shape) <= 3 and all(shape) else None
    if kind == "vec" and inner in DTYPES.values() and len(shape) == 1 and shape[0]:
        return VectorType(shape[0], inner)  # type: ignore[arg-type]
    return None
