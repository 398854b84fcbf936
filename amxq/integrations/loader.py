"""``load_model``: a transformers model whose INT4 layers run on amxq.

The model is built without memory for its weights (torch's meta device), its quantised
layers are replaced by :class:`Int4Linear`, and only then are tensors read
from the checkpoint, one at a time: a quantised layer is packed as soon as it is read and its
checkpoint tensors are let go, so that the peak of memory stays near the size of the result.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from amxq.errors import (
    ArgumentError,
    CheckpointError,
    DTypeError,
    QuantizationConfigError,
    did_you_mean,
)
from amxq.integrations import skeleton
from amxq.integrations.expert_loader import ExpertTensors, replace_experts
from amxq.integrations.experts import Int4Experts
from amxq.integrations.fusion import fuse
from amxq.integrations.layers import Int4Linear, PackedModule
from amxq.integrations.modules import Int8Linear
from amxq.integrations.progress import Progress
from amxq.integrations.summary import LoadSummary
from amxq.ops.checks import check_precision
from amxq.quantization.checkpoint import Checkpoint
from amxq.quantization.detect import folder_path
from amxq.quantization.names import some
from amxq.quantization.scheme import LayerScheme
from amxq.runtime import memory, targets

_log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What is not a module's own state: rotary frequencies that old exporters wrote out, for example.
_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_bias|bias))$")


def load_model(
    folder: str | Path,
    *,
    target: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    allow_nonfinite: bool = False,
    precision: str = "bf16",
    head: str | None = None,
) -> tuple[Any, Any]:
    """The model and the tokenizer of a checkpoint folder.

    Every model that transformers builds from ``torch.nn.Linear`` and GPT-2's ``Conv1D`` layers is
    served, and mixtures of experts, whose modules become :class:`Int4Experts`. The folders that
    ``amxq pack`` writes load fastest. No code from the checkpoint is run and nothing is downloaded.

    Args:
        folder: a local folder with config.json, safetensors files and a tokenizer.
        target: which instruction set to use, as :func:`amxq.set_target` takes it and for the
            whole process; ``"auto"`` is the best that this CPU runs. None leaves the choice as
            it is; if nobody has made one, an AutoRound checkpoint is refused without usable AMX.
        dtype: of everything that is not quantised, and so of the activations: bf16, fp16, fp32.
        allow_nonfinite: load layers with NaN or infinite scales too, with a warning that names
            them, instead of refusing.
        precision: of the INT4 layers: "bf16", which takes activations as they are, or "int8",
            which quantises them at run time, see :func:`amxq.linear`.
        head: None leaves an unquantised head (lm_head) as the checkpoint has it; "int8" makes its
            weight 8-bit while loading, with a scale for every 64 columns: a token reads half as
            much of it, for an error of 0.6 % of the weight's norm. An embedding that shares the
            weight stays as it is, and memory grows by the 8-bit copy.

    Returns:
        (model, tokenizer): a ``transformers.PreTrainedModel`` in evaluation mode, with what was
        done to it in ``model.amxq_summary`` (a :class:`LoadSummary`), and its tokenizer.

    Raises:
        CheckpointError: a file is missing or broken, the tensors do not fit the model, or the
            model has a quantised layer that is neither a ``torch.nn.Linear`` nor a ``Conv1D``.
        QuantizationConfigError: the quantisation is not one that amxq serves, or nobody asked
            for a target and there is no usable AMX.
        DTypeError: another dtype.
        ArgumentError: no such precision or head, or the model has no unquantised head.
        TargetError: this CPU does not run `target`.
        ImportError: transformers is not installed.
    """
    path = folder_path(folder)
    if target is None:
        return _load(path, dtype, allow_nonfinite, precision, head)
    with targets.target(target):
        loaded = _load(path, dtype, allow_nonfinite, precision, head)
    targets.set_target(target)
    return loaded


def _load(
    folder: Path, dtype: torch.dtype, allow_nonfinite: bool, precision: str, head: str | None
) -> tuple[Any, Any]:
    check_precision(precision)
    if head not in (None, "int8"):
        raise ArgumentError(f"head is {head!r}; expected None or 'int8'")
    if dtype not in _DTYPES:
        raise DTypeError(f"dtype is {dtype!r:.80}; expected {', '.join(map(str, _DTYPES))}")
    skeleton.need_transformers()
    checkpoint = Checkpoint.open(folder)
    checkpoint.allow_nonfinite = allow_nonfinite
    layers = checkpoint.quantized_layers()
    for name, scheme in layers.items():
        _guard(checkpoint, name, scheme)
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(checkpoint.verify)  # while Python builds the model
        model = _build(checkpoint, layers, dtype, precision, head)
        tokenizer = skeleton.tokenizer(folder)
        verified.result()
    memory.use_huge_pages()
    return model, tokenizer


def _build(
    checkpoint: Checkpoint,
    layers: Iterable[str],
    dtype: torch.dtype,
    precision: str,
    head: str | None,
) -> Any:
    model = skeleton.empty_model(checkpoint.folder, dtype, len(checkpoint.files))
    names = skeleton.Names(model)
    biased = _replace_layers(model, checkpoint, names, layers, precision)
    _assign_plain(model, checkpoint, names, biased)
    skeleton.initialise_buffers(model)
    model.eval().requires_grad_(False)
    if head == "int8":
        _quantize_head(model)
    fuse(model)
    model.amxq_summary = _summarise(model, checkpoint, names)
    return model


def _guard(checkpoint: Checkpoint, name: str, scheme: LayerScheme) -> None:
    """Ask the configuration's guards about one layer before anything large is read."""
    try:
        checkpoint.quantization.check_cpu_support(scheme.bits)
    except QuantizationConfigError as error:
        if scheme.bits == checkpoint.quantization.weight_bits:
            raise
        raise QuantizationConfigError(f"layer {name!r}: {error}") from None


