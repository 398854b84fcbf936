"""What names are bound to inside an interpreted kernel: values with Python's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from amxq.frontend.builtins import attribute
from amxq.frontend.descriptors import Int4Tensor, TensorDescriptor
from amxq.frontend.semantic import UNASSIGNABLE, Mistake, Semantic, describe
from amxq.interpreter.evaluator import Evaluated
from amxq.ir.ops import Value
from amxq.ir.types import PointerType, element_of

Guard = Callable[..., Any]
"""Calls a rule with proxies taken off its arguments, and puts one on its result."""


class Proxy:
    """A scalar, a tile, a pointer or a descriptor. ``print`` shows a value's numbers, and
    ``numpy.asarray`` gives them; scalars are numbers and truth values to Python too."""

    __slots__ = ("_call", "_sem", "value")

    def __init__(self, sem: Semantic, call: Guard, value: Any) -> None:
        self._sem, self._call, self.value = sem, call, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if isinstance(self.value, Value):
            found = self._call(attribute, self._sem, self.value, name)
        else:
            found = getattr(self.value, name)
        if not callable(found):
            return wrap(self._sem, self._call, found)
        return lambda *args, **kwargs: self._call(found, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        return self._call(self._sem.index, self, entries)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call(_refuse_assignment)

    def __neg__(self) -> Any:
        return self._call(self._sem.unary, "neg", self)

    def __pos__(self) -> Any:
        return self

    def __invert__(self) -> Any:
        return self._call(self._sem.invert, self)

    # --- Python's view of a value -----------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.value.array, dtype, copy=True)

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __index__(self) -> int:
        return int(np.asarray(self._number()).__index__())

    def _number(self) -> Any:
        value = self.value
        if isinstance(value, Evaluated) and not value.array.shape and value.memory is None:
            return value.array[()]
        return self._call(_refuse, self)

    def __format__(self, form: str) -> str:
        return format(self._number(), form) if form else str(self)

    def __str__(self) -> str:
        if not isinstance(self.value, Evaluated):
            return repr(self.value)
        if self.value.memory is None:
            return str(self.value.array)
        element = element_of(self.value.type)
        assert isinstance(element, PointerType)
        return f"{self.value.memory.name} + {self.value.array // element.element.bytes}"

    def __repr__(self) -> str:
        return f"{self} : {self.value.type}" if isinstance(self.value, Value) else str(self)


def _refuse(value: Any) -> None:
    raise Mistake(f"{describe(value)} is not one number", "reduce it first, or use tl.where")


def _refuse_assignment() -> None:
    raise Mistake(*UNASSIGNABLE)


def _operator(rule: str, kind: str, swapped: bool = False) -> Callable[..., Any]:
    def apply(self: Proxy, other: Any) -> Any:
        operands = (other, self) if swapped else (self, other)
        return self._call(getattr(self._sem, rule), kind, *operands)

    return apply


_BINARY = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "truediv",
    "floordiv": "floordiv",
    "mod": "mod",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "lshift": "shl",
    "rshift": "shr",
    "pow": "pow",
    "matmul": "matmul",
}
for _name, _kind in _BINARY.items():
    setattr(Proxy, f"__{_name}__", _operator("binary", _kind))
    setattr(Proxy, f"__r{_name}__", _operator("binary", _kind, swapped=True))
for _kind in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_kind}__", _operator("compare", _kind))


def wrap(sem: Semantic, call: Guard, value: Any) -> Any:
    """``value`` as a kernel sees it."""
    if isinstance(value, (Value, TensorDescriptor, Int4Tensor)):
        return Proxy(sem, call, value)
    if isinstance(value, tuple):
        return tuple(wrap(sem, call, v) for v in value)
    return value


def unwrap(value: Any) -> Any:
    """``value`` as the rules see it."""
    if isinstance(value, Proxy):
        return value.value
    if isinstance(value, (tuple, list)):
        return type(value)(unwrap(v) for v in value)
    if isinstance(value, np.generic):
        return value.item()
    return value
