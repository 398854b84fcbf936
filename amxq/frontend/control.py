"""Loops and branches: which names they carry, and what is visible after them."""

from __future__ import annotations

import ast
import builtins as py
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import amxq.language as tl
from amxq.frontend.semantic import describe
from amxq.ir import ops
from amxq.ir.ops import Block, Value
from amxq.ir.types import I1

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


def for_loop(gen: CodeGenerator, node: ast.For) -> bool | None:
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
        return _unrolled(gen, node, lower, upper, step)
    _rolled(gen, node, node.target.id, lower, upper, step)
    return None


def _bounds(gen: CodeGenerator, call: ast.Call) -> tuple[Any, Any, Any]:
    args = [gen.eval(a) for a in call.args]
    given = dict(zip(("stop",) if len(args) == 1 else ("start", "stop", "step"), args))
    for keyword in call.keywords:
        if keyword.arg not in ("start", "stop", "step") or keyword.arg in given:
            raise gen.error(call, f"range got an unexpected or repeated argument {keyword.arg}")
        given[keyword.arg] = gen.eval(keyword.value)
    if len(args) > 3 or "stop" not in given:
        raise gen.error(call, "a range takes stop, or start and stop, or start, stop and step")
    return given.get("start", 0), given["stop"], given.get("step", 1)


def _unrolled(gen: CodeGenerator, node: ast.For, lower: Any, upper: Any, step: Any) -> bool:
    if not all(isinstance(b, int) for b in (lower, upper, step)) or step == 0:
        raise gen.error(node.iter, "the bounds of tl.static_range are constants")
    assert isinstance(node.target, ast.Name)
    for i in py.range(lower, upper, step):
        gen.scope[node.target.id] = i
        if gen.run_body(node.body):
            return True
    return False


def _rolled(
    gen: CodeGenerator, node: ast.For, index: str, lower: Any, upper: Any, step: Any
) -> None:
    low, up, by = gen.guarded(node.iter, gen.sem.bounds, lower, upper, step)
    assigned = [n for n in assigned_names(node.body) if n != index and n in gen.scope]
    names = [n for n in assigned if _carriable(gen.scope[n])]
    inits = tuple(gen.sem.value(gen.scope[n]) for n in names)
    body = Block((Value(low.type, index), *(Value(v.type, n) for v, n in zip(inits, names))))
    before = dict(gen.scope)
    gen.scope[index] = body.args[0]
    gen.scope.update(zip(names, body.args[1:]))
    for name in set(assigned) - set(names):
        what = describe(gen.scope[name])
        gen.scope[name] = Unavailable(f"is {what} before this loop and something else in it")
    with gen.b.inside(body):
        if gen.run_body(node.body):
            raise gen.error(node, "return inside a loop is not part of the kernel language")
        results = tuple(
            gen.sem.carried(n, gen.scope[n], v.type, "in this loop") for n, v in zip(names, inits)
        )
        gen.b.emit(ops.Yield, values=results)
    after = gen.scope
    gen.scope = before
    gen.b.loc = gen.location(node)
    loop = gen.b.emit(
        ops.For,
        *(v.type for v in inits),
        lower=low,
        upper=up,
        step=by,
        inits=inits,
        body=body,
    )
    gen.scope.update(zip(names, loop.results))
    for name in (index, *after):
        if name not in before or name == index or (name in assigned and name not in names):
            gen.scope[name] = Unavailable(
                "is set inside of a loop only", "give it a value before the loop"
            )


def if_statement(gen: CodeGenerator, node: ast.If) -> bool | None:
    condition = gen.eval(node.test)
    if not isinstance(condition, Value):
        return gen.run_body(node.body if condition else node.orelse)
    if condition.type != I1:
        raise gen.error(node.test, f"the condition is {condition.type}, expected an int1 scalar")
    before = dict(gen.scope)
    scopes, blocks = [], []
    for statements in (node.body, node.orelse):
        gen.scope, block = dict(before), Block()
        with gen.b.inside(block):
            if gen.run_body(statements):
                raise gen.error(
                    node,
                    "return inside a branch that depends on a value of the run time",
                    "mask the stores instead",
                )
        scopes.append(gen.scope)
        blocks.append(block)
    assigned = dict.fromkeys(assigned_names(node.body) + assigned_names(node.orelse))
    equal = {n: scopes[0][n] for n in assigned if _equal(scopes[0].get(n), scopes[1].get(n))}
    names = [n for n in assigned if n not in equal and all(_carriable(s.get(n)) for s in scopes)]
    merged: list[tuple[Value, ...]] = [(), ()]
    types: list[Any] = []
    for name in names:
        with gen.b.inside(blocks[0]):
            first = gen.sem.value(scopes[0][name])
        with gen.b.inside(blocks[1]):
            second = gen.sem.carried(
                name, scopes[1][name], first.type, "in the branches of this if"
            )
        types.append(first.type)
        merged = [(*merged[0], first), (*merged[1], second)]
    for block, values in zip(blocks, merged):
        with gen.b.inside(block):
            gen.b.emit(ops.Yield, values=values)
    gen.scope = before
    gen.b.loc = gen.location(node)
    branch = gen.b.emit(ops.If, *types, condition=condition, then=blocks[0], other=blocks[1])
    gen.scope.update(zip(names, branch.results))
    gen.scope.update(equal)
    for scope in scopes:
        for name, value in scope.items():
            if name not in names and name not in equal and before.get(name) is not value:
                gen.scope[name] = Unavailable("is set in one branch of an if only")
    return None


def _equal(a: object, b: object) -> bool:
    """Whether two branches bind a name to one value of the run time, or to equal constants."""
    if isinstance(a, (int, float, str, tuple)) and type(a) is type(b):
        return repr(a) == repr(b)
    return a is b and not isinstance(a, Unavailable) and a is not None


def _carriable(value: object) -> bool:
    return isinstance(value, (Value, int, float))
