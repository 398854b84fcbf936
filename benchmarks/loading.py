"""How long loading a model takes: ``python -m benchmarks loading``.

A model of Qwen2.5-0.5B's shapes (or those of ``--shape``) with random weights is written three
times: unquantised, INT4 as AutoRound writes it, and packed by ``amxq pack``. Each load is a fresh
Python; the libraries and the model's class are imported before the clock starts, files are in the
page cache. The three take turns, forwards and backwards; the ratios are of loads that followed
each other.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import benchmarks
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_VOCAB, _KV_HEADS = 151936, 2
_SHAPES = {
    "0.5B": {"hidden": 896, "layers": 24, "intermediate": 4864, "heads": 14},
    "1.5B": {"hidden": 1536, "layers": 28, "intermediate": 8960, "heads": 12},
}
_GROUP = 128

_LOAD = """
import sys, time, torch, amxq
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen2 import modeling_qwen2
what, folder = sys.argv[1:]
load_model = amxq.load_model  # imports what it needs
start = time.perf_counter()
if what == "transformers":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
else:
    model, tokenizer = load_model(folder, target="auto")
loaded = time.perf_counter() - start
with torch.inference_mode():
    model(torch.arange(8).view(1, 8))
print(loaded, time.perf_counter() - start)
"""


def write_models(folder: pathlib.Path, layers: int, shape: str = "0.5B") -> dict[str, pathlib.Path]:
    """{who loads it: folder} of the three models."""
    from safetensors.torch import save_file

    from amxq.quantization import pack_checkpoint

    folders = {name: folder / name for name in ("transformers", "amxq", "amxq, packed")}
    sizes = _SHAPES[shape]
    hidden, intermediate = sizes["hidden"], sizes["intermediate"]
    kv = hidden // sizes["heads"] * _KV_HEADS
    dense: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.randn(_VOCAB, hidden).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    int4 = dict(dense)
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{name}.weight"
            dense[name] = int4[name] = torch.ones(hidden).bfloat16()
        for name, n, k in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            stem = f"model.layers.{layer}.{name}"
            dense[f"{stem}.weight"] = torch.randn(n, k).mul_(0.02).bfloat16()
            words = torch.randint(-(1 << 31), (1 << 31) - 1, (k // 8, n), dtype=torch.int32)
            int4[f"{stem}.qweight"] = words
            int4[f"{stem}.qzeros"] = torch.full((k // _GROUP, n // 8), 0x77777777).int()
            int4[f"{stem}.scales"] = (torch.rand(k // _GROUP, n) * 0.01).half()
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                dense[f"{stem}.bias"] = int4[f"{stem}.bias"] = torch.zeros(n).bfloat16()
    for name, tensors in (("transformers", dense), ("amxq", int4)):
        folders[name].mkdir()
        save_file(tensors, folders[name] / "model.safetensors", metadata={"format": "pt"})
        config = _config(sizes, layers) | (_QUANTISATION if name == "amxq" else {})
        (folders[name] / "config.json").write_text(json.dumps(config))
        _write_tokenizer(folders[name])
    pack_checkpoint(folders["amxq"], folders["amxq, packed"])
    return folders


_QUANTISATION = {
    "quantization_config": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": _GROUP,
        "sym": True,
    }
}


def _config(sizes: dict[str, int], layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": layers,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": _VOCAB,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _write_tokenizer(folder: pathlib.Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(folder)


def measure(folders: dict[str, pathlib.Path], repetitions: int) -> list[Row]:
    """One row for each who loads: seconds, and how many times as long as transformers."""
    loads: dict[str, list[list[float]]] = {name: [] for name in folders}
    for turn in range(-1, repetitions):
        for name in list(folders)[:: 1 if turn % 2 else -1]:
            code = [sys.executable, "-c", _LOAD, name, str(folders[name])]
            done = subprocess.run(code, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name}: exit status {done.returncode}:\n{done.stderr}")
            if turn >= 0:  # the first fills caches
                loads[name].append([float(word) for word in done.stdout.split()])
    rows = []
    for name, found in loads.items():
        row: Row = {"": name}
        for i, what in enumerate(("load", "first result")):
            seconds = [both[i] for both in found]
            others = [both[i] for both in loads["transformers"]]
            ratios = [a / b for a, b in zip(seconds, others, strict=True)]
            low, middle, high = (quantile(ratios, q) for q in (0.1, 0.5, 0.9))
            row[f"{what}, s"] = quantile(seconds, 0.5)
            row[f"{what}, of transformers'"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} loading", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--shape", choices=_SHAPES, default="0.5B", help="of Qwen2.5")
    parser.add_argument("--layers", type=int, help="how many, if not the shape's own")
    parser.add_argument("--folder", type=pathlib.Path, help="where the models go (1.9 or 5.2 GB)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    options = parser.parse_args(arguments)
    layers = options.layers or _SHAPES[options.shape]["layers"]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folders = write_models(pathlib.Path(folder), layers, options.shape)
        rows = measure(folders, options.repetitions)
    print(table(rows))
    if options.json:
        about: dict[str, Any] = machine() | {"date": time.strftime("%Y-%m-%d")}
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0
