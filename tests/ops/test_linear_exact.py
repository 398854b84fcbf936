"""``amxq.linear`` against fp64: every format, type, shape and target."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_reference import HALF_ULP, assert_exact, draw

import amxq
from amxq.runtime.targets import available_targets, target

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
QUICK = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def activations(rng: np.random.Generator, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers with all their bits in use and magnitudes over six orders."""
    x = rng.standard_normal((m, k)) * 10.0 ** rng.uniform(-3, 3, (m, 1))
    return torch.from_numpy(x).to(dtype)


def bias_of(rng: np.random.Generator, n: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    return None if dtype is None else torch.from_numpy(rng.standard_normal(n)).to(dtype)


@QUICK
@given(
    name=st.sampled_from(available_targets()),
    n=st.integers(1, 200),
    k=st.one_of(st.integers(1, 400), st.sampled_from([8, 64, 128, 256, 384])),
    m=st.one_of(st.sampled_from([0, 1, 2, 4, 8, 16, 17, 32, 64, 128]), st.integers(0, 150)),
    group=st.sampled_from([-1, 8, 16, 24, 32, 40, 64, 96, 128, 256]),
    format=st.sampled_from(["gptq", "gptq_v2", "awq", "plain"]),
    symmetric=st.booleans(),
    scales=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
    bias=st.sampled_from([None, *FLOATS, torch.float64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_linear(name, n, k, m, group, format, symmetric, scales, dtype, bias, seed):
    rng = np.random.default_rng(seed)
    if format.startswith("gptq"):
        k += -k % 8  # eight rows share a word: g_idx alone can say where K ends
    if group >= k:
        group = -1
    weight = draw(rng, n, k, group, symmetric=symmetric, dtype=scales)
    w = amxq.pack(*weight.tensors(format), format=format, group_size=group)
    x, b = activations(rng, m, k, dtype), bias_of(rng, n, bias)
    with target(name):
        got = amxq.linear(x, *w, bias=b)
    assert got.dtype == dtype
    assert_exact(got, weight, x, b)


@QUICK
@given(
    name=st.sampled_from(available_targets()),
    n=st.integers(1, 80),
    blocks=st.integers(1, 12),
    missing=st.integers(0, 7),
    m=st.sampled_from([1, 3, 20]),
    group=st.sampled_from([8, 16, 32]),
    format=st.sampled_from(["gptq", "gptq_v2", "awq", "plain"]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_act_order(name, n, blocks, missing, m, group, format, symmetric, dtype, seed):
    rng = np.random.default_rng(seed)
    k = max(group * blocks - missing, 1)
    weight = draw(rng, n, k, group, symmetric=symmetric, act_order=True)
    g_idx = torch.from_numpy(weight.groups).int()
    w = amxq.pack(*weight.tensors(format), format=format, group_size=group, g_idx=g_idx)
    x = activations(rng, m, k, dtype)
    with target(name):
        assert_exact(amxq.linear(x, *w), weight, x)


@QUICK
@given(
    name=st.sampled_from(available_targets()),
    awq=st.booleans(),
    n=st.sampled_from([8, 32, 48, 136]),
    groups=st.integers(1, 4),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_raw_checkpoint_tensors(name, awq, n, groups, symmetric, seed):
    rng = np.random.default_rng(seed)
    weight = draw(rng, n, 64 * groups, 64, symmetric=symmetric)
    x = activations(rng, 3, 64 * groups, torch.bfloat16)
    with target(name):
        assert_exact(amxq.linear(x, *weight.tensors("awq" if awq else "gptq")), weight, x)


# --- every number of rows -------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_number_of_rows(on: str, symmetric: bool) -> None:
    """Rows are taken in blocks of many sizes; each row is the same whatever its neighbours."""
    rng = np.random.default_rng(5)
    weight = draw(rng, 72, 192, 64, symmetric=symmetric)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = activations(rng, 257, 192, torch.bfloat16)
    whole = amxq.linear(x, *w)
    assert_exact(whole, weight, x)
    every = (*range(0, 41), 63, 64, 65, 66, 127, 128, 129, 131)
    for m in every if symmetric else (9, 131):
        assert_exact(amxq.linear(x[:m], *w), weight, x[:m])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_wider_activations(on: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(6)
    weight = draw(rng, 40, 128, 32, symmetric=False)
    w = amxq.pack(*weight.tensors("awq"), format="awq")
    x = activations(rng, 150, 128, dtype)
    for m in (1, 17, 150):
        assert_exact(amxq.linear(x[:m], *w), weight, x[:m])


def test_large_fp32_sums_are_accurate_to_a_millionth(on: str) -> None:
    rng = np.random.default_rng(7)
    weight = draw(rng, 64, 4096, 128, symmetric=False, dtype=torch.float32)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = torch.from_numpy(rng.standard_normal((9, 4096))).float()
    got = amxq.linear(x, *w).double().numpy()
    size = np.abs(x.double().numpy()) @ np.abs(weight.difference * weight.scale).T
    assert np.abs(got - weight.exact(x)).max() / size.max() < 1e-6
    assert (np.abs(got - weight.exact(x)) / size).max() < 1e-6


BATTERY = [  # M, N, K, group
    (1, 128, 128, 128),
    (4, 128, 256, 256),
    (16, 256, 512, 64),
    (32, 512, 256, 128),
    (64, 512, 512, 128),
    (1, 768, 1024, 32),
    (8, 768, 1024, 128),
    (16, 768, 1024, 32),
]


@pytest.mark.parametrize(("m", "n", "k", "group"), BATTERY)
def test_shapes_that_others_test(m: int, n: int, k: int, group: int) -> None:
    """Others accept 1e-2 here."""
    rng = np.random.default_rng(m + n + k)
    symmetric = group == 128
    weight = draw(rng, n, k, group, symmetric=symmetric, dtype=torch.bfloat16)
    w = amxq.pack(*weight.tensors("awq"), format="awq")
    x = activations(rng, m, k, torch.bfloat16)
    bias = bias_of(rng, n, torch.bfloat16)
    assert_exact(amxq.linear(x, *w), weight, x)
    assert_exact(amxq.linear(x, *w, bias=bias), weight, x, bias)


def test_a_layer_of_usual_size() -> None:
    rng = np.random.default_rng(12)
    weight = draw(rng, 4096, 4096, 128, symmetric=False)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = torch.from_numpy(rng.standard_normal((32, 4096))).bfloat16()
    got = amxq.linear(x, *w)
    assert_exact(got, weight, x)
    # nearly all results are the exact ones rounded once
    once = torch.from_numpy(weight.exact(x)).bfloat16()
    assert (got == once).float().mean() > 0.99
    assert_exact(amxq.linear(x[:1], *w), weight, x[:1])


def test_the_bound_is_not_generous() -> None:
    """Weights off by one in one place, or a result rounded to fewer bits, are out of bounds."""
    rng = np.random.default_rng(8)
    weight = draw(rng, 48, 256, 64, symmetric=True)
    q, s, _ = weight.tensors("plain")
    x = activations(rng, 4, 256, torch.float32)
    good = amxq.linear(x, *amxq.pack(q, s, format="plain"))
    assert_exact(good, weight, x)
    q[5, 100] ^= 1
    with pytest.raises(AssertionError, match="off by"):
        assert_exact(amxq.linear(x, *amxq.pack(q, s, format="plain")), weight, x)
    with pytest.raises(AssertionError, match="off by"):
        assert_exact(good.bfloat16().float(), weight, x)
    assert set(HALF_ULP) == set(FLOATS)


# --- layouts of x ---------------------------------------------------------------------------


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same [6, 72] numbers in many layouts; leading sizes may be split."""
    m, k = x.shape
    wide = torch.zeros(m, k + 9, dtype=x.dtype)
    wide[:, 4 : 4 + k] = x
    every = torch.zeros(2 * m, k, dtype=x.dtype)
    every[::2] = x
    odd = torch.zeros(m * k + 1, dtype=x.dtype)
    odd[1:] = x.flatten()
    spread = torch.zeros(m, 2 * k, dtype=x.dtype)
    spread[:, ::2] = x
    return {
        "contiguous": x,
        "columns of a wider one": wide[:, 4 : 4 + k],
        "every other row": every[::2],
        "every other column": spread[:, ::2],
        "transposed": x.T.contiguous().T,
        "at an odd address": odd[1:].view(m, k),
        "batched": x.view(2, 3, k),
        "batched and transposed": x.view(2, 3, k).transpose(0, 1).contiguous().transpose(0, 1),
        "with ones": x.view(1, m, 1, k),
        "five dimensions": x.view(1, 2, 1, 3, k),
    }


@pytest.mark.parametrize("k", [72, 70])
@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_of_x_give_the_same_bits(dtype: torch.dtype, k: int) -> None:
    rng = np.random.default_rng(9)
    weight = draw(rng, 40, k, -1, symmetric=False)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = activations(rng, 6, k, dtype)
    want = amxq.linear(x, *w)
    assert_exact(want, weight, x)
    for name, other in layouts(x).items():
        before = other.clone()
        got = amxq.linear(other, *w)
        assert got.shape == (*other.shape[:-1], 40) and got.is_contiguous(), name
        assert torch.equal(got.reshape(6, 40), want), name
        assert torch.equal(other, before), f"{name}: x was written to"
        out = torch.full((*other.shape[:-1], 40), torch.nan, dtype=dtype)
        assert amxq.linear(other, *w, out=out) is out
        assert torch.equal(out, got), name
    row = x[:1]
    expanded = row.expand(6, k)
    # compared at the same number of rows: vector targets add up in another order for few rows
    assert torch.equal(amxq.linear(expanded, *w), amxq.linear(row.repeat(6, 1), *w))
    assert torch.equal(amxq.linear(x[2], *w), amxq.linear(x[2:3], *w)[0])
    assert torch.equal(amxq.linear(x.conj(), *w), want)
    assert torch.equal(amxq.linear(torch._neg_view(-x), *w), want)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
def test_no_rows(on: str, shape: tuple[int, ...]) -> None:
    weight = draw(np.random.default_rng(0), 33, 64, 32, symmetric=False)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    for dtype in FLOATS:
        x = torch.zeros(*shape, 64, dtype=dtype)
        y = amxq.linear(x, *w, bias=torch.ones(33))
        assert y.shape == (*shape, 33) and y.dtype == dtype
        out = torch.zeros(*shape, 33, dtype=dtype)
        assert amxq.linear(x, *w, out=out) is out


def test_bias_layouts(on: str) -> None:
    rng = np.random.default_rng(10)
    weight = draw(rng, 40, 64, 32, symmetric=True)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = activations(rng, 3, 64, torch.float32)
    spread = torch.zeros(80)
    spread[::2] = torch.from_numpy(rng.standard_normal(40))
    for bias in (spread[::2], torch.tensor([0.5]).expand(40), spread[1:41].double()):
        assert_exact(amxq.linear(x, *w, bias=bias), weight, x, bias)


def test_packed_tensors_at_odd_addresses(on: str) -> None:
    """Weights may be slices of a file's bytes: nothing but the elements' alignment is promised."""
    rng = np.random.default_rng(11)
    weight = draw(rng, 70, 128, 32, symmetric=False)
    w = amxq.pack(*weight.tensors("plain"), format="plain")
    x = activations(rng, 5, 128, torch.bfloat16)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        room[1:] = tensor.flatten()
        return room[1:].view(tensor.shape)

    moved = amxq.PackedWeight(shifted(w.qweight), shifted(w.scales), shifted(w.zeros))
    assert moved.qweight.data_ptr() % 2 == 1
    assert torch.equal(amxq.linear(x, *moved), amxq.linear(x, *w))
