"""The configuration layer: quantised checkpoints, read and packed."""

from __future__ import annotations

from amxq.quantization.autoround import AutoRoundConfig
from amxq.quantization.awq import AWQConfig
from amxq.quantization.base import LayerMethod, QuantizationConfig
from amxq.quantization.checkpoint import Checkpoint, load_layer
from amxq.quantization.compressed_tensors import CompressedTensorsConfig
from amxq.quantization.detect import load_quantization_config
from amxq.quantization.experts import paired, stack_experts
from amxq.quantization.gptq import GPTQConfig
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packed_checkpoint import PackedCheckpoint, pack_checkpoint
from amxq.quantization.packing import dequantize, format_of_raw, is_raw, pack
from amxq.quantization.scheme import LayerScheme

__all__ = [
    "AWQConfig",
    "AutoRoundConfig",
    "Checkpoint",
    "CompressedTensorsConfig",
    "GPTQConfig",
    "LayerMethod",
    "LayerScheme",
    "PackedCheckpoint",
    "PackedWeight",
    "QuantizationConfig",
    "dequantize",
    "format_of_raw",
    "is_raw",
    "load_layer",
    "load_quantization_config",
    "pack",
    "pack_checkpoint",
    "paired",
    "stack_experts",
]