def _replace_layers(
    model: Any,
    checkpoint: Checkpoint,
    names: skeleton.Names,
    layers: Iterable[str],
    precision: str,
) -> set[str]:
    """Put an :class:`Int4Linear` in the place of each quantised layer, and :class:`Int4Experts` in
    that of experts.

    Returns:
        The names of the linear layers that the model wants a bias for.
    """
    modules = dict(model.named_modules())
    with Progress("loading") as progress:
        linear = replace_experts(modules, checkpoint, names, layers, precision, progress)
        quantised = {names.layer(name): name for name in linear}
        sizes = _sizes_of_replaceable(model, modules, quantised)
        biased = {name for name in quantised if modules[name].bias is not None}
        loaded = checkpoint.load_layers(quantised.values())
        for name, (stored, packed) in zip(quantised, loaded, strict=True):
            if (packed.out_features, packed.in_features) != sizes[name]:
                raise CheckpointError(
                    f"layer {stored!r} is [{packed.out_features}, {packed.in_features}] in the "
                    f"file; expected {list(sizes[name])} from config.json; the two do not belong "
                    f"together"
                )
            parent, _, attribute = name.rpartition(".")
            setattr(modules[parent], attribute, Int4Linear.from_packed(packed, precision=precision))
            progress.step(name)
    return biased


def _sizes_of_replaceable(
    model: Any, modules: dict[str, Any], quantised: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """{layer: (N, K)}; raises CheckpointError for a layer that cannot be replaced."""
    from transformers.pytorch_utils import Conv1D

    kind = type(model).__name__
    sizes = {}
    for name, stored in quantised.items():
        layer = modules.get(name)
        if isinstance(layer, torch.nn.Linear):
            sizes[name] = layer.out_features, layer.in_features
        elif isinstance(layer, Conv1D):  # GPT-2's; exporters store its weight as a Linear's
            sizes[name] = layer.nf, layer.nx
        elif layer is None:
            raise CheckpointError(
                f"the checkpoint has a quantised layer {stored!r}, but transformers' {kind} has "
                f"no layer of that name{did_you_mean(name, modules)}; load it alone with "
                f"amxq.load_layer"
            )
        else:
            raise CheckpointError(
                f"quantised layer {stored!r} is a {type(layer).__name__} in transformers' {kind}; "
                f"amxq.load_model replaces torch.nn.Linear and Conv1D only; load it alone with "
                f"amxq.load_layer"
            )
    return sizes


def _assign_plain(
    model: Any, checkpoint: Checkpoint, names: skeleton.Names, biased: set[str]
) -> None:
    """Read every tensor that is not part of a quantised weight into its place in the model."""
    modules = dict(model.named_modules())
    layers = {n: m for n, m in modules.items() if isinstance(m, Int4Linear)}
    packed = {n for n, m in modules.items() if isinstance(m, PackedModule)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    places = {n for n in model.state_dict() if n.rpartition(".")[0] not in packed} | parameters
    experts = ExpertTensors(modules, names)
    missing = places | {f"{name}.bias" for name in biased} | experts.needed()
    unexpected: list[str] = []
    for stored in checkpoint.plain_tensors():
        owner, _, kind = stored.rpartition(".")
        layer = layers.get(names.layer(owner)) if kind == "bias" else None
        name = f"{names.layer(owner)}.bias" if layer else names.tensor(stored)
        if layer is not None:
            layer.set_bias(checkpoint.read(stored))
        elif name in places:
            _assign(modules, name, checkpoint.read(stored), is_parameter=name in parameters)
        elif (complete := experts.take(stored, checkpoint.read)) is not None:
            name = complete
        else:
            unexpected.append(stored)
        missing.discard(name)
    _drop_ties_of_quantised(model)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    _report(model, missing, unexpected, places)


def _assign(
    modules: dict[str, Any], name: str, tensor: torch.Tensor, *, is_parameter: bool
) -> None:
    parent, _, attribute = name.rpartition(".")
    module = modules[parent]
    old = getattr(module, attribute)
    if tensor.shape != old.shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(tensor.shape)} in the file; expected "
            f"{list(old.shape)} from config.json; the two do not belong together"
        )
    if old.is_floating_point() and not tensor.is_floating_point():
        raise CheckpointError(
            f"tensor {name!r} has dtype {tensor.dtype} in the file; expected floats, as it is "
            f"not part of a quantised layer"
        )
    # The model's own dtype, not load_model's: some keep single parameters in fp32.
    value = tensor.to(old.dtype)
    if is_parameter:
        value = torch.nn.Parameter(value, requires_grad=False)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, attribute, value)


