"""Modules of transformers' models that amxq computes in one launch instead of several.

At one token the many small operations of a model cost more than its weights. Which modules are
replaced is not decided by their names: one is if a trial on random numbers gives the same result.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from amxq.integrations.layers import Int4Linear
from amxq.ops.gated import ACTIVATIONS, bound_gated_linear
from amxq.ops.normalize import rms_norm

TRIAL_ROWS = 3


class RmsNorm(torch.nn.Module):
    """A root mean square norm: weight · (x / sqrt(mean(x²) + eps))."""

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] -> [..., N]."""
        weight: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
        if (
            torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        ) or x.dtype != weight.dtype:
            return _rms_norm(x, weight, self.variance_epsilon)
        if torch.compiler.is_compiling():
            return torch.ops.amxq.rms_norm(  # type: ignore[no-any-return]
                x.contiguous(), weight, self.variance_epsilon
            )
        return rms_norm(x.contiguous(), weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What repr(model) shows of the module."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


class GatedMLP(torch.nn.Module):
    """down(activation(gate(x)) · up(x)), the first two and the activation in one launch."""

    def __init__(
        self, gate_proj: Int4Linear, up_proj: Int4Linear, down_proj: Any, activation: str
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation
        self._bound: tuple[Any, ...] = ((), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., K]."""
        gate, up = self.gate_proj, self.up_proj
        if gate.precision != "bf16" or up.precision != "bf16":
            h = ACTIVATIONS[self.activation](gate(x)) * up(x)
            return self.down_proj(h)  # type: ignore[no-any-return]
        tensors, call = self._bound
        now = (gate.qweight, gate.scales, up.qweight, up.scales)
        if len(tensors) != len(now) or any(a is not b for a, b in zip(tensors, now)):
            call = bound_gated_linear(gate.packed, up.packed, self.activation)
            self._bound = (now, call)
        return self.down_proj(call(x))  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which bind their own tensors."""
        return self.__dict__ | {"_bound": ((), None)}


class FlatLinear(torch.nn.Linear):
    """A dense linear layer that multiplies a matrix, whatever the shape of x.

    torch multiplies x [1, 1, K] in odd strides, as the last position of a prompt has them, by a
    weight without gradient as a batch, for which it transposes a copy of the weight: half a second
    for a head of 150,000 words (torch 2.13).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        flat = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return flat.view(*x.shape[:-1], self.out_features)


def fuse(model: torch.nn.Module) -> dict[str, int]:
    """Replaces modules of ``model`` in place, and flattens what dense layers multiply.

    Returns:
        Class name of what was put in → how many.
    """
    # A trial reads a module's weights, so modules that are equal but for them share one.
    known: dict[Any, bool] = {}
    count: dict[str, int] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is torch.nn.Linear:
                module.__class__ = FlatLinear  # it computes the same: no trial, and hooks stay
            new = _norm(module) or _gated_mlp(module)
            if new is None:
                continue
            key = (type(module), repr(new), *_plain_attributes(module))
            if key not in known:
                known[key] = _same(module, new)
            if known[key]:
                setattr(parent, name, new)
                count[type(new).__name__] = count.get(type(new).__name__, 0) + 1
    return count


def _plain_attributes(module: torch.nn.Module) -> list[tuple[str, object]]:
    return [(k, v) for k, v in sorted(vars(module).items()) if isinstance(v, (int, float, str))]


def _norm(module: torch.nn.Module) -> RmsNorm | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        return None
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        return None
    return RmsNorm(weight, eps)


def _gated_mlp(module: torch.nn.Module) -> GatedMLP | None:
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
    x = torch.linspace(-4, 4, 33)
    for name, function in ACTIVATIONS.items():
        if same_kind and torch.allclose(act(x), function(x), atol=1e-6):
            return GatedMLP(gate, up, down, name)
    return None


@torch.inference_mode()
def _same(module: torch.nn.Module, new: RmsNorm | GatedMLP) -> bool:
    """Whether `module` computes what `new` says, up to the rounding of intermediate results.

    An MLP is tried with small dense layers in the place of its own, so that no kernel has to be
    compiled for sizes that nobody may ask for.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if isinstance(new, RmsNorm):
        dtype, roundings = new.weight.dtype, 1
        x = random(TRIAL_ROWS, new.weight.shape[0])
        expected = _rms_norm(x, new.weight, new.variance_epsilon)
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


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
