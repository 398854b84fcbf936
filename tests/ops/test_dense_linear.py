"""Linear layers with bf16 and int8 weights for few rows, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.integrations.modules import FlatLinear, Int8Linear
from amxq.ops.dense import (
    FEW_ROWS,
    dequantize_rows,
    few_rows_linear,
    int8_weight_linear,
    quantize_rows,
)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def within_one_rounding(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``got`` is x · Wᵀ added up in fp32 and rounded once."""
    want = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    rounding = 1.01 * torch.finfo(got.dtype).eps / 2 * want.abs()
    return bool(((got.double() - want).abs() <= rounding + 2.0**-20 * size).all())


@pytest.mark.parametrize("shape", [(1, 16, 4), (3, 48, 7), (FEW_ROWS, 896, 130)])
def test_few_rows(on: str, shape: tuple[int, int, int]) -> None:
    M, K, N = shape
    x, weight, bias = random(M, K), random(N, K), random(N)
    got = few_rows_linear(x, weight, None)
    assert got is not None and within_one_rounding(got, x, weight)
    ones = torch.ones(M, 16).bfloat16()  # the bias as sixteen more columns
    wide, more = torch.cat([x, ones], 1), torch.cat([weight, (bias / 16)[:, None].expand(N, 16)], 1)
    got = few_rows_linear(x, weight, bias)
    assert got is not None and within_one_rounding(got, wide, more)
    for m in range(M):  # each row has the bits that it has alone
        alone = few_rows_linear(x[m], weight, bias)
        assert alone is not None and torch.equal(alone, got[m])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, FEW_ROWS), st.integers(1, 40), st.integers(4, 90), st.integers(1, 3))
def test_any_shape(M: int, sixteens: int, N: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight = random(M, 16 * sixteens), random(N, 16 * sixteens)
    got = few_rows_linear(x, weight, None)
    assert got is not None and within_one_rounding(got, x, weight)
    values, scales = quantize_rows(weight)
    exact = dequantize_rows(values, scales, torch.float64)
    assert within_one_rounding(int8_weight_linear(x, values, scales), x, exact)


def test_what_torch_has_to_compute() -> None:
    x, weight = random(1, 32), random(8, 32)
    assert few_rows_linear(x, weight, None) is not None
    others = [
        (x.float(), weight, None),
        (x, weight.float(), None),
        (random(FEW_ROWS + 1, 32), weight, None),
        (x[:0], weight, None),
        (random(1, 40), random(8, 40), None),
        (x, random(3, 32), None),
        (x, random(32, 8).T, None),
        (x, weight, random(8).float()),
        (x.requires_grad_(), weight, None),
    ]
    assert [few_rows_linear(*given) for given in others] == [None] * len(others)
    layer = FlatLinear(32, 8, bias=True).bfloat16()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(layer(x), few_rows_linear(x, layer.weight, layer.bias))
        strided = random(32, 3).T
        assert torch.equal(layer(strided), layer(strided.contiguous()))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_weights(on: str, dtype: torch.dtype) -> None:
    for M, K, N, group in ((1, 48, 4, 16), (3, 96, 7, 32), (2, 896, 130, 64)):
        x, weight = random(M, K, dtype=dtype), random(N, K, dtype=dtype)
        values, scales = quantize_rows(weight)
        assert scales.shape == (N, K // group)
        got = int8_weight_linear(x, values, scales)
        exact = dequantize_rows(values, scales, torch.float64)
        assert got.dtype == dtype and within_one_rounding(got, x, exact)
        assert torch.equal(got[0], int8_weight_linear(x[0], values, scales))
        biased = int8_weight_linear(x, values, scales, random(N, dtype=dtype))
        torch.testing.assert_close(biased, got + random(N, dtype=dtype), rtol=0.02, atol=0.05)


def test_quantising_rows() -> None:
    weight = random(5000, 128)
    weight[3] = 0
    values, scales = quantize_rows(weight)
    made = dequantize_rows(values, scales)
    assert not made[3].any() and values.abs().max() <= 127
    steps = scales.float().repeat_interleave(64, 1)
    assert ((made - weight.float()).abs() <= 0.75 * steps).all()  # the largest ones are cut
    assert 0.004 < (made - weight.float()).norm() / weight.float().norm() < 0.0065
    weight[5, 7] = float("nan")
    values, scales = quantize_rows(weight)
    assert int8_weight_linear(random(128), values, scales).isnan().nonzero().tolist() == [[5]]
    for shape in ((8, 40), (3, 64), (64,)):
        with pytest.raises(ShapeError, match="multiple of 16"):
            quantize_rows(random(*shape))
    with pytest.raises(DTypeError, match="float64"):
        quantize_rows(random(8, 64).double())


def test_int8_weights_are_checked() -> None:
    x, (values, scales) = random(2, 128), quantize_rows(random(8, 128))
    for wrong in (
        (x[:, :64], values, scales),
        (x, values[:4], scales),
        (x, values, scales[:, :0]),
        (x, values, scales[:, :1]),
        (x, values, scales, random(4)),
        (x, values[0], scales),
    ):
        with pytest.raises(ShapeError):
            torch.ops.amxq.int8_weight_linear(*wrong)
    for wrong in (
        (x.double(), values, scales),
        (x, values.short(), scales),
        (x, values, scales.float()),
        (x, values, scales, random(8).float()),
    ):
        with pytest.raises(DTypeError):
            torch.ops.amxq.int8_weight_linear(*wrong)
    with pytest.raises(LayoutError, match="weight"):
        torch.ops.amxq.int8_weight_linear(x, values.T.contiguous().T, scales)


def test_int8_layers() -> None:
    weight, bias = random(5000, 64), random(5000)
    layer = Int8Linear(weight, bias)
    exact = dequantize_rows(layer.values, layer.scales, torch.float64)
    for rows in (1, 40):  # by the kernel, and dequantised
        x = random(rows, 64)
        want = x.double() @ exact.T + bias.double()
        assert (layer(x).double() - want).norm() <= 0.004 * want.norm()
    assert layer(random(2, 0, 64)).shape == (2, 0, 5000)
    assert layer.half().scales.dtype is torch.bfloat16 and layer.bfloat16().nbytes == 5000 * 66
    x = random(2, 64).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad[0].double(), exact.sum(0), rtol=0.02, atol=1.0)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))
