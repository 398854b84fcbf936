"""Loops and branches: which names they carry, and what is visible after them."""

from __future__ import annotations

import ast
import builtins as py
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import amxq.language as tl
from amxq.frontend.descriptors import BlockPointer
from amxq.frontend.semantic import Mistake, describe
from amxq.ir import ops
from amxq.ir.ops import Block, Value

if TYPE_CHECKING:
    from amxq.frontend.code_generator import CodeGenerator


@dataclass(frozen=True)
class Unavailable:
    """What a name is bound to where it may have no value; using it is an error."""

    reason: str
    hint: str = ""


def assigned_names(statements: list[ast.stmt]) -> list[str]:
    """Names that the statements bind, in order of appearance."""
    names: dict[str, None] = {}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


def for_loop(gen: CodeGenerator, node: ast.For) -> None:
    if not isinstance(node.iter, ast.Call):
        raise gen.error(node.iter, "a for loop iterates over range, tl.range or tl.static_range")
    if node.orelse:
        raise gen.error(node, "for … else is not part of the kernel language")
    if not isinstance(node.target, ast.Name):
        raise gen.error(node.target, "the loop variable is one name")
    callee = gen.eval(node.iter.func)
    if callee not in (py.range, tl.range, tl.static_range):
        raise gen.error(node.iter, "a for loop iterates over range, tl.range or tl.static_range")
    lower, upper, step = _bounds(gen, node.iter)
    if callee is tl.static_range:
        _unrolled(gen, node, lower, upper, step)
    else:
        _rolled(gen, node, node.target.id, lower, upper, step)


def _bounds(gen: CodeGenerator, call: ast.Call) -> tuple[Any, Any, Any]:
    args = [gen.eval(a) for a in call.args]
    given = dict(zip(("stop",) if len(args) == 1 else ("start", "stop", "step"), args))
    for keyword in call.keywords:
        if keyword.arg in ("num_stages", "loop_unroll_factor"):  # Triton's, without effect
            gen.eval(keyword.value)
            continue
        if keyword.arg not in ("start", "stop", "step") or keyword.arg in given:
            raise gen.error(call, f"range got an unexpected or repeated argument {keyword.arg}")
        given[keyword.arg] = gen.eval(keyword.value)
    if len(args) > 3 or "stop" not in given:
        raise gen.error(call, "a range takes stop, or start and stop, or start, stop and step")
    return given.get("start", 0), given["stop"], given.get("step", 1)


def _unrolled(gen: CodeGenerator, node: ast.For, lower: Any, upper: Any, step: Any) -> None:
    assert isinstance(node.target, ast.Name)
    for i in gen.guarded(node.iter, gen.sem.static_range, lower, upper, step):
        gen.scope[node.target.id] = i
        gen.run_body(node.body)


def _rolled(
    gen: CodeGenerator, node: ast.For, index: str, lower: Any, upper: Any, step: Any
) -> None:
    low, up, by = gen.guarded(node.iter, gen.sem.bounds, lower, upper, step)
    loop = _Loop(gen, node, {index})
    number = Value(low.type, index)
    body = loop.region(node.body, {index: number})
    op = gen.b.emit(
        ops.For,
        *loop.types,
        lower=low,
        upper=up,
        step=by,
        inits=loop.inits,
        body=Block((number, *body.args), body.ops),
    )
    loop.finish(op.results)


def while_loop(gen: CodeGenerator, node: ast.While) -> None:
    if node.orelse:
        raise gen.error(node, "while … else is not part of the kernel language")
    loop = _Loop(gen, node, set())
    test = loop.block()
    with gen.b.inside(test):
        value = gen.eval(node.test)
        if not isinstance(value, Value):
            raise gen.error(
                node.test,
                f"the condition of while is {describe(value)}",
                "it must depend on what the loop changes; unroll with tl.static_range",
            )
        condition = gen.guarded(node.test, gen.sem.condition, value)
        gen.b.emit(ops.Yield, values=(condition,))
    body = loop.region(node.body, {})
    op = gen.b.emit(ops.While, *loop.types, inits=loop.inits, test=test, body=body)
    loop.finish(op.results)


