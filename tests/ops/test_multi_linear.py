"""``amxq.multi_linear`` and the residual of ``amxq.linear``, against fp64 and ``amxq.linear``."""

from __future__ import annotations

from typing import Any

import linear_reference as reference
import numpy as np
import pytest
import torch

import amxq
from amxq.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.ops.linear import bound_linear
from amxq.ops.multi import bound_multi_linear
from amxq.quantization import PackedWeight

K = 96
WIDTHS = (70, 32, 5)


def drawn(seed: int, n: int, *, symmetric: bool = True, group: int = 32) -> reference.Weight:
    return reference.draw(np.random.default_rng(seed), n, K, group, symmetric=symmetric)


def pack(weight: reference.Weight, **options: Any) -> PackedWeight:
    return amxq.pack(*weight.tensors("plain"), format="plain", **options)


def activations(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize(("rows", "symmetric"), [(1, True), (3, False), (33, True)])
def test_each_result_is_that_of_linear(on: str, rows: int, symmetric: bool) -> None:
    weights = [drawn(i, n, symmetric=symmetric) for i, n in enumerate(WIDTHS)]
    packed = [pack(w) for w in weights]
    biases = [torch.randn(n).bfloat16() for n in WIDTHS]
    x = activations(rows)
    for precision in ("bf16", "int8"):
        got = amxq.multi_linear(x, packed, biases, precision=precision)
        bound = bound_multi_linear(packed, biases, precision)(x)
        for y, z, w, p, b in zip(got, bound, weights, packed, biases, strict=True):
            assert torch.equal(y, amxq.linear(x, *p, bias=b, precision=precision))
            assert torch.equal(y, z)
            if precision == "bf16":
                reference.assert_exact(y, w, x, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_activations(dtype: torch.dtype) -> None:
    packed = [pack(drawn(i, n)) for i, n in enumerate(WIDTHS)]
    x = activations(6, dtype).T.contiguous().T
    for y, p in zip(amxq.multi_linear(x, packed), packed, strict=True):
        assert torch.equal(y, amxq.linear(x, *p))
    biases = [None, torch.randn(32), None]
    got = amxq.multi_linear(x, packed, biases)
    assert torch.equal(got[0], amxq.linear(x, *packed[0]))
    assert torch.equal(got[1], amxq.linear(x, *packed[1], bias=biases[1]))
    empty = amxq.multi_linear(x[:0].view(2, 0, K), packed)
    assert [y.shape for y in empty] == [(2, 0, n) for n in WIDTHS]


def test_act_order_is_shared_or_refused() -> None:
    rng = np.random.default_rng(5)
    first = reference.draw(rng, 40, K, 32, symmetric=True, act_order=True)
    second = reference.draw(rng, 8, K, 32, symmetric=True)
    second = reference.Weight(second.q, second.s, None, first.groups)
    other = reference.draw(rng, 8, K, 32, symmetric=True, act_order=True)
    one, two, three = (
        pack(w, g_idx=torch.from_numpy(w.groups), group_size=32) for w in (first, second, other)
    )
    x = activations(4)
    for call in (
        lambda w: amxq.multi_linear(x, w),
        lambda w: bound_multi_linear(w, None, "bf16")(x),
    ):
        for y, w in zip(call([one, two]), (first, second), strict=True):
            reference.assert_exact(y, w, x)
        with pytest.raises(LayoutError, match="act order is not the same"):
            call([one, three])
        with pytest.raises(LayoutError, match="act order is not the same"):
            call([one, two._replace(perm=None)])


def test_weights_lie_anywhere() -> None:
    """One is a view into a tensor that holds the other, at a lower address and unaligned."""
    a, b = pack(drawn(1, 40)), pack(drawn(2, 32))
    moved = []
    for tensors in zip(b[:2], a[:2], strict=True):
        flat = torch.cat([torch.zeros(2, dtype=tensors[0].dtype), *(t.flatten() for t in tensors)])
        size = tensors[0].numel()
        moved.append(
            (flat[2 : 2 + size].view(tensors[0].shape), flat[2 + size :].view(tensors[1].shape))
        )
    (bq, aq), (bs, az) = moved
    x = activations(2)
    got = amxq.multi_linear(x, [PackedWeight(aq, az), PackedWeight(bq, bs)])
    assert torch.equal(got[0], amxq.linear(x, *a)) and torch.equal(got[1], amxq.linear(x, *b))


def test_what_does_not_fit_is_refused() -> None:
    x, one = activations(2), pack(drawn(1, 40))
    with pytest.raises(ShapeError, match="same K and group size"):
        amxq.multi_linear(x, [one, pack(drawn(2, 40, group=48))])
    with pytest.raises(LayoutError, match="zeros"):
        amxq.multi_linear(x, [one, pack(drawn(2, 40, symmetric=False))])
    with pytest.raises(LayoutError, match="same kind"):
        amxq.multi_linear(x, [one, one._replace(scales=one.scales.float())])
    with pytest.raises(ShapeError, match="empty"):
        amxq.multi_linear(x, [])
    with pytest.raises(DTypeError, match="expected a list"):
        amxq.multi_linear(x, one)
    with pytest.raises(DTypeError, match="PackedWeight"):
        amxq.multi_linear(x, [one, tuple(one)])
    with pytest.raises(ShapeError, match="2 biases for 1 weights"):
        amxq.multi_linear(x, [one], [torch.zeros(40), None])
    with pytest.raises(ShapeError, match=r"expected \[40\]"):
        amxq.multi_linear(x, [one], [torch.zeros(41)])
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., 96\]"):
        amxq.multi_linear(x[:, :64], [one])
    with pytest.raises(ShapeError, match="3 biases for 1 weights"):
        amxq.multi_linear(x, [one], [None] * 3)
    for bias in ([1.0], [torch.zeros(40).to_sparse()], torch.zeros(40)):
        with pytest.raises((DTypeError, LayoutError), match="bias"):
            amxq.multi_linear(x, [one], bias)
    with pytest.raises(DTypeError, match="qweight of a weight is a NoneType"):
        amxq.multi_linear(x, [one._replace(qweight=None)])
    for wrong in (x.float().numpy(), x.float().to_sparse(), None):
        with pytest.raises((DTypeError, LayoutError), match="^x "):
            amxq.multi_linear(wrong, [one])
    with pytest.raises(ArgumentError, match="precision is None"):
        amxq.multi_linear(x, [one], precision=None)


@pytest.mark.parametrize("field", ["qweight", "scales"])
def test_a_tensor_on_the_meta_device_is_refused(field: str) -> None:
    """Its call ends in the operator's fake, which must not return what nobody has written."""
    one, x = pack(drawn(1, 40)), activations(2)
    lost = one._replace(**{field: getattr(one, field).to("meta")})
    with pytest.raises(LayoutError, match="meta"):
        amxq.multi_linear(x, [one, lost])
    with pytest.raises(ShapeError, match="96"):
        q, s = one.qweight.to("meta"), one.scales.to("meta")
        torch.ops.amxq.multi_linear(x[:, :64].to("meta"), [q], [s])
    with pytest.raises(ShapeError, match="1 scales"):
        torch.ops.amxq.multi_linear(x, [one.qweight] * 2, [one.scales])


def test_multi_linear_for_torch() -> None:
    packed = [pack(drawn(i, n, symmetric=False)) for i, n in enumerate(WIDTHS)]
    q, s, z, _ = (list(t) for t in zip(*packed, strict=True))
    x = activations(3)
    torch.library.opcheck(torch.ops.amxq.multi_linear.default, (x, q, s, z))

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return amxq.multi_linear(x, packed)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for y, want in zip(compiled(x), call(x), strict=True):
        assert torch.equal(y, want)
    learned = x.float().requires_grad_()
    sum(
        y.sum() for y in torch.compile(call, fullgraph=True, backend="aot_eager")(learned)
    ).backward()
    assert learned.grad is not None
    bias = torch.zeros(WIDTHS[0], requires_grad=True)
    x = x.float().requires_grad_()
    first, second, _ = amxq.multi_linear(x, packed, [bias, None, None])
    (first.sum() + 2 * second.sum()).backward()
    dense = [amxq.dequantize(p) for p in packed]
    want = dense[0].sum(0) + 2 * dense[1].sum(0)
    torch.testing.assert_close(x.grad, want.expand(3, K), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad, torch.full((WIDTHS[0],), 3.0))


# --- residual ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 33])
def test_residual(on: str, rows: int) -> None:
    weight = drawn(3, 70, symmetric=rows == 1)
    packed, bias = pack(weight), torch.randn(70).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        x, residual = activations(rows, dtype), torch.randn(rows, 70).to(dtype)
        got = amxq.linear(x, *packed, bias=bias, residual=residual)
        # the reference takes a bias of any shape
        reference.assert_exact(got, weight, x, bias.double() + residual.double())
        strided = residual.T.contiguous().T
        assert torch.equal(got, amxq.linear(x, *packed, bias=bias, residual=strided))
        assert torch.equal(got, bound_linear(packed, bias, "bf16")(x, residual))
        into = torch.empty_like(got)
        amxq.linear(x, *packed, bias=bias, residual=residual, out=into)
        assert torch.equal(got, into)
    x = activations(rows)
    residual = torch.randn(rows, 70).bfloat16()
    wide = amxq.linear(x.float(), *packed, residual=residual.float(), precision="int8")
    plain = amxq.linear(x.float(), *packed, precision="int8")
    assert torch.equal(wide, plain + residual.float())
    got = bound_linear(packed, None, "int8")(x, residual)
    assert torch.equal(got, amxq.linear(x, *packed, residual=residual, precision="int8"))
    assert torch.equal(got, wide.bfloat16())


def test_residual_errors_and_gradient() -> None:
    packed, x = pack(drawn(3, 40)), activations(3)
    for call in (
        lambda r: amxq.linear(x, *packed, residual=r),
        lambda r: bound_linear(packed, None, "bf16")(x, r),
    ):
        with pytest.raises(ShapeError, match=r"residual has shape \[40\]; expected \[3, 40\]"):
            call(torch.zeros(40).bfloat16())
        with pytest.raises(DTypeError, match="residual has dtype torch.float32"):
            call(torch.zeros(3, 40))
        with pytest.raises(LayoutError, match="residual is .*on meta"):
            call(torch.zeros(3, 40, device="meta").bfloat16())
    residual = torch.zeros(3, 40).bfloat16()
    with pytest.raises(LayoutError, match="overlaps residual"):
        amxq.linear(x, *packed, residual=residual, out=residual)
    y, r = x.float().requires_grad_(), torch.randn(3, 40, requires_grad=True)
    factor = torch.randn(3, 40)
    (amxq.linear(y, *packed, residual=r) * factor).sum().backward()
    assert r.grad is not None and torch.equal(r.grad, factor)
    torch.testing.assert_close(y.grad, factor @ amxq.dequantize(packed))
    arguments = (x, *packed[:2])
    torch.library.opcheck(torch.ops.amxq.linear.default, arguments, {"residual": residual})
