"""One token through all layers of a transformers model, without transformers' Python between them.

A model of decoder layers that :mod:`amxq.integrations.decoder` has replaced is, for one token of
one sequence, a list of launches: norm, q k v, attention with its rotation and its cache, o, norm,
gate and up, down, for each layer. Their arguments are packed once. Everything else, prompts too,
goes through the model's own class, and so does a model that does more than that: a trial finds out.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from amxq.integrations.decoder import (
    CACHE_NAMES,
    FusedLayer,
    fused,
    new_instance,
    random,
    with_modules,
)
from amxq.integrations.layers import Int4Linear
from amxq.integrations.modules import RmsNorm
from amxq.ops import attend, gated, linear, multi, normalize
from amxq.ops.bound import observed
from amxq.ops.checks import check_weight
from amxq.ops.schedule import Launch
from amxq.runtime import openmp
from amxq.runtime.targets import get_target

_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}
_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotation whose angles depend on the position alone."""
_POSITIONS = 256  # whose angles are computed at once
_LINE = 64
_Calls = list[Callable[[], Any]]


class FusedModel(torch.nn.Module):
    """What :func:`fuse` puts before the class of a model of embedding, decoder layers and norm.

    Attributes:
        result: the class of what the model returns, and its field for the cache.
    """

    result: tuple[Any, str]
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
            or self.config._attn_implementation != "sdpa"
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


