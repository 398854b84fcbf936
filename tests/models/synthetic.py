"""Writes small Llama checkpoints with random INT4 weights in AutoRound's GPTQ packing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WORDS = ("<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "mat", "sky", "is", "blue", "why")


def write_checkpoint(
    folder: Path,
    *,
    hidden: int = 64,
    intermediate: int = 96,
    layers: int = 2,
    vocab: int = 64,
    group: int = 32,
    chat: bool = False,
) -> Path:
    """Write config, weights and a tokenizer of whole words; returns `folder`.

    The layers are [hidden, hidden] and [intermediate, hidden]; embedding and head are tied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden).bfloat16()}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _add_layer(tensors, f"{stem}.self_attn.{name}", hidden, hidden, group)
        for name in ("gate_proj", "up_proj"):
            _add_layer(tensors, f"{stem}.mlp.{name}", intermediate, hidden, group)
        _add_layer(tensors, f"{stem}.mlp.down_proj", hidden, intermediate, group)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": group,
            "sym": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, chat)
    return folder


def _add_layer(
    tensors: dict[str, torch.Tensor], name: str, out: int, inside: int, group: int
) -> None:
    bits = torch.iinfo(torch.int32)
    qweight = torch.randint(bits.min, bits.max, (inside // 8, out), dtype=torch.int32)
    tensors[f"{name}.qweight"] = qweight
    tensors[f"{name}.qzeros"] = torch.full((inside // group, out // 8), 0x77777777).int()
    tensors[f"{name}.scales"] = (torch.randn(inside // group, out) / inside).half()


def write_tokenizer(folder: Path, chat: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat:
        tokenizer.chat_template = "{% for m in messages %}why {{ m['content'] }} the{% endfor %}"
    tokenizer.save_pretrained(folder)
