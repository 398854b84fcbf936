"""Elementary functions against wider arithmetic: largest errors in units of the last place."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import amxq
import amxq.language as tl

WORST = {  # the documented errors
    "exp": 1.0,
    "exp2": 1.0,
    "log": 1.5,
    "log2": 2.0,
    "rsqrt": 1.5,
    "sigmoid": 3.0,
    "tanh": 3.5,
    "erf": 1.5,
    "sin": 2.0,
    "cos": 2.0,
}
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0]


@amxq.jit
def apply(x, y, F: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + at)
    if F == "exp":
        v = tl.exp(v)
    elif F == "exp2":
        v = tl.exp2(v)
    elif F == "log":
        v = tl.log(v)
    elif F == "log2":
        v = tl.log2(v)
    elif F == "rsqrt":
        v = tl.rsqrt(v)
    elif F == "sigmoid":
        v = tl.sigmoid(v)
    elif F == "tanh":
        v = tl.tanh(v)
    elif F == "erf":
        v = tl.erf(v)
    elif F == "sin":
        v = tl.sin(v)
    elif F == "cos":
        v = tl.cos(v)
    tl.store(y + at, v)


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size, among them every exponent, denormals, and the edges."""
    g = torch.Generator().manual_seed(0)
    count = 1 << 14
    dense = [torch.empty(count, dtype=dtype).uniform_(-r, r, generator=g) for r in (1.5, 20, 110)]
    exponents = torch.empty(count, dtype=torch.float64)
    exponents = exponents.uniform_(*((-149, 128) if dtype == torch.float32 else (-1074, 1024)))
    x = torch.cat([*dense, torch.exp2(exponents).to(dtype)])
    x[: len(EDGES)] = torch.tensor(EDGES, dtype=dtype)
    return x


def reference(name: str, x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.float32:
        return np.asarray(getattr(torch, name)(x.double()))
    if name == "erf":
        return np.vectorize(math.erf)(x.numpy()).astype(np.longdouble)
    wide = x.numpy().astype(np.longdouble)
    with np.errstate(all="ignore"):
        if name == "rsqrt":
            return 1 / np.sqrt(wide)
        return 1 / (1 + np.exp(-wide)) if name == "sigmoid" else getattr(np, name)(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WORST)
def test_errors_are_as_documented(on: str, name: str, dtype: torch.dtype) -> None:
    x = samples(dtype)
    if name in ("sin", "cos"):
        x = x[x.abs() < 2.0**30]
        x = x[: len(x) // 64 * 64]
    got = torch.empty_like(x)
    apply[(len(x) // 64,)](x, got, F=name, N=64)
    y = got.numpy()
    with np.errstate(all="ignore"):
        want = reference(name, x)
        rounded = want.astype(y.dtype)
        same_kind = (np.isnan(y) == np.isnan(want)) & (np.isinf(y) == np.isinf(rounded))
        assert same_kind.all(), (x[~same_kind], y[~same_kind], want[~same_kind])
        finite = np.isfinite(rounded)
        if name == "sigmoid":  # 1 / (1 + e^-x) is 0 where e^-x is infinite
            finite &= np.abs(rounded) > np.finfo(rounded.dtype).tiny
        error = np.abs(y.astype(want.dtype) - want) / np.spacing(np.abs(rounded))
    worst = np.where(finite, error, 0)
    assert worst.max() <= WORST[name], (x[worst.argmax()], y[worst.argmax()])
    signs = np.signbit(rounded) == np.signbit(y)
    assert signs[finite].all(), x[finite][~signs[finite]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WORST)
def test_halves_are_rounded_from_float32(on: str, name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 512).to(dtype)
    got, wide = torch.empty_like(x), torch.empty(512)
    apply[(8,)](x, got, F=name, N=64)
    apply[(8,)](x.float(), wide, F=name, N=64)
    torch.testing.assert_close(got, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


@amxq.jit
def of_scalars(x, y):
    v = tl.load(x)
    tl.store(y, tl.exp(v))
    tl.store(y + 1, tl.log(v))
    tl.store(y + 2, tl.exp(1.0))


def test_scalars_have_the_same_bits_as_tiles(on: str) -> None:
    x = torch.linspace(0.1, 6.4, 64)
    exp, log, three = torch.empty(64), torch.empty(64), torch.empty(3)
    apply[(1,)](x, exp, F="exp", N=64)
    apply[(1,)](x, log, F="log", N=64)
    for i in range(0, 64, 9):
        of_scalars[(1,)](x[i:], three)
        assert three.tolist() == [exp[i].item(), log[i].item(), np.float32(np.e).item()]


def test_targets_give_the_same_bits() -> None:
    x = samples(torch.float32)
    results = []
    for name in amxq.available_targets():
        with amxq.target(name):
            parts = [torch.empty_like(x) for _ in WORST]
            for function, part in zip(WORST, parts):
                apply[(len(x) // 64,)](x, part, F=function, N=64)
            results.append(torch.stack(parts))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
