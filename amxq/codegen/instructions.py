"""The hardware instructions that amxq emits, each declared once: LLVM's name, its meaning
as NumPy code, and what it costs.

:data:`TABLE` maps a mnemonic to its :class:`Instruction`. The interpreter and the emulator's
tests execute the meanings, the cost model reads the costs.

Meanings take and return the contents of registers as arrays:

* bf16 and fp16 elements are their bit patterns, ``uint16``; the rest is what it says;
* a left tile operand A is ``[M, 2·K]`` (16-bit) or ``[M, 4·K]`` (8-bit elements), a right one
  in VNNI form B ``[K, 2·N]`` or ``[K, 4·N]``, the accumulator C ``[M, N]``;
* vectors are ``[lanes]``; any leading axes are batches.

They agree bit for bit, NaN payloads and flushed denormals included, with an Intel Xeon of
family 6, model 207, stepping 2 (Emerald Rapids), 2026-11-30: tests/amx compares them with a
record of that machine anywhere, and with the CPU itself where it has the instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # NumPy is imported inside the meanings: reading costs does not need it
    import numpy as np

    Array = np.ndarray[Any, Any]

_MEASURED = "measured, benchmarks/limits.py, family 6 model 207 stepping 2, 2026-11-30"
_PEERS = "measured as a peak rate, Zen 4, 2026-11-30"


@dataclass(frozen=True)
class Cost:
    """What an instruction costs on one CPU, in cycles of its core clock.

    Attributes:
        cpu: ``"emerald_rapids"`` or ``"zen4"``.
        cycles: between two starts when nothing else runs (reciprocal throughput).
        latency: from operand to result, None where nobody has measured it.
        source: who says so.
    """

    cpu: str
    cycles: float
    latency: float | None
    source: str


@dataclass(frozen=True)
class Instruction:
    """One hardware instruction.

    Attributes:
        llvm: name of the LLVM intrinsic that becomes exactly this instruction.
        requires: CPU features, as /proc/cpuinfo spells them.
        meaning: what it computes, see the module's text for operand shapes.
        costs: per CPU; empty where nobody has measured one.
    """

    name: str
    llvm: str
    requires: frozenset[str]
    meaning: Callable[..., Any]
    costs: tuple[Cost, ...]

    def cost(self, cpu: str = "emerald_rapids") -> Cost:
        """The cost on one CPU. Raises KeyError, naming the CPUs there are, for another."""
        for cost in self.costs:
            if cost.cpu == cpu:
                return cost
        known = ", ".join(cost.cpu for cost in self.costs) or "no CPU"
        raise KeyError(f"no cost of {self.name} for {cpu!r}; known: {known}")


# --- floating point: fused steps that treat denormals as zero and never ask MXCSR ----------


def _first_nan(value: Array, *operands: Array) -> Array:
    """x86's choice of NaN: the first operand that is one, made quiet; for an invalid
    operation on numbers the default NaN, 0xFFC00000."""
    import numpy as np

    bits: Array = value.view(np.uint32).copy()
    bits[np.isnan(value)] = 0xFFC00000
    for operand in reversed(operands):
        bits = np.where(np.isnan(operand), operand.view(np.uint32) | 0x00400000, bits)
    return bits.view(np.float32)


def _flush(x: Array) -> Array:
    """fp32 denormals become zeros of their sign."""
    import numpy as np

    bits = np.ascontiguousarray(x).view(np.uint32)
    denormal = (bits & 0x7F800000) == 0
    flushed: Array = np.where(denormal, bits & 0x80000000, bits)
    return flushed.view(np.float32)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of fp32 numbers in fp64, rounded to odd: rounding that to fp32 is one rounding.

    The product of two short significands is exact; of the sum the error is known exactly too, so
    an inexact sum whose last bit is even moves to the neighbour on the exact sum's side.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b, c.astype(np.float64)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.view(np.int64)
        inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
        odd = bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return odd.view(np.float64)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c in fp32, rounded once to nearest even, tiny results flushed to zero.

    A result counts as tiny if it is below 2**-126 after rounding with unbounded exponent, as the
    hardware does it.
    """
    import numpy as np

    a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
    total = fused(a, b, c)
    with np.errstate(all="ignore"):
        rounded = total.astype(np.float32)
    tiny = np.abs(total) < 2.0**-126 - 2.0**-151
    rounded = np.where(tiny, np.copysign(np.float32(0), rounded), rounded)
    return _first_nan(rounded, a, b, c)


