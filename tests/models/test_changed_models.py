"""Models that are changed after they were loaded, and after they have run, compute what
transformers' own modules compute after the same change."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_decode import PROMPT, decoded, one_thread, runs, step
from test_decoder import close, model_of

import amxq
from amxq.integrations.fusion import fuse

transformers = pytest.importorskip("transformers")

__all__ = ["one_thread", "runs"]  # fixtures
Change = Callable[[Any], object]


def pair(kind: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model as loaded, which has run, and one of transformers' modules."""
    plain = model_of(kind, **options)
    model = copy.deepcopy(plain)
    fuse(model)
    decoded(model, 2)
    return model, plain


def same_after(change: Change, kind: str = "llama", **options: Any) -> bool:
    """Whether logits are the same after a change, and others than before."""
    model, plain = pair(kind, **options)
    before = decoded(plain, 3)
    change(model)
    change(plain)
    want = decoded(plain, 3)
    assert not close(before, want)
    return close(decoded(model, 3), want)


def layer(model: Any) -> Any:
    return model.model.layers[0]


def doubled(result: Any) -> Any:
    if isinstance(result, tuple):
        return (result[0] * 2, *result[1:])
    return result * 2


PARTS = [
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.0.input_layernorm",
    "model.layers.0.self_attn",
    "model.layers.0.self_attn.v_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.0.mlp",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.down_proj",
    "model.rotary_emb",
    "model.norm",
]


@pytest.mark.parametrize("name", PARTS)
def test_hooks_see_and_change_what_modules_return(name: str) -> None:
    def hook(model: Any) -> None:
        model.get_submodule(name).register_forward_hook(lambda _, given, y: doubled(y))

    assert same_after(hook)


@pytest.mark.parametrize("name", PARTS)
def test_modules_with_another_forward(name: str) -> None:
    def patch(model: Any) -> None:
        module = model.get_submodule(name)
        old = module.forward
        module.forward = lambda *args, **kwargs: doubled(old(*args, **kwargs))

    assert same_after(patch)


@pytest.mark.parametrize("name", ["mlp", "mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj"])
def test_hooks_before_modules(name: str) -> None:
    def hook(model: Any) -> None:
        module = layer(model).get_submodule(name)
        module.register_forward_pre_hook(lambda _, given: tuple(x * 2 for x in given))

    assert same_after(hook)


def test_hooks_of_all_modules() -> None:
    model, plain = pair()
    seen: dict[str, int] = {}

    def hook(module: Any, given: Any, y: Any) -> Any:
        seen[type(module).__name__] = seen.get(type(module).__name__, 0) + 1
        return y * 1.5 if isinstance(module, amxq.Int4Linear) else None

    with_hook = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        assert close(decoded(model, 2), decoded(plain, 2))
    finally:
        with_hook.remove()
    assert seen["Int4Linear"] == 2 * 3 * 14


