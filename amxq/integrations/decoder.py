"""Attention and decoder layers of transformers' models with fewer launches.

A replaced attention multiplies q, k and v in one launch, rotates queries and keys in another, and
adds the decoder layer's residual in o_proj. Both stay instances of their classes, and whatever the
short way does not cover (gradients, tracing, other arguments, projections that someone has
replaced or put hooks on) their own classes compute as before.

Llama's relatives differ in what they hand to the attention function. Whether a module is one of
them is found out by a trial on random numbers: it must hand the same to the cache and to that
function, and return the same.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch

from amxq.errors import AmxqError
from amxq.integrations.layers import Int4Linear, plain_call
from amxq.integrations.modules import GatedMLP
from amxq.ops.bound import observed
from amxq.ops.multi import bound_multi_linear
from amxq.ops.rotary import can_rotate, plain_rotate, rotate

TRIAL = "amxq_trial"
CACHE_NAMES = ("cache", "past_key_values")  # transformers has renamed the argument
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class FusedAttention(torch.nn.Module):
    """What :func:`fused` puts before a class of attention modules.

    Attributes:
        options: what the class hands to the attention function beside its caller's arguments.
        tried: the settings that the module had in its trial.
    """

    options: dict[str, Any]
    tried: dict[str, Any]
    head_dim: int
    config: Any
    _bound: tuple[Any, ...] = ((), None)
    _rotated = staticmethod(rotate)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the class itself, with ``residual`` added to the first result."""
        implementation = self._implementation()
        if implementation is None or not self._covers(hidden_states, position_embeddings):
            y, *others = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
            return (y if residual is None else residual + y, *others)
        modules = self._modules
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = self._projected(hidden_states)
        q, k, v = q.view(heads), k.view(heads), v.view(heads).transpose(1, 2)
        if "q_norm" in modules:
            q, k = modules["q_norm"](q), modules["k_norm"](k)  # type: ignore[misc]
        q, k = self._rotated(q, k, *position_embeddings)
        for name in CACHE_NAMES:
            cache = kwargs.pop(name, None)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        y, weights = implementation(self, q, k, v, attention_mask, **self.options, **kwargs)
        y = y.reshape(*heads[:2], -1).contiguous()
        return modules["o_proj"](y, residual), weights  # type: ignore[misc]

    def _implementation(self) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)

    def _covers(self, x: torch.Tensor, angles: Any) -> bool:
        """Whether the short way computes this call."""
        modules: Any = self._modules
        projections = [modules[name] for name in _PROJECTIONS]
        return (
            all(type(layer) is Int4Linear for layer in projections)
            and plain_call(*projections)
            and self.tried.items() <= self.__dict__.items()
            and type(x) is torch.Tensor
            and x.dim() == 3
            and x.numel() > 0
            and not self.training
            and not observed(x)
            and not (x.requires_grad and torch.is_grad_enabled())
            and type(angles) is tuple
            and len(angles) == 2
            and can_rotate(x, *angles, self.head_dim)
            and modules["q_proj"].precision == modules["k_proj"].precision
            and modules["q_proj"].precision == modules["v_proj"].precision
        )

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layers: Any = [self._modules[name] for name in _PROJECTIONS[:3]]
        before, call = self._bound
        now = [layer.state for layer in layers]
        if before != now:
            biases = [layer.bias for layer in layers]
            call = bound_multi_linear(
                [layer.packed for layer in layers], biases, layers[0].precision
            )
            self._bound = (now, call)
        return call(x)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        """For copies and pickles: the class is made anew, and binds its own tensors."""
        return (
            new_instance,
            (FusedAttention, type(self).__mro__[2]),
            self.__dict__ | {"_bound": ((), None)},
        )


class FusedLayer(torch.nn.Module):
    """What :func:`fused` puts before a class of decoder layers. ``tried`` as above."""

    tried: dict[str, Any]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the class itself."""
        if args or not self._covers():
            return super().forward(hidden_states, *args, **kwargs)
        modules: Any = self._modules
        x = modules["input_layernorm"](hidden_states)
        x, _ = modules["self_attn"](hidden_states=x, residual=hidden_states, **kwargs)
        return modules["mlp"](modules["post_attention_layernorm"](x), x)

    def _covers(self) -> bool:
        return self.tried.items() <= self.__dict__.items() and _fused_parts(self)

    def __reduce__(self) -> Any:
        return new_instance, (FusedLayer, type(self).__mro__[2]), self.__dict__


@functools.cache
def fused(mixin: Any, kind: Any) -> Any:
    """The class of modules of class ``kind`` that have been replaced."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def new_instance(mixin: Any, kind: Any) -> Any:
    """An empty module of that class, for copies and pickles."""
    made = fused(mixin, kind)
    return made.__new__(made)


# --- trials -----------------------------------------------------------------------------