class _Loop:
    """What a loop at run time carries: the names that its body binds anew."""

    def __init__(self, gen: CodeGenerator, node: ast.For | ast.While, indices: set[str]) -> None:
        self.gen = gen
        self.node = node
        self.before = dict(gen.scope)
        self.indices = indices
        assigned = [n for n in assigned_names(node.body) if n not in indices]
        self.assigned = [n for n in assigned if n in gen.scope]
        self.carried = {n: gen.scope[n] for n in self.assigned if leaves(gen.scope[n]) is not None}
        self.inits = tuple(
            gen.sem.value(leaf) for value in self.carried.values() for leaf in leaves(value) or ()
        )
        self.types = tuple(v.type for v in self.inits)

    def block(self) -> Block:
        """A new block that takes the carried values; the scope is bound to its arguments."""
        hints = [n for n, value in self.carried.items() for _ in leaves(value) or ()]
        args = tuple(Value(t, h) for t, h in zip(self.types, hints))
        self.gen.scope = dict(self.before)
        for name in set(self.assigned) - set(self.carried):
            what = describe(self.before[name])
            reason = f"is {what} before this loop and something else in it"
            self.gen.scope[name] = Unavailable(reason)
        self._bind(args)
        return Block(args)

    def _bind(self, values: tuple[Value, ...]) -> None:
        rest = iter(values)
        for name, template in self.carried.items():
            self.gen.scope[name] = rebuilt(template, rest)

    def region(self, statements: list[ast.stmt], more: dict[str, Value]) -> Block:
        """The block of the loop's body, which yields the next values."""
        gen, block = self.gen, self.block()
        gen.scope.update(more)
        with gen.b.inside(block):
            gen.run_body(statements)
            gen.b.loc = gen.location(self.node)
            values: list[Value] = []
            for name, template in self.carried.items():
                types = self.types[len(values) : len(values) + len(leaves(template) or ())]
                values += _next(gen, name, gen.scope[name], template, types, "in this loop")
            gen.b.emit(ops.Yield, values=tuple(values))
        return block

    def finish(self, results: tuple[Value, ...]) -> None:
        """Binds names after the loop."""
        scope, self.gen.scope = self.gen.scope, dict(self.before)
        self._bind(results)
        for name in (*self.indices, *scope):
            lost = name in self.assigned and name not in self.carried
            if name not in self.before or name in self.indices or lost:
                self.gen.scope[name] = Unavailable(
                    "is set inside of a loop only", "give it a value before the loop"
                )


def if_statement(gen: CodeGenerator, node: ast.If, rest: list[ast.stmt]) -> bool:
    """``rest`` are the statements after it. Where a branch returns they become the end of both
    branches, and True says that they are done."""
    returns = any(isinstance(n, ast.Return) for n in ast.walk(node))
    rest = rest if returns else []
    condition = gen.eval(node.test)
    if not isinstance(condition, Value):
        gen.run_body((node.body if condition else node.orelse) + rest)
        return returns
    condition = gen.guarded(node.test, gen.sem.condition, condition)
    before = dict(gen.scope)
    scopes, blocks = [], []
    for statements in (node.body, node.orelse):
        gen.scope, block = dict(before), Block()
        with gen.b.inside(block):
            gen.run_body(statements + rest)
        scopes.append(gen.scope)
        blocks.append(block)
    gen.b.loc = gen.location(node)
    assigned = assigned_names(node.body) + assigned_names(node.orelse)
    if returns:
        assigned = [RETURNED] if any(s.get(RETURNED) is not None for s in scopes) else []
        if assigned and any(s.get(RETURNED) is None for s in scopes):
            raise gen.error(node, "a value is returned in one of the cases only")
    merged = _merge(gen, dict.fromkeys(assigned), scopes, blocks)
    gen.scope = before
    types = [v.type for v in merged.values[0]]
    branch = gen.b.emit(ops.If, *types, condition=condition, then=blocks[0], other=blocks[1])
    results = iter(branch.results)
    gen.scope.update({n: rebuilt(template, results) for n, template in merged.templates.items()})
    gen.scope.update(merged.equal)
    for scope in scopes:
        for name, value in scope.items():
            known = name in merged.templates or name in merged.equal
            if not known and before.get(name) is not value:
                gen.scope[name] = Unavailable("is set in one branch of an if only")
    return returns