def _quantize_head(model: Any) -> None:
    head = model.get_output_embeddings()
    name = next((n for n, m in model.named_modules() if m is head and n), None)
    if name is None or type(head) is not torch.nn.Linear:
        found = "none" if head is None else f"a {type(head).__name__}"
        raise ArgumentError(
            f"head is 'int8', but the head of this {type(model).__name__} is {found}; expected an "
            "unquantised linear layer; leave head out"
        )
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, Int8Linear(head.weight, head.bias))
    _drop_ties_of_quantised(model)


def _drop_ties_of_quantised(model: Any) -> None:
    """Forget ties to a quantised layer: it has no weight to share."""
    ties = model.all_tied_weights_keys
    for name, module in model.named_modules() if ties else ():
        if isinstance(module, (Int4Linear, Int8Linear)):
            weight = f"{name}.weight"
            for target in [t for t, source in ties.items() if weight in (t, source)]:
                del ties[target]


def _report(
    model: Any, missing: Iterable[str], unexpected: list[str], places: Iterable[str]
) -> None:
    """Say once which tensors are missing, which is an error, and which are left over."""
    ignorable = [re.compile(p) for p in model._keys_to_ignore_on_load_missing or ()]
    absent = sorted(n for n in missing if not any(p.search(n) for p in ignorable))
    if absent:
        raise CheckpointError(
            f"the checkpoint lacks {len(absent)} tensors that {type(model).__name__} needs: "
            f"{some(absent)}{did_you_mean(absent[0], unexpected)}; the download may be incomplete"
        )
    expected = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    surprising = [
        n for n in unexpected if not _COMPUTED.search(n) and not any(p.search(n) for p in expected)
    ]
    if surprising:
        _log.warning(
            "%d tensors of the checkpoint have no place in %s and were left out: %s%s",
            len(surprising),
            type(model).__name__,
            some(surprising),
            did_you_mean(surprising[0], places),
        )


def _summarise(model: Any, checkpoint: Checkpoint, names: skeleton.Names) -> LoadSummary:
    stored = {names.layer(name): name for name in checkpoint.dense_layers()}
    ours: list[str] = []
    int8: list[str] = []
    others: dict[str, str] = {}
    packed_bytes = 0
    for name, module in model.named_modules():
        if isinstance(module, (Int4Linear, Int4Experts)):
            ours.append(name)
            packed_bytes += module.nbytes
        elif isinstance(module, Int8Linear):
            int8.append(name)
            packed_bytes += module.nbytes
        elif isinstance(module, torch.nn.Linear):
            others[name] = _why_plain(model, checkpoint, name, stored.get(name, name))
    plain = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return LoadSummary(
        amxq_layers=tuple(ours),
        int8_layers=tuple(int8),
        unquantised=others,
        target=targets.get_target(),
        packed_bytes=packed_bytes,
        plain_bytes=sum(plain.values()),
    )


def _why_plain(model: Any, checkpoint: Checkpoint, name: str, stored: str) -> str:
    """Why a layer of the model, which the files call `stored`, is not quantised."""
    shared = model.all_tied_weights_keys.get(f"{name}.weight")
    if shared is not None:
        return f"it shares {shared!r}"
    known = f"{stored}.weight" in checkpoint.files
    return (checkpoint.why_plain(stored) if known else None) or "the files hold it as another layer"
