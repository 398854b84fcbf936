"""Descriptors: arrays in memory that are read and written in blocks.

They exist while a kernel is compiled only: each method call becomes load_block, store_block
or load_int4 operations on plain pointers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from amxq.frontend.semantic import Mistake, Operand, Semantic, describe
from amxq.frontend.shapes import permute, sizes_of
from amxq.ir import ops
from amxq.ir.ops import Value
from amxq.ir.types import F32, I64, U4, U8, DType, PointerType, TileType

PANEL = 32  # columns of one panel of packed weights


@dataclass(frozen=True)
class TensorDescriptor:
    """A strided array; see :func:`amxq.language.make_tensor_descriptor`."""

    sem: Semantic
    base: Value
    shape: tuple[Value, ...]
    strides: tuple[Value, ...]
    block_shape: tuple[int, ...]

    @classmethod
    def make(
        cls, sem: Semantic, base: Any, shape: Any, strides: Any, block_shape: Any
    ) -> TensorDescriptor:
        _pointer(base, "base")
        rank = len(block_shape)
        if not (1 <= rank <= 3 and len(shape) == len(strides) == rank):
            raise Mistake(
                f"a descriptor of {len(shape)} sizes, {len(strides)} strides, {rank} block sizes",
                "give one of each per dimension, 1 to 3 dimensions",
            )
        if not _is_one(sem, strides[-1]):
            raise Mistake("the last stride of a descriptor must be the constant 1")
        sizes = tuple(sem.i64(s) for s in shape)
        return cls(
            sem,
            base,
            sizes,
            tuple(sem.i64(s) for s in strides),
            sizes_of(block_shape, "block shape"),
        )

    @property
    def dtype(self) -> DType:
        assert isinstance(self.base.type, PointerType)
        return self.base.type.element

    def load(self, offsets: Any, boundary_check: Any = None) -> Value:
        return self.sem.b.value(
            ops.LoadBlock,
            TileType(self.block_shape, self.dtype),
            base=self.base,
            **self._place(offsets, boundary_check),
        )

    def store(self, offsets: Any, value: Operand, boundary_check: Any = None) -> None:
        tile = self.sem.b.cast(self.sem.value(value, self.dtype), self.dtype)
        tile = self.sem.broadcast_to(tile, self.block_shape)
        self.sem.b.emit(
            ops.StoreBlock, base=self.base, value=tile, **self._place(offsets, boundary_check)
        )

    def _place(self, offsets: Any, boundary_check: Any) -> dict[str, Any]:
        rank = len(self.block_shape)
        if not isinstance(offsets, (tuple, list)) or len(offsets) != rank:
            raise Mistake(f"expected {rank} offsets, got {describe(offsets)}")
        checked = tuple(range(rank)) if boundary_check is None else tuple(boundary_check)
        if any(not isinstance(d, int) or not 0 <= d < rank for d in checked):
            raise Mistake(f"boundary_check={describe(checked)} of a descriptor of rank {rank}")
        return {
            "offsets": tuple(self.sem.i64(o) for o in offsets),
            "strides": self.strides,
            "bounds": self.shape,
            "checked": checked,
        }


@dataclass(frozen=True)
class BlockPointer:
    """A block of a strided array; see :func:`amxq.language.make_block_ptr`."""

    sem: Semantic
    base: Value
    shape: tuple[Value, ...]
    strides: tuple[Value, ...]
    offsets: tuple[Value, ...]
    block_shape: tuple[int, ...]

    @classmethod
    def make(
        cls, sem: Semantic, base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any
    ) -> BlockPointer:
        _pointer(base, "base")
        rank = len(block_shape)
        given = (shape, strides, offsets)
        if not 1 <= rank <= 3 or any(len(x) != rank for x in given):
            raise Mistake(
                f"a block pointer of {', '.join(str(len(x)) for x in given)} sizes, strides and "
                f"offsets, and {rank} block sizes",
                "give one of each per dimension, 1 to 3 dimensions",
            )
        sizes, steps, corner = (tuple(sem.i64(x) for x in values) for values in given)
        return cls(sem, base, sizes, steps, corner, sizes_of(block_shape, "block shape"))

    def at(self, offsets: tuple[Value, ...]) -> BlockPointer:
        """The same array's block at other offsets."""
        return dataclasses.replace(self, offsets=offsets)

    def advanced(self, by: Any) -> BlockPointer:
        if not isinstance(by, (tuple, list)) or len(by) != len(self.offsets):
            raise Mistake(f"expected {len(self.offsets)} offsets, got {describe(by)}")
        steps = (self.sem.i64(x) for x in by)
        return self.at(tuple(self.sem.b.add(x, y) for x, y in zip(self.offsets, steps)))

    def load(self, boundary_check: Any, padding: str) -> Value:
        checked = self._checked(boundary_check)
        if padding not in ("", "zero", "nan"):
            raise Mistake(f"padding_option is {describe(padding)}", 'it is "zero" or "nan"')
        if padding != "nan":
            if _is_one(self.sem, self.strides[-1]):
                return self._descriptor(self).load(self.offsets, checked)
            if len(self.offsets) == 2 and _is_one(self.sem, self.strides[0]):
                turned = self._descriptor(self._transposed())
                tile = turned.load(self.offsets[::-1], tuple(1 - d for d in checked))
                return permute(self.sem, tile, (1, 0))
        pointers, mask = self._addresses(checked)
        other = None if mask is None else float("nan") if padding == "nan" else 0
        return self.sem.load(pointers, mask, other)

    def store(self, value: Operand, boundary_check: Any) -> None:
        checked = self._checked(boundary_check)
        if _is_one(self.sem, self.strides[-1]):
            self._descriptor(self).store(self.offsets, value, checked)
        else:
            pointers, mask = self._addresses(checked)
            self.sem.store(pointers, value, mask)

    def _checked(self, dimensions: Any) -> tuple[int, ...]:
        rank = len(self.offsets)
        if any(not isinstance(d, int) or not 0 <= d < rank for d in dimensions):
            raise Mistake(
                f"boundary_check={describe(dimensions)} of a block pointer of rank {rank}"
            )
        return tuple(dimensions)

    def _transposed(self) -> BlockPointer:
        turned = {
            field: getattr(self, field)[::-1]
            for field in ("shape", "strides", "offsets", "block_shape")
        }
        return dataclasses.replace(self, **turned)

    @staticmethod
    def _descriptor(block: BlockPointer) -> TensorDescriptor:
        b = block
        return TensorDescriptor(b.sem, b.base, b.shape, b.strides, b.block_shape)

    def _addresses(self, checked: tuple[int, ...]) -> tuple[Value, Value | None]:
        """The block's pointers, and which of them lie inside of the array."""
        sem, rank = self.sem, len(self.offsets)
        pointers: Value = self.base
        mask: Value | None = None
        for d, size in enumerate(self.block_shape):
            index = sem.binary("add", sem.arange(0, size), self.offsets[d])
            for axis in range(rank):
                if axis != d:
                    index = sem.expand_dims(index, axis)
            pointers = sem.binary("add", pointers, sem.binary("mul", index, self.strides[d]))
            if d in checked:
                inside = sem.binary(
                    "and", sem.compare("ge", index, 0), sem.compare("lt", index, self.shape[d])
                )
                mask = inside if mask is None else sem.binary("and", mask, inside)
        return pointers, mask