class Adapter(torch.nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.more = torch.nn.Linear(base.in_features, base.out_features).bfloat16()
        torch.nn.init.constant_(self.more.weight, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_adapters(name: str) -> None:
    torch.manual_seed(1)
    part, projection = name.split(".")

    def adapt(model: Any) -> None:
        torch.manual_seed(1)
        parent = getattr(layer(model), part)
        setattr(parent, projection, Adapter(getattr(parent, projection)))

    assert same_after(adapt)


CHANGES: list[tuple[str, str, Change]] = [
    ("eps", "llama", lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 5.0)),
    (
        "eps of heads",
        "qwen3",
        lambda m: setattr(layer(m).self_attn.q_norm, "variance_epsilon", 5.0),
    ),
    ("frequencies", "llama", lambda m: m.model.rotary_emb.inv_freq.mul_(3)),
    ("scaled angles", "llama", lambda m: setattr(m.model.rotary_emb, "attention_scaling", 3.0)),
    ("scaled scores", "llama", lambda m: setattr(layer(m).self_attn, "scaling", 3.0)),
    ("written bias", "qwen2", lambda m: layer(m).self_attn.q_proj.bias.mul_(20)),
    ("bias behind torch's back", "qwen2", lambda m: layer(m).self_attn.v_proj.bias.data.mul_(20)),
    ("fewer layers", "llama", lambda m: setattr(m.config, "num_hidden_layers", 1)),
]


@pytest.mark.parametrize(("kind", "change"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_changed_numbers(kind: str, change: Change) -> None:
    assert same_after(change, kind)


@pytest.mark.parametrize("assign", [False, True])
def test_another_state(assign: bool) -> None:
    def load(model: Any) -> None:
        state = {
            name: tensor * 1.25 if tensor.is_floating_point() else tensor ^ 3
            for name, tensor in model.state_dict().items()
        }
        model.load_state_dict(state, assign=assign)

    assert same_after(load, "qwen2")


def test_biases_of_two_dtypes() -> None:
    def change(model: Any) -> None:
        attention = layer(model).self_attn
        attention.q_proj.bias = attention.q_proj.bias.double()
        decoded(model, 2)
        attention.q_proj.bias.mul_(20)
        attention.k_proj.bias.mul_(20)

    assert same_after(change, "qwen2")


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.k_proj.scales",
        "self_attn.o_proj.scales",
        "mlp.up_proj.scales",
        "mlp.down_proj.qweight",
    ],
)
def test_lazily_negated_weights(name: str) -> None:
    path, tensor = name.rsplit(".", 1)

    def negate(model: Any) -> None:
        module = layer(model).get_submodule(path)
        setattr(module, tensor, torch._neg_view(getattr(module, tensor)))

    assert same_after(negate)


def test_attention_of_another_kind(runs: list[int]) -> None:
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    model, plain = pair()
    before, count = functions["sdpa"], len(runs)

    def other(*args: Any, **kwargs: Any) -> Any:
        return doubled(before(*args, **kwargs))

    functions["sdpa"] = other
    try:
        assert close(decoded(model, 2), decoded(plain, 2)) and len(runs) == count
    finally:
        del functions["sdpa"]
        functions["sdpa"] = before


def test_changes_between_two_tokens(runs: list[int]) -> None:
    def more(model: Any, change: Change) -> torch.Tensor:
        cache = step(model, [11], step(model, PROMPT, None)[1])[1]
        change(model)
        logits = step(model, [12], cache)[0]
        model.config.num_hidden_layers = 2
        return logits

    model, plain = pair()
    changes: list[Change] = [
        lambda m: setattr(m.config, "num_hidden_layers", 1),
        lambda m: m.model.rotary_emb.inv_freq.mul_(2),
        lambda m: setattr(m.model.norm, "variance_epsilon", 1.0),
        lambda m: m.model.layers[1].train(),  # no dropout: the same numbers
        lambda m: m.eval(),
    ]
    for change in changes:
        assert close([more(model, change)], [more(plain, change)])
    before = len(runs)
    decoded(model, 2)
    assert len(runs) == before + 2  # back on the fast path

    def drop(model: Any) -> None:
        for one in model.model.layers:
            one.self_attn.attention_dropout = 0.5
            one.train()

    cache = step(model, PROMPT, None)[1]
    drop(model)
    first, second = (step(model, [11], copy.deepcopy(cache))[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_models_that_were_fused_while_training() -> None:
    plain = model_of("llama", attention_dropout=0.5)
    model = copy.deepcopy(plain).train()
    assert fuse(model)["FusedAttention"] == 2
    assert all(module.training for module in model.modules())
    assert close(decoded(model.eval(), 3), decoded(plain, 3))


def test_nothing_is_kept_of_a_model() -> None:
    model, _ = pair("qwen2")
    kept = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    module = weakref.ref(model.model)
    gc.disable()
    try:
        del model
        assert module() is None and not any(one() is not None for one in kept)
    finally:
        gc.enable()


# --- the cache ----------------------------------------------------------------------------


def test_shallow_copies_of_a_layer_part(runs: list[int]) -> None:
    """Both go on from the same tokens, each in memory of its own."""
    model, plain = pair()
    logits = []
    for m in (model, plain):
        cache = step(m, [11], step(m, PROMPT, None)[1])[1]
        twin = copy.copy(cache)
        twin.layers = [copy.copy(one) for one in cache.layers]
        step(m, [12], cache)
        step(m, [13], twin)
        logits += [step(m, [14], one)[0] for one in (cache, twin)]
    assert close(logits[:2], logits[2:]) and not close(logits[:1], logits[1:2])


def test_a_cache_of_another_batch_is_refused() -> None:
    for m in pair():
        cache = step(m, [11], step(m, PROMPT, None, batch=2)[1], batch=2)[1]
        with pytest.raises(RuntimeError):
            step(m, [12], cache)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_two_models_on_two_threads_of_other_widths(threads: None) -> None:
    first, _ = pair()
    second, _ = pair("qwen2")
    want = [decoded(m, 6) for m in (first, second)]
    wrong: list[int] = []

    def work(width: int) -> None:
        torch.set_num_threads(width)
        for _ in range(4):
            for m, w in zip((first, second), want, strict=True):
                if not close(decoded(m, 6), w):
                    wrong.append(width)

    workers = [threading.Thread(target=work, args=(width,)) for width in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
