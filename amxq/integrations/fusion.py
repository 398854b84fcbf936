"""Which modules of a transformers model are replaced by those that need fewer launches.

At one token the many small operations of a model cost more than its weights. Which modules are
replaced is not decided by their names: one is if a trial on random numbers gives the same result.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from amxq.integrations import decode, decoder
from amxq.integrations.layers import Int4Linear
from amxq.integrations.modules import FlatLinear, GatedMLP, RmsNorm, plain_rms_norm
from amxq.ops.gated import ACTIVATIONS

TRIAL_ROWS = 3
_PLAIN = (int, float, str)


def fuse(model: torch.nn.Module) -> dict[str, int]:
    """Replaces modules of ``model`` in place, and flattens what dense layers multiply.

    Returns:
        Class name of what was put in → how many.
    """
    # A trial reads a module's weights, so modules that are equal but for them share one.
    known: dict[Any, Any] = {}
    count: dict[str, int] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is torch.nn.Linear:
                module.__class__ = FlatLinear  # it computes the same: no trial, and hooks stay
            new = _norm(module) or _gated_mlp(module, known)
            if new is None:
                continue
            key = (type(module), *_signature(new), *_plain_attributes(module))
            if key not in known:
                known[key] = _same(module, new)
            if known[key]:
                new.training = module.training
                setattr(parent, name, new)
                count[type(new).__name__] = count.get(type(new).__name__, 0) + 1
    modules = list(model.modules())
    for kind in (decoder.FusedAttention, decoder.FusedLayer):  # layers contain attention
        for module in modules:
            if decoder.fuse(module, kind, known):
                count[kind.__name__] = count.get(kind.__name__, 0) + 1
    for module in modules:
        if decode.fuse(module):
            count["FusedModel"] = count.get("FusedModel", 0) + 1
    return count


def _plain_attributes(module: torch.nn.Module) -> list[tuple[str, object]]:
    return [(k, v) for k, v in sorted(vars(module).items()) if isinstance(v, _PLAIN)]


def _signature(new: RmsNorm | GatedMLP) -> tuple[object, ...]:
    """What a trial of ``new`` depends on."""
    if isinstance(new, RmsNorm):
        return RmsNorm, new.weight.shape, new.weight.dtype, new.variance_epsilon
    return GatedMLP, new.activation


def _norm(module: torch.nn.Module) -> RmsNorm | None:
    if "RMSNorm" not in type(module).__name__:
        return None
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        return None
    return RmsNorm(weight, eps)


def _gated_mlp(module: torch.nn.Module, known: dict[Any, Any]) -> GatedMLP | None:
    children = dict(module.named_children())
    act = children.pop("act_fn", None)
    gate, up, down = (children.pop(f"{n}_proj", None) for n in ("gate", "up", "down"))
    if children or act is None or down is None:
        return None
    if not isinstance(gate, Int4Linear) or not isinstance(up, Int4Linear):
        return None
    if gate.bias is not None or up.bias is not None:
        return None
    same_kind = (
        gate.packed.group_size == up.packed.group_size
        and gate.qweight.shape == up.qweight.shape
        and gate.out_features == up.out_features
        and gate.scales.dtype == up.scales.dtype
        and (gate.zeros is None) == (up.zeros is None)
        and gate.perm is None
        and up.perm is None
    )
    if not same_kind:
        return None
    state = act._parameters or act._buffers or act._modules
    public = (
        (k, v if isinstance(v, _PLAIN) else id(v)) for k, v in vars(act).items() if k[0] != "_"
    )
    key = act if state else (type(act), *public)  # activations without state are alike
    if key not in known:
        x = torch.linspace(-4, 4, 33, device="cpu")
        names = (n for n, f in ACTIVATIONS.items() if torch.allclose(act(x), f(x), atol=1e-6))
        known[key] = next(names, None)
    return None if known[key] is None else GatedMLP(gate, up, down, known[key])


@torch.inference_mode()
def _same(module: torch.nn.Module, new: RmsNorm | GatedMLP) -> bool:
    """Whether `module` computes what `new` says, up to the rounding of intermediate results.

    An MLP is tried with small dense layers in the place of its own, so that no kernel has to be
    compiled for sizes that nobody may ask for.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)

    if isinstance(new, RmsNorm):
        dtype, roundings = new.weight.dtype, 1
        x = random(TRIAL_ROWS, new.weight.shape[0])
        expected = plain_rms_norm(x, new.weight, new.variance_epsilon)
    else:
        dtype, roundings = torch.bfloat16, 4
        x = random(TRIAL_ROWS, 8)
        linear = torch.nn.functional.linear
        gate, up, down = (partial(linear, weight=random(*s)) for s in ((16, 8), (16, 8), (8, 16)))
        expected = down(ACTIVATIONS[new.activation](gate(x)) * up(x))
        small = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        module = copy.copy(module)
        module.__dict__["_modules"] = module._modules | small
    try:
        got = module(x)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # it wants other arguments: not what it looks like
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return False
    error, size = (got.double() - expected.double()).norm(), expected.double().norm()
    return bool(error <= roundings * torch.finfo(dtype).eps * size)
