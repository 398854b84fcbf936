"""Calls of weights that were seen before give what the operator gives, errors included."""

import ast
import functools
import gc
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amxq
from amxq.integrations.layers import Int4Linear
from amxq.ops import remembered

CONSTRUCTORS = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros"),
}


def weight(n: int = 64, k: int = 128, asymmetric: bool = False) -> amxq.PackedWeight:
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = (torch.rand(n, k // 64) / 100).bfloat16()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if asymmetric else None
    return amxq.pack(q, scales, zeros, format="plain")


def known(call, times: int = 3):
    """What the last of several calls returns: by then it is remembered."""
    before = len(remembered._calls)
    results = [call() for _ in range(times)]
    assert len(remembered._calls) == before + 1
    return results[-1]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_remembered_call_gives_the_same_bits(precision: str, asymmetric: bool) -> None:
    w, x = weight(asymmetric=asymmetric), torch.randn(3, 128).bfloat16()
    bias, residual = torch.randn(64), torch.randn(3, 64).bfloat16()
    expected = torch.ops.amxq.linear(x, *w, bias=bias, residual=residual, precision=precision)

    def call() -> torch.Tensor:
        return amxq.linear(x, *w, bias=bias, residual=residual, precision=precision)

    assert torch.equal(known(call), expected)
    for other in (x[:1], x[None], x.float(), x.half(), x.T.contiguous().T, x[:0]):
        want = torch.ops.amxq.linear(other, *w, bias=bias, precision=precision)
        assert torch.equal(amxq.linear(other, *w, bias=bias, precision=precision), want)


def test_weights_that_were_written_or_replaced_are_seen() -> None:
    w, other, x = weight(), weight(), torch.randn(1, 128).bfloat16()
    known(lambda: amxq.linear(x, *w))
    w.scales.mul_(2)
    assert torch.equal(amxq.linear(x, *w), torch.ops.amxq.linear(x, *w))
    w.qweight.data = other.qweight.data
    assert torch.equal(amxq.linear(x, *w), torch.ops.amxq.linear(x, *w))
    w.qweight.set_(torch.zeros(2, 3, 2, 64, dtype=torch.uint8))
    with pytest.raises(amxq.errors.AmxqError):
        amxq.linear(x, *w)


def test_tensors_that_were_given_another_shape_are_seen() -> None:
    x = torch.randn(1, 128).bfloat16()
    for name, change in (("qweight", lambda t: t[:1]), ("scales", lambda t: t.view(32, 4))):
        w = weight()
        known(functools.partial(amxq.linear, x, *w))
        tensor = getattr(w, name)
        tensor.data = change(tensor.data)
        with pytest.raises(amxq.errors.ShapeError):
            amxq.linear(x, *w)


def test_nothing_is_kept_alive() -> None:
    w, x = weight(), torch.randn(1, 128).bfloat16()
    before = set(remembered._calls)
    known(functools.partial(amxq.linear, x, *w))
    del w
    gc.collect()
    assert set(remembered._calls) <= before


def test_gradients_flow_after_calls_without() -> None:
    w, x, bias = weight(), torch.randn(2, 128).bfloat16(), torch.randn(64)
    known(lambda: amxq.linear(x, *w, bias=bias))
    bias.requires_grad_()
    amxq.linear(x, *w, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((64,), 2.0))
    x.requires_grad_()
    amxq.linear(x, *w).sum().backward()
    assert x.grad.abs().sum() > 0


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_operator() -> None:
    w, x = weight(), torch.randn(2, 128).bfloat16()
    layer = Int4Linear.from_packed(w)
    known(lambda: amxq.linear(x, *w))
    layer(x)
    for call in (lambda: amxq.linear(x, *w), lambda: layer(x)):
        with Seen() as seen:
            call()
        assert "amxq.linear.default" in seen.names


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_default_device_does_not_reach_inside(precision: str, asymmetric: bool) -> None:
    """Kernels got null pointers of tensors made on the meta device."""
    w, x = weight(asymmetric=asymmetric), torch.randn(40, 128).bfloat16()
    layer = Int4Linear.from_packed(w, precision=precision)
    expected = layer(x)
    with torch.device("meta"):
        assert torch.equal(layer(x), expected)
        for _ in range(3):
            assert torch.equal(amxq.linear(x, *w, precision=precision), expected)


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """Else ``torch.set_default_device`` and ``with torch.device(...)`` decide."""
    unnamed = []
    for path in Path(amxq.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in CONSTRUCTORS
                and not any(k.arg == "device" for k in node.keywords)
            ):
                unnamed.append(f"{path}:{node.lineno}")
    assert not unnamed
