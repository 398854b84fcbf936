"""One token through a model as a list of launches, against the model's own classes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_decoder import close, model_of

import amxq
from amxq.integrations import decode
from amxq.integrations.fusion import fuse

transformers = pytest.importorskip("transformers")

FIELD = (
    "cache"
    if "cache" in transformers.modeling_outputs.BaseModelOutputWithPast().__dict__
    else ("past_key_values")
)
PROMPT = [5, 3, 9, 7, 2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small launches on several threads take milliseconds where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The positions of tokens that went through as a list of launches."""
    seen: list[int] = []
    run = decode.Program.run

    def counted(self: Any, x: Any, layers: Any, position: int) -> Any:
        made = run(self, x, layers, position)
        if made is not None:
            seen.append(position)
        return made

    monkeypatch.setattr(decode.Program, "run", counted)
    yield seen


@torch.inference_mode()
def step(model: Any, ids: list[int], cache: Any, batch: int = 1, **options: Any) -> Any:
    """Logits of the last token, and the cache."""
    made = model(torch.tensor([ids] * batch), use_cache=True, **{FIELD: cache}, **options)
    return made.logits[:, -1].float(), made[FIELD]


def decoded(model: Any, count: int, **options: Any) -> list[torch.Tensor]:
    """Logits after a prompt and after each of some tokens."""
    logits, cache = step(model, PROMPT, None)
    found = [logits]
    for token in range(11, 11 + count):
        logits, cache = step(model, [token], cache, **options)
        found.append(logits)
    return found


def pair(kind: str = "llama", precision: str = "bf16", **options: Any) -> tuple[Any, Any]:
    """A model as loaded, and without what this file tests."""
    model = model_of(kind, precision, **options)
    fuse(model)
    plain = copy.deepcopy(model)
    if isinstance(plain.model, decode.FusedModel):
        plain.model.__class__ = type(plain.model).__mro__[2]
    return model, plain


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("kind", "options", "fast"),
    [
        ("llama", {}, True),
        ("qwen2", {}, True),
        ("qwen3", {"attention_bias": True}, True),
        ("mistral", {"sliding_window": None}, True),
        ("mistral", {"sliding_window": 4}, False),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, False),
        ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, False),  # norms of another kind
        ("gemma2", {}, False),
    ],
)
def test_models_compute_what_they_did(
    kind: str, options: dict[str, Any], fast: bool, precision: str, runs: list[int]
) -> None:
    model, plain = pair(kind, precision, **options)
    # in int8 an activation between two integers may be rounded to the other one
    for got, want in zip(decoded(model, 20), decoded(plain, 20), strict=True):
        assert (got - want).norm() <= (0.03 if precision == "bf16" else 0.08) * want.norm()
    assert runs == (list(range(5, 25)) if fast else [])


def test_a_model_that_does_more_is_left_alone() -> None:
    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = kind.forward(self, *args, **kwargs)
        made.last_hidden_state = made.last_hidden_state * 2
        return made

    model = model_of("llama")
    kind = type(model.model)
    model.model.__class__ = type("LlamaModel", (kind,), {"forward": scaled})
    assert "FusedModel" not in fuse(model)
    assert fuse(model_of("llama"))["FusedModel"] == 1


