"""What to say of Python that is not part of the language: the messages, and what to write instead.

Each function returns a message and a hint, which may be empty.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FunctionType

import amxq.language as tl
from amxq.errors import did_you_mean
from amxq.frontend.semantic import describe

_COMPREHENSION = ("comprehensions", "unroll a loop with tl.static_range, or compute with tiles")
_EXPRESSIONS = {
    "JoinedStr": ("f-strings", "tl.static_print and tl.device_print take the values one by one"),
    "ListComp": _COMPREHENSION,
    "SetComp": _COMPREHENSION,
    "DictComp": _COMPREHENSION,
    "GeneratorExp": _COMPREHENSION,
    "Lambda": ("lambda functions", "define a function with @amxq.jit, and call it"),
    "Dict": ("dicts", "use a tuple, or names of their own"),
    "Set": ("sets", "use a tuple"),
    "NamedExpr": ("assignments inside of expressions", "assign in a statement of its own"),
}
_STATEMENTS = {
    "FunctionDef": ("def", "define the function outside of the kernel, with @amxq.jit"),
    "ClassDef": ("class", ""),
    "ImportFrom": ("import", "import outside of the kernel"),
    "Import": ("import", "import outside of the kernel"),
    "Delete": ("del", ""),
    "Raise": ("raise", "use tl.static_assert"),
}
_IN_PLACE_OF = {"print": "device_print"}


def expression(node: ast.expr) -> tuple[str, str]:
    """An expression that kernels cannot have."""
    kind = type(node).__name__
    words, hint = _EXPRESSIONS.get(kind, (f"{kind} expressions", ""))
    return f"{words} are not part of the kernel language", hint


def statement(node: ast.stmt) -> tuple[str, str]:
    """A statement that kernels cannot have."""
    kind = type(node).__name__
    word, hint = _STATEMENTS.get(kind, (kind.lower(), ""))
    return f"{word} is not a statement of the kernel language", hint


def callee(function: object) -> tuple[str, str]:
    """What is called, but neither of the language nor a jit function."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return f"{describe(function)} cannot be called in a kernel", ""
    hints = []
    ours = _IN_PLACE_OF.get(name, name)
    if not ours.startswith("_") and callable(getattr(tl, ours, None)):
        hints.append(f"use tl.{ours}")
    if isinstance(function, FunctionType):
        hints.append("decorate it with @amxq.jit to call it from a kernel")
    hint = ", or ".join(hints) or "docs/language.md lists the functions that there are"
    return f"{name} is not a function of the kernel language", hint


def missing_attribute(owner: object, name: str, names: Iterable[str]) -> tuple[str, str]:
    """``owner.name``, where there are ``names`` only."""
    public = [known for known in names if not known.startswith("_")]
    close = did_you_mean(name, public).removeprefix("; ")
    return f"{describe(owner)} has no attribute {name!r}", close
