"""Values of the kernel language: element-wise functions, casts, promotion, scalars."""

from __future__ import annotations

import math

import pytest
import torch

import amxq
import amxq.language as tl

DTYPES = {
    "bool": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draw(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Numbers that every type but bool can hold at least roughly, with both signs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.empty(count, dtype=torch.float64).uniform_(-100, 100, generator=g)
    if dtype == torch.bool:
        return x > 0
    if dtype == torch.uint8:
        x = x.abs()
    return x.to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# --- casts ------------------------------------------------------------------------------


@amxq.jit
def cast_all(x, b, i8, u8, i16, i32, i64, bf, f16, f32, f64, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(b + at, value.to(tl.int1))
    tl.store(i8 + at, value.to(tl.int8))
    tl.store(u8 + at, value.to(tl.uint8))
    tl.store(i16 + at, value.to(tl.int16))
    tl.store(i32 + at, value.to(tl.int32))
    tl.store(i64 + at, value.to(tl.int64))
    tl.store(bf + at, value.to(tl.bfloat16))
    tl.store(f16 + at, value.to(tl.float16))
    tl.store(f32 + at, value.to(tl.float32))
    tl.store(f64 + at, value.to(tl.float64))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("count", [32, 7])
def test_casts_agree_with_torch(on: str, source: str, count: int) -> None:
    x = draw(DTYPES[source], count)
    if x.dtype in FLOATS:
        x[:5] = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0], dtype=x.dtype)
    outs = {name: torch.zeros(count, dtype=dtype) for name, dtype in DTYPES.items()}
    cast_all[(1,)](x, *outs.values(), N=count)
    for name, got in outs.items():
        want = x.to(DTYPES[name])
        if name == "uint8" and x.dtype in FLOATS:  # negative floats saturate
            got, want = got[x >= 0], want[x >= 0]
        close(got, want)


@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
def test_floats_round_to_nearest_even_bfloat16(on: str, source: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32)
    x[:4] = torch.tensor([math.inf, -math.inf, 1 + 2**-8, 1 + 3 * 2**-8])
    x = x.to(DTYPES[source])
    got = torch.zeros(x.shape, dtype=torch.bfloat16)
    to_bfloat16[(len(x) // 64,)](x, got, N=64)
    close(got, x.to(torch.float32).to(torch.bfloat16))


@amxq.jit
def to_bfloat16(x, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


def test_every_bfloat16_widens_exactly(on: str) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    got = torch.zeros(x.shape, dtype=torch.float32)
    widen[(len(x) // 64,)](x, got, N=64)
    close(got, x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_denormals_survive_a_copy(on: str, dtype: torch.dtype) -> None:
    x = torch.arange(1, 65, dtype=torch.int16).view(dtype)
    got = torch.zeros(64)
    widen[(1,)](x, got, N=64)
    close(got, x.float())


@amxq.jit
def widen(x, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(tl.float32))


def test_floats_saturate_to_integers(on: str) -> None:
    x = torch.tensor([1e30, -1e30, math.nan, math.inf, -math.inf, 127.9, -128.9, 255.5])
    got8, got32 = torch.zeros(8, dtype=torch.int8), torch.zeros(8, dtype=torch.int32)
    unsigned = torch.zeros(8, dtype=torch.uint8)
    saturate[(1,)](x, got8, unsigned, got32)
    assert got8.tolist() == [127, -128, 0, 127, -128, 127, -128, 127]
    assert unsigned.tolist() == [255, 0, 0, 255, 0, 127, 0, 255]
    top = 2**31 - 1
    assert got32.tolist() == [top, -top - 1, 0, top, -top - 1, 127, -128, 255]


@amxq.jit
def saturate(x, a, b, c):
    at = tl.arange(0, 8)
    value = tl.load(x + at)
    tl.store(a + at, value.to(tl.int8))
    tl.store(b + at, value.to(tl.uint8))
    tl.store(c + at, value.to(tl.int32))


# --- element-wise -----------------------------------------------------------------------


@amxq.jit
def arithmetic(x, y, add, sub, mul, low, high, less, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(add + at, a + b)
    tl.store(sub + at, a - b)
    tl.store(mul + at, a * b)
    tl.store(low + at, tl.minimum(a, b))
    tl.store(high + at, tl.maximum(a, b))
    tl.store(less + at, a < b)


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
def test_arithmetic_agrees_with_torch(on: str, name: str) -> None:
    dtype, count = DTYPES[name], 48
    x, y = draw(dtype, count, 1), draw(dtype, count, 2)
    outs = [torch.zeros(count, dtype=dtype) for _ in range(5)]
    less = torch.zeros(count, dtype=torch.bool)
    arithmetic[(1,)](x, y, *outs, less, N=count)
    wants = (x + y, x - y, x * y, torch.minimum(x, y), torch.maximum(x, y))
    for got, want in zip(outs, wants, strict=True):
        close(got, want)
    close(less, x < y)


@amxq.jit
def float_functions(x, y, div, root, low, high, size, minus, fused, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(div + at, a / b)
    tl.store(root + at, tl.sqrt(tl.abs(a)))
    tl.store(low + at, tl.floor(a))
    tl.store(high + at, tl.ceil(a))
    tl.store(size + at, tl.abs(a))
    tl.store(minus + at, -a)
    tl.store(fused + at, tl.fma(a, b, a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_functions_agree_with_torch(on: str, dtype: torch.dtype) -> None:
    count = 40
    x, y = draw(dtype, count, 3), draw(dtype, count, 4)
    outs = [torch.zeros(count, dtype=dtype) for _ in range(7)]
    float_functions[(1,)](x, y, *outs, N=count)
    fused = (x.double() * y.double() + x.double()).to(dtype)
    wants = (x / y, x.abs().sqrt(), x.floor(), x.ceil(), x.abs(), -x)
    for got, want in zip(outs, wants, strict=False):
        close(got, want)
    torch.testing.assert_close(outs[6], fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_functions_round_once(on: str, dtype: torch.dtype) -> None:
    x, y = draw(dtype, 40, 3), draw(dtype, 40, 4)
    outs = [torch.zeros(40, dtype=dtype) for _ in range(6)]
    half_functions[(1,)](x, y, *outs, N=40)
    wide = x.float()
    wants = (wide / y.float(), wide.abs().sqrt(), wide.floor(), wide.ceil(), wide.abs(), -wide)
    for got, want in zip(outs, wants, strict=True):
        close(got, want.to(dtype))


@amxq.jit
def half_functions(x, y, div, root, low, high, size, minus, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(div + at, a / b)
    tl.store(root + at, tl.sqrt(tl.abs(a)))
    tl.store(low + at, tl.floor(a))
    tl.store(high + at, tl.ceil(a))
    tl.store(size + at, tl.abs(a))
    tl.store(minus + at, -a)


@amxq.jit
def integers(x, y, div, mod, up, both, either, differ, left, right, flip, size, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(div + at, a // b)
    tl.store(mod + at, a % b)
    tl.store(up + at, tl.cdiv(tl.abs(a), tl.abs(b)))
    tl.store(both + at, a & b)
    tl.store(either + at, a | b)
    tl.store(differ + at, a ^ b)
    tl.store(left + at, a << 3)
    tl.store(right + at, a >> 2)
    tl.store(flip + at, ~a)
    tl.store(size + at, tl.abs(a))


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
def test_integer_functions_agree_with_c(on: str, name: str) -> None:
    dtype, count = DTYPES[name], 24
    x, y = draw(dtype, count, 5), draw(dtype, count, 6) // 4
    y[y == 0] = 3
    outs = [torch.zeros(count, dtype=dtype) for _ in range(10)]
    integers[(1,)](x, y, *outs, N=count)
    trunc = torch.div(x, y, rounding_mode="trunc")
    up = torch.div(x.abs() + y.abs() - 1, y.abs(), rounding_mode="trunc")
    wants = (trunc, x - trunc * y, up, x & y, x | y, x ^ y, x << 3, x >> 2, ~x, x.abs())
    for got, want in zip(outs, wants, strict=True):
        close(got, want)


def test_dividing_by_zero_does_not_kill_the_process(on: str) -> None:
    """Masked-off lanes hold 0 often enough; what they give is unspecified, but they give it."""
    low = -(2**31)
    x = torch.tensor([7, low, low, 5], dtype=torch.int32)
    y = torch.tensor([0, -1, 0, 2], dtype=torch.int32)
    got = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    divide[(1,)](x, y, *got, N=4)
    assert got[0].tolist()[3] == 2 and got[1].tolist()[3] == 1
    scalar = torch.zeros(1, dtype=torch.int32)
    divide_scalars[(1,)](scalar, 7, 0)
    divide_scalars[(1,)](scalar, low, -1)


@amxq.jit
def divide(x, y, div, mod, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(div + at, a // b)
    tl.store(mod + at, a % b)


@amxq.jit
def divide_scalars(out, a, b):
    tl.store(out, a // b + a % b)


def test_minimum_and_maximum_skip_nan(on: str) -> None:
    x = torch.tensor([math.nan, 1.0, math.nan, math.inf])
    y = torch.tensor([2.0, math.nan, math.nan, -math.inf])
    low, high = torch.zeros(4), torch.zeros(4)
    extremes[(1,)](x, y, low, high)
    close(low, torch.fmin(x, y))
    close(high, torch.fmax(x, y))


@amxq.jit
def extremes(x, y, low, high):
    at = tl.arange(0, 4)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(low + at, tl.minimum(a, b))
    tl.store(high + at, tl.maximum(a, b))


@amxq.jit
def logic(x, y, a_and, a_or, a_xor, a_not, word_not, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(a_and + at, (a > 0) & (b > 0))
    tl.store(a_or + at, (a > 0) | (b > 0))
    tl.store(a_xor + at, (a > 0) ^ (b > 0))
    tl.store(a_not + at, ~(a > 0))
    tl.store(word_not + at, not a)


def test_logic_of_comparisons(on: str) -> None:
    x = draw(torch.int32, 32, 7) // 40
    y = draw(torch.int32, 32, 8) // 40
    outs = [torch.zeros(32, dtype=torch.bool) for _ in range(5)]
    logic[(1,)](x, y, *outs, N=32)
    wants = ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), x <= 0, x == 0)
    for got, want in zip(outs, wants, strict=True):
        close(got, want)


@amxq.jit
def compare_all(x, y, eq, ne, lt, le, gt, ge, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(eq + at, a == b)
    tl.store(ne + at, a != b)
    tl.store(lt + at, a < b)
    tl.store(le + at, a <= b)
    tl.store(gt + at, a > b)
    tl.store(ge + at, a >= b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_comparisons_nan_included(on: str, dtype: torch.dtype) -> None:
    x, y = draw(dtype, 16, 9), draw(dtype, 16, 10)
    y[::3] = x[::3]
    if dtype in FLOATS:
        x[1] = y[2] = x[5] = y[5] = math.nan
    else:
        x[1], y[1] = (200, 100) if dtype == torch.uint8 else (1 << 40, -(1 << 40))
    outs = [torch.zeros(16, dtype=torch.bool) for _ in range(6)]
    compare_all[(1,)](x, y, *outs, N=16)
    for got, want in zip(outs, (x == y, x != y, x < y, x <= y, x > y, x >= y), strict=True):
        close(got, want)


@amxq.jit
def choose(x, y, out, limit, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(a > limit, a * 2, b))


def test_where_promotes_its_branches(on: str) -> None:
    x, y = draw(torch.bfloat16, 64, 11), draw(torch.float32, 64, 12)
    got = torch.zeros(64)
    choose[(1,)](x, y, got, 0.0, N=64)
    close(got, torch.where(x > 0, (x * 2).float(), y))


# --- promotion --------------------------------------------------------------------------


PROMOTIONS = [
    (torch.bfloat16, torch.float32, "f32"),
    (torch.bfloat16, torch.float16, "f32"),
    (torch.float16, torch.float32, "f32"),
    (torch.float64, torch.bfloat16, "f64"),
    (torch.int64, torch.float16, "f16"),
    (torch.int8, torch.int32, "i32"),
    (torch.uint8, torch.int8, "u8"),
    (torch.uint8, torch.int16, "i16"),
    (torch.bool, torch.int16, "i16"),
]


@amxq.jit
def expects(x, y, KIND: tl.constexpr):
    at = tl.arange(0, 4)
    tl.static_assert((tl.load(x + at) + tl.load(y + at)).dtype == KIND, "promotion")
    tl.static_assert((tl.load(y + at) * tl.load(x + at)).dtype == KIND, "promotion")


@pytest.mark.parametrize(("a", "b", "kind"), PROMOTIONS)
def test_promotion(a: torch.dtype, b: torch.dtype, kind: str) -> None:
    from amxq.ir.types import DTYPES as BY_NAME

    expects.warmup(a, b, KIND=BY_NAME[kind], target="avx2")


@amxq.jit
def with_numbers(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.static_assert((value + 1).dtype == value.dtype)
    tl.static_assert((value * 0.5).dtype == value.dtype)
    tl.store(out + at, (value + 1) * 0.5 - 3 / (1 + 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_python_numbers_take_the_other_type(on: str, dtype: torch.dtype) -> None:
    x, got = draw(dtype, 16, 13), torch.zeros(16, dtype=dtype)
    with_numbers[(1,)](x, got, N=16)
    close(got, (x + 1) * 0.5 - 1.5)


@amxq.jit
def constants(out, small, half, brain, double):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.full((4,), 1e300, tl.float32))
    tl.store(small + at, tl.full((4,), 2.5, tl.int8))
    tl.store(half + at, tl.full((4,), 1e6, tl.float16))
    tl.store(brain + at, tl.full((4,), -1e39, tl.bfloat16))
    tl.store(double + at, tl.full((4,), 0.1, tl.float64))


def test_constants_out_of_range_convert_as_numbers_do(on: str) -> None:
    outs = [torch.zeros(4, dtype=d) for d in (torch.float32, torch.int8, *FLOATS[1::-1])]
    double = torch.zeros(4, dtype=torch.float64)
    constants[(1,)](*outs, double)
    assert outs[0].tolist() == [math.inf] * 4
    assert outs[1].tolist() == [2] * 4
    assert outs[2].tolist() == [math.inf] * 4
    assert outs[3].tolist() == [-math.inf] * 4
    assert double.tolist() == [0.1] * 4


# --- scalars ----------------------------------------------------------------------------


@amxq.jit
def scalars(out, i, j, f, flag, none):
    if none is None:
        tl.store(out, i * 2 + j)
    tl.store(out + 1, (j >> 33).to(tl.int64))
    tl.store(out + 2, (f * 4.0).to(tl.int64))
    tl.store(out + 3, flag.to(tl.int64))
    tl.store(out + 4, (i < 0) & flag)


def test_scalar_arguments(on: str) -> None:
    out = torch.zeros(5, dtype=torch.int64)
    scalars[(1,)](out, -7, 1 << 40, 2.25, True, None)
    assert out.tolist() == [(1 << 40) - 14, 1 << 7, 9, 1, 1]


def test_every_scalar_type_compiles(on: str) -> None:
    kinds = (tl.int8, tl.uint8, tl.int16, tl.int32, tl.int64, tl.float32, tl.float64)
    for kind in (*kinds, tl.bfloat16, tl.float16, tl.int1):
        store_scalar.warmup(torch.float32, kind)


@amxq.jit
def store_scalar(out, x):
    tl.store(out, x.to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_of_every_width(on: str, dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    top = (1 << bits) - 1
    x = torch.tensor([0, 1, top, top - 1, top // 2, 5, 6, 7], dtype=dtype)
    quotient, larger = torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=torch.bool)
    unsigned[(1,)](x, quotient, larger)
    assert quotient.tolist() == [v // 3 for v in x.tolist()]
    assert larger.tolist() == [v > 6 for v in x.tolist()]


@amxq.jit
def unsigned(x, quotient, larger):
    at = tl.arange(0, 8)
    value = tl.load(x + at)
    tl.store(quotient + at, value // 3)
    tl.store(larger + at, value > 6)
