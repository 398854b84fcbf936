"""Derivatives forwards, batches and modes of torch: of ``amxq.linear``, its relatives, and the
modules of models, whose calls are bound and pass by torch otherwise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import amxq
from amxq.errors import LayoutError
from amxq.integrations.layers import Int4Linear
from amxq.integrations.modules import FlatLinear, GatedMLP, Int8Linear, RmsNorm
from amxq.ops.dense import dequantize_rows
from amxq.ops.gated import bound_gated_linear
from amxq.ops.linear import bound_linear
from amxq.ops.multi import bound_multi_linear

N = K = 128
M = 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(seed: int = 0, perm: torch.Tensor | None = None) -> amxq.PackedWeight:
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    w = amxq.pack(q, randn(N, 4, seed=seed).half() * 0.1, format="plain", group_size=32)
    return w if perm is None else w._replace(perm=perm)


W = packed()
BOUND = bound_multi_linear([W, W], None, "bf16")
DENSE = amxq.dequantize(W)
FLAT = torch.nn.Linear(K, N).requires_grad_(False)
INT8 = Int8Linear(randn(N, K))
NORM = RmsNorm(torch.nn.Parameter(1 + randn(K), requires_grad=False), 1e-5)
HEAD = FlatLinear(K, N).requires_grad_(False)
HEAD.load_state_dict(FLAT.state_dict())


def linear(x: torch.Tensor) -> torch.Tensor:
    return x @ DENSE.T


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(linear(x)) * linear(x)


def norm(x: torch.Tensor) -> torch.Tensor:
    return NORM.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def int8(x: torch.Tensor) -> torch.Tensor:
    return x @ dequantize_rows(INT8.values, INT8.scales, torch.float32).T


Function = Callable[[torch.Tensor], torch.Tensor]
CALLS: dict[str, tuple[Function, Function, str]] = {
    "linear": (lambda x: amxq.linear(x, *W), linear, "amxq.linear"),
    "Int4Linear": (Int4Linear(W), linear, "amxq.linear"),
    "bound linear": (bound_linear(W, None, "bf16"), linear, "amxq.linear"),
    "multi_linear": (lambda x: amxq.multi_linear(x, [W, W])[1], linear, "amxq.multi_linear"),
    "bound multi_linear": (
        lambda x: BOUND(x)[1],
        linear,
        "amxq.multi_linear",
    ),
    "gated_linear": (lambda x: amxq.gated_linear(x, W, W), gated, "amxq.gated_linear"),
    "bound gated_linear": (bound_gated_linear(W, W, "silu", "bf16"), gated, "amxq.gated_linear"),
    "GatedMLP": (
        GatedMLP(Int4Linear(W), Int4Linear(W), Int4Linear(W), "silu"),
        lambda x: linear(gated(x)),
        "amxq.gated_linear",
    ),
    "Int8Linear": (INT8, int8, "amxq.int8_weight_linear"),
    "RmsNorm": (NORM, norm, "amxq.rms_norm"),
    "FlatLinear": (HEAD, FLAT, "linear"),
}


def jvp(f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.jvp(f, (x,), (t,))[1]
    return result


def dual(f: Function, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


def dual_compiled(f: Function, x: torch.Tensor, t: torch.Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x, t: dual(f, x, t), backend="eager")(x, t)


def loss(f: Function) -> Function:
    return lambda x: f(x).square().sum()


TRANSFORMS: dict[str, Callable[[Function, torch.Tensor, torch.Tensor], Any]] = {
    "dual": dual,
    "dual, no_grad": torch.no_grad()(dual),
    "dual, compiled": dual_compiled,
    "jvp": jvp,
    "vmap": lambda f, x, t: torch.vmap(f)(x),
    "vmap of columns": lambda f, x, t: torch.vmap(f, in_dims=1)(x[None]),
    "vmap of jvp": lambda f, x, t: torch.vmap(lambda x, t: jvp(f, x, t))(x, t),
    "jvp of vmap": lambda f, x, t: jvp(torch.vmap(f), x, t),
    "vmap of grad": lambda f, x, t: torch.vmap(torch.func.grad(loss(f)))(x),
    "jvp of grad": lambda f, x, t: jvp(torch.func.grad(loss(f)), x, t),
    "grad of jvp": lambda f, x, t: torch.func.grad(lambda x: jvp(loss(f), x, t))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_transforms(name: str, transform: str) -> None:
    call, dense, _ = CALLS[name]
    x, t = randn(M, K), randn(M, K, seed=1)
    apply = TRANSFORMS[transform]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no rule for a batch: it calls row by row
        want, got = apply(dense, x, t), apply(call, x, t)
    assert got is not None
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("RmsNorm", "FlatLinear")])
def test_tangents_of_bf16_after_calls_without(name: str) -> None:
    """Calls whose weights are known by then, which bf16 would be served by."""
    call, dense, _ = CALLS[name]
    x, t = randn(M, K).bfloat16(), randn(M, K, seed=1).bfloat16()
    for _ in range(3):
        call(x)
    want, got = dual(dense, x.float(), t.float()), dual(call, x, t)
    error = (got.float() - want).norm() / want.norm()
    assert error < 2e-2


def test_tangents_of_bias_and_residual() -> None:
    """As x has none, the tangent is theirs; the raw triple and int8 too."""
    raw = torch.zeros(K // 8, N, dtype=torch.int32), torch.ones(1, N), None
    x, residual, bias = randn(M, K), randn(M, N), randn(N)
    for weight, precision in (((*W,), "bf16"), ((*W,), "int8"), ((*raw, None), "bf16")):
        with forward_ad.dual_level():
            y = amxq.linear(
                x,
                *weight,
                bias=forward_ad.make_dual(bias, bias + 1),
                residual=forward_ad.make_dual(residual, residual + 2),
                precision=precision,
            )
            tangent = forward_ad.unpack_dual(y).tangent
        torch.testing.assert_close(tangent, bias + 1 + residual + 2)


def test_weights_in_batches() -> None:
    weights = [packed(seed) for seed in range(3)]
    q, s = (torch.stack(t) for t in list(zip(*weights, strict=True))[:2])
    x = randn(M, K)

    def of(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda q, s: f(lambda x: amxq.linear(x, q, s))

    for f in (lambda c: c(x), lambda c: torch.func.grad(loss(c))(x)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = torch.vmap(of(f))(q, s)
        for y, w in zip(got, weights, strict=True):
            torch.testing.assert_close(y, f(lambda x, w=w: amxq.linear(x, *w)))


def test_out_is_not_transformed() -> None:
    call = lambda x, out: amxq.linear(x, *W, out=out)  # noqa: E731
    for transformed in (torch.vmap(call), torch.func.grad(lambda *a: call(*a).sum())):
        with pytest.raises(LayoutError, match="out="):
            transformed(randn(M, K), torch.empty(M, N))
    with forward_ad.dual_level(), pytest.raises(LayoutError, match="no tangent"):
        amxq.linear(forward_ad.make_dual(randn(M, K), randn(M, K)), *W, out=torch.empty(M, N))


BARE: dict[str, Function] = {
    "linear": lambda x: torch.ops.amxq.linear(x, *W),
    "gated_linear": lambda x: torch.ops.amxq.gated_linear(x, *W[:3], *W[:3]),
    "multi_linear": lambda x: torch.ops.amxq.multi_linear(x, [W.qweight], [W.scales]),
    "rms_norm": lambda x: torch.ops.amxq.rms_norm(x, NORM.weight, 1e-5),
    "int8_weight_linear": lambda x: torch.ops.amxq.int8_weight_linear(x, INT8.values, INT8.scales),
    "route": lambda x: torch.ops.amxq.route(x, 2)[0],
}


@pytest.mark.parametrize("name", BARE)
def test_bare_operators_refuse_to_lose_a_tangent(name: str) -> None:
    x, t = randn(M, K), randn(M, K, seed=1)
    for apply in (dual, jvp):
        with pytest.raises(LayoutError, match=f"torch.ops.amxq.{name} has no tangents"):
            apply(BARE[name], x, t)
    with forward_ad.dual_level():
        assert torch.equal(BARE[name](x), BARE[name](x))


@pytest.mark.parametrize("name", CALLS)
def test_constants_beside_what_is_differentiated(name: str) -> None:
    call = CALLS[name][0]
    x, c, t = randn(M, N), randn(M, K, seed=1), randn(M, N, seed=2)
    got = torch.func.jvp(lambda x: call(c) * x, (x,), (t,))[1]
    torch.testing.assert_close(got, call(c) * t)


LAZY = {
    "negated": lambda *shape: randn(*shape).bfloat16()._neg_view(),
    "zeros": lambda *shape: torch._efficientzerotensor(shape, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("name", CALLS)
def test_lazy_activations(name: str, kind: str) -> None:
    """Of torch's tensors some stand for other numbers than their memory holds."""
    call, x = CALLS[name][0], LAZY[kind](M, K)
    if name in ("RmsNorm", "FlatLinear"):
        call = copy.deepcopy(call).bfloat16()
    got, want = call(x), call(x.clone() + 0)
    if name == "FlatLinear":  # lazy ones by torch, which adds up in another order
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_residuals_biases_and_scales(kind: str) -> None:
    x, residual, bias = randn(M, K).bfloat16(), LAZY[kind](M, N), LAZY[kind](N)
    scales = LAZY[kind](*W.scales.shape).half()
    lazy = W._replace(scales=scales if kind == "zeros" else (-W.scales)._neg_view())
    plain = lazy._replace(scales=lazy.scales.clone() + 0)
    for weight, other in ((lazy, plain), (W, W)):
        want = amxq.linear(x, *other, bias=bias + 0, residual=residual + 0)
        for _ in range(4):
            assert torch.equal(amxq.linear(x, *weight, bias=bias, residual=residual), want)
        layer = Int4Linear(weight, bias)
        assert torch.equal(layer(x, residual), want)


