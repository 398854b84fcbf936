"""Vectorisation of loads and stores.

A tile of pointers is one base pointer plus a tile of offsets. Where the offsets grow by one
from lane to lane an access is one vector load or store; where they are all equal it is a
scalar load; otherwise it is a gather or scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import I1, I32, I64, TileType, VectorType
from amxq.passes.affine import lane_stride
from amxq.passes.tiles import FIRST, Index, Place, Tile

if TYPE_CHECKING:
    from amxq.passes.vectorize import Vectorizer


def split(v: Vectorizer, index: Index, size: int) -> tuple[Index, Index]:
    """(index // size, index % size)."""
    if index.base is None:
        quotient, remainder = divmod(index.offset, size)
        return Index(None, quotient), Index(None, remainder)
    if size == 1:
        return index, FIRST
    number, by = v.number(index), v.b.i64(size)
    return Index(v.b.binary("div", number, by), 0), Index(v.b.binary("mod", number, by), 0)


def source_row(
    v: Vectorizer, source: tuple[int, ...], target: tuple[int, ...], row: Index
) -> Index:
    """The row of a tile of shape ``source`` that a broadcast to ``target`` reads for ``row``."""
    lead, wide = source[:-1], target[:-1]
    if lead == wide:
        return row
    if math.prod(lead) == 1:
        return FIRST
    outer, inner = split(v, row, wide[1])  # one of two leading dimensions is repeated
    return outer if lead[1] == 1 else inner


# --- tiles of pointers ------------------------------------------------------------------


@dataclass(frozen=True)
class Pointers:
    """A tile of pointers taken apart.

    Attributes:
        base: the pointer that all start from.
        offsets: tiles of i64 that are added to it, all of one shape.
        stride: by how many elements a pointer lies after its neighbour, None if not constant.
    """

    v: Vectorizer
    base: Value
    offsets: tuple[Tile, ...]
    stride: int | None

    def moved(self, offset: Value) -> Pointers:
        tile = self.v.tiles[offset]
        step = lane_stride(self.v.defs, offset, tile.lanes)
        if tile.late and not tile.small:
            tile = self.v.materialize(tile)  # what it reads may be overwritten before its use
        stride = None if self.stride is None or step is None else self.stride + step
        return Pointers(self.v, self.base, (*self.offsets, tile), stride)

    def expanded(self, shape: tuple[int, ...], axis: int) -> Pointers:
        offsets = tuple(self.v.expanded(t, shape, axis) for t in self.offsets)
        return Pointers(self.v, self.base, offsets, 0 if shape[-1] == 1 else self.stride)

    def repeated(self, shape: tuple[int, ...]) -> Pointers:
        column = any(t.type.shape[-1] == 1 for t in self.offsets)
        offsets = tuple(self.v.repeated(t, shape) for t in self.offsets)
        return Pointers(self.v, self.base, offsets, 0 if column else self.stride)

    def offset(self, row: Index, column: Index, type_: TileType) -> Value:
        """The offsets of one vector (i64 lanes) of a tile like ``type_``."""
        total: Value | None = None
        for offset in self.offsets:
            part = offset.at(row, column)
            total = part if total is None else self.v.b.add(total, part)
        if total is not None:
            return total
        lanes = self.v.lanes_of(type_)
        return self.v.b.constant(0, I64 if lanes == 1 else VectorType(lanes, I64))

    def address(self, row: Index, column: Index) -> Value:
        """The address of the vector's first element."""
        pointer = self.base
        for tile in self.offsets:
            pointer = self.v.b.addptr(pointer, self.v.element_of(tile, row, column))
        return pointer


def pointers_of(v: Vectorizer, value: Value) -> Pointers:
    """How a tile of pointers was made."""
    if value in v.pointers:
        return v.pointers[value]
    raise v.error(
        "cannot tell the base of this tile of pointers",
        "form it as pointer + offsets where it is used; carry or choose the offsets instead",
    )


def load(v: Vectorizer, op: ops.Load) -> None:
    if not isinstance(op.result.type, TileType):
        mask = None if op.mask is None else v.scalars[op.mask]
        loaded = v.b.value(hw.VectorLoad, op.result.type, pointer=v.scalars[op.pointer], mask=mask)
        if mask is not None:
            assert op.other is not None
            loaded = v.b.value(
                ops.Select, op.result.type, condition=mask, then=loaded, other=v.scalars[op.other]
            )
        v.scalars[op.result] = loaded
        return
    pointers = pointers_of(v, op.pointer)
    mask_tile = v.tiles[op.mask] if op.mask is not None else None
    other = v.tiles[op.other] if op.other is not None else None
    uniform_mask = op.mask is None or lane_stride(v.defs, op.mask, v.lanes) == 0

    def at(row: Index, column: Index) -> Value:
        mask = mask_tile.at(row, column) if mask_tile else None
        if tile.lanes == 1 or pointers.stride == 1:
            loaded = v.b.value(
                hw.VectorLoad,
                tile.part_type(),
                pointer=pointers.address(row, column),
                mask=mask,
            )
        elif pointers.stride == 0 and uniform_mask and mask is None:
            one = v.b.value(
                hw.VectorLoad,
                tile.dtype,
                pointer=pointers.address(row, column),
                mask=None,
            )
            loaded = v.splat(one, tile.lanes)
        else:
            loaded = v.b.value(
                hw.Gather,
                tile.part_type(),
                pointer=pointers.base,
                offsets=pointers.offset(row, column, tile.type),
                mask=mask,
            )
        if mask is None or other is None:
            return loaded
        return v.b.value(
            ops.Select,
            tile.part_type(),
            condition=mask,
            then=loaded,
            other=other.at(row, column),
        )

    tile = Tile(op.result.type, v.lanes_of(op.result.type), at, late=True)
    v.define(op.result, tile)


def store(v: Vectorizer, op: ops.Store) -> None:
    if not isinstance(op.value.type, TileType):
        mask = None if op.mask is None else v.scalars[op.mask]
        v.b.emit(
            hw.VectorStore, pointer=v.scalars[op.pointer], value=v.scalars[op.value], mask=mask
        )
        return
    pointers = pointers_of(v, op.pointer)
    tile = v.tiles[op.value]
    mask_tile = v.tiles[op.mask] if op.mask is not None else None
    if tile.late and not tile.small and pointers.stride != 1:
        tile = v.materialize(tile)  # scattered writes may hit what is read later

    def write(row: Index, column: Index) -> None:
        mask = mask_tile.at(row, column) if mask_tile else None
        value = tile.at(row, column)
        if tile.lanes == 1 or pointers.stride == 1:
            pointer = pointers.address(row, column)
            v.b.emit(hw.VectorStore, pointer=pointer, value=value, mask=mask)
        else:
            v.b.emit(
                hw.Scatter,
                pointer=pointers.base,
                offsets=pointers.offset(row, column, tile.type),
                value=value,
                mask=mask,
            )

    v.traversal.parts(tile, write)


# --- blocks of descriptors --------------------------------------------------------------


class _Block:
    """The addresses and masks of load_block and store_block."""

    def __init__(self, v: Vectorizer, op: ops.LoadBlock | ops.StoreBlock, shape: tuple[int, ...]):
        self.v = v
        self.shape = shape
        self.base = v.scalars[op.base]
        self.offsets = [v.scalars[o] for o in op.offsets]
        self.strides = [v.scalars[s] for s in op.strides]
        self.bounds = [v.scalars[s] for s in op.bounds]
        self.checked = op.checked
        b = v.b
        corner = self.offsets[-1]
        for offset, stride in zip(self.offsets[:-1], self.strides[:-1]):
            corner = b.add(corner, b.mul(offset, stride))
        self.corner = b.addptr(self.base, corner)

    def _leading(self, row: Index) -> list[Index]:
        """Indices of a row within the block, one for each leading dimension."""
        if len(self.shape) == 1:
            return []
        if len(self.shape) == 2:
            return [row]
        return list(split(self.v, row, self.shape[1]))

    def place(self) -> Place | None:
        if self.checked or len(self.shape) != 2:
            return None
        return Place(self.corner, self.strides[0])

    def pointer(self, row: Index, column: Index) -> Value:
        b = self.v.b
        if len(self.shape) == 2:  # keeps the constant part of the row apart
            return self.v.element_pointer(Place(self.corner, self.strides[0]), row, column)
        offset = self.v.number(column)
        for index, stride in zip(self._leading(row), self.strides[:-1]):
            offset = b.add(offset, b.mul(self.v.number(index), stride))
        return b.addptr(self.corner, offset)

    def mask(self, row: Index, column: Index, lanes: int) -> Value | None:
        """Which lanes lie inside, or None if nothing is checked."""
        b, v = self.v.b, self.v
        inside: Value | None = None
        leading = self._leading(row)
        for d in self.checked:
            if d == len(self.shape) - 1:
                continue
            at = b.add(self.offsets[d], v.number(leading[d]))
            ok = self._inside(at, self.bounds[d])
            inside = ok if inside is None else b.binary("and", inside, ok)
        mask = v.splat(inside, lanes) if inside is not None else None
        if len(self.shape) - 1 not in self.checked:
            return mask
        first = b.add(self.offsets[-1], v.number(column))
        if lanes == 1:
            ok = self._inside(first, self.bounds[-1])
            return ok if mask is None else b.binary("and", mask, ok)
        numbers = b.value(ops.Constant, VectorType(lanes, I32), value=tuple(range(lanes)))
        left = b.sub(self.bounds[-1], first)
        cols = self._compare("lt", numbers, self._clamped(left, lanes), lanes)
        corner = b.known(self.offsets[-1])
        if corner is None or corner < 0:  # may start left of the array
            before = b.sub(b.i64(0), first)
            more = self._compare("ge", numbers, self._clamped(before, lanes), lanes)
            cols = b.binary("and", cols, more)
        return cols if mask is None else b.binary("and", mask, cols)

    def _clamped(self, count: Value, lanes: int) -> Value:
        b = self.v.b
        clamped = b.binary("min", b.binary("max", count, b.i64(0)), b.i64(lanes))
        return self.v.splat(b.cast(clamped, I32), lanes)

    def _compare(self, kind: str, lhs: Value, rhs: Value, lanes: int) -> Value:
        return self.v.b.value(ops.Compare, VectorType(lanes, I1), kind=kind, lhs=lhs, rhs=rhs)

    def _inside(self, index: Value, bound: Value) -> Value:
        b = self.v.b
        low = b.value(ops.Compare, I1, kind="ge", lhs=index, rhs=b.i64(0))
        high = b.value(ops.Compare, I1, kind="lt", lhs=index, rhs=bound)
        return b.binary("and", low, high)


def load_block(v: Vectorizer, op: ops.LoadBlock) -> None:
    type_ = op.result.type
    assert isinstance(type_, TileType)
    block = _Block(v, op, type_.shape)

    def at(row: Index, column: Index) -> Value:
        return v.b.value(
            hw.VectorLoad,
            tile.part_type(),
            pointer=block.pointer(row, column),
            mask=block.mask(row, column, tile.lanes),
        )

    place = block.place()
    element = v.load_element(place) if place else None
    tile = Tile(type_, v.lanes_of(type_), at, element, place, late=True)
    v.define(op.result, tile)


def store_block(v: Vectorizer, op: ops.StoreBlock) -> None:
    tile = v.tiles[op.value]
    block = _Block(v, op, tile.type.shape)

    def write(row: Index, column: Index) -> None:
        mask = block.mask(row, column, tile.lanes)
        pointer = block.pointer(row, column)
        v.b.emit(hw.VectorStore, pointer=pointer, value=tile.at(row, column), mask=mask)

    v.traversal.parts(tile, write)
