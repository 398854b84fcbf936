"""Typing rules of atomic operations and of printing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amxq.frontend.semantic import Mistake, Operand, Semantic, describe, numbers
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import scalar_of, shape_of, with_element


def atomic(sem: Semantic, kind: str, pointer: Value, value: Operand, mask: Operand | None) -> Value:
    new = _operand(sem, pointer, value)
    if scalar_of(new.type).is_float and kind in ("and", "or", "xor"):
        raise Mistake(f"atomic {kind} needs integers, got {describe(pointer)}")
    guard = sem.mask(mask, new.type)
    return sem.b.value(ops.Atomic, new.type, kind=kind, pointer=pointer, value=new, mask=guard)


def compare_exchange(sem: Semantic, pointer: Value, expected: Operand, value: Operand) -> Value:
    old, new = _operand(sem, pointer, expected), _operand(sem, pointer, value)
    return sem.b.value(ops.CompareExchange, new.type, pointer=pointer, expected=old, value=new)


def _operand(sem: Semantic, pointer: Value, value: Operand) -> Value:
    """A value as the pointer's elements have it."""
    pointee = sem.pointee(pointer)
    if pointee.bits < 32:
        raise Mistake(
            f"atomic operations on {pointee}",
            "they take int32, int64, uint32, uint64, float32 and float64",
        )
    shape = shape_of(with_element(pointer.type, pointee))
    new = sem.b.cast(numbers(sem.value(value, pointee)), pointee)
    if shape_of(new.type) and not shape:
        raise Mistake(f"cannot store {describe(new)} through {describe(pointer)}")
    return sem.broadcast_to(new, shape)


def print_values(sem: Semantic, prefix: object, values: Iterable[Any]) -> None:
    if not isinstance(prefix, str):
        raise Mistake("the first argument of device_print is a constant string")
    shown = [numbers(sem.value(v)) for v in values]
    for i, _ in enumerate(shown):
        for j in range(i):
            shown[i], shown[j] = sem.broadcast(shown[i], shown[j])
    sem.b.emit(ops.Print, prefix=prefix, indices=(), values=tuple(shown))
