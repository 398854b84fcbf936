"""One token through all layers of a transformers model, without transformers' Python between them.

A model of decoder layers that :mod:`amxq.integrations.decoder` has replaced is, for one token of
one sequence, a list of launches: norm, q k v, attention with its rotation and its cache, o, norm,
gate and up, down, for each layer. Their arguments are packed once. Everything else, prompts too,
goes through the model's own class, and so does a model that does more than that: a trial finds out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from amxq.integrations.decoder import (
    CACHE_NAMES,
    FusedLayer,
    fused,
    new_instance,
    random,
    settings,
    with_modules,
)
from amxq.integrations.program import Program
from amxq.ops.bound import observed

_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


class FusedModel(torch.nn.Module):
    """What :func:`fuse` puts before the class of a model of embedding, decoder layers and norm.

    Attributes:
        result: the class of what the model returns, and its field for the cache.
        tried: the settings that the model had in its trial.
    """

    result: tuple[Any, str]
    tried: dict[str, Any]
    config: Any
    _program: Program | None = None

    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the class itself."""
        made = None if args else self._one_token(input_ids, kwargs)
        return super().forward(input_ids, *args, **kwargs) if made is None else made

    def _one_token(self, ids: Any, given: dict[str, Any]) -> Any:
        """The result for one more token of one sequence, or None where the class computes it."""
        kind, field = self.result
        if (
            type(ids) is not torch.Tensor
            or ids.shape != (1, 1)
            or self.training
            or torch.is_grad_enabled()
            or observed()
            or not self.tried.items() <= self.__dict__.items()
            or not _plain_attention(self.config._attn_implementation)
            or getattr(self.config, "output_hidden_states", False)
            or getattr(self.config, "output_attentions", False)
        ):
            return None
        cache = given.get(field)
        if cache is None or not self._plain(given, field):
            return None
        layers = _layers_of(cache)
        if not layers:
            return None
        program = self._program
        if program is None or not program.holds():
            program = self._program = Program(self)
        position = layers[0].get_seq_length()
        if not program.takes(layers, position) or not _all_seen(given, position):
            return None
        hidden = program.run(self._modules["embed_tokens"](ids), layers, position)  # type: ignore[misc]
        return None if hidden is None else kind(last_hidden_state=hidden, **{field: cache})

    def _plain(self, given: dict[str, Any], field: str) -> bool:
        """Whether a call asks for nothing but the next token."""
        use = given.get("use_cache")
        if not (self.config.use_cache if use is None else use):
            return False
        known = {field, "use_cache", "attention_mask", "position_ids", "return_dict"}
        return given.get("return_dict") is not False and all(
            value is None or value is False for name, value in given.items() if name not in known
        )

    def __reduce__(self) -> Any:
        """For copies and pickles: the class is made anew, and binds its own tensors."""
        return new_instance, (FusedModel, type(self).__mro__[2]), self.__dict__ | {"_program": None}


def _layers_of(cache: Any) -> Any:
    from transformers.cache_utils import DynamicCache

    from amxq.integrations.cache import grow

    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return None
    return grow(cache)


def _plain_attention(name: str) -> bool:
    """Whether attention of this name is what the launches compute."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(name) is sdpa_attention_forward


def _all_seen(given: dict[str, Any], position: int) -> bool:
    """Whether the token follows all others, and sees all of them."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (
        type(mask) is torch.Tensor and mask.shape == (1, position + 1) and bool(mask.all())
    ):
        return False
    return positions is None or (
        type(positions) is torch.Tensor and positions.numel() == 1 and int(positions) == position
    )


# --- trial --------------------------------------------------------------------------------


def fuse(model: Any) -> bool:
    """Puts FusedModel before the class of ``model``, in place, if a trial says that it may."""
    if set(model._modules) != _CHILDREN or not all(
        isinstance(layer, FusedLayer) for layer in model.layers
    ):
        return False
    tried = settings(model)
    try:
        result = _trial(model)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # it wants other arguments: not what it looks like
    if result is None:
        return False
    model.__class__ = fused(FusedModel, model.__class__)
    model.__dict__.update(result=result, tried=tried)
    return True


def _trial(model: Any) -> tuple[Any, str] | None:
    """The class of a model's result and its field for the cache, if the model is embedding,
    layers and norm, one after the other, and nothing else: functions stand in for them."""
    from transformers.cache_utils import DynamicCache

    sizes, length = (1, 1, 8), 3
    embedded, angles = random(*sizes), (random(1, 1, 4), random(1, 1, 4))
    observed: list[Any] = []

    def layer(x: torch.Tensor, **given: Any) -> torch.Tensor:
        observed.append(given)
        return x * 1.25 + 1

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        observed.append(position_ids)
        return angles

    small: dict[str, Any] = {
        "embed_tokens": lambda _: embedded,
        "layers": [layer] * len(model.layers),
        "norm": torch.sin,
        "rotary_emb": rotary,
    }
    cache = DynamicCache(config=model.config)
    before = random(1, 1, length, 4)
    for i in range(len(model.layers)):
        cache.update(before, before, i)
    names = inspect.signature(model.forward).parameters
    field = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])
    ids = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
    with torch.inference_mode():
        trial = with_modules(model, small)
        result = trial(ids, use_cache=True, **{field: cache})
        want = embedded
        for _ in model.layers:
            want = want * 1.25 + 1
        want = torch.sin(want)
    positions, *calls = observed
    same = (
        torch.equal(result.last_hidden_state, want)
        and result[field] is cache
        and len(result) == 2
        and positions.tolist() == [[length]]
        and len(calls) == len(model.layers)
        and all(
            given["position_embeddings"] is angles
            and given["attention_mask"] is None
            and given[field] is cache
            for given in calls
        )
    )
    return (type(result), field) if same else None
