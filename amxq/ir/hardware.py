"""Operations of the machine: what vectorisation leaves in a kernel.

They name instructions, not meanings; costs and NumPy meanings are in
:mod:`amxq.codegen.instructions`. Tile registers are numbered by us (``t``, ``c``, ``a``, ``b``):
the order written here is the order that reaches the assembler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from amxq.ir import ops
from amxq.ir.ops import Op, Value


@dataclass(eq=False, repr=False)
class Scratch(Op):
    """Stack memory of ``bytes`` bytes, 64-byte aligned, allocated once per program."""

    bytes: int
    name: ClassVar[str] = "scratch"


@dataclass(eq=False, repr=False)
class VectorLoad(Op):
    """One vector (or, for a scalar result, one element) at ``pointer``; masked-off lanes are 0
    and are not read."""

    pointer: Value
    mask: Value | None
    name: ClassVar[str] = "vector_load"


@dataclass(eq=False, repr=False)
class VectorStore(Op):
    pointer: Value
    value: Value
    mask: Value | None
    name: ClassVar[str] = "vector_store"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Gather(Op):
    """Lane i from ``pointer`` + offsets[i] elements (i64 lanes)."""

    pointer: Value
    offsets: Value
    mask: Value | None
    name: ClassVar[str] = "gather"


@dataclass(eq=False, repr=False)
class Scatter(Op):
    pointer: Value
    offsets: Value
    value: Value
    mask: Value | None
    name: ClassVar[str] = "scatter"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Prefetch(Op):
    """A hint: the line at ``pointer`` will be read soon; ``locality`` 0 (NTA) to 3 (L1)."""

    pointer: Value
    locality: int
    name: ClassVar[str] = "prefetch"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Extract(Op):
    """One lane of a vector."""

    vector: Value
    lane: int
    name: ClassVar[str] = "extract"


@dataclass(eq=False, repr=False)
class Horizontal(Op):
    """Reduction of a vector's lanes to a scalar, pairwise in a fixed order."""

    kind: str
    vector: Value
    name: ClassVar[str] = "horizontal"


@dataclass(eq=False, repr=False)
class Bitcast(Op):
    operand: Value
    name: ClassVar[str] = "bitcast"


@dataclass(eq=False, repr=False)
class Fma(Op):
    """a·b + c with one rounding."""

    a: Value
    b: Value
    c: Value
    name: ClassVar[str] = "fma"


POINTWISE = (ops.Binary, ops.Compare, ops.Unary, ops.Cast, ops.Select, Fma, Bitcast)
"""Operations on each element alone."""


@dataclass(eq=False, repr=False)
class Scalef(Op):
    """x · 2ⁿ for whole numbers n, rounded once (VSCALEFPS of 512 bits)."""

    x: Value
    n: Value
    name: ClassVar[str] = "scalef"


@dataclass(eq=False, repr=False)
class Vpermw(Op):
    """table[index mod 32] per 16-bit lane."""

    table: Value
    index: Value
    name: ClassVar[str] = "vpermw"


@dataclass(eq=False, repr=False)
class Vdpbf16ps(Op):
    """acc[i] + a[2i]·b[2i] + a[2i+1]·b[2i+1]."""

    acc: Value
    a: Value
    b: Value
    name: ClassVar[str] = "vdpbf16ps"


@dataclass(eq=False, repr=False)
class Shuffle(Op):
    """Lane i is lane ``lanes[i]`` of ``vector``, or of that followed by ``other``."""

    vector: Value
    other: Value | None
    lanes: tuple[int, ...]
    name: ClassVar[str] = "shuffle"


@dataclass(eq=False, repr=False)
class Vpdpbusd(Op):
    """acc[i] + the sum of a[4i + j]·b[4i + j] over j, a unsigned and b signed bytes."""

    acc: Value
    a: Value
    b: Value
    name: ClassVar[str] = "vpdpbusd"


@dataclass(eq=False, repr=False)
class Vpmaddubsw(Op):
    """a[2i]·b[2i] + a[2i+1]·b[2i+1] as i16, saturated; a unsigned and b signed bytes."""

    a: Value
    b: Value
    name: ClassVar[str] = "vpmaddubsw"


@dataclass(eq=False, repr=False)
class Vpmaddwd(Op):
    """a[2i]·b[2i] + a[2i+1]·b[2i+1] of i16 as i32."""

    a: Value
    b: Value
    name: ClassVar[str] = "vpmaddwd"


@dataclass(eq=False, repr=False)
class TileZero(Op):
    t: int
    name: ClassVar[str] = "tilezero"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class TileLoad(Op):
    """Rows of tile ``t`` from ``pointer``, ``stride`` bytes apart; ``once`` hints that they need
    not stay in the first-level cache (TILELOADDT1)."""

    t: int
    pointer: Value
    stride: Value
    once: bool = False
    name: ClassVar[str] = "tileload"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class TileStore(Op):
    t: int
    pointer: Value
    stride: Value
    name: ClassVar[str] = "tilestore"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Tdpbf16ps(Op):
    c: int
    a: int
    b: int
    name: ClassVar[str] = "tdpbf16ps"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Tdpbssd(Op):
    c: int
    a: int
    b: int
    name: ClassVar[str] = "tdpbssd"
    effect: ClassVar[bool] = True


@dataclass(eq=False, repr=False)
class Tdpfp16ps(Op):
    c: int
    a: int
    b: int
    name: ClassVar[str] = "tdpfp16ps"
    effect: ClassVar[bool] = True


TILE_DOTS = (Tdpbf16ps, Tdpbssd, Tdpfp16ps)
TILE_OPS = (TileZero, TileLoad, TileStore, *TILE_DOTS)
