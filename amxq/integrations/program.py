"""The launches of a model of decoder layers for one token, with their arguments bound."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from amxq.integrations.decoder import FusedLayer
from amxq.integrations.layers import Int4Linear, plain_call
from amxq.integrations.modules import RmsNorm
from amxq.ops import attend, gated, linear, multi, normalize
from amxq.ops.bound import BoundCall
from amxq.ops.checks import check_weight, lazy
from amxq.ops.schedule import Launch
from amxq.runtime import openmp
from amxq.runtime.targets import get_target

_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotation whose angles depend on the position alone."""
_POSITIONS = 256  # whose angles are computed at once
_LINE = 64
_Calls = list[Callable[[], Any]]


class _Unusual(Exception):
    """The model is not one that is a list of launches."""


class Program:
    """What one token of a model launches, for the modules and tensors that it has now."""

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())[1:]  # without the model, which holds this program
        self._types = list(map(type, self._modules))
        # All that the modules say of themselves: children, tensors, hooks, numbers. What is held
        # in the copies keeps its identity, which is what most of the comparison looks at.
        self._now = [*map(vars, self._modules), vars(model.config), model._modules]
        self._then = [{k: _copied(v) for k, v in one.items()} for one in self._now]
        dicts = [d for m in self._modules for d in (m._parameters, m._buffers)]
        self._tensors = [t for d in dicts for t in d.values() if t is not None]
        self._addresses = self._where()
        # while this memory is held, nothing else can come to lie at these addresses
        self._held: list[object] = [t.detach() for t in self._tensors]
        self._rotary = model.rotary_emb
        self._frequencies = [t for t in self._rotary._buffers.values() if t is not None]
        self._values = [t.clone() for t in self._frequencies]
        self._lock = threading.Lock()
        self._target, self._threads = get_target(), openmp.max_threads()
        self._steps: list[tuple[_Calls, float, _Calls]] = []
        try:
            self._build(model)
            self._usable = True
        except _Unusual:
            self._usable = False

    def _where(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))

    def holds(self) -> bool:
        """Whether the model is what it was, but for numbers that were written to its weights."""
        try:
            return (
                self._target == get_target()
                and self._threads == openmp.max_threads()
                and self._types == list(map(type, self._modules))
                and self._then == self._now
                and self._addresses == self._where()  # .data = … changes nothing else
                and all(map(torch.equal, self._frequencies, self._values))
            )
        except (RuntimeError, TypeError, ValueError):  # of arrays that are not the same ones
            return False

    def takes(self, layers: list[Any], position: int) -> bool:
        """Whether the launches give what the model would, with these layers of a cache."""
        if (
            not self._usable
            or len(layers) != len(self._steps)
            or torch.nn.modules.module._has_any_global_hook()
        ):
            return False
        for layer in layers:
            if layer.get_seq_length() != position or not layer.can_grow(torch.bfloat16):
                return False
            shape = layer.room(1)[0].shape
            if shape[0] != 1 or shape[1] != self._kv_heads or shape[3] != self._head:
                return False
        return True

    # --- building -------------------------------------------------------------------------

    def _build(self, model: Any) -> None:
        """Fills the steps. Raises _Unusual."""
        layers = list(model.layers)
        self._norm_module = model.norm
        if not (layers and plain_call(*self._modules) and all(map(_fits, layers))):
            raise _Unusual
        if len(layers) != model.config.num_hidden_layers:
            raise _Unusual
        if getattr(self._rotary, "rope_type", None) not in _FIXED_ANGLES:
            raise _Unusual
        first = layers[0].self_attn
        width, head = self._width, self._head = first.q_proj.in_features, first.head_dim
        heads, kv_heads = (p.out_features // head for p in (first.q_proj, first.k_proj))
        if heads % kv_heads or first.v_proj.out_features != kv_heads * head:
            raise _Unusual
        self._kv_heads, self._grid = kv_heads, (heads, 1, 1)
        inner = layers[0].mlp.down_proj.in_features
        self._columns = {"x": width, "attended": width, "normed": width, "gated": inner}
        self._columns |= {"qkv": (heads + 2 * kv_heads) * head, "heads": heads * head}
        self._place = {name: self._buffer(count) for name, count in self._columns.items()}
        self._angles = self._angles_up_to(_POSITIONS)
        self._attend = attend.attend_one(self._target, head)
        for layer in layers:
            attention = layer.self_attn
            widths = [attention._modules[f"{name}_proj"].out_features for name in "qkv"]
            if attention.head_dim != head or widths != [heads * head, *[kv_heads * head] * 2]:
                raise _Unusual
            scaling = attention.options["scaling"]
            self._steps.append((self._before(layer), scaling, self._after(layer)))
        self._norm(model.norm, "x", "normed")

    def _before(self, layer: Any) -> _Calls:
        """From a layer's input to its queries, keys and values."""
        attention = layer.self_attn
        projections = [attention._modules[f"{name}_proj"] for name in "qkv"]
        weights = [p.packed for p in projections]
        biases = [p.bias for p in projections]
        bias = multi.joint_bias(weights, biases)
        copies = multi.bias_copies(bias, weights, biases)
        call, held = multi.bound_call(weights, bias, projections[0].precision)
        if copies is None:
            raise _Unusual
        self._held += [bias, held]
        launches = [self._norm(layer.input_layernorm, "x", "normed")]
        launches += self._linear(call, "normed", "qkv")
        at = self._place["qkv"]
        for name, count in (("q_norm", self._grid[0]), ("k_norm", self._kv_heads)):
            norm = attention._modules.get(name)
            if norm is not None:
                launches.append(self._rows_norm(norm, at, at, count, self._head))
            at += 2 * count * self._head
        return copies + self._bound(launches)

    def _after(self, layer: Any) -> _Calls:
        """From the attention's result to the layer's."""
        mlp = layer.mlp
        gate, up = mlp.gate_proj, mlp.up_proj
        both = gated.bound_call(gate.packed, up.packed, mlp.activation, gate.precision)
        launches = self._linear(_call(layer.self_attn.o_proj), "heads", "attended", "x")
        launches.append(self._norm(layer.post_attention_layernorm, "attended", "normed"))
        launches += self._linear(both, "normed", "gated")
        launches += self._linear(_call(mlp.down_proj), "gated", "x", "attended")
        return self._bound(launches)

    def _linear(
        self, call: BoundCall | None, x: str, y: str, residual: str | None = None
    ) -> list[Launch]:
        if call is None or (call.K, call.N) != (self._columns[x], self._columns[y]):
            raise _Unusual
        place = self._place
        more = None if residual is None else place[residual]
        launches, memory = call.launches(place[x], place[y], more)
        self._held += memory
        return launches

    def _norm(self, norm: Any, x: str, y: str) -> Launch:
        return self._rows_norm(norm, self._place[x], self._place[y], 1, self._width)

    def _rows_norm(self, norm: Any, x: int, y: int, rows: int, columns: int) -> Launch:
        if type(norm) is not RmsNorm:
            raise _Unusual
        weight = norm.weight
        if weight.dtype is not torch.bfloat16 or weight.shape != (columns,):
            raise _Unusual
        if not (weight.is_contiguous() and weight.is_cpu) or lazy(weight):
            raise _Unusual
        kernel = normalize.compiled(self._target, torch.bfloat16)
        numbers = columns, norm.variance_epsilon
        return kernel, (rows, 1, 1), (x, weight.data_ptr(), y, *numbers)

    def _bound(self, launches: list[Launch]) -> _Calls:
        return [kernel.bind(grid, args, self._threads) for kernel, grid, args in launches]

    def _buffer(self, count: int) -> int:
        """Address of memory for so many bf16 numbers, from the start of a cache line."""
        memory = torch.empty(2 * count + _LINE, dtype=torch.uint8, device="cpu")
        self._held.append(memory)
        return memory.data_ptr() + -memory.data_ptr() % _LINE

    def _angles_up_to(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, count, head] of the first positions. Raises _Unusual."""
        like = torch.empty((1, 1, self._width), dtype=torch.bfloat16, device="cpu")
        cos, sin = self._rotary(like, torch.arange(count, device="cpu")[None])
        for angles in (cos, sin):
            if angles.shape != (1, count, self._head) or angles.dtype is not torch.bfloat16:
                raise _Unusual
        return cos.contiguous(), sin.contiguous()

    # --- running --------------------------------------------------------------------------

    def run(self, x: torch.Tensor, layers: list[Any], position: int) -> torch.Tensor | None:
        """The model's output [1, 1, N] for its embedded token, whose keys and values have been
        added to the cache; None, and nothing done, where x is unusual or another thread is here."""
        if x.dtype is not torch.bfloat16 or x.shape != (1, 1, self._width) or not x.is_cpu:
            return None
        if not x.is_contiguous() or not self._lock.acquire(blocking=False):
            return None
        try:
            if self._angles[0].shape[1] <= position:
                self._angles = self._angles_up_to(2 * position)
            place, half = self._place, 2 * self._head * position
            ctypes.memmove(place["x"], x.data_ptr(), 2 * self._width)
            angles = [t.data_ptr() + half for t in self._angles]
            launch, grid = self._attend.launch, self._grid
            for (before, scale, after), layer in zip(self._steps, layers, strict=True):
                for step in before:
                    step()
                keys, values = layer.room(1)
                stride = keys.shape[2] * self._head
                memory = place["qkv"], *angles, keys.data_ptr(), values.data_ptr(), place["heads"]
                launch(grid, (*memory, position, stride, self._kv_heads, scale))
                for step in after:
                    step()
            y = torch.empty_like(x)
            norm = self._norm_module
            kernel, grid, args = self._rows_norm(norm, place["x"], y.data_ptr(), 1, self._width)
            kernel.launch(grid, args)
        finally:
            self._lock.release()
        for layer in layers:
            layer.advance(1)
        return y


def _copied(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value


def _call(layer: Int4Linear) -> BoundCall | None:
    qweight, scales, zeros, perm = packed = layer.packed
    check_weight(*packed)
    return linear.bound_call(layer.precision, qweight, scales, zeros, perm, layer.bias)


def _fits(layer: Any) -> bool:
    """Whether a decoder layer is one of those that are a list of launches."""
    if not (isinstance(layer, FusedLayer) and layer._covers()):
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    if layer.training or attention.training:
        return False
    if not attention.tried.items() <= vars(attention).items():
        return False
    projections = [attention._modules[f"{name}_proj"] for name in "qkvo"]
    projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    options = dict(attention.options)
    scaling, dropout = options.pop("scaling", None), options.pop("dropout", 0.0)
    return (
        all(type(p) is Int4Linear and p.perm is None for p in projections)
        and len({p.precision for p in projections[:3]}) == 1
        and mlp.gate_proj.precision == mlp.up_proj.precision
        and isinstance(scaling, float)
        and not dropout
        and all(value is None for value in options.values())
        and attention.head_dim % 2 == 0
    )
