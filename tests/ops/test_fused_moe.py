"""``amxq.fused_moe`` against fp64, one expert at a time."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import Case, Experts, case, experts

import amxq
from amxq.errors import LayoutError, ShapeError
from amxq.ops.expert_bound import BoundExperts
from amxq.ops.expert_schedule import MOST_ROWS, row_blocks
from amxq.quantization.experts import is_paired, paired

E, H, I = 6, 64, 96  # noqa: E741
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def layer() -> tuple[Experts, Experts]:
    rng = np.random.default_rng(0)
    return experts(rng, E, 2 * I, H), experts(rng, E, H, I)


@pytest.mark.parametrize(
    ("M", "topk", "dtype", "symmetric"), [(1, 2, BF16, True), (9, 1, F16, False)]
)
def test_every_target_is_exact(
    on: str, M: int, topk: int, dtype: torch.dtype, symmetric: bool
) -> None:
    rng = np.random.default_rng(1)
    w13 = experts(rng, 3, 2 * I, H, 32, symmetric)
    w2 = experts(rng, 3, H, I, -1, symmetric)
    example = case(rng, w13, w2, M, topk, dtype)
    example.ids[:] = torch.arange(topk)  # rows of one expert each, or all of one
    example.check(example.call())


def test_few_and_many_rows(layer: tuple[Experts, Experts]) -> None:
    """Experts with 0 to 40 rows in one call."""
    rng = np.random.default_rng(2)
    counts = (40, 17, 7, 3, 1, 0)
    example = case(rng, *layer, sum(counts), 1)
    example.ids[:, 0] = torch.from_numpy(rng.permutation(np.repeat(np.arange(E), counts)))
    example.check(example.call())


OPTIONS = {
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu": {"activation": "swiglu"},
    "limit": {"limit": 0.5},
    "alpha": {"activation": "swiglu", "limit": 0.7, "alpha": 2.5},
    "interleaved": {"interleaved": True, "activation": "swiglu"},
    "scaled": {"routed_scaling_factor": 2.5},
    "on input": {"apply_router_weight_on_input": True},
    "biases": {"w13_bias": torch.randn(E, 2 * I), "w2_bias": torch.randn(E, H).bfloat16()},
    "fp64 bias": {"w2_bias": torch.randn(H, E, dtype=torch.float64).T},
    "bias on input": {"apply_router_weight_on_input": True, "w13_bias": torch.randn(E, 2 * I)},
    "map": {"expert_map": torch.tensor([3, -1, 0, 5, 1, 2, 4, -1])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, layer: tuple[Experts, Experts]) -> None:
    rng = np.random.default_rng(3)
    example = case(rng, *layer, 2, 3, **OPTIONS[name])
    if name == "map":
        example.ids = torch.tensor([[0, 1, 7], [6, 3, 2]])
    example.check(example.call())


@pytest.mark.parametrize(("hidden", "inner", "groups"), [(40, 24, (8, -1)), (136, 72, (-1, 24))])
def test_sizes_that_are_multiples_of_eight_only(
    hidden: int, inner: int, groups: tuple[int, int]
) -> None:
    rng = np.random.default_rng(4)
    w13 = experts(rng, 3, 2 * inner, hidden, groups[0], symmetric=False)
    w2 = experts(rng, 3, hidden, inner, groups[1])
    for interleaved in (False, True):
        example = case(rng, w13, w2, 2, 2, F16, interleaved=interleaved)
        example.check(example.call())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_routing(layer: tuple[Experts, Experts], data: st.DataObject) -> None:
    M, topk = data.draw(st.integers(0, 12)), data.draw(st.integers(1, E))
    ids = data.draw(
        st.lists(
            st.lists(st.integers(-2, E - 1), min_size=topk, max_size=topk), min_size=M, max_size=M
        )
    )
    rng = np.random.default_rng(len(ids) * topk)
    example = case(rng, *layer, M, topk)
    example.ids = torch.tensor(ids, dtype=torch.int64).reshape(M, topk)
    if data.draw(st.booleans()):
        example.ids = example.ids.int()
    example.weights = example.weights.to(data.draw(st.sampled_from((BF16, F16, F32))))
    example.check(example.call())


@pytest.mark.parametrize("topk", [1, 3])
def test_no_rows(layer: tuple[Experts, Experts], topk: int) -> None:
    example = case(np.random.default_rng(5), *layer, 0, topk)
    assert example.call().shape == (0, H)
    example = case(np.random.default_rng(5), *layer, 4, topk)
    example.ids[:] = -1
    assert torch.equal(example.call(), torch.zeros(4, H, dtype=BF16))


def test_fp32_is_exact_to_fp32(layer: tuple[Experts, Experts]) -> None:
    example = case(np.random.default_rng(12), *layer, 1, 3, F32)
    example.check(example.call())


def test_any_strides(layer: tuple[Experts, Experts]) -> None:
    example = case(np.random.default_rng(6), *layer, 3, 2)
    want = example.call()
    spread = torch.zeros(3, 2 * H, dtype=BF16)[:, ::2]
    spread.copy_(example.x)
    assert torch.equal(example.call(x=spread), want)
    assert torch.equal(example.call(x=example.x.T.contiguous().T), want)
    turned = {"topk_weights": example.weights, "topk_ids": example.ids}
    assert torch.equal(example.call(**{k: v.T.contiguous().T for k, v in turned.items()}), want)


def test_act_order(layer: tuple[Experts, Experts]) -> None:
    """A packed weight whose input features are permuted, as ``pack`` makes it of a g_idx."""
    rng = np.random.default_rng(7)
    example = case(rng, *layer, 3, 2)
    orders = [torch.from_numpy(rng.permutation(K)).int() for K in (H, I)]
    w13, w2 = (w.packed._replace(perm=p) for w, p in zip(layer, orders, strict=True))
    for weight, order in zip((example.w13, example.w2), orders, strict=True):
        assert weight.packed.perm is None and order.shape[0] == weight.packed.in_features
    x = torch.empty_like(example.x)
    x[:, orders[0].long()] = example.x
    plain = example.call()
    # w2's order undone by permuting w13's rows is not what this tests: compare with dequantised
    got = example.call(x=x, w13=w13)
    assert torch.equal(got, plain)
    want = _dequantised(example, x, w13, w2)
    got = example.call(x=x, w13=w13, w2=w2).double()
    assert (got - want).norm() <= 5e-3 * want.norm()


def test_an_act_order_of_each_expert(layer: tuple[Experts, Experts]) -> None:
    """One row, few and many, with and without their products in parts."""
    rng = np.random.default_rng(13)
    orders = [torch.from_numpy(np.stack([rng.permutation(K) for _ in range(E)])) for K in (H, I)]
    w13, w2 = (w.packed._replace(perm=p.int()) for w, p in zip(layer, orders, strict=True))
    for M, topk, dtype in ((1, 3, BF16), (2, 2, F16), (20, 1, BF16)):
        example = case(rng, *layer, M, topk, dtype)
        if topk == 1:
            example.ids[:] = 4
        want = _dequantised(example, example.x, w13, w2)
        got = example.call(w13=w13, w2=w2).double()
        assert (got - want).norm() <= 5e-3 * want.norm()
    with pytest.raises(LayoutError, match="no permutation"):
        example.call(w13=w13._replace(perm=w13.perm + H))  # type: ignore[operator]


@pytest.mark.parametrize("interleaved", [False, True])
def test_gate_and_up_in_whole_panels(interleaved: bool) -> None:
    """Rows of w13 that amxq brings into order itself, and ones that are in order already."""
    rng = np.random.default_rng(14)
    w13, w2 = experts(rng, 3, 2 * 40, 48, 16, symmetric=False), experts(rng, 3, 48, 40, -1)
    biases = {"w13_bias": torch.randn(3, 80), "w2_bias": torch.randn(3, 48)}
    example = case(rng, w13, w2, 3, 2, interleaved=interleaved, **biases)
    got = example.call()
    example.check(got)
    assert torch.equal(example.call(), got)
    padded = paired(w13.packed, interleaved)
    assert padded.out_features == 128 and is_paired(padded)
    if interleaved:
        bias = biases["w13_bias"]
        biases["w13_bias"] = torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
        with pytest.raises(ShapeError, match="w2 is"):
            example.call(w13=padded)
    assert torch.equal(example.call(w13=padded, interleaved=False, **biases), got)
    # a weight that is written to is brought into order again
    w13.packed.scales.mul_(2)
    for w in w13.matrices:
        w.scale = w.scale * 2
    example.check(example.call())


def _dequantised(
    example: Case, x: torch.Tensor, w13: amxq.PackedWeight, w2: amxq.PackedWeight
) -> torch.Tensor:
    """The result in fp64 from what ``amxq.dequantize`` gives."""
    first, second = amxq.dequantize(w13).double(), amxq.dequantize(w2).double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for m, j in np.ndindex(*example.ids.shape):
        e = int(example.ids[m, j])
        gate, up = (first[e] @ x[m].double()).chunk(2)
        out[m] += example.weights[m, j] * (second[e] @ (torch.nn.functional.silu(gate) * up))
    return out


def test_same_bits_for_any_number_of_threads(layer: tuple[Experts, Experts]) -> None:
    example = case(np.random.default_rng(8), *layer, 12, 3)
    want = example.call()
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        assert torch.equal(example.call(), want)


def test_callers_in_threads(layer: tuple[Experts, Experts]) -> None:
    cases = [case(np.random.default_rng(seed), *layer, 3 + seed, 2) for seed in range(4)]
    want = [c.call() for c in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        if any(not torch.equal(cases[i].call(), want[i]) for _ in range(20)):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bad_rows_stay_alone(layer: tuple[Experts, Experts]) -> None:
    """NaN and infinity do not reach other tokens."""
    example = case(np.random.default_rng(9), *layer, 8, 2)
    want = example.call()
    example.x[2], example.x[5, 3] = float("nan"), float("inf")
    got = example.call()
    keep = torch.ones(8, dtype=torch.bool)
    keep[[2, 5]] = False
    assert torch.equal(got[keep], want[keep])
    assert got[2].isnan().all() and not got[5].isfinite().all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("target", ["amx", "avx512_bf16", "avx512", "avx2"])
def test_blocks_cover_all_rows(target: str, int8: bool) -> None:
    cut = row_blocks(target, int8)
    for rows in range(1, MOST_ROWS + 1):
        size = cut.sizes[int(cut.class_of[rows])]
        blocks = -(-rows // size)
        if target != "amx":
            assert size <= 8 and blocks == -(-rows // 8)
        else:
            assert blocks * size - rows < size <= 128


def test_operator(layer: tuple[Experts, Experts]) -> None:
    example = case(np.random.default_rng(10), *layer, 3, 2)
    arguments = (example.x, *layer[0].packed, *layer[1].packed, example.weights, example.ids)
    want = example.call()
    assert torch.equal(torch.ops.amxq.fused_moe(*arguments), want)
    torch.library.opcheck(torch.ops.amxq.fused_moe.default, arguments)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return amxq.fused_moe(x, layer[0].packed, layer[1].packed, example.weights, example.ids)

    assert torch.equal(compiled(example.x), want)


@pytest.mark.parametrize(("M", "dtype", "symmetric"), [(1, BF16, True), (9, F32, False)])
def test_int8(on: str, M: int, dtype: torch.dtype, symmetric: bool) -> None:
    """Activations in 8 bits, one scale for 32 of them: about one percent for each of 3 products,
    where zero points that are ignored or counted twice would make tens."""
    rng = np.random.default_rng(11)
    w13 = experts(rng, 3, 2 * I, H, 32, symmetric)
    w2 = experts(rng, 3, H, I, 32, symmetric)
    example = case(rng, w13, w2, M, 1, dtype)
    example.ids[:] = 1
    got, want = example.call(precision="int8").double().numpy(), example.exact()
    assert np.linalg.norm(got - want) <= 0.035 * np.linalg.norm(want)
    torch.set_num_threads(3)
    assert np.array_equal(example.call(precision="int8").double().numpy(), got)


def test_bound(layer: tuple[Experts, Experts]) -> None:
    """Of fixed weights: the same results, and the errors of the operator."""
    example = case(np.random.default_rng(15), *layer, 1, 3)
    bound = BoundExperts(layer[0].packed, layer[1].packed)
    x, weights, ids = example.x, example.weights, example.ids
    assert torch.equal(bound(x, weights, ids), example.call())
    assert torch.equal(bound(x, weights[:, :2], ids[:, :2].int()), _first(example, 2).call())
    assert not bound(x, weights, -torch.ones_like(ids)).any()
    several = case(np.random.default_rng(16), *layer, 4, 2)
    assert torch.equal(bound(several.x, several.weights, several.ids), several.call())
    with pytest.raises(ShapeError, match=r"topk_ids\[0, 1\] is 6"):
        bound(x, weights, torch.tensor([[0, E, 1]]))
    with pytest.raises(ShapeError, match="x has shape"):
        bound(x[:, :8], weights, ids)


@pytest.mark.parametrize("inference", [False, True])
def test_bound_weights_that_are_written_or_lazy(
    inference: bool, layer: tuple[Experts, Experts]
) -> None:
    """A bias in fp64 is copied, and so it would be missed that it is written later."""
    x, weights = torch.randn(1, H).bfloat16(), torch.rand(1, 2)
    ids = torch.tensor([[1, 4]])
    w13, w2 = (one.packed for one in layer)
    with torch.inference_mode(inference):
        bias = torch.randn(w2.scales.shape[:2], dtype=torch.float64)
        bound = BoundExperts(w13, w2, w2_bias=bias)
        for _ in range(2):
            want = amxq.fused_moe(x, w13, w2, weights, ids, w2_bias=bias.clone())
            assert torch.equal(bound(x, weights, ids), want)
            bias.mul_(-3)
    negated = w2._replace(scales=torch._neg_view(w2.scales))
    want = amxq.fused_moe(x, w13, negated._replace(scales=-w2.scales), weights, ids)
    assert torch.equal(BoundExperts(w13, negated)(x, weights, ids), want)


def _first(example: Case, count: int) -> Case:
    """The same call with fewer experts of each token."""
    return replace(example, weights=example.weights[:, :count], ids=example.ids[:, :count])