class Listening(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(getattr(function, "__name__", str(function)))
        self.names.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_the_operator(name: str) -> None:
    call, _, operator = CALLS[name]
    x = randn(M, K)
    if name not in ("RmsNorm", "FlatLinear"):
        x = x.bfloat16()
    for _ in range(3):
        want = call(x)
    with Listening() as mode:
        assert torch.equal(call(x), want)
    assert operator in mode.names


def test_the_default_device_is_no_mode_to_be_seen_by() -> None:
    from amxq.ops.bound import observed

    with torch.device("cpu"):
        assert not observed()
        with Listening():
            assert observed()
    assert not observed()


def test_experts_have_no_tangent() -> None:
    experts = amxq.PackedWeight(*(None if t is None else t.repeat(2, *[1] * t.dim()) for t in W))
    w13 = experts._replace(
        qweight=experts.qweight.repeat(1, 2, 1, 1, 1), scales=experts.scales.repeat(1, 2, 1)
    )
    x, weights = randn(M, K), torch.ones(M, 1)
    ids = torch.zeros(M, 1, dtype=torch.int64)
    with forward_ad.dual_level():
        amxq.fused_moe(x, w13, experts, weights, ids)
        for given in (
            (forward_ad.make_dual(x, x), w13, experts, weights, ids),
            (x, w13, experts, forward_ad.make_dual(weights, weights), ids),
        ):
            with pytest.raises(LayoutError, match="has a tangent"):
                amxq.fused_moe(*given)
        amxq.route(x, 2)
        with pytest.raises(LayoutError, match="has a tangent"):
            amxq.route(forward_ad.make_dual(x, x), 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_equal_orders_in_two_tensors_compile(backend: str) -> None:
    torch._dynamo.reset()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(2)).int()
    weights = [packed(0, order), packed(1, order.clone())]

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return amxq.multi_linear(x, weights)

    x = randn(M, K)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for y, want in zip(compiled(x), call(x), strict=True):
        assert torch.equal(y, want)
