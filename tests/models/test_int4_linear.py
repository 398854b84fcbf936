"""The layer that holds a packed weight: buffers, copies, casts, and its errors."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import amxq
from amxq.errors import ArgumentError, DTypeError, LayoutError, ShapeError


def packed(
    n: int = 40, k: int = 64, group: int = 32, *, zeros: bool = True, seed: int = 0
) -> amxq.PackedWeight:
    """A random packed weight with full-range nibbles and zero points."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    s = torch.randn(n, k // group, generator=draw).half() * 0.02
    z = torch.randint(0, 16, s.shape, dtype=torch.uint8, generator=draw) if zeros else None
    return amxq.pack(q, s, z, format="plain")


def test_forward_equals_linear_with_the_dequantised_weight() -> None:
    w = packed()
    bias = torch.randn(40)
    layer = amxq.Int4Linear.from_packed(w, bias)
    x = torch.randn(3, 5, 64)
    expected = torch.nn.functional.linear(x.double(), amxq.dequantize(w).double(), bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert (layer.in_features, layer.out_features) == (64, 40)


def test_precision() -> None:
    w, x = packed(), torch.randn(3, 64)
    layer = amxq.Int4Linear.from_packed(w, precision="int8")
    for dtype in (torch.float32, torch.bfloat16):
        want = amxq.linear(x.to(dtype), *w, precision="int8")
        assert torch.equal(layer(x.to(dtype)), want)
    assert "precision=int8" in repr(copy.deepcopy(layer))
    layer.precision = "bf16"
    assert torch.equal(layer(x), amxq.linear(x, *w))
    with pytest.raises(ArgumentError, match="precision is 'int3'; expected one of bf16, int8"):
        amxq.Int4Linear.from_packed(w, precision="int3")


def test_packed_is_what_was_given() -> None:
    w = packed()
    layer = amxq.Int4Linear.from_packed(w)
    assert all(a is b for a, b in zip(layer.packed, w, strict=True))
    assert layer.bias is None
    assert "group_size=32, symmetric=False" in repr(layer)


def test_no_parameters_but_a_complete_state_dict() -> None:
    layer = amxq.Int4Linear.from_packed(packed(), torch.randn(40))
    other = amxq.Int4Linear.from_packed(packed(seed=1), torch.zeros(40))
    assert not list(layer.parameters())
    assert set(layer.state_dict()) == {"qweight", "scales", "zeros", "bias"}
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 64)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_casting_keeps_the_packed_tensors(dtype: torch.dtype) -> None:
    w = packed()
    layer = amxq.Int4Linear.from_packed(w, torch.randn(40)).to(dtype)
    assert layer.scales.dtype == torch.float16
    assert torch.equal(layer.scales, w.scales)
    assert layer.qweight.dtype == torch.uint8
    assert layer.bias is not None and layer.bias.dtype == dtype


def test_deepcopy_and_pickle_are_independent_copies() -> None:
    layer = amxq.Int4Linear.from_packed(packed())
    x = torch.randn(2, 64)
    before = layer(x)
    twin = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    layer.scales.zero_()
    assert torch.equal(twin(x), before)
    assert torch.equal(loaded(x), before)


def test_inside_a_compiled_graph() -> None:
    layer = amxq.Int4Linear.from_packed(packed(), torch.randn(40))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


def test_bias_that_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"bias has shape \[41\]; expected \[40\]"):
        amxq.Int4Linear.from_packed(packed(), torch.zeros(41))
    with pytest.raises(DTypeError, match="int64"):
        amxq.Int4Linear.from_packed(packed(), torch.zeros(40, dtype=torch.int64))


def test_weights_that_are_not_of_a_linear_layer() -> None:
    draw = torch.randint(0, 16, (3, 40, 64), dtype=torch.uint8)
    experts = amxq.pack(draw, torch.ones(3, 40, 2), format="plain")
    with pytest.raises(ShapeError, match="3 experts"):
        amxq.Int4Linear.from_packed(experts)
    strided = packed()._replace(scales=torch.ones(2, 40).T)
    with pytest.raises(LayoutError, match="contiguous"):
        amxq.Int4Linear.from_packed(strided)
