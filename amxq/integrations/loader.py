"""``load_model``: a transformers model whose INT4 layers run on amxq.

The model is built without memory for its weights (torch's meta device), its quantised
``torch.nn.Linear`` layers are replaced by :class:`Int4Linear`, and only then are tensors read
from the checkpoint, one at a time: a quantised layer is packed as soon as it is read and its
checkpoint tensors are let go, so that the peak of memory stays near the size of the result.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.integrations.layers import Int4Linear
from amxq.integrations.summary import LoadSummary, collapse
from amxq.quantization.checkpoint import Checkpoint
from amxq.quantization.scheme import LayerScheme, is_lm_head_name
from amxq.runtime import targets

_log = logging.getLogger(__name__)

# What is not a module's own state: rotary frequencies that old exporters wrote out, for example.
_COMPUTED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_bias|bias))$")


def load_model(
    folder: str | Path, *, target: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Any]:
    """The model and the tokenizer of a checkpoint folder.

    Every model that transformers builds from ``torch.nn.Linear`` layers is served. No code from
    the checkpoint is run and nothing is downloaded.

    Args:
        folder: a local folder with config.json, safetensors files and a tokenizer.
        target: which instruction set to use, as :func:`amxq.set_target` takes it and for the
            whole process; ``"auto"`` is the best that this CPU runs. None leaves the choice as
            it is; if nobody has made one, an AutoRound checkpoint is refused without usable AMX.
        dtype: of everything that is not quantised, and so of the activations.

    Returns:
        (model, tokenizer): a ``transformers.PreTrainedModel`` in evaluation mode, with what was
        done to it in ``model.amxq_summary`` (a :class:`LoadSummary`), and its tokenizer.

    Raises:
        CheckpointError: a file is missing or broken, the tensors do not fit the model, or the
            model has a quantised layer that is not a ``torch.nn.Linear``.
        QuantizationConfigError: the quantisation is not one that amxq serves, or nobody asked
            for a target and there is no usable AMX.
        TargetError: this CPU does not run `target`.
        ImportError: transformers is not installed.
    """
    path = Path(folder)
    if target is None:
        return _load(path, dtype)
    with targets.target(target):
        loaded = _load(path, dtype)
    targets.set_target(target)
    return loaded


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    _need_transformers()
    checkpoint = Checkpoint.open(folder)
    layers = checkpoint.quantized_layers()
    for name, scheme in layers.items():
        _guard(checkpoint, name, scheme)
    model = _empty_model(folder, list(layers), dtype)
    biased = _replace_layers(model, checkpoint, list(layers))
    _return_freed_memory()
    _assign_plain(model, checkpoint, biased)
    _initialise_buffers(model)
    model.eval().requires_grad_(False)
    model.amxq_summary = _summarise(model, checkpoint)
    return model, _tokenizer(folder)


def _guard(checkpoint: Checkpoint, name: str, scheme: LayerScheme) -> None:
    """Ask the configuration's guards about one layer before anything large is read."""
    try:
        checkpoint.quantization.check_cpu_support(scheme.bits)
    except QuantizationConfigError as error:
        if scheme.bits == checkpoint.quantization.weight_bits:
            raise
        raise QuantizationConfigError(f"layer {name!r}: {error}") from None


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"amxq.load_model needs transformers ({error}); install it with "
            f"pip install 'amxq[models]'"
        ) from error


def _empty_model(folder: Path, quantised: list[str], dtype: torch.dtype) -> Any:
    """The model of config.json on the meta device, without the quantisation settings."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if any(is_lm_head_name(name) for name in quantised):
            config.tie_word_embeddings = False  # the head has its own weights in the file
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: transformers cannot build a language model from config.json: {error}"
        ) from error
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def _return_freed_memory() -> None:
    """Give the allocator's free pages back: unpacking leaves many, 31 MB for a 135M model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it, musl does not
        trim(0)


def _replace_layers(model: Any, checkpoint: Checkpoint, quantised: list[str]) -> set[str]:
    """Put an :class:`Int4Linear` in the place of each quantised layer, packing one at a time.

    Returns the names of those that the model wants a bias for.
    """
    biased = set()
    for name in quantised:
        _check_replaceable(model, name)
    for name in quantised:
        old = model.get_submodule(name)
        packed = checkpoint.load_layer(name)
        if (packed.out_features, packed.in_features) != (old.out_features, old.in_features):
            raise CheckpointError(
                f"layer {name!r} is [{packed.out_features}, {packed.in_features}] in the file; "
                f"expected [{old.out_features}, {old.in_features}] from config.json; the two do "
                f"not belong together"
            )
        if old.bias is not None:
            biased.add(name)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Int4Linear.from_packed(packed))
    return biased


