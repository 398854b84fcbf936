"""``Int4Experts``: packed INT4 experts in the place of transformers' experts module."""

from __future__ import annotations

from typing import Any

import torch

from amxq.errors import CheckpointError, ShapeError
from amxq.integrations.layers import PackedModule, address
from amxq.ops.bound import observed
from amxq.ops.checks import check_precision
from amxq.ops.expert_bound import BoundExperts
from amxq.ops.fused_moe import fused_moe
from amxq.quantization.packed import PackedWeight

_NAMES = ("qweight", "scales", "zeros", "perm")


class Int4Experts(PackedModule):
    """All experts of one block, ``amxq.fused_moe`` on fixed weights; inference only.

    Attributes:
        w13, w2: the packed weights, whose tensors are buffers ``w13_qweight``, …
        w13_bias, w2_bias: [E, 2I] and [E, H], or None.
        options: what else ``amxq.fused_moe`` is called with (the activation).
        precision: "bf16" or "int8", as :func:`amxq.fused_moe` takes it; may be set at any time.
        needs_bias: whether the model has biases here.
        interleaved_bias: whether files that hold w13_bias in one tensor have gate and up in turns.
    """

    packed_names = tuple(f"{w}_{name}" for w in ("w13", "w2") for name in _NAMES)
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        w13: PackedWeight,
        w2: PackedWeight,
        options: dict[str, Any],
        *,
        precision: str = "bf16",
        needs_bias: bool = False,
        interleaved_bias: bool = False,
    ) -> None:
        super().__init__()
        check_precision(precision)
        self.precision = precision
        self.needs_bias, self.interleaved_bias = needs_bias, interleaved_bias
        for name, tensor in zip(self.packed_names, (*w13, *w2), strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("w13_bias", None)
        self.register_buffer("w2_bias", None)
        self.options = options
        self._bound: tuple[Any, ...] = ((), None)

    @property
    def w13(self) -> PackedWeight:
        """[E, 2I, H]."""
        return PackedWeight(*(getattr(self, f"w13_{name}") for name in _NAMES))

    @property
    def w2(self) -> PackedWeight:
        """[E, H, I]."""
        return PackedWeight(*(getattr(self, f"w2_{name}") for name in _NAMES))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return self.w13.nbytes + self.w2.nbytes

    def bias_shape(self, which: str) -> tuple[int, int]:
        """Of the bias of ``"w13"`` or ``"w2"``: w13 itself may be padded."""
        w2 = self.w2
        experts, hidden, _ = w2.scales.shape
        return experts, 2 * w2.in_features if which == "w13" else hidden

    def set_bias(self, which: str, bias: torch.Tensor) -> None:
        """Put the bias of ``"w13"`` or ``"w2"`` in place. Raises ShapeError if it does not fit."""
        expected = self.bias_shape(which)
        if bias.shape != expected:
            raise ShapeError(
                f"{which}_bias has shape {list(bias.shape)}; expected {list(expected)}"
            )
        setattr(self, f"{which}_bias", bias.detach().contiguous())

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [..., H], ids and weights [M, topk] -> [..., H]. Raises what amxq.fused_moe raises."""
        options: dict[str, Any] = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        options |= self.options | {"precision": self.precision}
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if type(rows) is not torch.Tensor or observed():
            out: torch.Tensor = fused_moe(
                rows, self.w13, self.w2, top_k_weights, top_k_index, **options
            )
            return out.view(hidden_states.shape)
        before, call = self._bound
        tensors = self._buffers.values()
        now = (self.precision, *self.options.values(), *map(id, tensors), *map(address, tensors))
        if before != now:  # new, or changed since
            call = BoundExperts(self.w13, self.w2, **options)
            self._bound = (now, call)
        out = call(rows, top_k_weights, top_k_index)
        return out.view(hidden_states.shape)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which bind their own tensors."""
        return self.__dict__ | {"_bound": ((), None)}

    def extra_repr(self) -> str:
        """What repr(model) shows of the module."""
        w13, w2 = self.w13, self.w2
        return (
            f"num_experts={w13.num_experts}, hidden={w13.in_features}, inner={w2.in_features}, "
            f"group_sizes=({w13.group_size}, {w2.group_size}), precision={self.precision}, "
            f"{self.options}"
        )


def is_experts(module: object) -> bool:
    """Whether a module is one of transformers' fused experts, which this package replaces."""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    shaped = all(isinstance(w, torch.Tensor) and w.dim() == 3 for w in weights)
    return shaped and hasattr(module, "_apply_gate") and bool(getattr(module, "has_gate", False))


def sizes_of(module: Any) -> tuple[int, int, int]:
    """(E, H, I) of transformers' experts."""
    E, rows, columns = module.gate_up_proj.shape
    H, inner = (rows, columns // 2) if module.is_transposed else (columns, rows // 2)
    return E, H, inner


def activation_of(module: Any, name: str) -> dict[str, Any]:
    """The options of ``amxq.fused_moe`` that compute what transformers' experts do.

    Told by what the module's own gate makes of numbers, not by the names of classes: what none of
    fused_moe's activations equals is refused.

    Raises:
        CheckpointError: it is another activation, or the experts end with a norm.
    """
    values = torch.linspace(-12, 12, 4 * 64, device="cpu").reshape(64, 4).T.contiguous()
    values[2:] = values[2:].flip(1) * 0.7  # gate and up differ
    gate, up = values[:, :32], values[:, 32:]
    given = values if module.is_concatenated else torch.stack((gate, up), -1).flatten(1)
    try:
        wanted = module._apply_gate(given)
    except Exception as error:
        raise CheckpointError(f"{name!r}: the experts' activation fails: {error}") from error
    limits = [getattr(module, key, None) for key in ("limit", "swiglu_limit", "act_limit")]
    for limit in {None, *(float(v) for v in limits if isinstance(v, (int, float)))}:
        for options in _activations(float(getattr(module, "alpha", 1.702) or 1.702)):
            if limit is not None:
                options = {**options, "limit": limit}
            if torch.allclose(_computed(gate, up, options), wanted, rtol=1e-4, atol=1e-5):
                post_norm = bool(getattr(module, "has_post_expert_norm", False))
                if not post_norm:
                    return options
    raise CheckpointError(
        f"{name!r} is a {type(module).__name__}, whose activation amxq.fused_moe has not; load its "
        f"layers alone with amxq.load_layer"
    )


def _activations(alpha: float) -> list[dict[str, Any]]:
    plain = [{"activation": kind} for kind in ("silu", "gelu", "gelu_tanh")]
    return [*plain, {"activation": "swiglu", "alpha": alpha, "limit": float("inf")}]


def _computed(gate: torch.Tensor, up: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """fused_moe's activation in torch."""
    limit = options.get("limit", float("inf"))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if options["activation"] == "swiglu":
        return gate * torch.sigmoid(options["alpha"] * gate) * (up + 1)
    if options["activation"] == "silu":
        return torch.nn.functional.silu(gate) * up
    approximate = "tanh" if options["activation"] == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up