RETURNED = "return"
"""What a return statement binds its value to: no variable has this name."""


@dataclass(frozen=True)
class _Merged:
    """Names after an if: those that both branches bind to one value, and those that the if
    gives, with the values that the two branches yield for them."""

    equal: dict[str, Any]
    templates: dict[str, Any]
    values: tuple[list[Value], list[Value]]


def _merge(
    gen: CodeGenerator, assigned: dict[str, None], scopes: list[dict[str, Any]], blocks: list[Block]
) -> _Merged:
    merged = _Merged({}, {}, ([], []))
    for name in assigned:
        both = [s.get(name) for s in scopes]
        if _equal(*both):
            merged.equal[name] = both[0]
        elif all(leaves(x) is not None for x in both):
            first, second = (leaves(x) or [] for x in both)
            # a constant takes the type that the other branch gives
            types = [
                next((v.type for v in pair if isinstance(v, Value)), None)
                for pair in zip(first, second)
            ]
            merged.templates[name] = both[0]
            for block, value, values in zip(blocks, both, merged.values):
                with gen.b.inside(block):
                    values += _next(gen, name, value, both[0], types, "in the branches of this if")
                    types = [v.type for v in values[len(values) - len(types) :]]
    for block, values in zip(blocks, merged.values):
        with gen.b.inside(block):
            gen.b.emit(ops.Yield, values=tuple(values))
    return merged


def _next(
    gen: CodeGenerator, name: str, value: Any, template: Any, types: Sequence[Any], where: str
) -> list[Value]:
    """The leaves of a carried variable's next value, which keep their types."""
    if isinstance(value, Unavailable):
        raise Mistake(f"{name} {value.reason}", value.hint)
    parts = leaves(value)
    if parts is None or len(parts) != len(types) or _form(value) != _form(template):
        was, now = describe(template), describe(value)
        raise Mistake(f"{name} changes its type {where}, from {was} to {now}")
    return [
        gen.sem.value(x) if t is None else gen.sem.carried(name, x, t, where)
        for x, t in zip(parts, types)
    ]


def _form(value: object) -> object:
    """What must not change of a variable, beside the types of its leaves."""
    if isinstance(value, tuple):
        return tuple(_form(x) for x in value)
    return value.at(()) if isinstance(value, BlockPointer) else None


def leaves(value: object) -> list[Any] | None:
    """What a variable consists of at run time: numbers and values; None if it cannot change."""
    if isinstance(value, (Value, int, float)):
        return [value]
    if isinstance(value, BlockPointer):
        return list(value.offsets)
    if not isinstance(value, tuple):
        return None
    parts = [leaves(x) for x in value]
    return None if any(p is None for p in parts) else [x for p in parts for x in p or ()]


def rebuilt(template: Any, values: Iterator[Value]) -> Any:
    """A variable like ``template`` that consists of the next of ``values``."""
    if isinstance(template, tuple):
        return tuple(rebuilt(x, values) for x in template)
    if isinstance(template, BlockPointer):
        return template.at(tuple(next(values) for _ in template.offsets))
    return next(values)


def _equal(a: object, b: object) -> bool:
    """Whether two branches bind a name to one value of the run time, or to equal constants."""
    if isinstance(a, (int, float, str, tuple)) and type(a) is type(b):
        return repr(a) == repr(b)
    return a is b and not isinstance(a, Unavailable) and a is not None