def test_what_the_class_has_to_compute(runs: list[int]) -> None:
    model, plain = pair()
    cache = step(model, PROMPT, None)[1]

    def same(**options: Any) -> bool:
        before = len(runs)
        got = step(model, [11], copy.deepcopy(cache), **options)[0]
        want = step(plain, [11], copy.deepcopy(cache), **options)[0]
        assert close([got], [want])
        return len(runs) == before

    assert not same() and not same(attention_mask=torch.ones(1, 6).long())
    assert not same(position_ids=torch.tensor([[5]])) and not same(output_attentions=False)
    assert same(attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    assert same(position_ids=torch.tensor([[9]]))
    for m in (model, plain):
        m.set_attn_implementation("eager")
    assert same()
    for m in (model, plain):
        m.set_attn_implementation("sdpa")
    assert not same()
    two = step(model, PROMPT, None, batch=2)[1]
    got, want = (step(m, [11], copy.deepcopy(two), batch=2)[0] for m in (model, plain))
    assert close([got], [want]) and len(runs) == 5
    with torch.enable_grad():
        model(torch.tensor([[11]]), use_cache=True, **{FIELD: step(model, PROMPT, None)[1]})
    assert len(runs) == 5
    assert model.model(torch.tensor([[11]]), torch.ones(1, 1))[0].shape == (1, 1, 64)
    static = transformers.StaticCache(model.config, max_cache_len=32)
    assert step(model, [11], step(model, PROMPT, static)[1])[0].isfinite().all()
    assert same(output_hidden_states=True) and same()  # transformers' hooks stay in the layers
    assert len(runs) == 5


def test_changed_models_compute_what_they_are_now(runs: list[int]) -> None:
    model, plain = pair()
    want = decoded(plain, 3)
    assert close(decoded(model, 3), want) and len(runs) == 3
    seen: list[int] = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    assert close(decoded(model, 3), want) and len(seen) == 4 and len(runs) == 3
    handle.remove()
    assert close(decoded(model, 3), want) and len(runs) == 6
    attention = model.model.layers[0].self_attn
    attention.v_proj = torch.nn.Sequential(attention.v_proj)  # as adapters do
    assert close(decoded(model, 3), want) and len(runs) == 6
    attention.v_proj = attention.v_proj[0]
    for m in model.modules():
        if isinstance(m, amxq.Int4Linear):
            m.precision = "int8"
    other = decoded(model, 3)
    assert close(other, want) and not torch.equal(other[-1], want[-1]) and len(runs) == 9
    weight = torch.nn.Parameter(torch.rand(64).bfloat16())
    for m in (model, plain):
        layer = m.model.layers[1]
        layer.mlp.down_proj.qweight = layer.mlp.down_proj.qweight ^ 255
        layer.input_layernorm.weight = weight
        for linear in m.modules():
            if isinstance(linear, amxq.Int4Linear):
                linear.precision = "bf16"
    assert not close(decoded(model, 3), want) and close(decoded(model, 3), decoded(plain, 3))
    assert len(runs) == 15


def test_targets_and_threads(runs: list[int]) -> None:
    model, plain = pair("qwen2")
    for target in amxq.available_targets():
        with amxq.target(target):
            for count in (1, 2):
                torch.set_num_threads(count)
                assert close(decoded(model, 3), decoded(plain, 3))
    assert len(runs) == 3 * 2 * len(amxq.available_targets())


def test_copies_pickles_and_threads() -> None:
    model, _ = pair()
    want = decoded(model, 8)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin.model, decode.FusedModel)
        assert all(map(torch.equal, decoded(twin, 8), want))
    found: list[list[torch.Tensor]] = []

    def work() -> None:
        for _ in range(5):
            found.append(decoded(model, 8))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 15 and all(close(f, want) for f in found)


def test_generation_of_transformers(runs: list[int]) -> None:
    model, plain = pair()
    ids = torch.tensor([PROMPT])
    options: Any = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert len(runs) == 11
    beams = model.generate(ids, num_beams=2, **options)
    assert torch.equal(beams, plain.generate(ids, num_beams=2, **options)) and len(runs) == 11


# --- the cache ----------------------------------------------------------------------------


def test_the_cache_is_one_of_transformers(runs: list[int]) -> None:
    model, plain = pair()
    caches = [step(m, PROMPT, None)[1] for m in (model, plain)]

    def same(*ids: int, batch: int = 1) -> None:
        got, want = (
            step(m, list(ids), c, batch)[0] for m, c in zip((model, plain), caches, strict=True)
        )
        assert close([got], [want])
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
        for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
            assert a.keys.shape == b.keys.shape and a.values.shape == b.values.shape
            assert close([a.keys.float(), a.values.float()], [b.keys.float(), b.values.float()])

    for token in range(11, 15):
        same(token)
    read = caches[0].layers[0].keys
    kept = read.clone()
    same(4, 8, 6)  # the next prompt
    for cache in caches:
        cache.crop(-2)
    same(12)
    same(13)
    assert len(runs) == 6 and torch.equal(read, kept)
    caches = [pickle.loads(pickle.dumps(copy.deepcopy(cache))) for cache in caches]
    same(14)
    for _ in range(300):  # more than there was room for
        same(15)
    assert len(runs) == 307
    for cache in caches:
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
    same(16, batch=2)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([1]))
    same(17)
    assert len(runs) == 308
    for cache in caches:
        cache.reset()
    same(*PROMPT)
    same(11)
    with torch.no_grad():  # what was made for inference only is not written to
        for cache, m in zip(caches, (model, plain), strict=True):
            m(torch.tensor([[4, 8]]), use_cache=True, **{FIELD: cache})
            m(torch.tensor([[4]]), use_cache=True, **{FIELD: cache})
    same(11)
    assert len(runs) == 311


def test_other_memory_under_the_same_tensors(runs: list[int]) -> None:
    """``.data = …``, as ``model.to(dtype)`` does it, frees what launches were bound to."""
    model, plain = pair()
    want = decoded(plain, 3)
    assert close(decoded(model, 3), want)
    for m in (model, plain):
        layer = m.model.layers[1]
        for tensor in (
            layer.input_layernorm.weight,
            m.model.norm.weight,
            layer.mlp.down_proj.scales,
            layer.mlp.gate_proj.scales,
            layer.self_attn.q_proj.scales,
        ):
            tensor.data = tensor.data * 1.5
    changed = decoded(plain, 3)
    assert close(decoded(model, 3), changed) and not close(changed, want)
    assert close(decoded(model.float().bfloat16(), 3), changed)
    assert len(runs) == 9
