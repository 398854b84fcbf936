"""``amxq.linear(..., precision="int8")``: bits against a NumPy model, errors against fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from int8_reference import int8_linear
from linear_reference import draw

import amxq
from amxq.runtime.targets import available_targets, target

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def packed(n: int = 72, k: int = 192, group: int = 64, *, symmetric: bool = True, **options):
    weight = draw(np.random.default_rng(n + k), n, k, group, symmetric=symmetric, **options)
    g_idx = torch.from_numpy(weight.groups).int() if options.get("act_order") else None
    format = "gptq_v2" if g_idx is not None else "plain"
    tensors = weight.tensors(format)
    return weight, amxq.pack(*tensors, format=format, group_size=group, g_idx=g_idx)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- what is computed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "symmetric", "dtype", "options"),
    [
        (1, 64, 256, 128, True, torch.bfloat16, {}),
        (5, 100, 104, 8, False, torch.float16, {}),
        (8, 33, 512, 256, False, torch.float32, {}),
        (16, 31, 320, 160, True, torch.bfloat16, {"bias": torch.float64}),
        (37, 40, 121, 32, False, torch.float32, {"bias": torch.bfloat16}),
        (64, 64, 256, 64, True, torch.float16, {"act_order": True}),
        (130, 32, 256, 128, False, torch.bfloat16, {}),
    ],
)
def test_every_bit(on: str, m, n, k, group, symmetric, dtype, options) -> None:
    bias = randn(n, seed=1).to(options["bias"]) if "bias" in options else None
    order = {"act_order": True} if "act_order" in options else {}
    weight, w = packed(n, k, group, symmetric=symmetric, **order)
    x = (randn(m, k) * 10.0 ** (4 * randn(m, 1, seed=2).clamp(-1, 1))).to(dtype)
    got = amxq.linear(x, *w, bias=bias, precision="int8")
    assert torch.equal(got, int8_linear(x, weight, w.group_size, bias))


@settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(available_targets()),
    n=st.integers(1, 100),
    k=st.integers(1, 300),
    m=st.one_of(st.integers(0, 40), st.sampled_from([64, 100])),
    group=st.sampled_from([-1, 8, 24, 64, 128]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_any_linear(name, n, k, m, group, symmetric, dtype, seed) -> None:
    group = -1 if group >= k else group
    weight = draw(np.random.default_rng(seed), n, k, group, symmetric=symmetric)
    w = amxq.pack(*weight.tensors("plain"), format="plain", group_size=group)
    x = randn(m, k, seed=seed).to(dtype)
    with target(name):
        got = amxq.linear(x, *w, precision="int8")
    assert torch.equal(got, int8_linear(x, weight, w.group_size))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("outliers", "limit"), [(0, 0.0066), (20, 0.0202)])
def test_error_is_that_of_activations_in_blocks_of_128(
    symmetric: bool, outliers: int, limit: float
) -> None:
    """``outliers`` of 4096 channels are 20 times as large as the others."""
    rng = np.random.default_rng(0)
    weight, w = packed(256, 4096, 128, symmetric=symmetric)
    channels = np.ones(4096)
    channels[rng.choice(4096, outliers, replace=False)] = 20
    x = torch.from_numpy(rng.standard_normal((16, 4096)) * channels).float()
    exact = weight.exact(x)
    error = np.linalg.norm(amxq.linear(x, *w, precision="int8").numpy() - exact)
    assert 0.1 * limit < error / np.linalg.norm(exact) < limit


def test_bits_depend_on_neither_threads_nor_rows(on: str) -> None:
    _, w = packed(200, symmetric=False)
    x = randn(70, 192).bfloat16()
    want = amxq.linear(x, *w, precision="int8")
    assert torch.equal(amxq.linear(x[3:4], *w, precision="int8"), want[3:4])
    torch.set_num_threads(3)
    assert torch.equal(amxq.linear(x, *w, precision="int8"), want)


# --- special numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_row_nan(on: str, value: float) -> None:
    _, w = packed(symmetric=math.isnan(value))
    for m, dtype in ((1, torch.bfloat16), (40, torch.float32)):
        x = randn(m, 192).to(dtype)
        want = amxq.linear(x, *w, precision="int8")
        want[m // 2] = math.nan
        x[m // 2, 77] = value
        got = amxq.linear(x, *w, precision="int8")
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_nans_of_every_payload() -> None:
    _, w = packed()
    x = torch.zeros(3, 192)
    bits = x.view(torch.int32)
    bits[0, 0], bits[1, 1], bits[2, 2] = 0x7F800001, 0x7FC00000, -0x7FFFFF
    assert amxq.linear(x, *w, precision="int8").isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-37, 1e-30, 1e30])
def test_huge_tiny_and_no_activations(scale: float) -> None:
    weight, w = packed(symmetric=False)
    x = (randn(5, 192).double() * scale).float()
    got = amxq.linear(x, *w, precision="int8")
    assert torch.equal(got, int8_linear(x, weight, 64))
    exact = weight.exact(x)
    if scale >= 1e-30:
        assert np.linalg.norm(got.numpy() / scale - exact / scale) < 0.01 * np.linalg.norm(
            exact / scale
        )
    else:
        assert np.abs(got.numpy() - exact).max() < 1e-33


def test_zero_scales_and_denormal_modes() -> None:
    _, w = packed(symmetric=False)
    x = randn(7, 192)
    zero = w._replace(scales=torch.zeros_like(w.scales))
    assert (amxq.linear(x, *zero, precision="int8") == 0).all()
    want = amxq.linear(x, *w, precision="int8")
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(amxq.linear(x, *w, precision="int8"), want)
    finally:
        torch.set_flush_denormal(False)


# --- the torch operator ---------------------------------------------------------------------


def test_the_operator() -> None:
    weight, w = packed(symmetric=False, act_order=True)
    x = randn(2, 3, 192).half()
    options = {"bias": randn(72), "precision": "int8"}
    torch.library.opcheck(torch.ops.amxq.linear.default, (x, *w), options)
    want = int8_linear(x.view(6, 192), weight, 64, options["bias"]).view(2, 3, 72)
    assert torch.equal(torch.ops.amxq.linear(x, *w, **options), want)
    assert torch.equal(amxq.linear(x, *w, **options, out=torch.empty_like(want)), want)
    compiled = torch.compile(
        lambda x: amxq.linear(x * 1, *w, **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), want)
    strided = torch.stack([x, x], -1)[..., 1]
    assert torch.equal(amxq.linear(strided, *w, **options), want)
    assert amxq.linear(x[:0], *w, **options).shape == (0, 3, 72)


def test_gradients_are_those_of_the_unquantised_activations() -> None:
    weight, w = packed()
    x = randn(4, 192).requires_grad_()
    grad = randn(4, 72, seed=1)
    amxq.linear(x, *w, precision="int8").backward(grad)
    want = grad.double() @ torch.from_numpy(weight.difference * weight.scale)
    torch.testing.assert_close(x.grad.double(), want, rtol=1e-5, atol=1e-5)
