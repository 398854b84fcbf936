"""What the statements and expressions that :mod:`amxq.interpreter.rewrite` changes become. They
act for the program that runs in this thread."""

from __future__ import annotations

import builtins as py
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import amxq.language as tl
from amxq.frontend.builtins import HANDLERS
from amxq.interpreter.proxies import Proxy, unwrap
from amxq.ir.ops import Value
from amxq.ir.types import Type
from amxq.language.core import interpreting

Unbound = NameError


def _program() -> Any:
    return interpreting.get()


def _is_value(x: object) -> bool:
    return isinstance(x, Proxy) and isinstance(x.value, Value)


def _as_value(x: Any) -> Any:
    """A number of Python's as a value of the run time; anything else as it is."""
    program = _program()
    return program.call(program.sem.value, x) if isinstance(x, (int, float)) else x


def _truth(condition: Any) -> bool:
    """Whether a branch or another iteration is taken."""
    if _is_value(condition):
        _program().b.branch_or_loop()
        condition = _program().call(_program().sem.condition, condition)
    return bool(condition)


class Loop:
    """A loop, over ``items`` or as long as a condition holds. In one of the run time variables
    keep the types that they enter with."""

    def __init__(self, items: Iterable[Any], at_run_time: bool) -> None:
        self._items, self._at_run_time = items, at_run_time
        self._types: dict[str, Type] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def test(self, condition: Any) -> bool:
        return _truth(condition)

    def enter(self, name: str, x: Any) -> Any:
        if self._at_run_time:
            x = _as_value(x)
            if _is_value(x):
                self._types[name] = x.value.type
        return x

    def next(self, name: str, x: Any) -> Any:
        if name not in self._types:
            return x
        program = _program()
        return program.call(program.sem.carried, name, x, self._types[name], "in this loop")


def loop(callee: Callable[..., Any], *args: Any, **kwargs: Any) -> Loop:
    """The iterator of a for statement."""
    if callee is tl.static_range:
        return Loop(_program().call(_static_range, *args, **kwargs), False)
    if callee not in (py.range, tl.range):
        return Loop(callee(*args, **kwargs), False)
    given = dict(zip(("stop",) if len(args) == 1 else ("start", "stop", "step"), args)) | kwargs
    program = _program()
    program.b.branch_or_loop()
    bounds = (given.get("start", 0), given["stop"], given.get("step", 1))
    lower, upper, step = program.call(program.sem.bounds, *bounds)
    type_ = lower.value.type
    numbers = py.range(int(lower), int(upper), int(step))
    return Loop((program.call(program.sem.b.constant, i, type_) for i in numbers), True)


def _static_range(start: Any, stop: Any = None, step: Any = 1) -> Any:
    bounds = (0, start, step) if stop is None else (start, stop, step)
    return _program().sem.static_range(*bounds)


def endless() -> Loop:
    """The loop of a while statement."""
    return Loop((), True)


class Branch:
    """An if statement; one of the run time makes values of the constants that it sets."""

    def __init__(self, condition: Any) -> None:
        self._at_run_time = _is_value(condition)
        self._taken = _truth(condition)

    def taken(self) -> bool:
        return self._taken

    def leave(self, name: str, x: Any) -> Any:
        return _as_value(x) if self._at_run_time else x


branch = Branch


def boolean(kind: str, *operands: Callable[[], Any]) -> Any:
    program = _program()
    return program.call(program.sem.boolean, kind, (unwrap(x()) for x in operands))


def negate(x: Any) -> Any:
    program = _program()
    return program.call(program.sem.negate, x) if _is_value(x) else not x


def choose(condition: Any, then: Callable[[], Any], other: Callable[[], Any]) -> Any:
    if not _is_value(condition):
        return then() if condition else other()
    program = _program()
    return program.call(program.sem.where, condition, then(), other())


def call(callee: Any, *args: Any, **kwargs: Any) -> Any:
    """Python's min and max of two values."""
    if callee in (py.min, py.max) and len(args) == 2 and any(map(_is_value, args)):
        program = _program()
        rule = HANDLERS[tl.minimum if callee is py.min else tl.maximum]
        return program.call(rule, program.sem, *args)
    return callee(*args, **kwargs)
