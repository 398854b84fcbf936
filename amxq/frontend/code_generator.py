"""The walk over a kernel's syntax tree: Python source to tile-IR.

Names are bound to IR values, or to Python objects known at compile time. Typing rules are in
:mod:`amxq.frontend.semantic`; this file knows syntax, scopes and where an error is.
"""

from __future__ import annotations

import ast
import builtins as py
import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import amxq.language as tl
from amxq.errors import CompilationError
from amxq.frontend import control, wording
from amxq.frontend.builtins import HANDLERS, attribute
from amxq.frontend.descriptors import Int4Tensor, TensorDescriptor
from amxq.frontend.semantic import UNASSIGNABLE, Mistake, Semantic, describe, text_of
from amxq.frontend.shapes import beyond
from amxq.frontend.source import KernelSource
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Value
from amxq.ir.types import DType, PointerType, Type

_MAX_BITS = 1024
"""Of constants: longer ones would fill the memory before they are found not to fit."""


def _shifted(x: Any, y: Any) -> Any:
    return x << _short(y, y, x)


def _power(x: Any, y: Any) -> Any:
    return x ** _short(y, y * x.bit_length() if isinstance(x, int) else 0, x)


def _short(y: Any, bits: Any, x: Any) -> Any:
    """``y``, unless it makes a constant of more than so many bits of ``x``."""
    if isinstance(x, int) and isinstance(y, int) and bits > _MAX_BITS:
        raise OverflowError(f"the constant has more than {_MAX_BITS} bits")
    return y


# Syntax → the rule for values of the run time, and Python's operation on constants.
_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("truediv", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Mod: ("mod", operator.mod),
    ast.BitAnd: ("and", operator.and_),
    ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor),
    ast.LShift: ("shl", _shifted),
    ast.RShift: ("shr", operator.rshift),
    ast.Pow: ("pow", _power),
    ast.MatMult: ("matmul", operator.matmul),
}
_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("eq", operator.eq),
    ast.NotEq: ("ne", operator.ne),
    ast.Lt: ("lt", operator.lt),
    ast.LtE: ("le", operator.le),
    ast.Gt: ("gt", operator.gt),
    ast.GtE: ("ge", operator.ge),
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_SAFE_GLOBALS = (py.len, py.int, py.float, py.bool, py.tuple, py.isinstance)
_WITH_ATTRIBUTES = (TensorDescriptor, Int4Tensor, DType, PointerType)
_MAX_DEPTH = 32


Captured = dict[tuple[KernelSource, str], Any]
"""Globals that were used as constants, by function and name, with the value compiled in."""


def generate(
    source: KernelSource,
    types: dict[str, Type],
    constants: dict[str, Any],
    captured: Captured | None = None,
    facts: Mapping[str, int] = MappingProxyType({}),
) -> Function:
    """Tile-IR of a kernel for parameters of the given types and constant values; ``captured`` is
    filled. ``facts`` says which integer parameters are 1 (compiled in), or a multiple of what."""
    body = Block()
    params = {name: Value(type_, name) for name, type_ in types.items()}
    captured = {} if captured is None else captured
    builder = Builder(body)
    scope = {**params, **constants}
    for name, fact in facts.items():
        type_ = params[name].type
        scope[name] = (
            builder.constant(1, type_)
            if fact == 1
            else builder.value(ops.MultipleOf, type_, operand=params[name], by=fact)
        )
        scope[name].hint = name
    generator = CodeGenerator(source, builder, scope, captured)
    generator.run_body(source.tree.body)
    body.ops.append(ops.build(ops.Yield, (), generator.location(source.tree), values=()))
    return Function(source.name, tuple(params.values()), body)


