"""A kernel's function, changed where the language means something else than Python does.

Python's own for, while and if run; a loop over a range goes over typed numbers, and a constant
that a loop or a branch changes becomes a value of the run time, as in a compiled kernel:

    x = 0                                x = 0
    for i in range(n):                   loop = __amxq__.loop(range, n)
        x += i                           x = loop.enter("x", x)         (if it has a value yet)
                                         for i in loop:
                                             x += i
                                             x = loop.next("x", x)

``a and b``, ``a or b``, ``not a`` and ``a if c else b`` become calls, as tiles have no truth value;
so do ``min(a, b)`` and ``max(a, b)``. Lines and columns stay, for messages and for pdb.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import amxq.language as tl
from amxq.frontend.control import assigned_names
from amxq.frontend.source import KernelSource

HELPER = "__amxq__"
_codes: set[types.CodeType] = set()


def is_kernels(code: types.CodeType) -> bool:
    """Whether it is of a function that :func:`interpretable` made, or of an expression in one."""
    return code in _codes


@functools.cache
def interpretable(source: KernelSource, helper: Any) -> Callable[..., Any]:
    """The function behind ``source``, with ``helper`` (:mod:`amxq.interpreter.steps`) in its
    closure; it takes all parameters by name."""
    tree = copy.deepcopy(source.tree)
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults = []
    for argument in tree.args.args:
        argument.annotation = None
    _Rewriter().visit(tree)
    ast.increment_lineno(tree, source.first_line - 1)
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)):
            node.col_offset += source.indent
            node.end_col_offset = (node.end_col_offset or 0) + source.indent
    free = source.function.__code__.co_freevars
    outer = ast.parse(f"def outer({', '.join((HELPER, *free))}):\n    return None").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, tree)
    module = ast.fix_missing_locations(ast.Module([outer], type_ignores=[]))
    code = _named(_named(compile(module, source.file, "exec"), "outer"), source.name)
    _remember(code)
    cells = dict(zip(free, source.function.__closure__ or ()))
    cells[HELPER] = types.CellType(helper)
    closure = tuple(cells[name] for name in code.co_freevars)
    names = source.function.__globals__
    constants = {k: v.value for k, v in names.items() if isinstance(v, tl.constexpr)}
    names = {**names, **constants} if constants else names
    return types.FunctionType(code, names, source.name, None, closure)


def _remember(code: types.CodeType) -> None:
    _codes.add(code)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _remember(inner)


def _named(code: types.CodeType, name: str) -> types.CodeType:
    """The code of a function defined in ``code``."""
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def _fresh(self) -> str:
        self.count += 1
        return f"__amxq_{self.count}"

    # --- statements -----------------------------------------------------------------------

    def visit_For(self, node: ast.For) -> Any:
        names = assigned_names(node.body)
        self.generic_visit(node)
        if not isinstance(node.iter, ast.Call):
            return node
        loop = self._fresh()
        call = node.iter
        made = _assign(loop, ast.Call(_helper("loop"), [call.func, *call.args], call.keywords))
        node.iter = ast.Name(loop, ast.Load())
        node.body += [_update(n, loop, "next") for n in names]
        before = [_at(call, made), *(_update(n, loop, "enter") for n in names)]
        return [_at(node, s) for s in before] + [_at(node, node)]

    def visit_While(self, node: ast.While) -> Any:
        names = assigned_names(node.body)
        self.generic_visit(node)
        loop = self._fresh()
        node.test = ast.Call(_attribute(loop, "test"), [node.test], [])
        node.body += [_update(n, loop, "next") for n in names]
        made = ast.Call(_helper("endless"), [], [])
        before = [_assign(loop, made), *(_update(n, loop, "enter") for n in names)]
        return [_at(node, s) for s in before] + [_at(node, node)]

    def visit_If(self, node: ast.If) -> Any:
        fixed = _both(node)
        names = dict.fromkeys(assigned_names([node]))
        self.generic_visit(node)
        branch = self._fresh()
        made = _assign(branch, ast.Call(_helper("branch"), [node.test], []))
        node.test = ast.Call(_attribute(branch, "taken"), [], [])
        after = [_update(n, branch, "leave") for n in names if n not in fixed]
        return [_at(node, s) for s in (made, node, *after)]

    # --- expressions ----------------------------------------------------------------------

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        kind = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        return _at(node, ast.Call(_helper("boolean"), [kind, *map(_later, node.values)], []))

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        operands = [node.left, *node.comparators]
        pairs = zip(node.ops, operands, operands[1:])
        parts = [_later(ast.Compare(x, [op], [y])) for op, x, y in pairs]
        return _at(node, ast.Call(_helper("boolean"), [ast.Constant("and"), *parts], []))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return _at(node, ast.Call(_helper("negate"), [node.operand], []))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        args = [node.test, _later(node.body), _later(node.orelse)]
        return _at(node, ast.Call(_helper("choose"), args, []))

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            return _at(node, ast.Call(_helper("call"), [node.func, *node.args], node.keywords))
        return node


def _constants(statements: list[ast.stmt]) -> dict[str, str]:
    """Names that a branch binds to a number in its source: equal ones stay constants."""
    found: dict[str, str] = {}
    for statement in statements:
        for name in assigned_names([statement]):
            found.pop(name, None)
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                found[name] = repr(statement.value.value)
        if isinstance(statement, ast.If):
            found |= _both(statement)
    return found


def _both(node: ast.If) -> dict[str, str]:
    """Names that both branches bind to the same number."""
    other = _constants(node.orelse)
    return {n: text for n, text in _constants(node.body).items() if other.get(n) == text}


def _attribute(name: str, attribute: str) -> ast.expr:
    return ast.Attribute(ast.Name(name, ast.Load()), attribute, ast.Load())


def _helper(name: str) -> ast.expr:
    return _attribute(HELPER, name)


def _later(value: ast.expr) -> ast.expr:
    arguments = ast.arguments([], [], None, [], [], None, [])
    return ast.Lambda(arguments, value)


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _update(name: str, owner: str, method: str) -> ast.stmt:
    """``name = owner.method("name", name)`` if the name has a value."""
    args: list[ast.expr] = [ast.Constant(name), ast.Name(name, ast.Load())]
    assign = _assign(name, ast.Call(_attribute(owner, method), args, []))
    unbound = ast.ExceptHandler(_helper("Unbound"), None, [ast.Pass()])
    return ast.Try([assign], [unbound], [], [])


def _at(place: ast.stmt | ast.expr, node: Any) -> Any:
    """``node`` and all in it that has no place yet, at the first line of ``place``."""
    placed = (ast.expr, ast.stmt, ast.excepthandler)
    for inner in ast.walk(node):
        if isinstance(inner, placed) and not hasattr(inner, "lineno"):
            ast.copy_location(inner, place)
            # Python 3.11 says of a method's call that it is where the method's name ends
            inner.end_lineno, inner.end_col_offset = place.lineno, place.col_offset
    return node
