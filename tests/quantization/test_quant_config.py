"""Configurations: guards, GPTQ and AWQ, files from the wild."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from amxq.errors import CheckpointError, QuantizationConfigError, TargetError
from amxq.quantization import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    LayerScheme,
    load_quantization_config,
)
from amxq.runtime import targets

AR = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
FOUR, DENSE = LayerScheme(4, 128, True), LayerScheme(16, -1, True)
Q = "model.layers.0.self_attn"


class FusedMoE:
    """Stands for a serving framework's layer of experts."""


class ParallelLMHead(torch.nn.Module):
    """Stands for a serving framework's output projection."""


def ar(**more: Any) -> AutoRoundConfig:
    return AutoRoundConfig.from_config({**AR, **more})


# Guards


def test_bits_guard(amx_machine: None) -> None:
    for bits in (2, 3, 8):
        c = ar(bits=bits)
        with pytest.raises(
            ValueError,
            match=(
                "only 4-bit AWQ/GPTQ checkpoints because it uses the Intel AMX INT4 backend, "
                f"but got {bits}-bit."
            ),
        ):
            c.check_cpu_support(bits)
    ar().check_cpu_support(4)


def test_target_guard_is_strict(plain_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    c = ar()
    with pytest.raises(ValueError, match="AMX.*required.*AMD.*AMXQ_TARGET=auto"):
        c.check_cpu_support(4)
    with pytest.raises(ValueError, match="AMX"):
        c.apply_gptq_quant_layer(torch.nn.Linear(8, 8), "model.layers.0.mlp.up_proj")
    monkeypatch.setattr(targets, "requested_target", lambda: "auto")
    c.check_cpu_support(4)
    assert c.apply_awq_quant_layer(torch.nn.Linear(8, 8), "model.layers.0.mlp.up_proj")


def test_target_guard_asks_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(name: str) -> None:
        asked.append(name)
        raise TargetError("not here")

    monkeypatch.setattr(targets, "requested_target", lambda: "avx512")
    monkeypatch.setattr(targets, "require_runnable", refuse)
    for config in (ar(), GPTQConfig(4, 128), AWQConfig(4, 128)):
        with pytest.raises(TargetError):
            config.check_cpu_support(4)
    assert asked == ["avx512"] * 3


def test_an_emulated_amx_does_not_satisfy_the_strict_guard(
    amx_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "get_target", lambda: "avx512_bf16")
    with pytest.raises(ValueError, match="AMX"):
        ar().check_cpu_support(4)


def test_gptq_and_awq_are_not_strict(plain_machine: None) -> None:
    for config in (GPTQConfig(4, 128), AWQConfig(4, 128)):
        method = config.get_quant_method(torch.nn.Linear(8, 8), "model.layers.0.mlp.up_proj")
        assert method is not None and method.scheme.bits == 4


def test_apply_describes_the_method(amx_machine: None) -> None:
    c = ar(extra_config={"dense": {"bits": 16}, "eight": {"bits": 8}})
    method = c.apply_gptq_quant_layer(torch.nn.Linear(8, 8), "x.y")
    assert method is not None
    assert (method.prefix, method.scheme, method.kind, method.format) == (
        "x.y",
        FOUR,
        "linear",
        "gptq",
    )
    method = c.apply_awq_quant_layer(FusedMoE(), "x.experts")
    assert method is not None and (method.kind, method.format) == ("experts", "awq")
    assert c.apply_gptq_quant_layer(torch.nn.Linear(8, 8), "dense") is None
    assert c.apply_gptq_quant_layer(torch.nn.LayerNorm(8), "norm") is None
    assert c.apply_awq_quant_layer(torch.nn.Embedding(8, 8), "embed") is None
    assert c.apply_gptq_quant_layer(ParallelLMHead(), "output") is None
    with pytest.raises(ValueError, match="got 8-bit"):
        c.apply_awq_quant_layer(torch.nn.Linear(8, 8), "eight")


def test_sixteen_bits_come_before_every_guard(plain_machine: None) -> None:
    c = ar(bits=8, desc_act=True, extra_config={"dense": {"bits": 16}})
    assert c.apply_gptq_quant_layer(torch.nn.Linear(8, 8), "dense") is None


def test_act_order_is_refused_after_the_log_line(
    amx_machine: None, caplog: pytest.LogCaptureFixture
) -> None:
    c = ar(desc_act=True)
    with (
        caplog.at_level(logging.INFO, logger="amxq"),
        pytest.raises(ValueError, match="desc_act=False only.*gptq"),
    ):
        c.apply_gptq_quant_layer(torch.nn.Linear(8, 8), "x")
    assert len(caplog.records) == 1
    assert c.apply_awq_quant_layer(torch.nn.Linear(8, 8), "x") is not None


# GPTQ


def gptq(**more: Any) -> GPTQConfig:
    return GPTQConfig.from_config({"bits": 4, "group_size": 128, "desc_act": False, **more})


def test_gptq_dynamic_rules() -> None:
    c = gptq(
        dynamic={
            r"+:.*\.18\..*gate.*": {"bits": 4, "group_size": 32},
            r".*\.19\..*gate.*": {"bits": 8, "sym": False},
            r"-:.*\.20\..*gate.*": {},
            r"-:.*down.*": {},
            r".*\.down_proj": {"bits": 8},
            "lm_head": {"group_size": 64},
        }
    )
    assert c.get_layer_config("m.18.mlp.gate_proj") == LayerScheme(4, 32, True)
    assert c.get_layer_config("m.19.mlp.gate_proj") == LayerScheme(8, 128, False)
    assert c.get_layer_config("m.20.mlp.gate_proj") == DENSE
    assert c.get_layer_config("m.18.mlp.down_proj") == DENSE  # the first match counts
    assert c.get_layer_config("m.18.mlp.up_proj") == FOUR
    assert c.get_layer_config("x.lm_head") == DENSE  # re.match, from the start
    assert c.get_layer_config("lm_head") == LayerScheme(4, 64, True)
    with pytest.raises(ValueError, match="gate_up_proj.*disagree"):
        c.get_layer_config("m.20.mlp.gate_up_proj")
    with pytest.raises(ValueError, match="disagree"):
        c.get_layer_config("m.1.mlp.experts", is_fused_moe=True)
    assert c.get_layer_config("m.1.mlp.gate_up_proj") == FOUR
    assert (
        gptq(dynamic={"-:.*experts.*": {}}).get_layer_config("m.experts", is_fused_moe=True)
        == DENSE
    )


def test_gptq_formats() -> None:
    assert gptq().tensor_format == "gptq"
    assert gptq(checkpoint_format="gptq_v2").tensor_format == "gptq_v2"
    assert gptq(format="gptq_v2").tensor_format == "gptq_v2"
    assert gptq(checkpoint_format="gptq_p").tensor_format == "gptq_v2"
    assert gptq(lm_head=True).get_layer_config("lm_head") == FOUR
    assert gptq(desc_act=True).get_quant_method is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"checkpoint_format": "marlin", "group_size": None}, "'marlin'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "contradicts itself"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"pack_dtype": "int16"}, "'int16'"),
        ({"group_size": None}, "no 'group_size'"),
        ({"dynamic": {"-:(": {}}}, r"key '\(', which is not a regular"),
        ({"dynamic": {"x": {"bits": 3.5}}}, "whole number"),
    ],
)
def test_gptq_errors(change: dict[str, Any], text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        gptq(**change)


# AWQ


def test_awq_fields_and_skips() -> None:
    c = AWQConfig.from_config(
        {
            "w_bit": 4,
            "q_group_size": 64,
            "zero_point": True,
            "version": "GEMM",
            "modules_to_not_convert": ["mlp.gate", "model.layers.0.", "m.3.mlp.experts.1.up_proj"],
        }
    )
    assert (c.weight_bits, c.group_size, c.sym, c.tensor_format) == (4, 64, False, "awq")
    four = LayerScheme(4, 64, False)
    assert c.get_layer_config("model.layers.1.mlp.gate") == DENSE
    assert c.get_layer_config("model.layers.1.mlp.gate_up_proj") == four
    assert c.get_layer_config("model.layers.0.mlp.experts.7.w1") == DENSE
    assert c.get_layer_config("model.layers.0.mlp.experts", is_fused_moe=True) == DENSE
    assert c.get_layer_config("model.layers.10.mlp.experts", is_fused_moe=True) == four
    assert c.get_layer_config("lm_head") == DENSE
    with pytest.raises(ValueError, match="disagree"):
        c.get_layer_config("m.3.mlp.experts", is_fused_moe=True)
    c = AWQConfig(4, 64, modules_to_not_convert=["self_attn.v_proj"])
    with pytest.raises(ValueError, match="qkv_proj.*disagree"):
        c.get_layer_config(f"{Q}.qkv_proj")


@pytest.mark.parametrize("version", ["gemv", "GEMV", "gemv_fast", "marlin"])
def test_other_awq_layouts_are_refused_by_name(version: str) -> None:
    with pytest.raises(QuantizationConfigError, match=version):
        AWQConfig.from_config({"bits": 4, "group_size": 32, "version": version})


# Where it lies


def test_where_a_folder_keeps_it(tmp_path: Path) -> None:
    def write(name: str, value: object) -> None:
        (tmp_path / name).write_text(json.dumps(value))

    with pytest.raises(CheckpointError, match="not a folder"):
        load_quantization_config(tmp_path / "absent")
    with pytest.raises(QuantizationConfigError, match="holds no quantization_config"):
        load_quantization_config(tmp_path)
    write("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": True})
    assert isinstance(load_quantization_config(str(tmp_path)), GPTQConfig)
    write("quantization_config.json", {**AR, "group_size": 32})
    assert load_quantization_config(tmp_path).group_size == 32
    write("config.json", {"model_type": "llama", "quantization_config": None})
    assert load_quantization_config(tmp_path).group_size == 32
    write("config.json", {"text_config": {"quantization_config": {**AR, "group_size": 16}}})
    assert load_quantization_config(tmp_path).group_size == 16
    write("config.json", {"quantization_config": AR})
    assert load_quantization_config(tmp_path).group_size == 128
    write("config.json", {"quantization_config": [1]})
    with pytest.raises(QuantizationConfigError, match="expected an object"):
        load_quantization_config(tmp_path)
    for text in ("{", "[]", "[" * 100_000, '"\ud800"'):
        (tmp_path / "config.json").write_text(text, errors="surrogatepass")
        with pytest.raises(CheckpointError):
            load_quantization_config(tmp_path)


@pytest.mark.parametrize("name", ["auto-round", "intel/auto-round", "autoround", "AUTO-ROUND"])
def test_spellings_of_autoround(name: str) -> None:
    assert isinstance(load_quantization_config({**AR, "quant_method": name}), AutoRoundConfig)