class CodeGenerator:
    """One call of one jit function: its scope and the shared insertion point."""

    def __init__(
        self,
        source: KernelSource,
        builder: Builder,
        scope: dict[str, Any],
        captured: Captured,
        depth: int = 0,
    ) -> None:
        self.source = source
        self.captured = captured
        self.b = builder
        self.sem = Semantic(builder)
        self.scope = scope
        self.depth = depth
        self.location, self.error = source.location, source.error

    # --- statements -----------------------------------------------------------------------

    def run_body(self, statements: list[ast.stmt]) -> bool:
        """Generates statements in order; True if a return ended them."""
        for i, statement in enumerate(statements):
            self.b.loc = self.location(statement)
            if isinstance(statement, ast.If):
                rest = statements[i + 1 :]
                if self.guarded(statement, control.if_statement, self, statement, rest):
                    return True
                continue
            handler = getattr(self, f"stmt_{type(statement).__name__}", None)
            if handler is None:
                raise self.error(statement, *wording.statement(statement))
            if self.guarded(statement, handler, statement):
                return True
        return False

    def guarded(self, node: ast.AST, function: Any, *args: Any) -> Any:
        """Calls ``function``; a Mistake becomes a CompilationError at ``node``."""
        try:
            return function(*args)
        except Mistake as mistake:
            raise self.error(node, str(mistake), mistake.hint) from None
        except RecursionError:
            raise self.error(node, "this expression is nested too deeply") from None
        except (ArithmeticError, MemoryError, ValueError) as problem:  # of constants
            raise self.error(node, text_of(problem)) from None

    def stmt_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring does nothing
            self.eval(node.value)

    def stmt_Pass(self, node: ast.Pass) -> None:
        pass

    def stmt_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def stmt_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.eval(node.value))

    def stmt_AugAssign(self, node: ast.AugAssign) -> None:
        load = ast.copy_location(ast.Name(_name(node.target, self), ast.Load()), node.target)
        self.assign(node.target, self.binary(node, node.op, self.eval(load), self.eval(node.value)))

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, (tuple, list)) or len(value) != len(target.elts):
                raise self.error(
                    target, f"cannot unpack {describe(value)} into {len(target.elts)} names"
                )
            for part, item in zip(target.elts, value):
                self.assign(part, item)
            return
        name = _name(target, self)
        if isinstance(value, Value) and not value.hint and value.type:
            value.hint = name
        self.scope[name] = value

    def stmt_For(self, node: ast.For) -> None:
        control.for_loop(self, node)

    def stmt_While(self, node: ast.While) -> None:
        control.while_loop(self, node)

    def stmt_Return(self, node: ast.Return) -> bool:
        if node.value is not None:
            if self.depth == 0:
                raise self.error(node, "a kernel returns nothing", "store results with tl.store")
            self.scope[control.RETURNED] = self.eval(node.value)
        return True

    def stmt_Assert(self, node: ast.Assert) -> None:
        raise self.error(node, "assert is not part of the kernel language", "use tl.static_assert")

    # --- expressions ----------------------------------------------------------------------

    def eval(self, node: ast.expr) -> Any:
        handler = getattr(self, f"expr_{type(node).__name__}", None)
        if handler is None:
            raise self.error(node, *wording.expression(node))
        before, self.b.loc = self.b.loc, self.location(node)
        try:
            return self.guarded(node, handler, node)
        finally:
            self.b.loc = before

    def expr_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def expr_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.eval(e) for e in node.elts)

    def expr_List(self, node: ast.List) -> tuple[Any, ...]:
        return tuple(self.eval(e) for e in node.elts)

    def expr_Name(self, node: ast.Name) -> Any:
        if node.id in self.scope:
            value = self.scope[node.id]
            if isinstance(value, control.Unavailable):
                raise self.error(node, f"{node.id} {value.reason}", value.hint)
            return value
        found, value = self.source.lookup(node.id)
        if not found:
            raise self.error(node, f"name {node.id!r} is not defined")
        if callable(value) or isinstance(value, DType) or _is_module(value):
            return value
        if isinstance(value, (int, float, bool, str, tuple, type(None))):
            self.captured[self.source, node.id] = value
            return value
        raise self.error(
            node,
            f"{node.id} is {describe(value)}, which a kernel cannot use",
            "pass it as an argument",
        )

    def expr_Attribute(self, node: ast.Attribute) -> Any:
        owner = self.eval(node.value)
        if isinstance(owner, Value):
            return attribute(self.sem, owner, node.attr)
        if isinstance(owner, _WITH_ATTRIBUTES) or _is_module(owner):
            if not node.attr.startswith("_") and hasattr(owner, node.attr):
                return getattr(owner, node.attr)
        raise self.error(node, *wording.missing_attribute(owner, node.attr, dir(owner)))

    def expr_BinOp(self, node: ast.BinOp) -> Any:
        return self.binary(node, node.op, self.eval(node.left), self.eval(node.right))

    def binary(self, node: ast.AST, op: ast.operator, x: Any, y: Any) -> Any:
        kind, on_constants = _BINARY[type(op)]
        if not isinstance(x, Value) and not isinstance(y, Value):
            return self.fold(node, lambda: on_constants(x, y))
        return self.guarded(node, self.sem.binary, kind, x, y)

    def fold(self, node: ast.AST, operation: Callable[[], Any]) -> Any:
        """Python's own arithmetic on constants."""
        try:
            return operation()
        except (ArithmeticError, MemoryError, TypeError, ValueError) as problem:
            raise self.error(node, text_of(problem)) from None

    def expr_UnaryOp(self, node: ast.UnaryOp) -> Any:
        x = self.eval(node.operand)
        if not isinstance(x, Value):
            return self.fold(node, lambda: _UNARY[type(node.op)](x))
        if isinstance(node.op, ast.USub):
            return self.sem.unary("neg", x)
        if isinstance(node.op, ast.UAdd):
            return x
        return self.sem.negate(x) if isinstance(node.op, ast.Not) else self.sem.invert(x)

    def expr_Compare(self, node: ast.Compare) -> Any:
        operands = [self.eval(node.left), *(self.eval(c) for c in node.comparators)]
        pairs = zip(node.ops, operands, operands[1:])
        return self.sem.boolean("and", (self.compare(node, *pair) for pair in pairs))

    def compare(self, node: ast.Compare, op: ast.cmpop, x: Any, y: Any) -> Any:
        if isinstance(op, ast.Is):
            return x is y
        if isinstance(op, ast.IsNot):
            return x is not y
        if type(op) not in _COMPARE:
            raise self.error(node, f"the comparison {type(op).__name__} is not defined")
        kind, on_constants = _COMPARE[type(op)]
        if isinstance(x, Value) or isinstance(y, Value):
            return self.sem.compare(kind, x, y)
        return self.fold(node, lambda: on_constants(x, y))

    def expr_BoolOp(self, node: ast.BoolOp) -> Any:
        kind = "and" if isinstance(node.op, ast.And) else "or"
        return self.sem.boolean(kind, (self.eval(operand) for operand in node.values))

    def expr_IfExp(self, node: ast.IfExp) -> Any:
        condition = self.eval(node.test)
        if isinstance(condition, Value):
            return self.sem.where(condition, self.eval(node.body), self.eval(node.orelse))
        return self.eval(node.body if condition else node.orelse)

    def expr_Subscript(self, node: ast.Subscript) -> Any:
        owner, index = self.eval(node.value), self._index(node.slice)
        if isinstance(owner, tuple):
            if not isinstance(index, int) or not -len(owner) <= index < len(owner):
                raise self.error(node, f"the index of a tuple of {len(owner)} is {describe(index)}")
            return owner[index]
        return self.sem.index(owner, index if isinstance(index, tuple) else (index,))

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(self._index(e) for e in node.elts)
        if isinstance(node, ast.Slice):
            return _ALL if node.lower is node.upper is node.step is None else node
        return self.eval(node)

    # --- calls ----------------------------------------------------------------------------

    def expr_Call(self, node: ast.Call) -> Any:
        callee = self.eval(node.func)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise self.error(node, "* and ** arguments are not part of the kernel language")
        args = [self.eval(a) for a in node.args]
        kwargs = {str(k.arg): self.eval(k.value) for k in node.keywords}
        return self.call(node, callee, args, kwargs)

    def call(self, node: ast.Call, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if callee in (py.range, tl.range, tl.static_range):
            raise self.error(node, "a range is only allowed as the iterator of a for loop")
        if callee in (py.min, py.max) and len(args) > 1:
            of_two = HANDLERS[tl.minimum if callee is py.min else tl.maximum]
            return functools.reduce(lambda x, y: of_two(self.sem, x, y), args)
        try:
            if callee in HANDLERS:
                args = [self.function(node, a) for a in args]
                kwargs = {name: self.function(node, a) for name, a in kwargs.items()}
                return HANDLERS[callee](self.sem, *args, **kwargs)
            if hasattr(callee, "kernel_source"):
                return self.inline(node, callee.kernel_source, args, kwargs)
            if callee in _SAFE_GLOBALS:
                if any(isinstance(a, Value) for a in args):
                    what = f"{callee.__name__}() of a value of the run time"
                    raise Mistake(what, "value.to(tl.float32) converts, value.shape tells sizes")
                return callee(*args, **kwargs)
            if getattr(callee, "__module__", "").startswith("amxq.") and not _is_module(callee):
                return callee(*args, **kwargs)
        except TypeError as problem:
            # the builtin's handler is named after it, with an underscore before
            raise self.error(node, str(problem).removeprefix("_")) from None
        raise self.error(node, *wording.callee(callee))

    def function(self, node: ast.Call, value: Any) -> Any:
        """A jit function that is handed to a builtin, as a function of values."""
        source = getattr(value, "kernel_source", None)
        return value if source is None else functools.partial(self.combined, node, source)

    def combined(self, node: ast.Call, source: KernelSource, *args: Value) -> Any:
        result = self.inline(node, source, list(args), {})
        if not all(isinstance(op, (ops.Constant, *hw.POINTWISE)) for op in self.b.block.ops):
            raise beyond(source.name)
        return result

    def inline(
        self, node: ast.Call, source: KernelSource, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The body of another jit function, in a scope of its own."""
        if self.depth >= _MAX_DEPTH:
            raise self.error(node, f"jit functions call each other more than {_MAX_DEPTH} deep")
        scope = source.bind(args, kwargs)
        inner = CodeGenerator(source, self.b, scope, self.captured, self.depth + 1)
        try:
            inner.run_body(source.tree.body)
        except CompilationError as error:
            at = self.location(node)
            error.calls += ((at.file, at.line, at.column, self.source.line(at.line)),)
            raise
        return inner.scope.get(control.RETURNED)


_ALL = slice(None)


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


def _name(target: ast.expr, generator: CodeGenerator) -> str:
    if isinstance(target, ast.Name):
        return target.id
    raise generator.error(target, *UNASSIGNABLE)
