"""Element-wise functions: scalars and tiles of any shape, broadcast to one another. Functions of
floats take bf16, float16, float32 and float64 and give the same type; 16-bit types are computed
in float32 and rounded once."""

from __future__ import annotations

from typing import Any

from amxq.language.core import builtin


@builtin
def cast(
    value: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False
) -> Any:
    """Number conversion; the same as ``value.to(dtype)``.

    Floats round to nearest even ("rtne", the only ``fp_downcast_rounding``); floats to integers
    drop the fraction and stay at the type's ends, NaN gives 0; integers keep their low bits.
    ``bitcast`` keeps the bits and reads them as another type of the same size.
    """


@builtin
def where(condition: Any, x: Any, y: Any) -> Any:
    """x where ``condition`` (int1) holds, else y, element by element."""


@builtin
def maximum(x: Any, y: Any) -> Any:
    """The larger one, element by element; the number where one side is NaN."""


@builtin
def minimum(x: Any, y: Any) -> Any:
    """The smaller one, element by element; the number where one side is NaN."""


@builtin
def abs(x: Any) -> Any:
    """Absolute value."""


@builtin
def sqrt(x: Any) -> Any:
    """Square root of floats, correctly rounded."""


@builtin
def floor(x: Any) -> Any:
    """Largest whole number not above x, as a float."""


@builtin
def ceil(x: Any) -> Any:
    """Smallest whole number not below x, as a float."""


@builtin
def exp(x: Any) -> Any:
    """e to the power x, of floats, within 1 unit of the last place (bf16 and f16 are computed
    in f32). 0 below and infinite above the type's range; denormal results are rounded once."""


@builtin
def exp2(x: Any) -> Any:
    """2 to the power x, as :func:`exp`; exact for whole numbers."""


@builtin
def log(x: Any) -> Any:
    """Natural logarithm of floats, within 1.5 units of the last place; NaN for negative numbers,
    minus infinity for 0."""


@builtin
def log2(x: Any) -> Any:
    """Logarithm to the base 2, as :func:`log`, within 2 units of the last place."""


@builtin
def rsqrt(x: Any) -> Any:
    """1 / sqrt(x) of floats, within 1.5 units of the last place."""


@builtin
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of floats, within 3 units of the last place; 0 where it is below the
    smallest normal number."""


@builtin
def tanh(x: Any) -> Any:
    """Hyperbolic tangent of floats, within 3.5 units of the last place."""


@builtin
def erf(x: Any) -> Any:
    """The error function of floats, within 1.5 units of the last place."""


@builtin
def sin(x: Any) -> Any:
    """Sine of floats, x in radians, within 2 units of the last place; NaN for |x| > 2^40."""


@builtin
def cos(x: Any) -> Any:
    """Cosine of floats, x in radians, within 2 units of the last place; NaN for |x| > 2^40."""


@builtin
def fma(x: Any, y: Any, z: Any) -> Any:
    """x·y + z with one rounding; floats of one type."""


@builtin
def clamp(x: Any, min: Any, max: Any) -> Any:
    """x, at least ``min`` and at most ``max``."""


@builtin
def cdiv(x: Any, div: Any) -> Any:
    """x divided by div, rounded up; x ≥ 0, div > 0."""
