"""A model as llama.cpp's file: one GGUF in bf16, which llama.cpp quantises.

For Qwen2's architecture and Llama's, without a vocabulary: token numbers go in, logits come out.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch


def write_gguf(folder: pathlib.Path, file: pathlib.Path) -> None:
    """Write the unquantised checkpoint in a folder as a GGUF (package gguf).

    Matrices stay bf16, vectors become fp32 as llama.cpp wants them.

    Raises:
        ValueError: the model is of another architecture.
    """
    import gguf
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("qwen2", "llama"):
        raise ValueError(f"{folder} holds a {kind} model; convert it yourself")
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(layers)
    writer.add_context_length(config.get("max_position_embeddings", 32768))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if kind == "llama":
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if kind == "llama" and (part := name.split(".")[-2]) in heads:
            tensor = _interleaved(tensor, heads[part])
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim == 1:
            writer.add_tensor(renamed, tensor.float().numpy())
        else:
            bits = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(renamed, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp's Llama rotates them: pairs next to each other, where
    transformers has the two halves of a head."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