@dataclass(frozen=True)
class Int4Tensor:
    """A packed INT4 weight [K, N]; see :func:`amxq.language.int4_tensor`."""

    sem: Semantic
    qweight: Value
    scale_base: Value
    zero_base: Value | None
    columns: Value
    k_blocks: Value
    groups: Value
    block_shape: tuple[int, int]

    @classmethod
    def make(
        cls,
        sem: Semantic,
        qweight: Any,
        scales: Any,
        zeros: Any,
        shape: Any,
        group_size: Operand,
        block_shape: Any,
    ) -> Int4Tensor:
        for name, pointer, element in (("qweight", qweight, U8), ("zeros", zeros, U8)):
            if name == "zeros" and pointer is None:
                continue
            if _pointer(pointer, name) != element:
                raise Mistake(f"{name} is {describe(pointer)}, expected ptr<{element}>")
        if not _pointer(scales, "scales").is_float:
            raise Mistake(f"scales is {describe(scales)}, expected a pointer to floats")
        block = sizes_of(block_shape, "block shape")
        if len(block) != 2 or block[0] % 8 or block[1] != PANEL:
            raise Mistake(f"block shape {list(block)}", "use [BLOCK_K, 32], BLOCK_K % 8 == 0")
        k, n = (sem.i64(s) for s in _pair(shape, "shape"))
        k_blocks = sem.b.binary("div", k, sem.b.i64(8))
        groups = sem.b.binary("div", k, sem.i64(group_size))
        return cls(sem, qweight, scales, zeros, n, k_blocks, groups, block)

    @property
    def has_zeros(self) -> bool:
        return self.zero_base is not None

    def load(self, offsets: Any) -> Value:
        k, n = (self.sem.i64(o) for o in _pair(offsets, "offsets"))
        type_ = TileType(self.block_shape, U4)
        return self.sem.b.value(
            ops.LoadInt4, type_, base=self.qweight, k=k, n=n, k_blocks=self.k_blocks
        )

    def scales(self, offsets: Any) -> Value:
        return self.sem.b.cast(self._per_group(self.scale_base, offsets), F32)

    def zeros(self, offsets: Any) -> Value:
        if self.zero_base is None:
            raise Mistake("this int4 tensor has no zero points", "test w.has_zeros first")
        stored = self.sem.b.cast(self._per_group(self.zero_base, offsets), F32)
        return self.sem.binary("sub", stored, 8.0)

    def _per_group(self, base: Value, offsets: Any) -> Value:
        """32 values of group g: a panel is a [G, width] block, width = 32 but for the last."""
        b = self.sem.b
        g, n = (self.sem.i64(o) for o in _pair(offsets, "offsets"))
        width = b.binary("min", b.i64(PANEL), b.sub(self.columns, n))
        start = b.add(b.mul(n, self.groups), b.mul(g, width))
        assert isinstance(base.type, PointerType)
        return b.value(
            ops.LoadBlock,
            TileType((PANEL,), base.type.element),
            base=b.addptr(base, start),
            offsets=(b.constant(0, I64),),
            strides=(b.constant(1, I64),),
            bounds=(width,),
            checked=(0,),
        )


def _pair(values: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise Mistake(
            f"{name} of an int4 tensor is {describe(values)}, expected two: [k, n] or [g, n]"
        )
    return values[0], values[1]


def _pointer(value: object, name: str) -> DType:
    if isinstance(value, Value) and isinstance(value.type, PointerType):
        return value.type.element
    raise Mistake(f"{name} is {describe(value)}, expected a tensor (pointer)")


def _is_one(sem: Semantic, stride: Any) -> bool:
    return (sem.b.known(stride) if isinstance(stride, Value) else stride) == 1
