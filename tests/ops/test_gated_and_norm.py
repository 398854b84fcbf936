"""The operators of whole modules, ``amxq.gated_linear`` and ``torch.ops.amxq.rms_norm``, against
fp64, and the modules of transformers' models that they replace."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import amxq
from amxq.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from amxq.integrations.fusion import FlatLinear, GatedMLP, RmsNorm, fuse
from amxq.ops.gated import bound_gated_linear

REFERENCE = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def weight(n: int, k: int, groups: int, zeros: bool, seed: int) -> amxq.PackedWeight:
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=g)
    s = torch.randn(n, groups, generator=g).bfloat16() / k**0.5 / 4
    z = torch.randint(0, 16, s.shape, dtype=torch.uint8, generator=g) if zeros else None
    return amxq.pack(q, s, z, format="plain")


@pytest.mark.parametrize(
    ("activation", "rows", "zeros"),
    [("silu", 1, False), ("gelu", 1, True), ("gelu_tanh", 3, False), ("silu", 35, True)],
)
def test_gated_linear(on: str, activation: str, rows: int, zeros: bool) -> None:
    n, k = 72, 128
    gate, up = (weight(n, k, 4, zeros, seed) for seed in (1, 2))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(3)).to(dtype)
        a, b = (x.double() @ amxq.dequantize(w).double().T for w in (gate, up))
        want = REFERENCE[activation](a) * b
        got = amxq.gated_linear(x, gate, up, activation=activation)
        assert got.dtype == dtype and got.shape == (rows, n)
        a, b = (x.double().abs() @ amxq.dequantize(w).double().abs().T for w in (gate, up))
        sums = 2.0**-20 * (a + 1) * (b + 1)  # fp32 sums of both, on what they are multiplied by
        rounding = 1.01 * torch.finfo(dtype).eps / 2 * want.abs()
        assert ((got.double() - want).abs() <= rounding + sums).all()


@pytest.mark.parametrize(("rows", "zeros"), [(1, False), (3, True), (35, False)])
def test_gated_linear_in_int8(on: str, rows: int, zeros: bool) -> None:
    gate, up = (weight(72, 128, 4, zeros, seed) for seed in (1, 2))
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    # exact but for the rounding of the sums, which are those of amxq.linear in fp32
    wide = x.float()
    a, b = (amxq.linear(wide, *w, precision="int8").double() for w in (gate, up))
    want = torch.nn.functional.silu(a) * b
    got = amxq.gated_linear(x, gate, up, precision="int8")
    assert ((got.double() - want).abs() <= 1.01 * 2.0**-8 * want.abs() + 1e-7).all()
    assert torch.equal(got, bound_gated_linear(gate, up, "silu", "int8")(x))
    exact = (x.double() @ amxq.dequantize(gate).double().T).double()
    exact = torch.nn.functional.silu(exact) * (x.double() @ amxq.dequantize(up).double().T)
    assert 1e-4 * exact.norm() < (got - exact).norm() <= 0.03 * exact.norm()


def test_gated_linear_takes_strided_and_empty_activations() -> None:
    gate, up = weight(40, 64, 2, False, 1), weight(40, 64, 2, False, 2)
    x = torch.randn(64, 6).bfloat16().T
    assert torch.equal(amxq.gated_linear(x, gate, up), amxq.gated_linear(x.contiguous(), gate, up))
    assert amxq.gated_linear(torch.empty(2, 0, 64).bfloat16(), gate, up).shape == (2, 0, 40)


def test_gated_linear_refuses_weights_that_do_not_belong_together() -> None:
    x, one = torch.randn(2, 64).bfloat16(), weight(40, 64, 2, False, 1)
    for other, said in (((48, 64, 2), r"\[48, 64\] with groups of 32"), ((40, 64, 4), "of 16")):
        with pytest.raises(ShapeError, match=rf"gate is \[40, 64\] with groups of 32, up .*{said}"):
            amxq.gated_linear(x, one, weight(*other, False, 2))
    lost = one._replace(qweight=one.qweight.to("meta"))
    for arguments, name in (((x, one, lost), "up.qweight"), ((x.to("meta"), one, one), "x")):
        with pytest.raises(LayoutError, match=f"{name} is on meta and .* on cpu"):
            amxq.gated_linear(*arguments)
    with pytest.raises(LayoutError, match="zeros"):
        amxq.gated_linear(x, one, weight(40, 64, 2, True, 2))
    with pytest.raises(LayoutError, match="perm"):
        amxq.gated_linear(x, one._replace(perm=torch.arange(64, dtype=torch.int32)), one)
    with pytest.raises(ArgumentError, match="activation='relu'"):
        amxq.gated_linear(x, one, one, activation="relu")
    with pytest.raises(ArgumentError, match="precision is 'int4'"):
        amxq.gated_linear(x, one, one, precision="int4")
    with pytest.raises(ShapeError, match="expected \\[..., 64\\]"):
        amxq.gated_linear(x[:, :32], one, one)


def test_opcheck() -> None:
    gate, up = weight(40, 64, 2, True, 1), weight(40, 64, 2, True, 2)
    x = torch.randn(3, 64).bfloat16()
    torch.library.opcheck(torch.ops.amxq.gated_linear.default, (x, *gate[:3], *up[:3]))
    norm = (x, torch.randn(64).bfloat16(), 1e-6)
    torch.library.opcheck(torch.ops.amxq.rms_norm.default, norm)


def test_gradient_of_gated_linear() -> None:
    gate, up = weight(40, 64, 2, False, 1), weight(40, 64, 2, False, 2)
    x = torch.randn(3, 64, requires_grad=True)
    amxq.gated_linear(x, gate, up).sum().backward()
    y = x.detach().requires_grad_()
    a, b = (y @ amxq.dequantize(w).T for w in (gate, up))
    (torch.nn.functional.silu(a) * b).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [8, 64, 100, 576])
def test_rms_norm(on: str, dtype: torch.dtype, n: int) -> None:
    x, w = torch.randn(2, 3, n).to(dtype), torch.randn(n).to(dtype)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    got = torch.ops.amxq.rms_norm(x, w, 1e-5)
    roundings = 6 if dtype is torch.float32 else 1.1  # of the sum, or of quotient and product
    bound = roundings * torch.finfo(dtype).eps * want.abs() + 1e-7
    assert ((got.double() - want).abs() <= bound).all()


def test_rms_norm_refuses() -> None:
    x = torch.randn(3, 64)
    with pytest.raises(ShapeError, match=r"\[3, 64\] and weight \[32\]"):
        torch.ops.amxq.rms_norm(x, torch.randn(32), 1e-6)
    with pytest.raises(LayoutError, match="weight is on meta and x on cpu"):
        torch.ops.amxq.rms_norm(x, torch.randn(64, device="meta"), 1e-6)
    with pytest.raises(DTypeError, match="bfloat16"):
        torch.ops.amxq.rms_norm(x, torch.randn(64).bfloat16(), 1e-6)
    with pytest.raises(LayoutError, match="contiguous"):
        torch.ops.amxq.rms_norm(torch.randn(64, 64), torch.randn(128)[::2], 1e-6)


# --- modules ----------------------------------------------------------------------------


class LikeLlamaRMSNorm(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(n)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class LikeGemmaRMSNorm(LikeLlamaRMSNorm):
    """Multiplies by one more than its weight, so it may not be replaced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((1 + self.weight.float()) * wide).to(x.dtype)