def fuse(module: Any, mixin: Any, known: dict[Any, Any]) -> bool:
    """Puts the short way before the class of a module, in place, if a trial says that it may.

    Args:
        mixin: FusedAttention or FusedLayer: what the module may become.
        known: the trials so far: modules that are alike but for their weights share one.
    """
    shape, trial = (_attention, _try_attention) if mixin is FusedAttention else (_layer, _try_layer)
    if not shape(module):
        return False
    plain = settings(module)
    kinds = ((name, type(child)) for name, child in module.named_children())
    key = (type(module), id(getattr(module, "config", None)), *kinds, *sorted(plain.items()))
    if key not in known:
        try:
            known[key] = trial(module)
        except (AmxqError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            known[key] = None  # it wants other arguments: not what it looks like
    if known[key] is None:
        return False
    module.__class__ = fused(mixin, module.__class__)
    module.__dict__.update(known[key], tried=plain)
    return True


def settings(module: Any) -> dict[str, Any]:
    """What a trial of a module may depend on beside its children. Nothing else is tried when one
    of them is changed: the module computes as its class does until it is what it was."""
    other = ("layer_idx", "training", "_is_full_backward_hook")
    kinds = (int, float, str, type(None))
    return {k: v for k, v in vars(module).items() if isinstance(v, kinds) and k not in other}


def _attention(module: Any) -> bool:
    children = set(module._modules)
    return (
        {*_PROJECTIONS} <= children <= {*_PROJECTIONS, "q_norm", "k_norm"}
        and all(type(module._modules[name]) is Int4Linear for name in _PROJECTIONS)
        and ("q_norm" in children) == ("k_norm" in children)
    )


def _layer(module: Any) -> bool:
    children = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    return set(module._modules) == children and _fused_parts(module)


def _fused_parts(layer: Any) -> bool:
    """Whether attention and MLP of a layer add the residual, and nothing sees what they return."""
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    replaced = isinstance(attention, FusedAttention) and type(mlp) is GatedMLP
    return replaced and plain_call(attention, mlp)


def _try_attention(module: Any) -> dict[str, Any] | None:
    """The attributes that the replaced module needs, or None if it would not be the same.

    Small dense layers stand in for its own, and torch rotates, so that no kernel is compiled.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    observed: list[Any] = []

    class Cache:
        def update(self, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            observed.append((k, v, args, kwargs))
            return k, v

    def attend(_: Any, q: torch.Tensor, *tensors: Any, **options: Any) -> tuple[Any, None]:
        observed.append((q, *tensors, options))
        return q.transpose(1, 2).contiguous(), None

    head = module.head_dim
    q, k, v = (random(width, 8) for width in (2 * head, head, head))
    small = {
        name: functools.partial(torch.nn.functional.linear, weight=weight)
        for name, weight in zip(_PROJECTIONS, (q, k, v, random(8, 2 * head)), strict=True)
    }
    names = inspect.signature(module.forward).parameters
    given = {
        "hidden_states": random(1, 3, 8),
        "position_embeddings": (random(1, 3, head), random(1, 3, head)),
        "attention_mask": random(1, 1, 3, 3),
        "position_ids": torch.arange(3, device="cpu")[None],
        "use_cache": True,
        next((name for name in CACHE_NAMES if name in names), "cache"): Cache(),
    }
    old, new = with_modules(module, small), with_modules(module, small)
    new.__class__ = fused(FusedAttention, module.__class__)
    new._covers = lambda *_: True
    new._rotated = plain_rotate
    new._projected = lambda x: tuple(small[name](x) for name in _PROJECTIONS[:3])
    new._modules["o_proj"] = lambda y, residual: small["o_proj"](y)
    old.config = new.config = copy.copy(module.config)
    old.config._attn_implementation = TRIAL
    ALL_ATTENTION_FUNCTIONS[TRIAL] = attend
    try:
        want = old(**given)
        options = {k: v for k, v in observed[-1][-1].items() if k not in given}
        if not all(v is None or isinstance(v, (int, float, str)) for v in options.values()):
            return None
        new.options = options
        got = new(**given)
    finally:
        del ALL_ATTENTION_FUNCTIONS[TRIAL]
    half = len(observed) // 2
    same = _alike((want, observed[:half]), (got, observed[half:]))
    return {"options": options} if same else None


def _try_layer(module: Any) -> dict[str, Any] | None:
    """The same for a decoder layer, with functions in the place of its modules."""
    observed: list[Any] = []

    def attend(
        *, hidden_states: torch.Tensor, residual: torch.Tensor | float = 0.0, **given: Any
    ) -> tuple[torch.Tensor, None]:
        observed.append(given)
        return residual + hidden_states * 1.25, None

    small = {
        "input_layernorm": torch.sin,
        "self_attn": attend,
        "post_attention_layernorm": torch.cos,
        "mlp": lambda x, residual=0.0: residual + x * x,
    }
    old, new = with_modules(module, small), with_modules(module, small)
    new.__class__ = fused(FusedLayer, module.__class__)
    new._covers = lambda: True
    mask, angles = random(1, 1, 3, 3), (random(1, 3, 8), random(1, 3, 8))
    given = {"attention_mask": mask, "position_embeddings": angles, "use_cache": True}
    given |= {"position_ids": torch.arange(3, device="cpu")[None]}
    for name in CACHE_NAMES:
        if name in inspect.signature(module.forward).parameters:
            given[name] = object()
    x = random(1, 3, 8)
    want, got = old(x, **given), new(x, **given)
    return {} if _alike((want, observed[:1]), (got, observed[1:])) else None


def random(*shape: int) -> torch.Tensor:
    """bf16 numbers for a trial, the same ones each time."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
    return numbers.to(torch.bfloat16)


def with_modules(module: Any, modules: dict[str, Any]) -> Any:
    """A copy of a module with others, or functions, in the place of its own."""
    made = copy.copy(module)
    made.__dict__.update(_modules=module._modules | modules, training=False)
    return made


def _alike(a: Any, b: Any) -> bool:
    """Whether two results are the same, up to the rounding of intermediate ones."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        error, size = (a.double() - b.double()).norm(), a.double().norm()
        return bool(error <= 4 * torch.finfo(a.dtype).eps * size)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    return a is b or bool(a == b)
