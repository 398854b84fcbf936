"""A transformers model without weights: built from config.json, named as checkpoints name it."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch

from amxq.errors import CheckpointError

_log = logging.getLogger(__name__)


def need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"amxq.load_model needs transformers ({error}); install amxq with its extra 'models': "
            f"pip install '.[models]' in the source folder"
        ) from None


def empty_model(folder: Path, dtype: torch.dtype, tensors: int) -> Any:
    """The model of config.json on the meta device, without the quantisation settings.

    Args:
        tensors: how many the files hold; a configuration with more layers is not built.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
            layers = getattr(part, "num_hidden_layers", 0)
            if isinstance(layers, int) and layers > tensors:
                raise ValueError(f"it says {layers} layers, but the files hold {tensors} tensors")
        with torch.device("meta"), no_init_weights():
            model = _build(config, dtype)
        if (folder / "generation_config.json").is_file():
            settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
            model.generation_config = settings
    except ImportError:
        raise
    except Exception as error:  # whatever a wrong value leads transformers to
        raise CheckpointError(
            f"{folder}: transformers cannot build a language model from config.json: {error}"
        ) from error
    model.name_or_path = str(folder)
    return model


def _build(config: Any, dtype: torch.dtype) -> Any:
    """A model of the class that config.json names, if transformers has it and it makes text.

    The class that transformers would choose by the model's type may be another one: of a model that
    sees and speaks only the part that speaks, whose layers have other names.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    for name in config.architectures or ():
        named: Any = getattr(transformers, str(name), None)
        can_generate = getattr(named, "can_generate", None)
        if callable(can_generate) and can_generate():
            return named._from_config(config, dtype=dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Names:
    """From a checkpoint's names to the model's.

    transformers renames what older versions called otherwise (``language_model.model.layers`` is
    now ``model.language_model.layers``), and files may lack the model's own prefix (``h.0`` for
    ``transformer.h.0``). Transformers' own table of renamings is asked.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prefix = str(model.base_model_prefix or "")
        self._places = set(model.state_dict()) | {n for n, _ in model.named_modules()}

    @functools.cached_property
    def _renamings(self) -> list[Any]:
        """Asked for only if a name differs: to compile the table takes longer than all else."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        steps = get_model_conversion_mapping(self._model)
        return [step for step in steps if isinstance(step, WeightRenaming)]

    def tensor(self, name: str) -> str:
        """The model's name of a tensor; `name` itself if the model has none."""
        if name in self._places:
            return name
        renamed = name
        for step in self._renamings:
            renamed, _ = step.rename_source_key(renamed)
        for candidate in (renamed, f"{self._prefix}.{renamed}"):
            if candidate in self._places:
                return candidate
        short = renamed.removeprefix(f"{self._prefix}.")
        return short if short in self._places else renamed

    def layer(self, name: str) -> str:
        """The model's name of a layer."""
        return name if name in self._places else self.tensor(f"{name}.weight")[: -len(".weight")]


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ImportError:
        raise
    except Exception as error:  # tokenizers' native code raises Exception itself
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def initialise_buffers(model: Any) -> None:
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
