"""Loads that are put off, and the stores that they must not end up behind.

Large tiles are evaluated where they are consumed, so the loads in them move down. Before
memory is written, such tiles are copied to scratch if they are needed later, or if the store
itself would overwrite what it has yet to read:

    %x = load %p                         %x = load %p
    store %p, %new          becomes      %kept = copy %x        (scratch)
    store %q, %x                         store %p, %new
                                         store %q, %kept

Two parameters of a kernel are taken to be the same tensor or tensors that do not overlap, so
only accesses through one parameter are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amxq.ir import ops
from amxq.ir.hardware import POINTWISE
from amxq.ir.ops import Op, Value
from amxq.ir.types import TileType

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer

_Access = ops.Load | ops.Store | ops.LoadBlock | ops.StoreBlock


def writes(op: Op) -> bool:
    """Whether an operation, or one inside of it, stores to memory of the user."""
    if isinstance(op, (ops.Store, ops.StoreBlock, ops.Atomic, ops.CompareExchange)):
        return True
    return any(writes(inner) for region in ops.regions(op) for inner in region.ops)


def settle(v: Vectorizer, op: Op, rest: list[Op]) -> None:
    """Copies late tiles that are needed after ``op``, the first of ``rest``, has written.

    The writing operation itself may consume them, except a loop, which writes repeatedly, and
    a store to other elements of the same tensor.
    """
    simple = isinstance(op, (ops.Store, ops.StoreBlock))
    needed = {value for o in rest[simple:] for value in _operands_inside(o)}
    if isinstance(op, (ops.Store, ops.StoreBlock)) and _reads_elsewhere(v, op.value, op):
        needed.add(op.value)
    for value in [x for x in needed if x in v.tiles and v.tiles[x].late]:
        v.tiles[value] = v.materialize(v.tiles[value])


def _operands_inside(op: Op) -> list[Value]:
    found = list(ops.operands(op))
    for region in ops.regions(op):
        for inner in region.ops:
            found += _operands_inside(inner)
    return found


def _reads_elsewhere(v: Vectorizer, value: Value, store: ops.Store | ops.StoreBlock) -> bool:
    """Whether evaluating ``value`` reads the stored tensor at other places than are stored."""
    if not isinstance(value.type, TileType) or not v.tiles[value].late or v.tiles[value].small:
        return False
    op = v.defs.get(value)
    if isinstance(op, (ops.Load, ops.LoadBlock)):
        return _root(v, op) is _root(v, store) and not _same_place(op, store)
    if isinstance(op, ops.Dot):  # every element reads whole rows
        return any(_reads(v, x, store) for x in ops.operands(op))
    if isinstance(op, (*POINTWISE, ops.ExpandDims, ops.Broadcast)):
        return any(_reads_elsewhere(v, x, store) for x in ops.operands(op))
    return False


def _reads(v: Vectorizer, value: Value, store: ops.Store | ops.StoreBlock) -> bool:
    op = v.defs.get(value)
    if isinstance(op, (ops.Load, ops.LoadBlock)):
        return _root(v, op) is _root(v, store)
    return False


def _same_place(load: ops.Load | ops.LoadBlock, store: ops.Store | ops.StoreBlock) -> bool:
    if isinstance(load, ops.Load):
        return isinstance(store, ops.Store) and load.pointer is store.pointer
    if not isinstance(store, ops.StoreBlock):
        return False
    one, other = (load.base, load.offsets, load.strides), (store.base, store.offsets, store.strides)
    return one == other


def _root(v: Vectorizer, access: _Access) -> Value:
    """The parameter that an access goes through."""
    value = access.pointer if isinstance(access, (ops.Load, ops.Store)) else access.base
    while True:
        op = v.defs.get(value)
        if isinstance(op, ops.AddPtr):
            value = op.pointer
        elif isinstance(op, (ops.Splat, ops.Broadcast, ops.ExpandDims)):
            value = op.operand
        else:
            return value
