"""Types of tile-IR.

    type    ::= scalar | pointer | tile | vector
    scalar  ::= "i1" | "i8" | "i16" | "i32" | "i64" | "u4" | "u8" | "u16" | "u32" | "u64"
              | "bf16" | "f16" | "f32" | "f64"
    pointer ::= "ptr<" scalar ">"
    tile    ::= "tile<" (int "x")+ (scalar | pointer) ">"
    vector  ::= "vec<" int "x" scalar ">"        one hardware register, after vectorisation

``u4`` occurs as the element of a packed INT4 tile only; such a tile is an operand of ``dot``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A scalar type. ``kind`` is "int" (signed), "uint", "bool" or "float"."""

    name: str
    kind: str
    bits: int

    def __str__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_signed(self) -> bool:
        return self.kind == "int"

    def holds(self, number: int | float) -> bool:
        """Whether this integer type has ``number`` exactly."""
        low = -(1 << (self.bits - 1)) if self.is_signed else 0
        return isinstance(number, int) and low <= number < low + (1 << self.bits)

    @property
    def bytes(self) -> int:
        """Size in memory; a bool takes a byte, as in torch."""
        return max(self.bits // 8, 1)


I1 = DType("i1", "bool", 1)
I8, I16, I32, I64 = (DType(f"i{b}", "int", b) for b in (8, 16, 32, 64))
U4, U8, U16, U32, U64 = (DType(f"u{b}", "uint", b) for b in (4, 8, 16, 32, 64))
BF16 = DType("bf16", "float", 16)
F16, F32, F64 = (DType(f"f{b}", "float", b) for b in (16, 32, 64))

DTYPES: dict[str, DType] = {
    d.name: d for d in (I1, I8, I16, I32, I64, U4, U8, U16, U32, U64, BF16, F16, F32, F64)
}


@dataclass(frozen=True)
class PointerType:
    """The address of one element."""

    element: DType

    def __str__(self) -> str:
        return f"ptr<{self.element}>"


@dataclass(frozen=True)
class TileType:
    """A block of values, rank 1 to 3, row-major in meaning; where it lives is decided later."""

    shape: tuple[int, ...]
    element: DType | PointerType

    def __str__(self) -> str:
        return f"tile<{'x'.join(map(str, self.shape))}x{self.element}>"


@dataclass(frozen=True)
class VectorType:
    """One vector register's worth of values."""

    lanes: int
    element: DType

    def __str__(self) -> str:
        return f"vec<{self.lanes}x{self.element}>"


Type = DType | PointerType | TileType | VectorType


def element_of(type_: Type) -> DType | PointerType:
    """The type of one element: of a tile or vector, else the type itself."""
    return type_.element if isinstance(type_, (TileType, VectorType)) else type_


def scalar_of(type_: Type) -> DType:
    """As :func:`element_of`, where a pointer cannot occur."""
    element = element_of(type_)
    if not isinstance(element, DType):
        raise TypeError(f"expected numbers, got {type_}")
    return element


def shape_of(type_: Type) -> tuple[int, ...]:
    return type_.shape if isinstance(type_, TileType) else ()


def with_element(type_: Type, element: DType | PointerType) -> Type:
    """The same tile, vector or scalar with another element type."""
    if isinstance(type_, TileType):
        return TileType(type_.shape, element)
    if isinstance(type_, VectorType):
        assert isinstance(element, DType)
        return VectorType(type_.lanes, element)
    return element


def dot_element(lhs: Type) -> DType:
    """What a dot adds up in: int32 for bytes, fp64 for fp64, else fp32."""
    return {I8: I32, F64: F64}.get(scalar_of(lhs), F32)
