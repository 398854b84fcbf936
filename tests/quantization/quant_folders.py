"""Small checkpoint folders with known weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import quant_reference as reference
import torch
from safetensors.torch import save_file

from amxq.quantization import dequantize, load_layer

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
AR = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}


def layer(seed: int, format: str, *, sym: bool = True, N: int = 40) -> tuple[Any, dict[str, Any]]:
    """A weight of K = 64, group 32, and its checkpoint tensors."""
    rng = np.random.default_rng(seed)
    shape = (N, 2)
    z = np.full(shape, 8, np.uint8) if sym else rng.integers(0, 16, shape, dtype=np.uint8)
    weight = reference.Weight(
        rng.integers(0, 16, (N, 64), dtype=np.uint8),
        z,
        rng.standard_normal(shape).astype(np.float16),
        np.arange(64) // 32,
    )
    q, s, zeros = weight.tensors(format)
    tensors = {"qweight": q, "scales": s, "qzeros": zeros}
    return weight, {k: torch.from_numpy(v.copy()) for k, v in tensors.items()}  # type: ignore[union-attr]


def write(folder: Path, config: dict[str, Any] | None, **layers: dict[str, Any]) -> Path:
    """A folder with config.json and one model.safetensors; names use __ for dots."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = {
        f"{prefix.replace('__', '.')}.{part}": tensor
        for prefix, parts in layers.items()
        for part, tensor in parts.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def name(prefix: str) -> str:
    return prefix.replace(".", "__")


def same(folder: Path, prefix: str, weight: reference.Weight) -> bool:
    return np.array_equal(dequantize(load_layer(folder, prefix)).numpy(), weight.exact())
