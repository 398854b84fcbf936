"""``amxq.linear`` as a torch operator: opcheck, compile, gradients, modes, raw tensors."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import amxq
from amxq.ops import raw

N, K = 72, 128


def packed(symmetric: bool = False, seed: int = 0, k: int = K) -> amxq.PackedWeight:
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (N, k), dtype=torch.uint8, generator=g)
    s = torch.randn(N, 4, generator=g).half() * 0.1
    z = None if symmetric else torch.randint(0, 16, s.shape, dtype=torch.uint8, generator=g)
    return amxq.pack(q, s, z, format="plain", group_size=32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


INPUTS = {
    "symmetric bf16": lambda: ((randn(5, K).bfloat16(), *packed(True)), {}),
    "zeros, fp16, bias": lambda: ((randn(2, 3, K).half(), *packed()), {"bias": randn(N).half()}),
    "fp32, one vector": lambda: ((randn(K), *packed()), {}),
    "K with a tail": lambda: ((randn(4, 121), *packed(k=121)), {"bias": randn(N)}),
    "no rows": lambda: ((randn(0, K), *packed()), {}),
    "strided": lambda: ((randn(K, 6).T, *packed()), {}),
    "raw": lambda: (
        (
            randn(3, 64),
            torch.randint(-(2**31), 2**31 - 1, (8, 40), dtype=torch.int32),
            randn(2, 40).half(),
            torch.randint(-(2**31), 2**31 - 1, (2, 5), dtype=torch.int32),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_opcheck(name: str) -> None:
    args, kwargs = INPUTS[name]()
    torch.library.opcheck(torch.ops.amxq.linear.default, args, kwargs)
    y = torch.ops.amxq.linear(*args, **kwargs)
    out = torch.full_like(y, torch.nan)
    torch.library.opcheck(torch.ops.amxq.linear_out.default, args, {**kwargs, "out": out})
    torch.ops.amxq.linear_out(*args, **kwargs, out=out)
    assert torch.equal(out, y)
    assert torch.equal(amxq.linear(*args, **kwargs), y)


class Layer(torch.nn.Module):
    def __init__(self, w: amxq.PackedWeight) -> None:
        super().__init__()
        self.w = w

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.relu(amxq.linear(x * 2, *self.w, bias=bias)) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    layer = Layer(packed())
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for m in (4, 7, 33) if dynamic else (4,):
            for x in (randn(m, K), randn(2, m, K).bfloat16()):
                assert torch.equal(compiled(x), layer(x))
                assert torch.equal(compiled(x, randn(N)), layer(x, randn(N)))


def test_compile_recompiles_nothing_for_other_rows() -> None:
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    layer = Layer(packed())
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for m in (5, 7, 33, 90):  # 4 is the number of groups, which dynamo would tie m to
            compiled(randn(m, K))
    assert counter.frame_count == 1


def test_compile_with_out() -> None:
    torch._dynamo.reset()
    w = packed()

    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return amxq.linear(x, *w, out=out) * 2

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(into, fullgraph=True, backend=backend)
        x, out = randn(3, K), torch.zeros(3, N)
        with torch.no_grad():
            assert torch.equal(compiled(x, out), amxq.linear(x, *w) * 2)
        assert torch.equal(out, amxq.linear(x, *w))


def test_export() -> None:
    program = torch.export.export(Layer(packed()), (randn(4, K),))
    calls = [n for n in program.graph.nodes if n.target is torch.ops.amxq.linear.default]
    assert len(calls) == 1
    layer = Layer(packed())
    assert torch.equal(program.module()(randn(4, K)), layer(randn(4, K)))


def test_fake_and_meta_tensors() -> None:
    w = packed()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in w]
        y = amxq.linear(mode.from_tensor(randn(2, 3, K).bfloat16()), *fakes)
    assert y.shape == (2, 3, N) and y.dtype == torch.bfloat16 and y.device.type == "cpu"
    metas = [None if t is None else t.to("meta") for t in w]
    y = amxq.linear(torch.empty(5, K, device="meta"), *metas)
    assert y.shape == (5, N) and y.is_meta


# --- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_of_activations_and_bias(symmetric: bool) -> None:
    w = packed(symmetric)
    dense = amxq.dequantize(w).double()
    x, bias = randn(2, 5, K).requires_grad_(), randn(N).requires_grad_()
    weights = randn(2, 5, N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (amxq.linear(x, *w, bias=bias) * weights).sum().backward()
    exact_x = x.detach().double().requires_grad_()
    exact_bias = bias.detach().double().requires_grad_()
    exact = torch.nn.functional.linear(exact_x, dense, exact_bias)
    (exact * weights).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad.double(), exact_bias.grad, rtol=1e-5, atol=1e-5)


def test_gradients_keep_the_dtype_and_act_order() -> None:
    w = packed(k=K)
    w = w._replace(perm=torch.randperm(K, generator=torch.Generator().manual_seed(1)).int())
    x = randn(3, K).bfloat16().requires_grad_()
    amxq.linear(x, *w).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    want = amxq.dequantize(w).sum(0).bfloat16().expand(3, K)
    assert torch.equal(x.grad, want)


def test_gradients_through_raw_tensors_and_compile() -> None:
    torch._dynamo.reset()
    (x, *triple), _ = INPUTS["raw"]()
    dense = amxq.dequantize(amxq.pack(*triple, format="gptq"))
    x.requires_grad_()
    amxq.linear(x, *triple).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, 64))
    layer = Layer(packed(True))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for module in (layer, compiled):
        leaf = randn(4, K).requires_grad_()
        module(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_the_bare_operator_never_gives_wrong_gradients_silently() -> None:
    x = randn(3, K).requires_grad_()
    y = torch.ops.amxq.linear(x, *packed())
    if y.requires_grad:
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            y.sum().backward()
        assert x.grad is None


def test_modes_without_gradients() -> None:
    w = packed()
    x = randn(3, K).requires_grad_()
    want = amxq.linear(x.detach(), *w)
    with torch.no_grad():
        y = amxq.linear(x, *w)
        assert not y.requires_grad and torch.equal(y, want)
        assert not amxq.linear(x, *w, out=torch.empty(3, N)).requires_grad
    with torch.inference_mode():
        y = amxq.linear(x, *w)
        assert y.is_inference() and torch.equal(y, want)
        inner = amxq.PackedWeight(*(None if t is None else t.clone() for t in w))
        assert torch.equal(amxq.linear(x.clone(), *inner), want)
    assert torch.equal(amxq.linear(randn(3, K), *inner), want)
    with pytest.raises(amxq.errors.LayoutError, match="out= has no gradient"):
        amxq.linear(x, *w, out=torch.empty(3, N))


def test_autocast_and_default_dtype() -> None:
    w, x = packed(), randn(3, K)
    want = amxq.linear(x, *w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(amxq.linear(x, *w), want)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(amxq.linear(x, *w), want)
    finally:
        torch.set_default_dtype(before)


def test_copies_of_packed_weights() -> None:
    w = packed()
    x = randn(3, K)
    for other in (copy.copy(w), copy.deepcopy(w)):
        assert isinstance(other, amxq.PackedWeight)
        assert torch.equal(amxq.linear(x, *other), amxq.linear(x, *w))
    assert copy.deepcopy(w).qweight.data_ptr() != w.qweight.data_ptr()


def test_parameters_and_buffers_work_as_tensors() -> None:
    w = packed()
    frozen = amxq.PackedWeight(
        torch.nn.Parameter(w.qweight, requires_grad=False),
        torch.nn.Parameter(w.scales, requires_grad=False),
        torch.nn.Buffer(w.zeros),
    )
    assert torch.equal(amxq.linear(randn(2, K), *frozen), amxq.linear(randn(2, K), *w))
    trainable = frozen._replace(scales=torch.nn.Parameter(w.scales))
    assert torch.equal(amxq.linear(randn(2, K), *trainable), amxq.linear(randn(2, K), *w))


# --- raw checkpoint tensors -------------------------------------------------------------------


def triple(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=g)

    return [words(8, 40), torch.randn(2, 40, generator=g).half(), words(2, 5)]


def test_raw_tensors_are_packed_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = raw.pack
    monkeypatch.setattr(raw, "pack", lambda *a, **k: calls.append(1) or real(*a, **k))
    before = len(raw._packed)
    x, t = randn(2, 64), triple()
    want = amxq.linear(x, *amxq.pack(*t, format="gptq"))
    for _ in range(3):
        assert torch.equal(amxq.linear(x, *t), want)
    assert len(calls) == 1 and len(raw._packed) == before + 1
    del t
    gc.collect()
    assert len(raw._packed) == before


def test_raw_tensors_that_change_are_packed_again() -> None:
    x, t = randn(2, 64), triple()
    first = amxq.linear(x, *t)
    t[1].mul_(2)
    assert torch.equal(amxq.linear(x, *t), 2 * first)
    t[0].zero_()
    assert torch.equal(amxq.linear(x, *t), amxq.linear(x, *amxq.pack(*t, format="gptq")))
    assert torch.equal(amxq.linear(x, t[0], t[1] * 2, t[2]), 2 * amxq.linear(x, *t))
    for factor in range(1, 5):  # scales that die and whose address is taken again
        got = amxq.linear(x, t[0], t[1] * factor, t[2])
        want = amxq.linear(x, *amxq.pack(t[0], t[1] * factor, t[2], format="gptq"))
        assert torch.equal(got, want)


def test_raw_tensors_without_zeros_and_of_inference_mode() -> None:
    x, t = randn(2, 64), triple()
    want = amxq.linear(x, *amxq.pack(t[0], t[1], format="gptq"))
    assert torch.equal(amxq.linear(x, t[0], t[1]), want)
    assert not torch.equal(amxq.linear(x, *t), want)
    with torch.inference_mode():
        inner = [t[0].clone(), t[1].clone()]
        assert torch.equal(amxq.linear(x, *inner), want)
        assert torch.equal(amxq.linear(x, *inner), want)


def test_import_registers_the_operator() -> None:
    code = "import torch, amxq; print(torch.ops.amxq.linear, torch.ops.amxq.linear_out)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["amxq.linear", "amxq.linear_out"]


def test_raw_inference_tensors_are_packed_at_every_call() -> None:
    x = torch.ones(1, 64)
    with torch.inference_mode():
        q = torch.zeros(8, 32, dtype=torch.int32)
        scales, zeros = torch.ones(1, 32), torch.full((1, 4), 0x77777777, dtype=torch.int32)
        assert amxq.linear(x, q, scales, zeros)[0, 0] == -8 * 64
        q.fill_(0x11111111)
        assert amxq.linear(x, q, scales, zeros)[0, 0] == -7 * 64
