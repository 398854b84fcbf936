"""compressed-tensors: which group a layer belongs to, and how its tensors are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quant_reference as reference
import torch
from quant_folders import UP, name, same, write

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.quantization import (
    Checkpoint,
    CompressedTensorsConfig,
    LayerScheme,
    load_layer,
    load_quantization_config,
)

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FOUR, DENSE = LayerScheme(4, 32, True), LayerScheme(16, -1, True)


def config(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": said, **more}


def group(*targets: str, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets) or ["Linear"], "weights": {**WEIGHTS, **weights}}


def load(*groups: dict[str, Any], **more: Any) -> CompressedTensorsConfig:
    return CompressedTensorsConfig.from_config(config(*groups, **more))


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    c = load(
        group("Linear"),
        group(r"re:.*self_attn\.[qk]_proj", num_bits=8, group_size=64),
        group("model.layers.0.self_attn.q_proj", "lm_head", symmetric=False),
        ignore=["re:.*shared.*", "model.layers.1.mlp.up_proj"],
    )
    at = "model.layers.{}.self_attn.{}_proj".format
    assert c.get_layer_config(at(0, "q")) == LayerScheme(4, 32, False)
    assert c.get_layer_config(at(1, "q")) == LayerScheme(8, 64, True)
    assert c.get_layer_config(at(1, "v")) == FOUR
    assert c.get_layer_config("model.layers.1.mlp.up_proj") == DENSE
    assert c.get_layer_config("model.layers.11.mlp.up_proj") == FOUR
    assert c.get_layer_config("model.layers.1.mlp.shared.up_proj") == DENSE
    assert c.lm_head_quantized and c.weight_bits == 4
    with pytest.raises(QuantizationConfigError, match="qkv_proj.*disagree"):
        c.get_layer_config("model.layers.1.self_attn.qkv_proj")
    with pytest.raises(QuantizationConfigError, match="gate_up_proj.*disagree"):
        c.get_layer_config("model.layers.1.mlp.gate_up_proj")
    assert c.get_layer_config("model.layers.2.mlp.gate_up_proj") == FOUR


def test_a_group_without_linear_leaves_other_layers_alone() -> None:
    c = load(group("re:.*mlp.*"), ignore=["lm_head"])
    assert c.get_layer_config("a.mlp.x") == FOUR and c.get_layer_config("a.attn.x") == DENSE


def test_fused_experts() -> None:
    def scheme(*ignore: str) -> LayerScheme:
        c = load(group(), ignore=list(ignore))
        return c.get_layer_config("model.layers.0.mlp.experts", is_fused_moe=True)

    assert scheme("lm_head", r"re:.*mlp\.gate$") == FOUR
    assert scheme(r"re:.*\.experts\..*") == DENSE
    with pytest.raises(QuantizationConfigError, match="disagree"):
        scheme(r"re:.*\.experts\.3\..*")
    with pytest.raises(QuantizationConfigError, match="disagree"):
        scheme("model.layers.0.mlp.experts.3.up_proj", r"re:.*\.experts\.4\.down_proj")


def test_patterns_with_commas_are_not_split() -> None:
    c = load(group(r"re:model\.layers\.\d{1,2}\..*"))
    assert c.get_layer_config("model.layers.10.mlp.up_proj") == FOUR
    assert c.get_layer_config("model.layers.100.mlp.up_proj") == DENSE


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (config(group(), format="int-quantized"), "format is 'int-quantized'"),
        (config(group(), format="mixed-precision"), "group_0.*Linear.* has format None"),
        (config(), "no config_groups"),
        (config(group(), transform_config={"a": 1}), "online transforms"),
        (config(group(), sparsity_config={"format": "sparse-24"}), "'sparse-24'"),
        (config({**group(), "input_activations": {"num_bits": 8}}), "input_activations of 8 bits"),
        (config(group("a.b", type="float")), "targets a.b, has weights of type 'float'"),
        (config(group(strategy="tensor")), "strategy 'tensor'"),
        (config(group(group_size=12)), "is 12; expected a multiple of 8"),
        (config(group(actorder="sideways")), "actorder 'sideways'"),
        (config(group(num_bits="4")), "whole number"),
        (config(group("re:(")), r"targets'\] has the key '\(', which is not a regular"),
        (config(group(num_bits=8)), "got 8-bit"),
    ],
)
def test_what_cannot_run_is_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        load_quantization_config(bad)


def test_old_key_and_missing_method() -> None:
    old = config(group())
    del old["quant_method"]
    for source in (old, {"compression_config": old}, {"quantization_config": old}):
        assert isinstance(load_quantization_config(source), CompressedTensorsConfig)


def layer(
    seed: int, N: int, K: int, size: int, *, sym: bool = True, groups: np.ndarray | None = None
) -> tuple[reference.Weight, dict[str, torch.Tensor]]:
    """A weight, and its tensors as compressed-tensors packs them."""
    rng = np.random.default_rng(seed)
    groups = np.arange(K) // size if groups is None else groups
    shape = (N, int(groups.max()) + 1)
    z = np.full(shape, 8, np.uint8) if sym else rng.integers(0, 16, shape, dtype=np.uint8)
    q = rng.integers(0, 16, (N, K), dtype=np.uint8)
    weight = reference.Weight(q, z, rng.standard_normal(shape).astype(np.float32), groups)
    tensors = {
        "weight_packed": torch.from_numpy(reference.words(q, 1)),
        "weight_scale": torch.from_numpy(weight.s),
        "weight_shape": torch.tensor([N, K]),
    }
    if not sym:
        tensors["weight_zero_point"] = torch.from_numpy(reference.words(z, 0).copy())
    return weight, tensors


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("N", "K"), [(40, 64), (37, 96), (3, 100), (64, 77), (16, 32)])
def test_groups(tmp_path: Path, N: int, K: int, sym: bool) -> None:
    weight, tensors = layer(N, N, K, 32, sym=sym)
    assert same(write(tmp_path, config(group(symmetric=sym)), **{name(UP): tensors}), UP, weight)


@pytest.mark.parametrize("sym", [True, False])
def test_channels(tmp_path: Path, sym: bool) -> None:
    weight, tensors = layer(1, 24, 76, 76, sym=sym)
    said = group(strategy="channel", group_size=None, symmetric=sym)
    assert same(write(tmp_path, config(said), **{name(UP): tensors}), UP, weight)


def test_act_order_and_an_index_that_says_nothing(tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(128)
    weight, tensors = layer(2, 16, 128, 32, sym=False, groups=(np.arange(128) // 32)[order])
    tensors["weight_g_idx"] = torch.from_numpy(weight.groups.astype(np.int32))
    said = config(group(symmetric=False, actorder="group"))
    write(tmp_path, said, **{name(UP): tensors})
    assert same(tmp_path, UP, weight)
    assert load_layer(tmp_path, UP).perm is not None
    weight, tensors = layer(3, 16, 128, 32)
    tensors["weight_g_idx"] = torch.full((128,), -1)
    write(tmp_path, config(group(actorder="static")), **{name(UP): tensors})
    assert same(tmp_path, UP, weight)


def test_eight_bits_in_the_tensors_are_refused_by_name(fixtures: Path) -> None:
    checkpoint = Checkpoint.open(fixtures / "checkpoints" / "lc-rtn-mixed")
    bits = {p: s.bits for p, s in checkpoint.quantized_layers().items()}
    assert sorted(bits.values()) == [4] * 7 + [8] * 6
    with pytest.raises(QuantizationConfigError, match=r"mlp\.up_proj'.*got 8-bit"):
        checkpoint.load_layer("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight_scale": None}, r"no tensor .*weight_scale"),
        ({"weight_packed": torch.zeros(40, 8, dtype=torch.uint8)}, "stored as U8; expected I32"),
        ({"weight_packed": torch.zeros(41, 8, dtype=torch.int32)}, "do not fit"),
        ({"weight_packed": torch.zeros(1, 40, 8, dtype=torch.int32)}, "do not fit"),
        ({"weight_shape": torch.tensor([40, 1 << 40])}, "do not fit"),
        ({"weight_shape": torch.tensor([40, -64])}, r"says \[40, -64\]"),
        ({"weight_shape": torch.tensor([39, 64])}, r"says \[39, 64\]"),
        ({"weight_shape": torch.tensor([40.0, 64.0])}, r"is F32 \[2\]"),
        ({"weight_zero_point": torch.zeros(40, 2, dtype=torch.int8)}, "stored as I8"),
        ({"weight_zero_point": torch.zeros(5, 3, dtype=torch.int32)}, "do not fit"),
        ({"weight_g_idx": torch.full((64,), 2)}, r"g_idx\[0\] is 2"),
    ],
)
def test_contradicting_tensors(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    tensors = {**layer(4, 40, 64, 32)[1], **change}
    write(
        tmp_path, config(group()), **{name(UP): {k: v for k, v in tensors.items() if v is not None}}
    )
    with pytest.raises(CheckpointError, match=text):
        load_layer(tmp_path, UP)
