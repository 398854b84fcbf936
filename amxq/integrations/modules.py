"""Modules of transformers' models as amxq computes them: in one launch instead of several."""

from __future__ import annotations

from typing import Any

import torch

from amxq.integrations.layers import Int4Linear, PackedModule, plain_call
from amxq.ops.bound import observed
from amxq.ops.dense import dequantize_rows, few_rows_linear, int8_weight_linear, quantize_rows
from amxq.ops.gated import ACTIVATIONS, bound_gated_linear, gated_linear
from amxq.ops.gradient import differentiated, primal
from amxq.ops.normalize import rms_norm

MANY_ROWS = 16
"""Rows from which on torch multiplies by a dequantised int8 weight faster than its kernel does."""
BLOCK = 4096
"""Rows of an int8 weight that are dequantised at once."""


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What :class:`RmsNorm` computes, by torch's operators."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


class RmsNorm(torch.nn.Module):
    """A root mean square norm: weight · (x / sqrt(mean(x²) + eps))."""

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] -> [..., N]."""
        weight: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
        if differentiated(x, weight) or x.dtype != weight.dtype:
            return plain_rms_norm(x, weight, self.variance_epsilon)
        if observed(x, weight):
            return primal(  # type: ignore[no-any-return]
                torch.ops.amxq.rms_norm, x, weight, self.variance_epsilon
            )
        return rms_norm(x.contiguous(), weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        """What repr(model) shows of the module."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


class GatedMLP(torch.nn.Module):
    """down(activation(gate(x)) · up(x)) + residual; gate, up and the activation in one launch."""

    def __init__(
        self, gate_proj: Int4Linear, up_proj: Int4Linear, down_proj: Any, activation: str
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation
        self._bound: tuple[Any, ...] = ((), None)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., K]."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not self._one_launch():
            h = ACTIVATIONS[self.activation](gate(x)) * up(x)
        elif type(x) is not torch.Tensor or observed():
            options: Any = {"activation": self.activation, "precision": gate.precision}
            h = gated_linear(x, gate.packed, up.packed, **options)
        else:
            before, call = self._bound
            now = (gate.state, up.state)
            if before != now:
                call = bound_gated_linear(gate.packed, up.packed, self.activation, gate.precision)
                self._bound = (now, call)
            h = call(x)
        if residual is None:
            return down(h)  # type: ignore[no-any-return]
        if type(down) is Int4Linear and plain_call(down):
            return down(h, residual)  # type: ignore[no-any-return]
        return residual + down(h)  # type: ignore[no-any-return]

    def _one_launch(self) -> bool:
        """Whether gate and up can be computed together: others may have been put in place."""
        gate, up = self.gate_proj, self.up_proj
        return (
            type(gate) is Int4Linear
            and type(up) is Int4Linear
            and gate.precision == up.precision
            and gate.bias is None
            and up.bias is None
            and plain_call(gate, up)
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which bind their own tensors."""
        return self.__dict__ | {"_bound": ((), None)}


class FlatLinear(torch.nn.Linear):
    """A dense linear layer: by a kernel of amxq for few rows of bf16, which is as exact and reads
    the weight faster, else by torch, as a matrix, whatever the shape of x.

    torch multiplies x [1, 1, K] in odd strides, as the last position of a prompt has them, by a
    weight without gradient as a batch, for which it transposes a copy of the weight: half a second
    for a head of 150,000 words (torch 2.13).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        few = few_rows_linear(x, self.weight, self.bias)
        if few is not None:
            return few
        flat = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return flat.view(*x.shape[:-1], self.out_features)


class Int8Linear(PackedModule):
    """A linear layer whose weight has been made int8, with a scale for every 64 columns of a row:
    for what reads much memory a token, a model's head. Activations keep their dtype.

    Attributes:
        values, scales: int8 [N, K] and bf16 [N, groups] of :func:`amxq.ops.dense.quantize_rows`.
        bias: [N], or None.
    """

    packed_names = ("values", "scales")
    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Quantises weight [N, K]; raises what quantize_rows raises."""
        super().__init__()
        values, scales = quantize_rows(weight.detach())
        self.out_features, self.in_features = values.shape
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        if x.numel() > MANY_ROWS * self.in_features or differentiated(x):
            blocks = zip(self.values.split(BLOCK), self.scales.split(BLOCK), strict=True)
            linear = torch.nn.functional.linear
            y = torch.cat([linear(x, dequantize_rows(*b, x.dtype)) for b in blocks], -1)
            return y if self.bias is None else y + self.bias
        arguments = x, self.values, self.scales, self.bias
        if observed(x):
            return primal(  # type: ignore[no-any-return]
                torch.ops.amxq.int8_weight_linear, *arguments
            )
        return int8_weight_linear(*arguments)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weight."""
        return self.values.nbytes + self.scales.nbytes

    def extra_repr(self) -> str:
        """What repr(model) shows of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
