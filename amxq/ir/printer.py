"""Tile-IR as text, at any stage; the grammar is in :mod:`amxq.ir.parser`."""

from __future__ import annotations

import json

from amxq.ir import ops
from amxq.ir.ops import Block, Function, Op, Value


def print_function(function: Function) -> str:
    return _Printer().function(function)


class _Printer:
    def __init__(self) -> None:
        self._names: dict[Value, str] = {}
        self._taken: set[str] = set()

    def function(self, function: Function) -> str:
        params = ", ".join(f"{self.name(p)}: {p.type}" for p in function.params)
        tiles = ""
        if function.tiles:
            tiles = " tiles " + " ".join(f"{i}:{r}x{b}" for i, (r, b) in enumerate(function.tiles))
        body = "\n".join(self.block(function.body, "  "))
        return f"func @{function.name}({params}){tiles} {{\n{body}\n}}\n"

    def name(self, value: Value) -> str:
        if value not in self._names:
            name = value.hint or str(len(self._names))
            while name in self._taken:
                name = f"{value.hint}.{len(self._names)}" if value.hint else f"v{name}"
            self._taken.add(name)
            self._names[value] = f"%{name}"
        return self._names[value]

    def block(self, block: Block, indent: str) -> list[str]:
        lines: list[str] = []
        for op in block.ops:
            lines += self.op(op, indent)
        return lines

    def op(self, op: Op, indent: str) -> list[str]:
        text = indent
        if op.results:
            text += ", ".join(self.name(r) for r in op.results) + " = "
        text += self.body(op)
        if op.results:
            text += " : " + ", ".join(str(r.type) for r in op.results)
        lines = [text]
        for region in ops.regions(op):
            args = ", ".join(f"{self.name(a)}: {a.type}" for a in region.args)
            lines[-1] += f" {{ ^({args})" if args else " {"
            lines += self.block(region, indent + "  ")
            lines.append(indent + "}")
        return lines

    def body(self, op: Op) -> str:
        if isinstance(op, (ops.Binary, ops.Compare)):
            return f"{op.kind} {self.name(op.lhs)}, {self.name(op.rhs)}"
        if isinstance(op, ops.Unary):
            return f"{op.kind} {self.name(op.operand)}"
        parts = []
        for field, value in ops.fields_of(op).items():
            if isinstance(value, Block) or value is None or value is False:
                continue
            parts.append(f"{field}={self.field(value)}")
        return " ".join([op.name, *parts])

    def field(self, value: object) -> str:
        if isinstance(value, Value):
            return self.name(value)
        if isinstance(value, tuple):
            return "(" + ", ".join(self.field(v) for v in value) + ")"
        if isinstance(value, str) and not value.isidentifier():
            return json.dumps(value)
        return str(value)
