"""A jit function's source: its tree, where it stands in its file, and the names it sees."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import textwrap
from collections.abc import Callable
from functools import cached_property
from typing import Any

import amxq.language as tl
from amxq.errors import CompilationError
from amxq.frontend.semantic import Mistake
from amxq.ir.ops import Location

_LEAVING: dict[type[ast.AST], tuple[str, str]] = {
    ast.Break: ("break", "let the condition of a while loop say how long it runs"),
    ast.Continue: ("continue", "put what is left out under an if, or mask it"),
    ast.Return: ("return", "run the whole loop, and mask what is not needed"),
}


class KernelSource:
    """The Python function behind ``@amxq.jit``.

    Attributes:
        parameters: names in order.
        constexprs: names annotated with ``tl.constexpr``.
        defaults: name → default value.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                raise CompilationError(
                    f"{self.name}: parameter {parameter} is not supported",
                    file=function.__code__.co_filename,
                    line=function.__code__.co_firstlineno,
                    hint="kernels take plain parameters, without *, ** or /",
                )
        self.parameters = tuple(signature.parameters)
        self.constexprs = frozenset(
            p.name for p in signature.parameters.values() if _is_constexpr(p.annotation)
        )
        self.defaults = {
            p.name: p.default
            for p in signature.parameters.values()
            if p.default is not inspect.Parameter.empty
        }
        self.file = function.__code__.co_filename
        self.first_line = function.__code__.co_firstlineno

    @cached_property
    def tree(self) -> ast.FunctionDef:
        try:
            lines, _ = inspect.getsourcelines(self.function)
            self.indent = len(lines[0]) - len(lines[0].lstrip())
            tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        except (OSError, SyntaxError) as problem:
            raise self._unreadable(str(problem)) from None
        if not isinstance(tree, ast.FunctionDef):
            raise self._unreadable("it is not a def statement")
        for loop in ast.walk(tree):
            for node in ast.walk(loop) if isinstance(loop, (ast.For, ast.While)) else ():
                if type(node) in _LEAVING:
                    word, hint = _LEAVING[type(node)]
                    message = f"{word} inside a loop is not part of the kernel language"
                    raise self.error(node, message, hint)
        return tree

    def location(self, node: ast.AST) -> Location:
        line = getattr(node, "lineno", 1) + self.first_line - 1
        return Location(self.file, line, getattr(node, "col_offset", 0) + self.indent)

    def error(self, node: ast.AST, message: str, hint: str = "") -> CompilationError:
        at = self.location(node)
        return CompilationError(
            message,
            file=at.file,
            line=at.line,
            column=at.column,
            source_line=self.line(at.line),
            hint=hint,
        )

    def _unreadable(self, why: str) -> CompilationError:
        return CompilationError(
            f"the source of {self.name} cannot be read: {why}",
            file=self.file,
            line=self.first_line,
            hint="kernels are def statements in a file; exec and lambda keep no source",
        )

    indent = 0

    def line(self, number: int) -> str:
        return linecache.getline(self.file, number).rstrip("\n")

    def lookup(self, name: str) -> tuple[bool, Any]:
        """A name from the enclosing functions, the module, or Python's built-ins."""
        function = self.function
        if name in function.__code__.co_freevars and function.__closure__ is not None:
            cell = function.__closure__[function.__code__.co_freevars.index(name)]
            try:
                return True, cell.cell_contents
            except ValueError:  # the enclosing function has not assigned it yet
                return False, None
        for scope in (function.__globals__, vars(builtins)):
            if name in scope:
                value = scope[name]
                return True, value.value if isinstance(value, tl.constexpr) else value
        return False, None

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Parameter → argument of a call inside a kernel."""
        if len(args) > len(self.parameters):
            raise Mistake(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        bound = dict(zip(self.parameters, args))
        for name, value in kwargs.items():
            if name not in self.parameters or name in bound:
                raise Mistake(f"{self.name} got an unexpected or repeated argument {name!r}")
            bound[name] = value
        for name in self.parameters:
            if name not in bound:
                if name not in self.defaults:
                    raise Mistake(f"{self.name} misses the argument {name!r}")
                bound[name] = self.defaults[name]
        return bound


def _is_constexpr(annotation: Any) -> bool:
    if isinstance(annotation, str):  # from __future__ import annotations
        return annotation.split(".")[-1] == "constexpr"
    return annotation is tl.constexpr
