"""Quantises a transformers model by rounding and writes the checkpoint that an exporter would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import quant_reference as reference
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "auto-round": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": GROUP,
        "packing_format": "auto_round:auto_gptq",
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "group_size": GROUP, "type": "int", "strategy": "group"},
            }
        },
    },
}


def write_quantised(
    model: Any,
    folder: Path,
    *,
    method: str = "auto-round",
    sym: bool = True,
    scales: torch.dtype = torch.float16,
    shards: int = 1,
    inside: str = "layers",
    rename: Callable[[str], str] = lambda name: name,
) -> Any:
    """Write `model` [fp32] with its linear layers in 4 bits; returns it with those values.

    Args:
        inside: part of the names of the layers to quantise.
        rename: from the model's names to the file's.
    """
    tensors = {rename(n): t.detach().clone() for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors = {n: t for n, t in tensors.items() if not n.endswith("lm_head.weight")}
    for name, module in model.named_modules():
        if inside in name and isinstance(module, (torch.nn.Linear, Conv1D)):
            stem = rename(f"{name}.weight").removesuffix(".weight")
            del tensors[f"{stem}.weight"]
            tensors.update({f"{stem}.{k}": v for k, v in _round(module, method, sym, scales)})
    _save(folder, tensors, shards)
    config = json.loads(json.dumps(CONFIGS[method]))
    if method == "compressed-tensors":
        config["config_groups"]["group_0"]["weights"]["symmetric"] = sym
    else:
        config["zero_point" if method == "awq" else "sym"] = sym ^ (method == "awq")
    model.config.save_pretrained(folder)
    whole = json.loads((folder / "config.json").read_text())
    whole |= {"architectures": [type(model).__name__], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    return model


def _round(
    module: Any, method: str, sym: bool, scales: torch.dtype
) -> list[tuple[str, torch.Tensor]]:
    """Round a layer's weight in place; the tensors that hold it."""
    transposed = isinstance(module, Conv1D)
    weight = (module.weight.T if transposed else module.weight).detach().float()
    N, K = weight.shape
    groups = weight.reshape(N, -1, GROUP) if K % GROUP == 0 else weight.reshape(N, 1, K)
    span = groups.amax(-1) - groups.amin(-1)
    s = (2 * groups.abs().amax(-1) / 15 if sym else span / 15).clamp_min(1e-4).to(scales)
    z = torch.full(s.shape, 8.0) if sym else (-groups.amin(-1) / s.float()).round().clamp(0, 15)
    q = (groups / s.float()[..., None] + z[..., None]).round().clamp(0, 15)
    exact = ((q - z[..., None]) * s.float()[..., None]).reshape(N, K)
    module.weight.data = exact.T.contiguous() if transposed else exact
    integers = reference.Weight(
        q.reshape(N, K).numpy().astype(np.uint8),
        z.numpy().astype(np.uint8),
        np.zeros(s.shape, np.float16),
        np.arange(K) // groups.shape[-1],
    )
    format = {"auto-round": "gptq", "compressed-tensors": "gptq_v2"}.get(method, method)
    words, _, zeros = integers.tensors(format)
    qweight, qzeros = torch.from_numpy(words.copy()), torch.from_numpy(np.copy(zeros))
    if method != "compressed-tensors":
        return [("qweight", qweight), ("qzeros", qzeros), ("scales", s.T.contiguous())]
    parts = [
        ("weight_packed", qweight.T.contiguous()),
        ("weight_scale", s),
        ("weight_shape", torch.tensor([N, K])),
    ]
    return parts if sym else [*parts, ("weight_zero_point", qzeros.T.contiguous())]


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    where = {name: f"model-{i % shards + 1}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
