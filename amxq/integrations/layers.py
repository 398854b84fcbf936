"""``Int4Linear``: a packed INT4 weight in the place of a ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amxq.errors import DTypeError, LayoutError, ShapeError
from amxq.ops.bound import observed
from amxq.ops.checks import check_precision
from amxq.ops.linear import bound_linear, linear
from amxq.quantization.packed import PackedWeight


def address(tensor: torch.Tensor | None) -> int:
    """Where its memory is; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def plain_call(*modules: torch.nn.Module) -> bool:
    """Whether calling each of them runs its class's forward and nothing else: no hooks, and no
    forward of its own."""
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return False
    return not torch.nn.modules.module._has_any_global_hook()


class PackedModule(torch.nn.Module):
    """A module whose packed tensors stay as the checkpoint wrote them under ``.to(dtype)``,
    ``.half()``, ``.bfloat16()``: fp16 scales cast to bf16 would be off by up to 0.4%, and indices
    are no numbers to convert.

    Attributes:
        packed_names: the buffers in question.
    """

    packed_names: tuple[str, ...] = ("qweight", "scales", "zeros", "perm")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in self.packed_names}
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            after = self._buffers[name]
            if tensor is None or after is None or after.dtype == tensor.dtype:
                continue
            self._buffers[name] = tensor.to(after.device)
        return result


class Int4Linear(PackedModule):
    """y = x · Wᵀ + bias with W [N, K] in 4 bits, inference only.

    The packed tensors and the bias are buffers: they are in the state dict, are copied and
    pickled with the module, and no optimiser sees them. Casting the module to another dtype
    leaves the packed tensors as they are.

    Attributes:
        qweight, scales, zeros, perm: the tensors of :attr:`packed`; zeros and perm may be None.
        bias: [N] in any floating dtype, or None.
        precision: "bf16" or "int8", as :func:`amxq.linear` takes it; may be set at any time.
        in_features, out_features: K and N.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    perm: torch.Tensor | None
    bias: torch.Tensor | None
    precision: str = "bf16"
    _bound: tuple[Any, ...] = ((), None)

    def __init__(
        self, packed: PackedWeight, bias: torch.Tensor | None = None, precision: str = "bf16"
    ) -> None:
        """See :meth:`from_packed`."""
        super().__init__()
        check_precision(precision)
        self.precision = precision
        if not isinstance(packed, PackedWeight):
            raise DTypeError(
                f"packed is a {type(packed).__name__}; expected an amxq.PackedWeight, as amxq.pack "
                "and amxq.load_layer return it"
            )
        packed.check()
        if packed.num_experts is not None:
            raise ShapeError(
                f"the packed weight holds {packed.num_experts} experts; expected one linear "
                f"layer; call amxq.fused_moe for experts"
            )
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        # register_buffer's checks would take longer than all else here
        self._buffers.update(zip(self.packed_names, packed, strict=True), bias=None)
        if bias is not None:
            self.set_bias(bias)

    @classmethod
    def from_packed(
        cls, packed: PackedWeight, bias: torch.Tensor | None = None, *, precision: str = "bf16"
    ) -> Int4Linear:
        """A layer that computes with `packed`, whose tensors it keeps without copying.

        Args:
            packed: one linear layer's weight, from ``amxq.pack`` or ``amxq.load_layer``.
            bias: [N], bf16, fp16 or fp32; kept without copying.
            precision: "bf16" or "int8", see :func:`amxq.linear`.

        Raises:
            ShapeError: `packed` holds experts, its shapes contradict each other, or the bias is
                not [N].
            DTypeError, LayoutError: a tensor of `packed` is not of the packed layout, the bias is
                no floating tensor, or there is no such precision.
        """
        return cls(packed, bias, precision)

    @property
    def packed(self) -> PackedWeight:
        """The weight, as ``amxq.linear(x, *layer.packed)`` takes it."""
        return PackedWeight(self.qweight, self.scales, self.zeros, self.perm)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return self.packed.nbytes

    def set_bias(self, bias: torch.Tensor) -> None:
        """Put `bias` [N] in place. Raises ShapeError or DTypeError if it does not fit."""
        if not isinstance(bias, torch.Tensor):
            raise DTypeError(f"bias is a {type(bias).__name__}; expected a torch.Tensor or None")
        if bias.layout is not torch.strided:
            raise LayoutError(f"bias has layout {bias.layout}; expected a dense tensor")
        if bias.shape != (self.out_features,):
            raise ShapeError(
                f"bias has shape {list(bias.shape)}; expected [{self.out_features}], "
                f"one value for each output feature"
            )
        if not bias.is_floating_point():
            raise DTypeError(f"bias has dtype {bias.dtype}; expected bf16, fp16 or fp32")
        self.bias = bias.detach().contiguous()

    @property
    def state(self) -> tuple[object, ...]:
        """Changes when another tensor or precision is put in place, or other memory under a tensor
        (``.data = …``). It names tensors by their ids, so what compares two states has to hold the
        first one's tensors."""
        tensors = self._buffers.values()
        return self.precision, *map(id, tensors), *map(address, tensors)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] bf16, fp16 or fp32 -> [..., N] in x.dtype, with residual added, as
        amxq.linear does and with its errors."""
        if type(x) is not torch.Tensor or observed():
            return linear(
                x, *self.packed, bias=self.bias, residual=residual, precision=self.precision
            )
        before, call = self._bound
        now = self.state
        if before != now:  # new, or changed since
            call = bound_linear(self.packed, self.bias, self.precision)
            self._bound = (now, call)
        return call(x, residual)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which bind their own tensors."""
        return self.__dict__ | {"_bound": ((), None)}

    def extra_repr(self) -> str:
        """What repr(model) shows of the layer."""
        packed = self.packed
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"group_size={packed.group_size}, symmetric={self.zeros is None}, "
            f"act_order={self.perm is not None}, bias={self.bias is not None}, "
            f"precision={self.precision}"
        )