def _check_replaceable(model: Any, name: str) -> None:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise CheckpointError(
            f"the checkpoint has a quantised layer {name!r}, but transformers' "
            f"{type(model).__name__} has no layer of that name (fused experts, for example, are "
            f"not torch.nn.Linear layers); load it alone with amxq.load_layer"
        ) from None
    if not isinstance(layer, torch.nn.Linear):
        raise CheckpointError(
            f"quantised layer {name!r} is a {type(layer).__name__} in transformers' "
            f"{type(model).__name__}; amxq.load_model replaces torch.nn.Linear only; load it "
            f"alone with amxq.load_layer"
        )


def _assign_plain(model: Any, checkpoint: Checkpoint, biased: set[str]) -> None:
    """Read every tensor that is not part of a quantised weight into its place in the model."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Int4Linear)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    places = {n for n in model.state_dict() if n.rpartition(".")[0] not in layers} | parameters
    missing = places | {f"{name}.bias" for name in biased}
    unexpected: list[str] = []
    for name in checkpoint.plain_tensors():
        owner, _, kind = name.rpartition(".")
        if owner in layers and kind == "bias":
            layers[owner].set_bias(checkpoint.read(name))
        elif name in places:
            _assign(model, name, checkpoint.read(name), is_parameter=name in parameters)
        else:
            unexpected.append(name)
        missing.discard(name)
    _drop_ties_of_quantised(model)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    _report(model, missing, unexpected)


def _assign(model: Any, name: str, tensor: torch.Tensor, *, is_parameter: bool) -> None:
    parent, _, attribute = name.rpartition(".")
    module = model.get_submodule(parent)
    old = getattr(module, attribute)
    if tensor.shape != old.shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(tensor.shape)} in the file; expected "
            f"{list(old.shape)} from config.json; the two do not belong together"
        )
    # The model's own dtype, not load_model's: some keep single parameters in fp32.
    value = tensor.to(old.dtype)
    if is_parameter:
        value = torch.nn.Parameter(value, requires_grad=False)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, attribute, value)


def _drop_ties_of_quantised(model: Any) -> None:
    """Forget ties to a quantised layer: it has no weight to share."""
    ties = model.all_tied_weights_keys
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            weight = f"{name}.weight"
            for target in [t for t, source in ties.items() if weight in (t, source)]:
                del ties[target]


def _report(model: Any, missing: Iterable[str], unexpected: list[str]) -> None:
    ignorable = [re.compile(p) for p in model._keys_to_ignore_on_load_missing or ()]
    absent = sorted(n for n in missing if not any(p.search(n) for p in ignorable))
    if absent:
        raise CheckpointError(
            f"the checkpoint lacks {len(absent)} tensors that {type(model).__name__} needs: "
            f"{_some(absent)}; the download may be incomplete"
        )
    expected = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    surprising = [
        n for n in unexpected if not _COMPUTED.search(n) and not any(p.search(n) for p in expected)
    ]
    if surprising:
        _log.warning(
            "%d tensors of the checkpoint have no place in %s and were left out: %s",
            len(surprising),
            type(model).__name__,
            _some(surprising),
        )


def _some(names: list[str], most: int = 8) -> str:
    kinds = collapse(names)
    more = f" and {len(kinds) - most} more kinds" if len(kinds) > most else ""
    return ", ".join(kinds[:most]) + more


def _initialise_buffers(model: Any) -> None:
    """Compute what no file holds (rotary frequencies) with the model's own initialiser."""
    from transformers import PreTrainedModel

    with torch.no_grad():
        for name, module in model.named_modules():
            empty = [k for k, b in module.named_buffers(recurse=False) if b.is_meta]
            if not empty:
                continue
            for key in empty:
                old = module._buffers[key]
                poison = float("nan") if old.is_floating_point() else 0
                module._buffers[key] = torch.full_like(old, poison, device="cpu")
            _owner(model, name, PreTrainedModel)._init_weights(module)
            for key in empty:
                if module._buffers[key].isnan().any():
                    raise CheckpointError(
                        f"buffer {key!r} of {name or 'the model'!r} is not in the checkpoint, and "
                        f"transformers' {type(model).__name__} does not say how to compute it"
                    )


def _owner(model: Any, name: str, kind: type) -> Any:
    """The innermost module of type `kind` that `name` is in; its initialiser is the one to ask."""
    while name:
        module = model.get_submodule(name)
        if isinstance(module, kind):
            return module
        name = name.rpartition(".")[0]
    return model


def _summarise(model: Any, checkpoint: Checkpoint) -> LoadSummary:
    ours: list[str] = []
    others: dict[str, str] = {}
    packed_bytes = 0
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            ours.append(name)
            packed_bytes += module.packed.nbytes
        elif isinstance(module, torch.nn.Linear):
            others[name] = checkpoint.why_plain(name)
    plain = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    return LoadSummary(tuple(ours), others, targets.get_target(), packed_bytes, sum(plain.values()))
