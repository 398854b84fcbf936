"""Which configuration a checkpoint has, and where it keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.autoround import AutoRoundConfig
from amxq.quantization.awq import AWQConfig
from amxq.quantization.base import QuantizationConfig
from amxq.quantization.compressed_tensors import CompressedTensorsConfig
from amxq.quantization.gptq import GPTQConfig

_METHODS: dict[str, type[QuantizationConfig]] = {
    "auto-round": AutoRoundConfig,
    "intel/auto-round": AutoRoundConfig,
    "autoround": AutoRoundConfig,
    "gptq": GPTQConfig,
    "awq": AWQConfig,
    "compressed-tensors": CompressedTensorsConfig,
}
_EXPECTED = "auto-round, gptq, awq or compressed-tensors"

# Beside config.json, or alone: AutoRound; GPTQModel and AutoGPTQ; AWQ of the first hour.
_SIDE_FILES = ("quantization_config.json", "quantize_config.json", "quant_config.json")

# Vision-language models keep the language model's settings one level down.
_NESTED = ("text_config", "llm_config", "language_config")

_MAX_JSON = 64 << 20


def load_quantization_config(
    source: Mapping[str, Any] | str | os.PathLike[str],
) -> QuantizationConfig:
    """The quantisation of a checkpoint, by its quant_method, wherever the folder keeps it.

    Args:
        source: a quantization_config, a whole config.json, or the path of a checkpoint folder.

    Raises:
        QuantizationConfigError: there is none, its method is not one of these four, or it
            asks for what is not supported; 4 bits are.
        CheckpointError: the folder or one of its JSON files cannot be read.
    """
    block = dict(source) if isinstance(source, Mapping) else read_block(folder_path(source))
    if isinstance(source, Mapping):
        block = nested_block(block) or block
    config = from_block(block)
    config.check_supported()
    return config


def from_block(block: Mapping[str, Any]) -> QuantizationConfig:
    """The configuration of one quantization_config block; the number of bits is not judged.

    Raises:
        QuantizationConfigError: as above.
    """
    method = _method(block)
    if method not in _METHODS:
        raise QuantizationConfigError(
            f"quant_method is {fields.shown(method)}; expected {_EXPECTED}; "
            f"other methods store weights in layouts that amxq does not read"
        )
    return _METHODS[method].from_config(block)


def nested_block(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config inside a model's config.json, or None."""
    for holder in (config, *(config.get(key) for key in _NESTED)):
        if not isinstance(holder, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            block = holder.get(key)
            if block is not None and not isinstance(block, Mapping):
                raise QuantizationConfigError(
                    f"{key} is {fields.shown(block)}; expected an object; correct config.json"
                )
            if block:
                # Old compressed-tensors files are known by the key alone.
                default = {"quant_method": "compressed-tensors"} if "comp" in key else {}
                return default | dict(block)
    return None


def folder_path(folder: object) -> Path:
    """The path of a folder, whether it exists or not.

    Raises:
        CheckpointError: it is no path, or none that this system can have.
    """
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise CheckpointError(
            f"the folder is {fields.shown(folder)}, a {type(folder).__name__}; expected its path, "
            f"a str or a pathlib.Path"
        )
    try:
        os.stat(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{fields.shown(os.fspath(folder))} cannot be looked into ({error}); expected the "
            f"folder of a checkpoint"[:400]
        ) from None
    return Path(folder)


def read_block(folder: Path) -> dict[str, Any]:
    """The quantization_config of a checkpoint folder.

    Raises:
        CheckpointError: no such folder, or a JSON file in it cannot be read.
        QuantizationConfigError: no file holds one.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} is not a folder; expected the folder of a checkpoint, "
            f"with config.json and *.safetensors"
        )
    if (folder / "config.json").is_file():
        block = nested_block(read_json(folder / "config.json"))
        if block is not None:
            return block
    for name in _SIDE_FILES:
        if (folder / name).is_file():
            return read_json(folder / name)
    raise QuantizationConfigError(
        f"{str(folder)!r} holds no quantization_config: neither config.json nor "
        f"{', '.join(_SIDE_FILES)} has one; expected a checkpoint quantised by AutoRound, GPTQ, "
        f"AWQ or llm-compressor; quantise the model first"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: it cannot be read, is too large, or is no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(
                f"{str(path)!r} has {path.stat().st_size} bytes; expected a JSON file of at most "
                f"{_MAX_JSON}; download the checkpoint again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{str(path)!r} cannot be read as JSON ({error}); download the checkpoint again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{str(path)!r} holds a JSON {type(value).__name__}; expected an object; "
            f"download the checkpoint again"
        )
    return value


def _method(block: Mapping[str, Any]) -> str:
    """The quant_method in lower case; files of the AutoGPTQ and AWQ eras do without."""
    said = block.get("quant_method") or block.get("method")
    if isinstance(said, str):
        return said.lower()
    if said is not None:
        raise QuantizationConfigError(f"quant_method is {fields.shown(said)}; expected a string")
    if block.get("w_bit") is not None:
        return "awq"
    if block.get("config_groups") is not None:
        return "compressed-tensors"
    format = block.get("checkpoint_format") or block.get("format")
    gptq_format = isinstance(format, str) and format.startswith("gptq")
    if block.get("bits") is not None and ("desc_act" in block or gptq_format):
        return "gptq"
    raise QuantizationConfigError(
        f"quantization_config has no quant_method; it has {fields.keys(block)}; "
        f"expected quant_method {_EXPECTED}; add it"
    )
