"""Experts of a checkpoint into transformers' modules: ``Int4Experts``, or dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from amxq.errors import AmxqError, CheckpointError
from amxq.integrations.experts import Int4Experts, activation_of, is_experts, sizes_of
from amxq.integrations.progress import Progress
from amxq.integrations.skeleton import Names
from amxq.quantization.checkpoint import Checkpoint
from amxq.quantization.experts import (
    ExpertGroup,
    concatenate,
    expert_part,
    group_experts,
    paired,
    stack_experts,
)
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packed_checkpoint import PackedCheckpoint


def replace_experts(
    modules: Mapping[str, Any],
    checkpoint: Checkpoint,
    names: Names,
    layers: Iterable[str],
    precision: str,
    progress: Progress,
) -> list[str]:
    """Put :class:`Int4Experts` in the place of each module of fused experts, one at a time.

    Args:
        modules: all modules of the model by name.
        layers: the checkpoint's names of all quantised layers.
        precision: as ``amxq.fused_moe`` takes it.

    Returns:
        The names of the layers that are not part of such a module.

    Raises:
        CheckpointError: experts are quantised in part, differ in shape or settings, or are not
            what config.json says; or their activation is another one.
    """
    layers = list(layers)
    done: set[str] = set()
    for prefix, group in group_experts(layers).items():
        name = names.tensor(f"{prefix}.gate_up_proj").removesuffix(".gate_up_proj")
        if not is_experts(modules.get(name)):
            continue  # experts that transformers keeps as linear layers
        parent, _, attribute = name.rpartition(".")
        experts = _loaded(modules[name], name, group, checkpoint, precision)
        setattr(modules[parent], attribute, experts)
        done.update(group.layers())
        progress.step(name)
    return [layer for layer in layers if layer not in done]


def _loaded(
    module: Any, name: str, group: ExpertGroup, checkpoint: Checkpoint, precision: str
) -> Int4Experts:
    E, H, inner = sizes_of(module)
    options = activation_of(module, name)

    def part(*which: str) -> PackedWeight | None:
        """A part of all experts, or gate above up."""
        sources = [group.sources(name, E) for name in which]
        if None in sources:
            return None
        whole = [checkpoint.load_layer(s) for s in sources if isinstance(s, str)]
        if whole:
            return whole[0] if len(whole) == 1 else concatenate(*whole)
        experts = list(zip(*sources, strict=True))
        if isinstance(checkpoint, PackedCheckpoint):
            mapped = checkpoint.load_stack(experts)
            if mapped is not None:
                return mapped
        order = [layer for parts in experts for layer in parts]
        loaded = (packed for _, packed in checkpoint.load_layers(order))
        if len(which) == 2:
            loaded = (concatenate(gate, up) for gate, up in zip(loaded, loaded))
        return stack_experts(loaded, E)

    try:
        w13, w2, interleaved = part("gate_up"), part("down"), not module.is_concatenated
        if w13 is None:
            w13, interleaved = part("gate", "up"), False
    except CheckpointError:
        raise
    except AmxqError as error:
        raise CheckpointError(
            f"the experts of {group.prefix!r} cannot run together: {error}; load them alone with "
            f"amxq.load_layer"
        ) from None
    if w13 is None or w2 is None:
        raise CheckpointError(
            f"{group.prefix!r} has quantised matrices for only some of gate, up and down; expected "
            f"all three"
        )
    found = [(w.num_experts, w.out_features, w.in_features) for w in (w13, w2)]
    expected = [(E, 2 * inner, H), (E, H, inner)]
    if found != expected:
        raise CheckpointError(
            f"the experts of {group.prefix!r} are {found} in the files; expected {expected} from "
            f"config.json; the two do not belong together"
        )
    return Int4Experts(
        paired(w13, interleaved),
        w2,
        options,
        precision=precision,
        needs_bias=bool(getattr(module, "has_bias", False)),
        interleaved_bias=not module.is_concatenated,
    )


class ExpertTensors:
    """Takes the plain tensors of a checkpoint that belong to fused experts: biases of quantised
    ones, and the matrices of dense ones, stored one by one."""

    def __init__(self, modules: Mapping[str, Any], names: Names) -> None:
        self._names = names
        self._modules = {
            name: module
            for name, module in modules.items()
            if isinstance(module, Int4Experts) or is_experts(module)
        }
        self._left: dict[str, int] = {}  # how many parts of a tensor have yet to come

    def needed(self) -> set[str]:
        """Names of the biases that quantised experts want."""
        return {
            f"{name}.{bias}"
            for name, module in self._modules.items()
            if isinstance(module, Int4Experts) and module.needs_bias
            for bias in ("w13_bias", "w2_bias")
        }

    def take(self, stored: str, read: Callable[[str], torch.Tensor]) -> str | None:
        """Put one tensor where it belongs.

        Returns:
            The name that is complete with it, "" if it is not yet, None if it is none of experts'.
        """
        owner, _, kind = stored.rpartition(".")
        if kind in ("gate_up_proj_bias", "down_proj_bias"):
            prefix, expert, part = owner, None, kind.removesuffix("_proj_bias")
        else:
            prefix, expert, part = expert_part(owner) or ("", None, "")
        name = self._names.tensor(f"{prefix}.gate_up_proj").removesuffix(".gate_up_proj")
        module = self._modules.get(name)
        if isinstance(module, Int4Experts) and kind.endswith("bias"):
            weight = "w2" if part == "down" else "w13"
            which = f"{weight}_bias"
            tensor = read(stored)
            if expert is None:
                if part == "gate_up" and module.interleaved_bias:
                    tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
                module.set_bias(weight, tensor)
                return f"{name}.{which}"
            if getattr(module, which) is None:
                shape = module.bias_shape(weight)
                module.set_bias(weight, torch.empty(shape, dtype=tensor.dtype, device="cpu"))
            return self._fill(name, module, which, expert, part, tensor)
        if module is None or isinstance(module, Int4Experts) or kind != "weight" or expert is None:
            return None
        which = "down_proj" if part == "down" else "gate_up_proj"
        old = getattr(module, which)
        if old.is_meta:
            value = torch.nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=False)
            value._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(module, which, value)
        return self._fill(name, module, which, expert, part, read(stored))

    def _fill(
        self, name: str, module: Any, which: str, expert: int, part: str, tensor: torch.Tensor
    ) -> str:
        """One expert's share of a tensor of all experts; gate comes before up."""
        whole = getattr(module, which)
        whole_name = f"{name}.{which}"
        if not 0 <= expert < whole.shape[0]:
            raise CheckpointError(f"{name!r} has {whole.shape[0]} experts; the files have {expert}")
        own = whole[expert]
        if whole.dim() == 3 and module.is_transposed:
            own = own.T
        if part in ("gate", "up"):
            half = own.shape[0] // 2
            concatenated = isinstance(module, Int4Experts) or module.is_concatenated
            first, second = own.split(half) if concatenated else (own[::2], own[1::2])
            own = first if part == "gate" else second
        if own.shape != tensor.shape:
            raise CheckpointError(
                f"expert {expert} of {name!r} has a {part} tensor {list(tensor.shape)} in the "
                f"files; expected {list(own.shape)} from config.json; they do not belong together"
            )
        own.copy_(tensor)
        left = self._left.get(whole_name, whole.shape[0] * (1 if part == "down" else 2)) - 1
        self._left[whole_name] = left
        return "" if left else whole_name