def _add(first: Array, second: Array) -> Array:
    """fp32 sum, to nearest even, denormals in and out flushed; ``first``'s NaN wins."""
    import numpy as np

    first, second = _flush(first), _flush(second)
    with np.errstate(all="ignore"):
        return _first_nan(_flush(first + second), first, second)


def _from_bf16(bits: Array) -> Array:
    import numpy as np

    return _flush((np.asarray(bits, np.uint32) << 16).view(np.float32))


def _from_fp16(bits: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


# --- meanings -----------------------------------------------------------------------------


def _tile_dot_pairs(widen: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    def meaning(c: Array, a: Array, b: Array) -> Array:
        """C [M, N] fp32 + A [M, 2K] · B [K, 2N], pairs of 16-bit floats.

        The products of even k are added up in one chain of fused steps that starts at +0,
        those of odd k in another; the chains are added, then C is.
        """
        import numpy as np

        a, b = widen(a), widen(b)
        even = odd = np.zeros_like(c)
        for k in range(b.shape[-2]):
            even = _fma(a[..., 2 * k, None], b[..., k, None, 0::2], even)
            odd = _fma(a[..., 2 * k + 1, None], b[..., k, None, 1::2], odd)
        return _add(c, _add(even, odd))

    return meaning


def _tile_dot_bytes(left: str, right: str) -> Callable[[Array, Array, Array], Array]:
    def meaning(c: Array, a: Array, b: Array) -> Array:
        """C [M, N] int32 + A [M, 4K] · B [K, 4N], quads of bytes; wraps modulo 2**32."""
        import numpy as np

        rows, columns = b.shape[-2], b.shape[-1] // 4
        quads = a.view(left).astype(np.int64).reshape(*a.shape[:-1], rows, 4)
        weights = b.view(right).astype(np.int64).reshape(*b.shape[:-1], columns, 4)
        total = c + np.einsum("...mkq,...knq->...mn", quads, weights)
        return np.asarray(total.astype(np.uint64).astype(np.uint32).view(np.int32))

    return meaning


def _vdpbf16ps(c: Array, a: Array, b: Array) -> Array:
    """C [lanes] fp32 + pairs of A · B [2·lanes] bf16: first the odd element of each pair is
    fused into C, then the even one. (Not the tiles' order: the bits differ.)"""
    a, b = _from_bf16(a), _from_bf16(b)
    return _fma(a[..., 0::2], b[..., 0::2], _fma(a[..., 1::2], b[..., 1::2], _flush(c)))


def _vpdpbusd(c: Array, a: Array, b: Array) -> Array:
    """C [lanes] int32 + quads of A [4·lanes] uint8 · B int8; wraps modulo 2**32."""
    import numpy as np

    products = a.view(np.uint8).astype(np.int64) * b.view(np.int8)
    total = c + products.reshape(*products.shape[:-1], -1, 4).sum(-1)
    return np.asarray(total.astype(np.uint64).astype(np.uint32).view(np.int32))


def _vpmaddubsw(a: Array, b: Array) -> Array:
    """Pairs of A [2·lanes] uint8 · B int8 as int16 [lanes], saturated."""
    import numpy as np

    products = a.view(np.uint8).astype(np.int32) * b.view(np.int8)
    total = products.reshape(*products.shape[:-1], -1, 2).sum(-1)
    return np.asarray(np.clip(total, -(1 << 15), (1 << 15) - 1).astype(np.int16))


def _vpmaddwd(a: Array, b: Array) -> Array:
    """Pairs of A · B [2·lanes] int16 as int32 [lanes]; wraps modulo 2**32."""
    import numpy as np

    products = a.view(np.int16).astype(np.int64) * b.view(np.int16)
    total = products.reshape(*products.shape[:-1], -1, 2).sum(-1)
    return np.asarray(total.astype(np.uint64).astype(np.uint32).view(np.int32))


def _vpermw(table: Array, index: Array) -> Array:
    """table[index mod 32] for each 16-bit lane."""
    import numpy as np

    return np.take_along_axis(table, (index & 31).astype(np.intp), axis=-1)


def _ldtilecfg(config: Array) -> list[tuple[int, int]]:
    """64 bytes of configuration -> (rows, bytes a row) of tiles 0..7; all tiles are zeroed."""
    import numpy as np

    widths = config[16:32].view(np.uint16)
    return [(int(config[48 + t]), int(widths[t])) if config[0] else (0, 0) for t in range(8)]


def _tilerelease() -> list[tuple[int, int]]:
    """No tile is configured any more, and their contents are gone."""
    return [(0, 0)] * 8


def _tilezero() -> Array:
    """A tile, 16 rows of 64 bytes, all zero."""
    import numpy as np

    return np.zeros((16, 64), np.uint8)


def _tileload(memory: Array, stride: int, rows: int, width: int) -> Array:
    """Bytes ``memory[r·stride + j]`` -> tile uint8 [16, 64]; beyond rows and width it is 0."""
    tile = _tilezero()
    for row in range(rows):
        tile[row, :width] = memory[row * stride : row * stride + width]
    return tile


def _tilestore(tile: Array, memory: Array, stride: int, rows: int, width: int) -> None:
    """Write the configured part of a tile to ``memory``; other bytes stay."""
    for row in range(rows):
        memory[row * stride : row * stride + width] = tile[row, :width]


# --- the table ----------------------------------------------------------------------------


def _emerald(cycles: float, latency: float | None = None) -> Cost:
    return Cost("emerald_rapids", cycles, latency, _MEASURED)


def _zen4(cycles: float) -> Cost:
    return Cost("zen4", cycles, None, _PEERS)


def _tile(name: str, meaning: Callable[..., Any], *costs: Cost, llvm: str = "") -> Instruction:
    return Instruction(name, f"llvm.x86.{llvm or name}", frozenset({"amx_tile"}), meaning, costs)


def _dot(name: str, feature: str, meaning: Callable[..., Any], *costs: Cost) -> Instruction:
    return Instruction(name, f"llvm.x86.{name}", frozenset({"amx_tile", feature}), meaning, costs)


def _vector(name: str, llvm: str, feature: str, meaning: Any, *costs: Cost) -> Instruction:
    requires = frozenset({"avx512f", feature})
    return Instruction(name, f"llvm.x86.{llvm}.512", requires, meaning, costs)


# Tile costs are those of 16 rows. The latency is from C to a store of it; a further dot into
# the same tile does not wait for it, so one accumulator is enough (docs/amx.md).
_DOT = _emerald(16.0, 50.0)

TABLE: dict[str, Instruction] = {
    instruction.name: instruction
    for instruction in (
        _tile("ldtilecfg", _ldtilecfg, _emerald(200.0)),
        _tile("tilerelease", _tilerelease, _emerald(12.0)),
        _tile("tilezero", _tilezero, _emerald(0.17)),
        _tile("tileloadd", _tileload, _emerald(8.4), llvm="tileloadd64"),
        _tile("tileloaddt1", _tileload, _emerald(17.0), llvm="tileloaddt164"),
        _tile("tilestored", _tilestore, _emerald(16.0), llvm="tilestored64"),
        _dot("tdpbf16ps", "amx_bf16", _tile_dot_pairs(_from_bf16), _DOT),
        _dot("tdpfp16ps", "amx_fp16", _tile_dot_pairs(_from_fp16)),
        _dot("tdpbssd", "amx_int8", _tile_dot_bytes("int8", "int8"), _DOT),
        _dot("tdpbsud", "amx_int8", _tile_dot_bytes("int8", "uint8"), _DOT),
        _dot("tdpbusd", "amx_int8", _tile_dot_bytes("uint8", "int8"), _DOT),
        _dot("tdpbuud", "amx_int8", _tile_dot_bytes("uint8", "uint8"), _DOT),
        _vector("vpermw", "avx512.permvar.hi", "avx512bw", _vpermw, _emerald(1.0, 4.0), _zen4(1.0)),
        _vector(
            "vdpbf16ps",
            "avx512bf16.dpbf16ps",
            "avx512_bf16",
            _vdpbf16ps,
            _emerald(2.0, 8.0),
            _zen4(1.0),
        ),
        _vector(
            "vpdpbusd", "avx512.vpdpbusd", "avx512_vnni", _vpdpbusd, _emerald(0.5, 6.0), _zen4(1.0)
        ),
        _vector("vpmaddubsw", "avx512.pmaddubs.w", "avx512bw", _vpmaddubsw),
        _vector("vpmaddwd", "avx512.pmaddw.d", "avx512bw", _vpmaddwd),
    )
}
