"""``amxq.route`` against transformers' own routers, and against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amxq
from amxq.errors import AmxqError, ArgumentError, DTypeError, ShapeError

SIZES = {"hidden_size": 32, "num_experts_per_tok": 3}


def sorted_by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.long().sort(1)
    return weights.float().gather(1, order), ids


def routers() -> dict[str, tuple[Any, dict[str, Any]]]:
    """transformers' router, and the options of ``amxq.route`` that mean the same."""
    from transformers import (
        DeepseekV2Config,
        DeepseekV3Config,
        GptOssConfig,
        MixtralConfig,
        OlmoeConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sums = {"renormalize": True}
    groups = {"num_groups": 4, "topk_groups": 2, "routed_scaling_factor": 2.5}
    v3 = DeepseekV3Config(
        n_routed_experts=16, n_group=4, topk_group=2, routed_scaling_factor=2.5, **SIZES
    )
    v2 = DeepseekV2Config(
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=2.5,
        **SIZES,
    )
    qwen3 = Qwen3MoeConfig(num_experts=16, norm_topk_prob=True, **SIZES)
    return {
        "mixtral": (MixtralTopKRouter(MixtralConfig(num_local_experts=16, **SIZES)), sums),
        "qwen2_moe": (Qwen2MoeTopKRouter(Qwen2MoeConfig(num_experts=16, **SIZES)), {}),
        "qwen3_moe": (Qwen3MoeTopKRouter(qwen3), sums),
        "olmoe": (OlmoeTopKRouter(OlmoeConfig(num_experts=16, **SIZES)), {}),
        "gpt_oss": (GptOssTopKRouter(GptOssConfig(num_local_experts=16, **SIZES)), sums),
        "deepseek_v2": (DeepseekV2TopkRouter(v2), groups),
        "deepseek_v3": (DeepseekV3TopkRouter(v3), groups | sums | {"scoring": "sigmoid"}),
    }


def test_as_transformers_routes() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 32)
    for name, (router, options) in routers().items():
        router.eval()
        for parameter in router.parameters():
            parameter.data = torch.randn_like(parameter)
        bias = getattr(router, "e_score_correction_bias", None)
        if bias is not None:
            bias.copy_(torch.randn(16))
            options = options | {"correction_bias": bias}
        with torch.no_grad():
            logits, weights, ids = router(x)
            found = amxq.route(logits, 3, **options)
        assert found[0].dtype == torch.float32 and found[1].dtype == torch.int32
        want = sorted_by_id(weights, ids)
        got = sorted_by_id(*found)
        assert torch.equal(got[1], want[1]), name
        torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=1e-7, msg=name)


def test_every_target(on: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 40).half()
    weights, ids = amxq.route(logits, 5)
    want = logits.float().softmax(-1).topk(5)
    assert torch.equal(ids.long(), want.indices)
    torch.testing.assert_close(weights, want.values, rtol=2e-6, atol=0)


@pytest.mark.parametrize("experts", [1, 7, 512])
def test_sizes_and_strides(experts: int) -> None:
    torch.manual_seed(2)
    logits = torch.randn(experts, 3).T
    weights, ids = amxq.route(logits, experts, scoring="sigmoid")
    assert torch.equal(ids.long().sort(1).values, torch.arange(experts).expand(3, experts))
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids.long()))
    assert (weights.diff(dim=1) <= 0).all()
    assert amxq.route(logits[:0], 1)[0].shape == (0, 1)


def test_ties_and_numbers_that_are_none() -> None:
    weights, ids = amxq.route(torch.zeros(1, 8), 8)
    assert ids.tolist() == [list(range(8))] and torch.equal(weights, torch.full((1, 8), 0.125))
    logits = torch.full((2, 8), float("nan"))
    logits[1] = float("inf")
    assert ((amxq.route(logits, 3)[1] >= 0) & (amxq.route(logits, 3)[1] < 8)).all()


WRONG = [
    ({"logits": [1.0]}, DTypeError, "a list"),
    ({"logits": torch.zeros(2, 8).double()}, DTypeError, "float64"),
    ({"logits": torch.zeros(8)}, ShapeError, r"\[8\]"),
    ({"topk": 0}, ArgumentError, "topk=0"),
    ({"topk": 9}, ArgumentError, "1 to 8"),
    ({"scoring": "relu"}, ArgumentError, "'relu'"),
    ({"num_groups": 3}, ArgumentError, "num_groups=3"),
    ({"num_groups": 2, "topk_groups": 3}, ArgumentError, "topk_groups=3"),
    ({"num_groups": 4, "topk_groups": 1, "topk": 3}, ArgumentError, "1 to 2"),
    ({"num_groups": 8, "topk_groups": 4, "scoring": "sigmoid"}, ShapeError, "two experts"),
    ({"correction_bias": torch.zeros(7)}, ShapeError, r"\[7\]"),
    ({"correction_bias": torch.zeros(8).int()}, DTypeError, "int32"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_mistakes(changes: dict[str, Any], error: type[AmxqError], message: str) -> None:
    with pytest.raises(error, match=message):
        amxq.route(**({"logits": torch.zeros(2, 8), "topk": 2} | changes))


def test_operator() -> None:
    torch.manual_seed(3)
    logits, bias = torch.randn(3, 8), torch.randn(8)
    options = {"scoring": "sigmoid", "correction_bias": bias, "num_groups": 2, "topk_groups": 1}
    torch.library.opcheck(torch.ops.amxq.route.default, (logits, 2), options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return amxq.route(x, 2, **options)

    want = amxq.route(logits, 2, **options)
    assert all(torch.equal(a, b) for a, b in zip(compiled(logits), want, strict=True))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("case", ["two finite", "one NaN", "all NaN", "all -inf"])
def test_the_experts_of_a_token_differ(on: str, scoring: str, case: str) -> None:
    """fused_moe would count an expert twice."""
    logits, bias = torch.randn(1, 8), torch.zeros(8)
    if case == "two finite":
        bias[2:] = -torch.inf
    else:
        logits[0, 3 if case == "one NaN" else slice(None)] = (
            -torch.inf if case == "all -inf" else torch.nan
        )
    _, ids = amxq.route(logits, 4, scoring=scoring, correction_bias=bias)
    assert len(set(ids[0].tolist())) == 4 and ids.min() >= 0 and ids.max() < 8
    if case == "two finite":
        assert set(ids[0, :2].tolist()) == {0, 1}


def test_numbers_of_experts_are_whole() -> None:
    for topk in (2.5, "a", None):
        with pytest.raises(ArgumentError, match="topk is"):
            amxq.route(torch.randn(2, 8), topk)