class MLP(torch.nn.Module):
    def __init__(self, act: torch.nn.Module, twist: float = 1.0) -> None:
        super().__init__()
        linear = amxq.Int4Linear.from_packed
        self.gate_proj = linear(weight(96, 64, 2, False, 1))
        self.up_proj = linear(weight(96, 64, 2, False, 2))
        self.down_proj = linear(weight(64, 96, 3, False, 3))
        self.act_fn, self.twist = act, twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.twist)


def test_only_modules_that_compute_the_same_are_replaced() -> None:
    model = torch.nn.ModuleDict(
        {
            "llama": LikeLlamaRMSNorm(64).bfloat16(),
            "gemma": LikeGemmaRMSNorm(64).bfloat16(),
            "silu": MLP(torch.nn.SiLU()),
            "gelu": MLP(torch.nn.GELU()),
            "relu": MLP(torch.nn.ReLU()),
            "twisted": MLP(torch.nn.SiLU(), twist=1.5),
        }
    ).requires_grad_(False)
    before = copy.deepcopy(model)
    assert fuse(model) == {"RmsNorm": 1, "GatedMLP": 2}
    kinds = {name: type(module) for name, module in model.items()}
    assert kinds["llama"] is RmsNorm and kinds["silu"] is kinds["gelu"] is GatedMLP
    assert (kinds["gemma"], kinds["relu"], kinds["twisted"]) == (LikeGemmaRMSNorm, MLP, MLP)
    assert model.state_dict().keys() == before.state_dict().keys()
    x = torch.randn(2, 5, 64).bfloat16()
    for name, module in model.items():
        want = before[name](x).float()
        assert (module(x).float() - want).norm() <= 0.02 * want.norm(), name
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied["silu"](x), model["silu"](x))


def test_dense_layers_multiply_matrices() -> None:
    head = torch.nn.Linear(64, 40).bfloat16().requires_grad_(False)
    model = torch.nn.Sequential(head)
    x = torch.randn(2, 7, 64).bfloat16()
    want = head(x)
    assert fuse(model) == {} and type(model[0]) is FlatLinear and isinstance(head, torch.nn.Linear)
    assert torch.equal(model(x), want) and model(x[:, -1:]).shape == (2, 1, 40)
    assert torch.equal(
        model(x[:, -1:]), model(x[:, -1:].clone(memory_format=torch.contiguous_format))
    )
    assert model(x[0, 0]).shape == (40,) and model(x[:, :0]).shape == (2, 0, 40)


def test_replaced_modules_keep_gradients_and_compile() -> None:
    norm, mlp = RmsNorm(torch.nn.Parameter(torch.randn(64)), 1e-6), MLP(torch.nn.SiLU())
    fused = GatedMLP(mlp.gate_proj, mlp.up_proj, mlp.down_proj, "silu")
    x = torch.randn(3, 64, requires_grad=True)
    fused(norm(x)).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None

    def both(x: torch.Tensor) -> torch.Tensor:
        return fused(norm(x))

    with torch.no_grad():
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x.detach()), both(x.detach()))


def test_a_layer_binds_the_tensors_that_it_has_now() -> None:
    layer, other = MLP(torch.nn.SiLU()).gate_proj, weight(96, 64, 2, False, 9)
    x = torch.randn(1, 64).bfloat16()
    first = layer(x)
    layer.qweight, layer.scales = other.qweight, other.scales
    assert torch.equal(layer(x), amxq.linear(x, *other)) and not torch.equal(layer(x), first)
    layer.set_bias(torch.randn(96).bfloat16())
    assert torch.equal(layer(x), amxq.linear(x, *other, bias=layer.bias))
    strided = torch.randn(64, 3).bfloat16().T
    assert torch.equal(layer(strided), amxq.linear(strided, *other, bias=layer.bias))
    with pytest.raises(ShapeError):
        layer(torch.randn(1, 32).bfloat16())
    with torch.no_grad(), pytest.raises(DTypeError):
        layer(torch.ones(1, 64, dtype=torch.int32))
