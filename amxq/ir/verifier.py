"""What tile-IR must satisfy between passes. LLVM here aborts the process on bad IR, so
whatever it would abort on is refused in this file, by name and with the offending line.

Rules about single operations are in :mod:`amxq.ir.rules` and :mod:`amxq.ir.hardware_rules`. On
top of them every operand must be defined before its use, in its block or an outer one, and tile
registers must fit the CPU's.
"""

from __future__ import annotations

import linecache

from amxq.errors import CompilationError
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.hardware_rules import HARDWARE_RULES
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.rules import RULES, yields

_RULES = {**RULES, **HARDWARE_RULES}


def verify(function: Function, stage: str) -> None:
    """Raises CompilationError naming ``stage`` for the first operation that breaks a rule."""
    if len(function.tiles) > 8 or any(
        not (0 < r <= 16 and 0 < b <= 64 and b % 4 == 0) for r, b in function.tiles
    ):
        raise _broken(None, f"tile configuration {function.tiles} is outside palette 1", stage)
    _verify_block(function.body, set(function.params), function, stage)
    if problem := yields(function.body, []):
        raise _broken(None, problem, stage)


def _verify_block(block: Block, outer: set[Value], function: Function, stage: str) -> None:
    seen = outer | set(block.args)
    for op in block.ops:
        for operand in ops.operands(op):
            if operand not in seen:
                raise _broken(op, f"uses {operand!r} before it is defined", stage)
        for region in ops.regions(op):
            _verify_block(region, seen, function, stage)
        rule = _RULES.get(type(op))
        try:
            problem = rule(op) if rule else "there is no rule for this operation"
        except (AssertionError, AttributeError, IndexError, TypeError, ValueError):
            problem = "it lacks a result, an operand or an argument of a region"
        if problem is None and isinstance(op, hw.TILE_OPS):
            problem = _tiles(op, function.tiles)
        if problem:
            raise _broken(op, problem, stage)
        seen.update(op.results)


def _tiles(op: Op, tiles: tuple[tuple[int, int], ...]) -> str | None:
    """AMX: palette 1 has 8 tiles of at most 16 rows of 64 bytes; every tile used must be
    configured, and the three of a multiplication must fit each other."""
    numbers = [v for k, v in ops.fields_of(op).items() if k in ("t", "c", "a", "b")]
    if any(type(n) is not int or not 0 <= n < len(tiles) for n in numbers):
        return f"tile number of {numbers} is not configured ({len(tiles)} tiles)"
    if isinstance(op, hw.TILE_DOTS):
        (c_rows, c_bytes), (a_rows, a_bytes), (b_rows, b_bytes) = (
            tiles[op.c],
            tiles[op.a],
            tiles[op.b],
        )
        if len(set(numbers)) < 3 or (c_rows, c_bytes, a_bytes) != (a_rows, b_bytes, 4 * b_rows):
            return f"tiles {op.c}, {op.a}, {op.b} do not fit: {tiles}"
    return None


def _broken(op: Op | None, problem: str, stage: str) -> CompilationError:
    loc = op.loc if op else ops.UNKNOWN
    return CompilationError(
        f"internal: the IR after {stage} is not valid: {op.name if op else 'function'}: {problem}",
        file=loc.file,
        line=loc.line,
        column=loc.column,
        source_line=linecache.getline(loc.file, loc.line).rstrip("\n"),
        hint="this is a bug in amxq's compiler, please report it with the kernel",
    )
