"""Attention and decoder layers with fewer launches, against transformers' own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import amxq
from amxq.integrations.decoder import FusedAttention, FusedLayer
from amxq.integrations.fusion import fuse
from amxq.ops.rotary import can_rotate, plain_rotate, rotate

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def model_of(kind: str, precision: str = "bf16", **options: Any) -> Any:
    """A model with random INT4 layers in attention and MLP."""
    config = transformers.AutoConfig.for_model(kind, **SIZES | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.model.layers.modules():
        for name, layer in list(module.named_children()):
            if type(layer) is torch.nn.Linear:
                q = torch.randint(0, 16, layer.weight.shape, dtype=torch.uint8)
                scales = torch.rand(q.shape[0], q.shape[1] // 32).bfloat16() / 32
                bias = None if layer.bias is None else torch.randn(q.shape[0]).bfloat16()
                packed = amxq.pack(q, scales, format="plain")
                setattr(module, name, amxq.Int4Linear(packed, bias, precision))
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: Any, count: int = 3, **options: Any) -> list[torch.Tensor]:
    """Of a padded prompt of two texts, and of the tokens after it."""
    ids = torch.tensor([[5, 3, 9, 7, 2], [0, 0, 4, 8, 6]])
    mask = (ids != 0).long()
    found, cache = [], {}
    for _ in range(count):
        made = model(input_ids=ids, attention_mask=mask, use_cache=True, **cache, **options)
        name = "cache" if "cache" in made else "past_key_values"
        cache = {name: made[name]}
        found.append(made.logits[:, -1].float())
        ids = torch.full((2, 1), 11)
        mask = torch.cat([mask, torch.ones(2, 1).long()], 1)
    return found


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all((a - b).norm() <= 0.03 * b.norm() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "count"),
    [
        ("llama", {}, 2),
        ("mistral", {"sliding_window": 4}, 2),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, 2),
        ("qwen3", {"attention_bias": True}, 2),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, 2),
        ("gemma2", {}, 0),  # attention alone is the same, its layers have more norms
        ("olmo2", {}, 0),  # norms of whole rows
        ("cohere", {}, 0),  # pairs of neighbours are rotated
        ("phi3", {}, 0),  # q, k and v are one weight already
    ],
)
def test_models_compute_what_they_did(kind: str, options: dict[str, Any], count: int) -> None:
    model = model_of(kind, **options)
    own = logits(model)
    attention_alone = copy.deepcopy(model)
    made = fuse(model)
    assert made.get("FusedLayer", 0) == count
    assert made.get("FusedAttention", 0) == (2 if kind == "gemma2" else count)
    assert close(logits(model), own)
    names = [type(m).__name__ for m in model.model.layers]
    assert names == [type(m).__name__ for m in attention_alone.model.layers]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_attention_gives_the_same_bits(precision: str) -> None:
    model = model_of("qwen2", precision)
    fuse(model)
    for layer in model.model.layers:
        layer.__class__ = type(layer).__mro__[2]  # without residuals, which round less often
    fused = logits(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type(layer.self_attn).__mro__[2]
    for a, b in zip(fused, logits(model), strict=True):
        assert torch.equal(a, b)


def test_residuals_are_rounded_once() -> None:
    model = model_of("llama")
    fuse(model)
    layer = model.model.layers[0]
    x = torch.randn(1, 3, 64).bfloat16()
    angles = torch.randn(2, 1, 3, 16).bfloat16()
    got = layer(x, position_embeddings=(angles[0], angles[1]))
    wide = layer.self_attn(layer.input_layernorm(x), (angles[0], angles[1]))[0]
    assert (wide + x - got).norm() > 0  # the MLP adds to it
    attended, _ = layer.self_attn(x, (angles[0], angles[1]), residual=x)
    plain, _ = layer.self_attn(x, (angles[0], angles[1]))
    assert (attended - (x + plain)).abs().max() <= 2.0**-7 * attended.abs().max()


def test_copies_pickles_hooks_and_replaced_projections() -> None:
    model = model_of("llama")
    fuse(model)
    want = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = twin.model.layers[0].self_attn
        assert isinstance(attention, FusedAttention) and isinstance(attention, type(attention))
        assert isinstance(twin.model.layers[1], FusedLayer)
        assert all(map(torch.equal, logits(twin), want))
    seen: list[int] = []
    attention = model.model.layers[0].self_attn
    handle = attention.k_proj.register_forward_hook(lambda *_: seen.append(1))
    assert close(logits(model), want) and len(seen) == 3
    handle.remove()
    attention.v_proj = torch.nn.Sequential(attention.v_proj)  # as adapters do
    assert close(logits(model), want)
    attention.v_proj = attention.v_proj[0]
    attention.q_proj.precision = "int8"
    assert close(logits(model), want)
    attention.q_proj.precision = "bf16"
    attention.k_proj.qweight = attention.k_proj.qweight ^ 255
    assert not close(logits(model), want)


def test_other_ways_to_call() -> None:
    model = model_of("llama")
    ids = torch.tensor([[5, 3, 9, 7, 2]])
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    fuse(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), want)
    with torch.inference_mode():
        made = model(ids, output_hidden_states=True)
        assert len(made.hidden_states) == 3
        model.set_attn_implementation("eager")
        made = model(ids, output_attentions=True)
        assert len(made.attentions) == 2 and made.attentions[0].shape == (1, 4, 5, 5)
    model.set_attn_implementation("sdpa")
    embedded = model.model.embed_tokens(ids).requires_grad_()
    model(inputs_embeds=embedded).logits.float().sum().backward()
    assert embedded.grad is not None and embedded.grad.norm() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head", [8, 80])
def test_rotation(head: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    joint = torch.randn(2, 5, 5 * head).to(dtype)
    q, k, _ = joint.split([2 * head, head, 2 * head], -1)
    q, k = q.view(2, 5, 2, head), k.view(2, 5, 1, head)
    for batch in (1, 2):
        cos, sin = torch.randn(2, batch, 5, head).to(dtype)
        assert can_rotate(joint, cos, sin, head)
        want = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        for a, b in zip(plain_rotate(q, k, cos, sin), want, strict=True):
            assert torch.equal(a, b)  # trials rotate by this one
        for a, b in zip(rotate(q, k, cos, sin), want, strict=True):
            if dtype is torch.float32:  # products are added unrounded
                torch.testing.assert_close(a, b)
            else:
                assert torch.equal(a, b)
    for wrong in (cos[:1, :4], cos.double(), cos.transpose(1, 2), cos[..., : head // 2], None):
        assert not can_rotate(joint, wrong, sin, head)
