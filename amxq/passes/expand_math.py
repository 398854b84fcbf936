"""Expands elementary functions into multiplications, additions and integer operations.

Before:  %y = exp %x : vec<16xf32>
After:   %t = fma a=%x b=1.442695 c=12582912.0        (round(x / ln 2), in the low bits of %t)
         %n = sub %t, 12582912.0                      (the same, as a float)
         %r = fma a=%n b=-0.6931472 c=%x …            (|r| ≤ ln 2 / 2)
         %p = fma a=%r b=… c=…                        (a polynomial)
         %y = mul %p, 2 ** n

One code for every target, for scalars and vectors: no table, branch or library call, the same
bits everywhere. bf16 and f16 are computed in f32, sin and cos of f32 in f64, and rounded once
more. tests/compiler/test_language_math.py holds the largest errors.

The reductions are the classical ones (Cody and Waite, Software Manual for the Elementary
Functions, 1980; for the logarithm Tang, TOMS 16, 1990). Polynomials are Chebyshev expansions on
the reduced range, computed with 50 digits and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.builder import Builder
from amxq.ir.ops import Block, Function, Value
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    U32,
    U64,
    DType,
    Type,
    VectorType,
    scalar_of,
    with_element,
)

Coefficients = tuple[float, ...]
"""Of a polynomial, the constant first."""
Whole = tuple[Value, Value]
"""A whole number as a float, and in the low bits of an integer."""


@dataclass(frozen=True)
class Format:
    """A floating-point type: its layout, and the polynomials for its precision.

    Attributes:
        bits: the integer type of the same size.
        mantissa, bias: stored bits of the significand; the exponent's bias.
        exp: (e^r - 1) / r for |r| ≤ ln 2 / 2.
        exp2: (2^r - 1) / r for |r| ≤ 1/2.
        log: (log((1 + s) / (1 - s)) - 2s) / s³ of s² for |s| ≤ 0.172.
        erf: erf(x) / x - 1 of x² for |x| < 1.
        erfc: -log(1 - erf(x)) of x - ``erfc_centre`` for 1 ≤ x ≤ ``erf_is_one``.
        ln2, log2e: high and low parts.
        exp_range, exp2_range: below and above, results are 0 and infinite.
        tanh_is_one, erf_is_one: from where results round to 1.
    """

    element: DType
    bits: DType
    mantissa: int
    bias: int
    exp: Coefficients
    exp2: Coefficients
    log: Coefficients
    erf: Coefficients
    erfc: Coefficients
    erfc_centre: float
    ln2: tuple[float, float]
    log2e: tuple[float, float]
    exp_range: tuple[float, float]
    exp2_range: tuple[float, float]
    tanh_is_one: float
    erf_is_one: float


# fmt: off
SINGLE = Format(
    F32, U32, mantissa=23, bias=127,
    exp=(1.0, 0.5, 0.16666504740715027, 0.041666463017463684, 0.008369220420718193,
         0.0013933731243014336),
    exp2=(0.6931471824645996, 0.24022650718688965, 0.055503565818071365, 0.009618082083761692,
          0.001339109381660819, 0.0001545336126582697),
    log=(0.6666668653488159, 0.39988550543785095, 0.29590317606925964),
    erf=(0.12837916612625122, -0.3761262595653534, 0.11283594369888306, -0.02685421146452427,
         0.005189087241888046, -0.000801686430349946, 7.875874871388078e-05),
    erfc=(-0.00018489928334020078, 1.1295640468597412, 0.6332476735115051, 0.1083894595503807,
          -0.02519030123949051, 0.004198059439659119, -0.00044005634845234454,
          2.1581221517408267e-05),
    erfc_centre=0.0,
    ln2=(0.6931471824645996, -1.9046542121259336e-09),
    log2e=(1.4426950216293335, 1.9259629911266175e-08),
    exp_range=(-104.0, 89.0), exp2_range=(-151.0, 129.0), tanh_is_one=10.0, erf_is_one=4.0,
)
DOUBLE = Format(
    F64, U64, mantissa=52, bias=1023,
    exp=(1.0, 0.5000000000000006, 0.1666666666666667, 0.04166666666657239, 0.008333333333326084,
         0.0013888888932751, 0.0001984126987500228, 2.4801504014426906e-05,
         2.755725517000089e-06, 2.7626495546432196e-07, 2.5105312729622103e-08),
    exp2=(0.6931471805599453, 0.240226506959101, 0.0555041086648216, 0.009618129107606541,
          0.001333355814641675, 0.00015403530442319546, 1.5252733830147138e-05,
          1.3215442232969344e-06, 1.0178062256646543e-07, 7.072656799362923e-09,
          4.4549983631048684e-10),
    log=(0.666666666666667, 0.3999999999989322, 0.28571428628810996, 0.22222210674238516,
         0.18182922513515942, 0.15330617306743305, 0.1463003136412286),
    erf=(0.12837916709551256, -0.37612638903183543, 0.11283791670945006, -0.02686617064323777,
         0.0052239776071164225, -0.0008548325975389692, 0.00012055294904839707,
         -1.492473690741966e-05, 1.6447424703317362e-06, -1.6208483801871705e-07,
         1.3720064546777686e-08, -7.795898827002142e-10),
    erfc=(5.364941264616636, 4.418160805994429, 0.9237508418240377, 0.016465118137047447,
          -0.0035707563499550923, 0.0007323993790844681, -0.0001353093168509056,
          2.0706473598533384e-05, -1.952225447888408e-06, -2.037433306798771e-07,
          1.7322650606259674e-07, -5.7674315242084414e-08, 1.3945888890548092e-08,
          -2.620305530638326e-09, 2.7685386242848157e-10, 7.184385459639251e-11,
          -4.065205954483652e-11, 5.716591233107378e-12),
    erfc_centre=2.0,
    ln2=(0.6931471805599453, 2.3190468138462996e-17),
    log2e=(1.4426950408889634, 2.0355273740931033e-17),
    exp_range=(-746.0, 710.0), exp2_range=(-1076.0, 1025.0), tanh_is_one=20.0, erf_is_one=6.0,
)
HALF_PI = (1.5707963267948966, 6.123233995736765e-17, 1.082856673921914e-32)
"""π/2 in three parts, all positive so that sin(-0) is -0."""
SIN = (-0.16666666666666666, 0.008333333333330925, -0.00019841269836722418,
       2.755731608381636e-06, -2.5051127944014188e-08, 1.5917848524808262e-10)
"""(sin r - r) / r³ of r², |r| ≤ π/4."""
COS = (0.041666666666666664, -0.0013888888888887382, 2.480158729874307e-05,
       -2.7557317260008837e-07, 2.0876143827993133e-09, -1.1382456778061306e-11)
"""(cos r - 1 + r²/2) / r⁴ of r², |r| ≤ π/4."""
# fmt: on
VANISHES = -1000.0
"""A power of 2, or of e, that VSCALEFPS makes 0 at its full speed: results that just underflow,
2⁻¹⁶⁰ as well, cost it 200 cycles (Emerald Rapids, 2026-12-01)."""
SIN_LIMIT = 2.0**40
"""sin and cos of larger numbers are NaN: three parts of π/2 are not enough for them."""


def expand_math(function: Function) -> None:
    _block(function.body, {})


def _block(block: Block, renamed: dict[Value, Value]) -> None:
    before, block.ops = block.ops, []
    b = Builder(block)
    for op in before:
        op = ops.replace_operands(op, lambda v: renamed.get(v, v))
        if isinstance(op, ops.Unary) and op.kind in ops.MATH:
            b.loc = op.loc
            renamed[op.result] = _expand(b, op.kind, op.operand)
            continue
        for region in ops.regions(op):
            _block(region, renamed)
        block.ops.append(op)


def _expand(b: Builder, kind: str, x: Value) -> Value:
    element = scalar_of(x.type)
    if element in (BF16, F16):
        return b.cast(_expand(b, kind, b.cast(x, F32)), element)
    if kind in ("sin", "cos") and element == F32:
        return b.cast(_expand(b, kind, b.cast(x, F64)), F32)
    expansion = Expansion(b, DOUBLE if element == F64 else SINGLE, x.type)
    function: Callable[[Value], Value] = getattr(expansion, kind)
    return function(x)


class Expansion:
    """The functions, for values of one type; each method appends its operations."""

    def __init__(self, b: Builder, form: Format, type_: Type) -> None:
        self.b = b
        self.form = form
        self.type = type_
        self.bits_type = with_element(type_, form.bits)

    # --- vocabulary -----------------------------------------------------------------------

    def const(self, number: float) -> Value:
        return self.b.constant(number, self.type)

    def integer(self, number: int) -> Value:
        """An integer constant of the bits' type, modulo its size."""
        return self.b.constant(number % (1 << self.form.bits.bits), self.bits_type)

    def fma(self, x: Value, y: Value | float, z: Value | float) -> Value:
        y, z = (v if isinstance(v, Value) else self.const(v) for v in (y, z))
        return self.b.value(hw.Fma, self.type, a=x, b=y, c=z)

    def poly(self, x: Value, coefficients: Coefficients) -> Value:
        """Horner's rule."""
        result = self.const(coefficients[-1])
        for c in coefficients[-2::-1]:
            result = self.fma(result, x, c)
        return result

    def compare(self, kind: str, x: Value, y: float) -> Value:
        bools = with_element(self.type, I1)
        return self.b.value(ops.Compare, bools, kind=kind, lhs=x, rhs=self.const(y))

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        return self.b.value(ops.Select, x.type, condition=condition, then=x, other=y)

    def at_most(self, x: Value, high: float) -> Value:
        """min(x, high), where NaN stays NaN: one instruction."""
        return self.select(self.compare("gt", x, high), self.const(high), x)

    def negative(self, x: Value) -> Value:
        return self.b.value(ops.Unary, self.type, kind="neg", operand=x)

    def absolute(self, x: Value) -> Value:
        return self.b.value(ops.Unary, self.type, kind="abs", operand=x)

    def bits(self, x: Value) -> Value:
        return self.b.value(hw.Bitcast, self.bits_type, operand=x)

    def from_bits(self, bits: Value) -> Value:
        return self.b.value(hw.Bitcast, self.type, operand=bits)

    def with_sign(self, magnitude: Value, sign: Value) -> Value:
        """``magnitude`` ≥ 0 with the sign of ``sign``."""
        mask = self.integer(1 << self.form.bits.bits - 1)
        sign_bit = self.b.binary("and", self.bits(sign), mask)
        return self.from_bits(self.b.binary("or", self.bits(magnitude), sign_bit))

    @cached_property
    def magic(self) -> float:
        """Adding it rounds to a whole number, which then stands in the sum's low bits."""
        return 1.5 * 2.0**self.form.mantissa

    def rounded(self, x: Value, factor: float) -> Whole:
        """round(x · factor), as a float and in the low bits of an integer."""
        shifted = self.fma(x, factor, self.magic)
        return self.b.sub(shifted, self.const(self.magic)), self.bits(shifted)

    @property
    def scalef(self) -> bool:
        """Whether one instruction scales by a power of 2, which gives the same bits."""
        return self.type == VectorType(16, F32)

    def scaled(self, x: Value, n: Whole) -> Value:
        """x · 2ⁿ: elsewhere in two steps, as 2ⁿ itself may be out of range."""
        if self.scalef:
            return self.b.value(hw.Scalef, self.type, x=x, n=n[0])
        b, form = self.b, self.form
        one, shift = self.integer(form.bias << form.mantissa), self.integer(form.mantissa)
        half = b.binary("shr", n[1], self.integer(1))
        for part in (half, b.sub(n[1], half)):
            power = b.add(b.binary("shl", part, shift), one)
            x = b.mul(x, self.from_bits(power))
        return x

    # --- functions ------------------------------------------------------------------------

    def exp(self, x: Value) -> Value:
        def power(x: Value) -> Value:
            q, r, n = self._exp_parts(x)
            return self.scaled(self.fma(r, q, 1.0), n)

        return self._in_range(power, x, *self.form.exp_range)

    def _in_range(
        self, power: Callable[[Value], Value], x: Value, low: float, high: float
    ) -> Value:
        """``power`` of x, 0 below ``low``: -inf is common (masks of a softmax), and results that
        just underflow cost Intel's cores 150 cycles each."""
        zero = self.compare("lt", x, low)
        instead = self.const(VANISHES if self.scalef else 0.0)
        result = power(self.at_most(self.select(zero, instead, x), high))
        return result if self.scalef else self.select(zero, self.const(0.0), result)

    def _exp_parts(self, x: Value) -> tuple[Value, Value, Whole]:
        """(q, r, n) such that e^x = (1 + r·q)·2ⁿ."""
        n = self.rounded(x, self.form.log2e[0])
        r = x
        for part in self.form.ln2:
            r = self.fma(n[0], -part, r)
        return self.poly(r, self.form.exp), r, n

    def exp2(self, x: Value) -> Value:
        def power(x: Value) -> Value:
            n = self.rounded(x, 1.0)
            r = self.b.sub(x, n[0])
            return self.scaled(self.fma(r, self.poly(r, self.form.exp2), 1.0), n)

        return self._in_range(power, x, *self.form.exp2_range)

    def log(self, x: Value) -> Value:
        e, log_m = self._log_parts(x)
        high, low = self.form.ln2
        return self._log_edges(x, self.fma(e, high, self.fma(e, low, log_m)))

    def log2(self, x: Value) -> Value:
        e, log_m = self._log_parts(x)
        high, low = self.form.log2e
        log2_m = self.fma(log_m, high, self.b.mul(log_m, self.const(low)))
        return self._log_edges(x, self.b.add(log2_m, e))

    def _log_parts(self, x: Value) -> tuple[Value, Value]:
        """(e, log m) with x = m·2ᵉ, √½ ≤ m < √2, for x > 0."""
        b, form = self.b, self.form
        tiny = self.compare("lt", x, 2.0 ** (1 - form.bias))
        grown = self.select(tiny, b.mul(x, self.const(2.0**form.mantissa)), x)
        bits, shift = self.bits(grown), self.integer(form.mantissa)
        # from √½ on, so that the exponent field changes at √½, √2, …; biased, hence positive
        half = round(math.sqrt(0.5) * 2 ** (form.mantissa + 1)) - (1 << form.mantissa)
        root = ((form.bias - 1) << form.mantissa) + half
        from_root = b.add(bits, self.integer((form.bias << form.mantissa) - root))
        exponent = b.binary("shr", from_root, shift)
        m_bits = b.add(
            b.sub(bits, b.binary("shl", exponent, shift)), self.integer(form.bias << form.mantissa)
        )
        # the exponent as the low bits of a float of the size 2^mantissa
        base = 2.0**form.mantissa
        carrier = b.binary(
            "or", exponent, self.integer((form.bias + form.mantissa) << form.mantissa)
        )
        start = self.select(
            tiny, self.const(base + form.bias + form.mantissa), self.const(base + form.bias)
        )
        e = b.sub(self.from_bits(carrier), start)
        f = b.sub(self.from_bits(m_bits), self.const(1.0))
        s = b.binary("div", f, b.add(f, self.const(2.0)))
        z = b.mul(s, s)
        half_square = b.mul(b.mul(f, f), self.const(0.5))
        rest = self.fma(z, self.poly(z, form.log), half_square)
        return e, b.sub(f, b.sub(half_square, b.mul(s, rest)))

    def _log_edges(self, x: Value, result: Value) -> Value:
        """The logarithms of 0, infinity, negative numbers and NaN."""
        result = self.select(self.compare("lt", x, math.inf), result, x)
        zero = self.compare("eq", x, 0.0)
        edge = self.select(zero, self.const(-math.inf), self.const(math.nan))
        return self.select(self.compare("gt", x, 0.0), result, edge)

    def rsqrt(self, x: Value) -> Value:
        root = self.b.value(ops.Unary, self.type, kind="sqrt", operand=x)
        return self.b.binary("div", self.const(1.0), root)

    def sigmoid(self, x: Value) -> Value:
        one = self.const(1.0)
        return self.b.binary("div", one, self.b.add(self.exp(self.negative(x)), one))

    def tanh(self, x: Value) -> Value:
        """(e^2|x| - 1) / (e^2|x| + 1), where e^y - 1 = 2ⁿ·(e^r - 1) + (2ⁿ - 1) keeps the digits
        of small numbers."""
        b = self.b
        size = self.at_most(self.absolute(x), self.form.tanh_is_one)
        q, r, n = self._exp_parts(b.add(size, size))
        power = self.scaled(self.const(1.0), n)
        minus_one = self.fma(power, b.mul(r, q), b.sub(power, self.const(1.0)))
        ratio = b.binary("div", minus_one, b.add(minus_one, self.const(2.0)))
        return self.with_sign(ratio, x)

    def erf(self, x: Value) -> Value:
        b, form = self.b, self.form
        near = self.fma(x, self.poly(b.mul(x, x), form.erf), x)
        size = self.absolute(x)
        t = b.sub(self.at_most(size, form.erf_is_one), self.const(form.erfc_centre))
        q, r, n = self._exp_parts(self.negative(self.poly(t, form.erfc)))
        erfc = self.scaled(self.fma(r, q, 1.0), n)
        far = self.with_sign(b.sub(self.const(1.0), erfc), x)
        return self.select(self.compare("lt", size, 1.0), near, far)

    def sin(self, x: Value) -> Value:
        return self._circular(x, 0)

    def cos(self, x: Value) -> Value:
        return self._circular(x, 1)

    def _circular(self, x: Value, quarter: int) -> Value:
        """sin(x + quarter·π/2): of r = x - n·π/2, sine or cosine by the quadrant."""
        b = self.b
        n, n_bits = self.rounded(x, 1 / HALF_PI[0])
        r = x
        for part in HALF_PI:
            r = self.fma(n, -part, r)
        z = b.mul(r, r)
        sine = b.mul(r, self.fma(z, self.poly(z, SIN), 1.0))
        cosine = self.fma(b.mul(z, z), self.poly(z, COS), self.fma(z, -0.5, 1.0))
        quadrant = b.add(n_bits, self.integer(quarter))
        bools = with_element(self.type, I1)
        odd = b.value(
            ops.Compare,
            bools,
            kind="ne",
            lhs=b.binary("and", quadrant, self.integer(1)),
            rhs=self.integer(0),
        )
        sign = b.binary(
            "shl", b.binary("shr", quadrant, self.integer(1)), self.integer(self.form.bits.bits - 1)
        )
        value = self.bits(self.select(odd, cosine, sine))
        result = self.from_bits(b.binary("xor", value, sign))
        return self.select(
            self.compare("le", self.absolute(x), SIN_LIMIT), result, self.const(math.nan)
        )
