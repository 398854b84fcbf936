"""What tile-IR must satisfy between passes. LLVM here aborts the process on bad IR, so
whatever it would abort on is refused in this file, by name and with the offending line.

Each rule is a function of one operation that returns what is wrong, or None; ``RULES`` is the
table. On top of it every operand must be defined before its use, in its block or an outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amxq.errors import CompilationError
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Block, Function, Op, Value
from amxq.ir.types import (
    BF16,
    F32,
    I1,
    I64,
    U4,
    DType,
    PointerType,
    TileType,
    VectorType,
    element_of,
    shape_of,
    with_element,
)

Rule = Callable[[Any], "str | None"]


def _same_types(op: ops.Binary) -> str | None:
    if op.kind not in ops.BINARY:
        return f"unknown kind {op.kind}"
    if not op.lhs.type == op.rhs.type == op.result.type:
        return f"types differ: {op.lhs.type}, {op.rhs.type} -> {op.result.type}"
    element = element_of(op.lhs.type)
    if not isinstance(element, DType):
        return f"needs numbers, got {op.lhs.type}"
    if op.kind in ("and", "or", "xor", "shl", "shr") and element.is_float:
        return f"{op.kind} needs integers, got {op.lhs.type}"
    return None


def _compare(op: ops.Compare) -> str | None:
    if op.kind not in ops.COMPARE or op.lhs.type != op.rhs.type:
        return f"{op.kind} of {op.lhs.type} and {op.rhs.type}"
    return None if op.result.type == with_element(op.lhs.type, I1) else "result must be i1"


def _select(op: ops.Select) -> str | None:
    if not op.then.type == op.other.type == op.result.type:
        return f"branches differ: {op.then.type}, {op.other.type}"
    if op.condition.type not in (I1, with_element(op.then.type, I1)):
        return f"condition is {op.condition.type}"
    return None


def _constant(op: ops.Constant) -> str | None:
    element = element_of(op.result.type)
    if not isinstance(element, DType):
        return f"a constant of type {op.result.type}"
    if isinstance(op.value, tuple):
        wide = isinstance(op.result.type, VectorType) and len(op.value) == op.result.type.lanes
        return None if wide else "lanes do not match the vector"
    if isinstance(op.value, float) != element.is_float:
        return f"{op.value!r} does not fit {element}"
    return None


def _dot(op: ops.Dot) -> str | None:
    lhs, rhs, out = op.lhs.type, op.rhs.type, op.result.type
    tiles = isinstance(lhs, TileType) and isinstance(rhs, TileType) and isinstance(out, TileType)
    if not tiles or not (len(shape_of(lhs)) == len(shape_of(rhs)) == 2):
        return f"needs two tiles of rank 2, got {lhs} and {rhs}"
    (m, k), (k2, n) = shape_of(lhs), shape_of(rhs)
    if k != k2 or out != TileType((m, n), F32):
        return f"{lhs} times {rhs} gives {out}"
    return None if op.acc is None or op.acc.type == out else f"acc is {op.acc.type}"


def _load_int4(op: ops.LoadInt4) -> str | None:
    shape = shape_of(op.result.type)
    if element_of(op.result.type) != U4 or len(shape) != 2 or shape[0] % 8 or shape[1] % 32:
        return f"needs tile<8·i x 32·j x u4>, got {op.result.type}"
    return None


def _block_access(op: ops.LoadBlock | ops.StoreBlock) -> str | None:
    tile = op.result.type if isinstance(op, ops.LoadBlock) else op.value.type
    rank = len(shape_of(tile))
    if not rank or not rank == len(op.offsets) == len(op.strides) == len(op.bounds):
        return f"{tile} with {len(op.offsets)} offsets, {len(op.bounds)} bounds"
    if op.base.type != PointerType(element_of(tile)):  # type: ignore[arg-type]
        return f"{op.base.type} does not address {tile}"
    if any(v.type != I64 for v in (*op.offsets, *op.strides, *op.bounds)):
        return "offsets, strides and bounds are i64"
    return None if all(0 <= d < rank for d in op.checked) else f"checked={op.checked}"


def _access(op: ops.Load | ops.Store) -> str | None:
    value = op.result if isinstance(op, ops.Load) else op.value
    pointee = element_of(op.pointer.type)
    if not isinstance(pointee, PointerType) or pointee.element != element_of(value.type):
        return f"{op.pointer.type} does not address {value.type}"
    if shape_of(op.pointer.type) != shape_of(value.type):
        return f"shapes of {op.pointer.type} and {value.type} differ"
    if op.mask is not None and op.mask.type != with_element(value.type, I1):
        return f"mask is {op.mask.type}"
    if isinstance(op, ops.Load) and op.other is not None and op.other.type != value.type:
        return f"other is {op.other.type}"
    return None


def _splat(op: ops.Splat) -> str | None:
    fits = op.operand.type == element_of(op.result.type) and op.result.type != op.operand.type
    return None if fits else f"{op.operand.type} -> {op.result.type}"


def _for(op: ops.For) -> str | None:
    carried = [v.type for v in op.inits]
    if not (op.lower.type == op.upper.type == op.step.type == op.body.args[0].type):
        return "bounds, step and index differ in type"
    if [a.type for a in op.body.args[1:]] != carried or [r.type for r in op.results] != carried:
        return "carried types differ"
    return _yields(op.body, carried)


def _if(op: ops.If) -> str | None:
    types = [r.type for r in op.results]
    if op.condition.type != I1:
        return f"condition is {op.condition.type}"
    return _yields(op.then, types) or _yields(op.other, types)


def _yields(block: Block, types: list[Any]) -> str | None:
    last = block.ops[-1] if block.ops else None
    if not isinstance(last, ops.Yield):
        return "region does not end with yield"
    return None if [v.type for v in last.values] == types else "yield does not match the results"


def _vector_memory(op: hw.VectorLoad | hw.VectorStore) -> str | None:
    value = op.result if isinstance(op, hw.VectorLoad) else op.value
    if op.pointer.type != PointerType(element_of(value.type)):  # type: ignore[arg-type]
        return f"{op.pointer.type} does not address {value.type}"
    if op.mask is not None and op.mask.type != with_element(value.type, I1):
        return f"mask is {op.mask.type}"
    return None


def _vpermw(op: hw.Vpermw) -> str | None:
    types = {op.table.type, op.index.type, op.result.type}
    ok = all(
        isinstance(t, VectorType) and t.lanes == 32 and element_of(t).bits == 16 for t in types
    )  # type: ignore[union-attr]
    return None if ok else "needs three vectors of 32 16-bit lanes"


def _vdpbf16ps(op: hw.Vdpbf16ps) -> str | None:
    wide, pairs = VectorType(16, F32), VectorType(32, BF16)
    ok = op.acc.type == op.result.type == wide and op.a.type == op.b.type == pairs
    return None if ok else f"{op.acc.type}, {op.a.type}, {op.b.type}"


RULES: dict[type[Op], Rule] = {
    ops.Binary: _same_types,
    ops.Compare: _compare,
    ops.Select: _select,
    ops.Constant: _constant,
    ops.Dot: _dot,
    ops.LoadInt4: _load_int4,
    ops.LoadBlock: _block_access,
    ops.StoreBlock: _block_access,
    ops.Load: _access,
    ops.Store: _access,
    ops.Splat: _splat,
    ops.For: _for,
    ops.If: _if,
    hw.VectorLoad: _vector_memory,
    hw.VectorStore: _vector_memory,
    hw.Vpermw: _vpermw,
    hw.Vdpbf16ps: _vdpbf16ps,
}


def _tiles(op: Op, tiles: tuple[tuple[int, int], ...]) -> str | None:
    """AMX: palette 1 has 8 tiles of at most 16 rows of 64 bytes; every tile used must be
    configured, and the three of a multiplication must fit each other."""
    numbers = [v for k, v in ops.fields_of(op).items() if k in ("t", "c", "a", "b")]
    if any(not isinstance(n, int) or not 0 <= n < len(tiles) for n in numbers):
        return f"tile number of {numbers} is not configured ({len(tiles)} tiles)"
    if isinstance(op, hw.Tdpbf16ps):
        (c_rows, c_bytes), (a_rows, a_bytes), (b_rows, b_bytes) = (
            tiles[op.c],
            tiles[op.a],
            tiles[op.b],
        )
        if len(set(numbers)) < 3 or (c_rows, c_bytes, a_bytes) != (a_rows, b_bytes, 4 * b_rows):
            return f"tiles {op.c}, {op.a}, {op.b} do not fit: {tiles}"
    return None


MAX_SCRATCH = 1 << 20
"""Bytes of scratch memory of one kernel: it lies on the stacks of worker threads (2 MB and more)."""

_TILE_OPS = (hw.TileZero, hw.TileLoad, hw.TileStore, hw.Tdpbf16ps)


def verify(function: Function, stage: str) -> None:
    """Raises CompilationError naming ``stage`` for the first operation that breaks a rule."""
    if len(function.tiles) > 8 or any(
        not (0 < r <= 16 and 0 < b <= 64 and b % 4 == 0) for r, b in function.tiles
    ):
        raise _broken(None, f"tile configuration {function.tiles} is outside palette 1", stage)
    scratch = [op for op in ops.walk(function.body) if isinstance(op, hw.Scratch)]
    total = sum(op.bytes for op in scratch)
    if total > MAX_SCRATCH:
        loc = max(scratch, key=lambda op: op.bytes).loc
        raise CompilationError(
            f"the kernel's tiles need {total} bytes of scratch memory, more than {MAX_SCRATCH}",
            file=loc.file,
            line=loc.line,
            column=loc.column,
            hint="use smaller blocks",
        )
    _verify_block(function.body, set(function.params), function, stage)
    if problem := _yields(function.body, []):
        raise _broken(None, problem, stage)


def _verify_block(block: Block, outer: set[Value], function: Function, stage: str) -> None:
    seen = outer | set(block.args)
    for op in block.ops:
        for operand in ops.operands(op):
            if operand not in seen:
                raise _broken(op, f"uses {operand!r} before it is defined", stage)
        for region in ops.regions(op):
            _verify_block(region, seen, function, stage)
        rule = RULES.get(type(op))
        problem = rule(op) if rule else None
        if problem is None and isinstance(op, _TILE_OPS):
            problem = _tiles(op, function.tiles)
        if problem:
            raise _broken(op, problem, stage)
        seen.update(op.results)


def _broken(op: Op | None, problem: str, stage: str) -> CompilationError:
    loc = op.loc if op else ops.UNKNOWN
    return CompilationError(
        f"internal: the IR after {stage} is not valid: {op.name if op else 'function'}: {problem}",
        file=loc.file,
        line=loc.line,
        column=loc.column,
        hint="this is a bug in amxq's compiler, please report it with the kernel",
    )