class Program:
    """The launches of a model for one token, for the modules and tensors that it has now."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._dicts = [
            d for m in self._modules for d in (m._modules, m._parameters, m._buffers) if d
        ]
        self._hooks = [h for m in self._modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._int4 = [m for m in self._modules if isinstance(m, Int4Linear)]
        self._state = self._now()
        self._held: list[object] = [list(d.values()) for d in self._dicts]
        self._lock = threading.Lock()
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps: list[tuple[_Calls, float, _Calls]] = []
        self._usable = self._build()

    def _now(self) -> tuple[Any, ...]:
        """Changes with everything that the launches depend on."""
        tensors = itertools.chain.from_iterable([d.values() for d in self._dicts])
        return (
            get_target(),
            openmp.max_threads(),
            list(map(id, tensors)),
            list(map(type, self._modules)),
            [m.precision for m in self._int4],
        )

    def holds(self) -> bool:
        """Whether the model is what it was."""
        return self._now() == self._state

    def takes(self, layers: list[Any], position: int) -> bool:
        """Whether the launches give what the model would, with these layers of a cache."""
        if (
            not self._usable
            or len(layers) != len(self._steps)
            or any(self._hooks)
            or torch.nn.modules.module._has_any_global_hook()
        ):
            return False
        heads, head = self._kv_heads, self._head
        for layer in layers:
            if layer.get_seq_length() != position or not layer.can_grow(torch.bfloat16):
                return False
            shape = layer.room(1)[0].shape
            if shape[0] != 1 or shape[1] != heads or shape[3] != head:
                return False
        return True

    # --- building -------------------------------------------------------------------------

    def _build(self) -> bool:
        """Fills the steps; False if the model cannot be run so."""
        model, layers = self._model, list(self._model.layers)
        if not layers or not all(map(_fits, layers)):
            return False
        if type(model.norm) is not RmsNorm or getattr(model.rotary_emb, "rope_type", None) not in (
            _FIXED_ANGLES
        ):
            return False
        first = layers[0].self_attn
        self._head, self._width = first.head_dim, first.q_proj.in_features
        self._kv_heads = first.k_proj.out_features // self._head
        heads = first.q_proj.out_features // self._head
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            sizes = (
                attention.head_dim,
                *(attention._modules[f"{name}_proj"].out_features for name in "qkvo"),
            )
            kv = self._kv_heads * self._head
            if sizes != (self._head, heads * self._head, kv, kv, self._width):
                return False
            if mlp.down_proj.out_features != self._width or heads % self._kv_heads:
                return False
        widest = max(layer.mlp.gate_proj.out_features for layer in layers)
        columns = {"x": self._width, "more": self._width, "h": self._width, "g": widest}
        columns |= {"qkv": (heads + 2 * self._kv_heads) * self._head, "a": heads * self._head}
        self._place = {name: _buffer(count, self._held) for name, count in columns.items()}
        self._target, self._threads = get_target(), openmp.max_threads()
        self._attend = attend.attend_one(self._target, self._head)
        self._grid = heads, 1, 1
        for layer in layers:
            before = self._before(layer, heads)
            after = self._after(layer)
            if before is None or after is None:
                return False
            attention = layer.self_attn
            self._steps.append((before, attention.options["scaling"], after))
        return self._norm_fits(model.norm)

    def _before(self, layer: Any, heads: int) -> Any:
        """From a layer's input to its queries, keys and values."""
        place, attention = self._place, layer.self_attn
        projections = [attention._modules[f"{name}_proj"] for name in "qkv"]
        weights = [p.packed for p in projections]
        bias = multi.joint_bias(weights, [p.bias for p in projections])
        call, held = multi.bound_call(weights, bias, projections[0].precision)
        if call is None or not self._norm_fits(layer.input_layernorm):
            return None
        self._held += [weights, bias, held]
        launches = [self._norm(layer.input_layernorm, place["x"], place["h"])]
        launches += self._linear(call, place["h"], place["qkv"])
        at = place["qkv"]
        for name, count in (("q_norm", heads), ("k_norm", self._kv_heads)):
            norm = attention._modules.get(name)
            if norm is not None:
                if type(norm) is not RmsNorm or norm.weight.shape != (self._head,):
                    return None
                launches.append(self._norm(norm, at, at, count))
            at += 2 * count * self._head
        return self._bound(launches)

    def _after(self, layer: Any) -> Any:
        """From the attention's result to the layer's."""
        place, attention, mlp = self._place, layer.self_attn, layer.mlp
        o, down, gate, up = attention.o_proj, mlp.down_proj, mlp.gate_proj, mlp.up_proj
        calls = []
        for projection in (o, down):
            qweight, scales, zeros, perm = packed = projection.packed
            check_weight(*packed)
            calls.append(
                linear.bound_call(
                    projection.precision, qweight, scales, zeros, perm, projection.bias
                )
            )
        if None in calls or not self._norm_fits(layer.post_attention_layernorm):
            return None
        both = gated.bound_call(gate.packed, up.packed, mlp.activation, gate.precision)
        launches = self._linear(calls[0], place["a"], place["more"], place["x"])
        launches.append(self._norm(layer.post_attention_layernorm, place["more"], place["h"]))
        launches += self._linear(both, place["h"], place["g"])
        launches += self._linear(calls[1], place["g"], place["x"], place["more"])
        return self._bound(launches)

    def _linear(self, call: Any, x: int, y: int, residual: int | None = None) -> list[Launch]:
        launches, memory = call.launches(x, y, residual)
        self._held += memory
        return launches  # type: ignore[no-any-return]

    def _norm(self, norm: RmsNorm, x: int, y: int, rows: int = 1) -> Launch:
        kernel = normalize.compiled(self._target, torch.bfloat16)
        numbers = norm.weight.shape[0], norm.variance_epsilon
        return kernel, (rows, 1, 1), (x, norm.weight.data_ptr(), y, *numbers)

    def _norm_fits(self, norm: Any) -> bool:
        weight = norm.weight
        return (
            type(norm) is RmsNorm
            and weight.dtype is torch.bfloat16
            and weight.shape == (self._width,)
            and weight.is_contiguous()
            and weight.is_cpu
        )

    def _bound(self, launches: list[Launch]) -> list[Callable[[], Any]]:
        return [kernel.bind(grid, args, self._threads) for kernel, grid, args in launches]

    # --- running --------------------------------------------------------------------------

    def run(self, x: torch.Tensor, layers: list[Any], position: int) -> torch.Tensor | None:
        """The model's output [1, 1, N] for its embedded token, whose keys and values have been
        added to the cache; None, and nothing done, where x is unusual or another thread is here."""
        if x.dtype is not torch.bfloat16 or x.shape != (1, 1, self._width) or not x.is_cpu:
            return None
        if not x.is_contiguous() or not self._lock.acquire(blocking=False):
            return None
        try:
            cos, sin = self._angles_of(x, position)
            place, half = self._place, 2 * self._head * position
            ctypes.memmove(place["x"], x.data_ptr(), 2 * self._width)
            angles = cos.data_ptr() + half, sin.data_ptr() + half
            launch, grid = self._attend.launch, self._grid
            for (before, scale, after), layer in zip(self._steps, layers, strict=True):
                for step in before:
                    step()
                keys, values = layer.room(1)
                stride = keys.shape[2] * self._head
                memory = place["qkv"], *angles, keys.data_ptr(), values.data_ptr(), place["a"]
                launch(grid, (*memory, position, stride, self._kv_heads, scale))
                for step in after:
                    step()
            y = torch.empty_like(x)
            kernel, grid, args = self._norm(self._model.norm, place["x"], y.data_ptr())
            kernel.launch(grid, args)
        finally:
            self._lock.release()
        for layer in layers:
            layer.advance(1)
        return y

    def _angles_of(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, head] that reach to this position."""
        if self._angles is None or self._angles[0].shape[1] <= position:
            count = 2 * position // _POSITIONS * _POSITIONS + _POSITIONS
            positions = torch.arange(count, device="cpu")[None]
            cos, sin = self._model.rotary_emb(x, positions)
            self._angles = cos.contiguous(), sin.contiguous()
        return self._angles


def _fits(layer: Any) -> bool:
    """Whether a decoder layer is one of those that are a list of launches."""
    if not (isinstance(layer, FusedLayer) and layer._covers()):
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    projections = [attention._modules[f"{name}_proj"] for name in "qkvo"]
    projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    options = dict(attention.options)
    scaling, dropout = options.pop("scaling", None), options.pop("dropout", 0.0)
    return (
        all(type(p) is Int4Linear for p in projections)
        and len({p.precision for p in projections[:3]}) == 1
        and mlp.gate_proj.precision == mlp.up_proj.precision
        and isinstance(scaling, float)
        and not dropout
        and all(value is None for value in options.values())
        and attention.head_dim % 2 == 0
    )


def _buffer(size: int, held: list[object]) -> int:
    """Address of memory for so many bf16 numbers, from the start of a cache line."""
    memory = torch.empty(2 * size + _LINE, dtype=torch.uint8, device="cpu")
    held.append(memory)
    return memory.data_ptr() + -memory.data_ptr() % _LINE


# --- trial --------------------------------------------------------------------------------


def fuse(model: Any) -> bool:
    """Puts FusedModel before the class of ``model``, in place, if a trial says that it may."""
    if set(model._modules) != _CHILDREN or not all(
        isinstance(layer, FusedLayer) for layer in model.layers
    ):
        return False
    try:
        result = _trial(model)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # it wants other arguments: not what it looks like
    if result is None:
        return False
    model.__class__ = fused(FusedModel, model.__class__)
    model.result = result
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
    for i in range(len(model.layers)):
        cache.update(random(1, 1, length, 4), random(1, 1, length, 4), i)
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
