"""Removes operations whose results nobody uses, and repeats of pure ones in a block.

Before:  %1 = cast %M : i64        After:  %1 = cast %M : i64
         %2 = cast %M : i64                %3 = mul %1, %1 : i64
         %3 = mul %1, %2 : i64
         %4 = add %3, %3 : i64     (unused)
"""

from __future__ import annotations

from typing import Any

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Function, Op, Value

_MEMORY = (ops.Load, ops.LoadBlock, hw.VectorLoad, hw.Gather, hw.Scratch)


def simplify(function: Function) -> None:
    _merge(function.body, {}, {})
    _drop(function.body, set())


def _merge(block: Block, known: dict[Any, Op], renamed: dict[Value, Value]) -> None:
    """Common subexpressions: an equal pure operation in this or an outer block serves."""
    known = dict(known)
    kept: list[Op] = []
    for op in block.ops:
        op = ops.replace_operands(op, lambda v: renamed.get(v, v))
        for region in ops.regions(op):
            _merge(region, known, renamed)
        if not op.effect and not isinstance(op, _MEMORY) and len(op.results) == 1:
            key = (type(op), op.result.type, *map(_key, ops.fields_of(op).values()))
            if key in known:
                renamed[op.result] = known[key].result
                continue
            known[key] = op
        kept.append(op)
    block.ops[:] = kept


def _key(value: Any) -> Any:
    # repr tells 0.0 from -0.0 and 1 from 1.0, which compare equal
    return value if isinstance(value, (Value, tuple)) else repr(value)


def _drop(block: Block, used: set[Value]) -> None:
    """Drops what nobody uses, the last operation first; ``used`` grows by what the rest uses."""
    kept: list[Op] = []
    for op in reversed(block.ops):
        if op.effect or any(r in used for r in op.results):
            kept.append(op)
            used.update(ops.operands(op))
            for region in ops.regions(op):
                _drop(region, used)
    block.ops[:] = reversed(kept)
