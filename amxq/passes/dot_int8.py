"""int8 times int4 in vector registers.

A 16-bit word of packed weights holds k 0, 2, 4, 6 (even words) or 1, 3, 5, 7 (odd words) of one
column. Its low and high nibbles are bytes that lie as the instructions for bytes want them, four
k of a column in 32 bits, if the activations are in the order 0, 4, 1, 5, 2, 6, 3, 7 (int4_order):

    words = vector_load panel
    q     = words & 0x0F0F                 k 0, 4, 1, 5      unsigned, 0 to 15
    r     = words >> 4 & 0x0F0F            k 2, 6, 3, 7
    acc   = vpdpbusd(acc, q, splat(a[m, 0:4]))              for every row m
    acc   = vpdpbusd(acc, r, splat(a[m, 4:8]))

VPDPBUSD multiplies unsigned by signed bytes, and so do the pairs of CPUs without it: VPMADDUBSW
adds two products in 16 bits, 3840 at most, and VPMADDWD widens the sum of the low and the high
quad to 32. Everything is exact.
"""

from __future__ import annotations

from amxq.ir import hardware as hw
from amxq.ir.builder import Builder
from amxq.ir.ops import Value
from amxq.ir.types import I8, I16, I32, U8, U16, PointerType, VectorType
from amxq.passes.dot_vector import BLOCK_BYTES, Int4Dot, bitcast


def int4_quads(b: Builder, words: Value) -> list[Value]:
    """The bytes k (0, 4, 1, 5) and k (2, 6, 3, 7) of 8 k, as 16-bit words."""
    low = b.constant(0x0F0F, words.type)
    shifted = b.binary("shr", words, b.constant(4, words.type))
    return [b.binary("and", words, low), b.binary("and", shifted, low)]


class Int8Dot(Int4Dot):
    """int8 tile [M, K] in int4_order times packed int4 [K, 32]."""

    def setup(self) -> None:
        """The pointer to words and, without VPDPBUSD, ones to add pairs with."""
        b, lanes = self.v.b, self.v.lanes
        self.words = bitcast(b, self.panel, PointerType(U16))
        self.unsigned, self.signed = VectorType(4 * lanes, U8), VectorType(4 * lanes, I8)
        self.pair, self.sums = VectorType(2 * lanes, I16), VectorType(lanes, I32)
        self.ones = None
        if self.op.lowering == "vpmaddubsw":
            self.ones = b.constant(1, self.pair)

    def block(self, kb: Value, number: int, accs: list[Value]) -> list[Value]:
        b = self.v.b
        quads = [self._quads(kb, vector) for vector in range(self.vectors)]
        for row in range(self.rows):
            a = [bitcast(b, self.activation(row, kb, first), self.signed) for first in (0, 4)]
            for vector, q in enumerate(quads):
                if self.ones is not None:
                    i = self.index(row, vector, number)
                    accs[i] = b.add(accs[i], self._pairs(q, a, self.ones))
                    continue
                for j in range(2):
                    i = self.index(row, vector, 2 * number + j)
                    accs[i] = b.value(hw.Vpdpbusd, self.sums, acc=accs[i], a=q[j], b=a[j])
        return accs

    def _quads(self, kb: Value, vector: int) -> list[Value]:
        b = self.v.b
        type_ = VectorType(2 * self.v.lanes, U16)
        offset = b.add(b.mul(kb, b.i64(BLOCK_BYTES // 2)), b.i64(type_.lanes * vector))
        pointer = b.addptr(self.words, offset)
        words = b.value(hw.VectorLoad, type_, pointer=pointer, mask=None)
        return [bitcast(b, q, self.unsigned) for q in int4_quads(b, words)]

    def _pairs(self, q: list[Value], a: list[Value], ones: Value) -> Value:
        b = self.v.b
        low, high = (b.value(hw.Vpmaddubsw, self.pair, a=x, b=y) for x, y in zip(q, a))
        return b.value(hw.Vpmaddwd, self.sums, a=b.add(low, high), b=ones)
