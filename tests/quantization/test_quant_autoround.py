"""AutoRound's configuration: fields, defaults, and how each layer is resolved."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from amxq.errors import QuantizationConfigError
from amxq.quantization import (
    AutoRoundConfig,
    LayerScheme,
)

AR = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
FOUR, EIGHT, DENSE = LayerScheme(4, 128, True), LayerScheme(8, 128, True), LayerScheme(16, -1, True)
SIX = (
    "lm_head_quantized",
    "desc_act",
    "dynamic",
    "checkpoint_format",
    "true_sequential",
    "static_groups",
)
Q = "model.layers.0.self_attn"


def ar(**more: Any) -> AutoRoundConfig:
    return AutoRoundConfig.from_config({**AR, **more})


# AutoRound: fields


def test_autoround_defaults_are_explicit() -> None:
    c = ar()
    assert (c.weight_bits, c.group_size, c.sym) == (4, 128, True)
    assert c.packing_format == "auto_round:auto_gptq" and c.backend == "auto"
    assert c.data_type == "int" and c.block_name_to_quantize is None
    assert not c.extra_config
    assert c.get_gptq_config_kwargs(4, 128) == {
        "weight_bits": 4,
        "group_size": 128,
        "lm_head_quantized": False,
        "desc_act": False,
        "dynamic": {},
        "checkpoint_format": "",
        "true_sequential": False,
        "static_groups": False,
    }
    assert c.gptq_defaulted_config_keys == SIX


@pytest.mark.parametrize("key", ["lm_head", "lm_head_quantized"])
def test_lm_head_counts_under_both_names(key: str) -> None:
    c = ar(**{key: True}, desc_act=False, dynamic=None)
    assert c.lm_head_quantized and c.dynamic == {}
    assert c.gptq_defaulted_config_keys == SIX[3:]


def test_defaults_are_logged_once_for_an_object(caplog: pytest.LogCaptureFixture) -> None:
    c = ar(desc_act=True, static_groups=False)
    with caplog.at_level(logging.INFO, logger="amxq"):
        for _ in range(2):
            with pytest.raises(ValueError, match="desc_act=False only"):
                c.get_gptq_config_kwargs(4, 128)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    text = record.getMessage()
    assert "lm_head_quantized, dynamic, checkpoint_format, true_sequential" in text
    assert "desc_act" not in text and "static_groups" not in text


def test_nothing_is_logged_when_everything_is_given(caplog: pytest.LogCaptureFixture) -> None:
    c = ar(lm_head=False, desc_act=False, dynamic={}, checkpoint_format="", true_sequential=False)
    c.gptq_defaulted_config_keys = ()
    with caplog.at_level(logging.INFO, logger="amxq"):
        c.get_gptq_config_kwargs(4, 128)
    assert not caplog.records


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("a.layers, b.layers", ["a.layers", "b.layers"]),
        (["a.layers"], ["a.layers"]),
        ([["a.0", "a.1"], ["b.0"]], ["a.0", "a.1", "b.0"]),
        ("", None),
        (None, None),
    ],
)
@pytest.mark.parametrize(
    "key", ["block_name_to_quantize", "to_quant_block_names", "quant_block_list"]
)
def test_block_lists(key: str, blocks: object, expected: object) -> None:
    assert ar(**{key: blocks}).block_name_to_quantize == expected


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({}, "gptq"),
        ({"packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({"packing_format": "auto_round:gptq"}, "gptq"),
        ({"packing_format": "auto_round"}, "gptq_v2"),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq_v2"),
        ({"packing_format": "auto_round:auto_awq"}, "awq"),
        ({"packing_format": "auto_round:awq"}, "awq"),
        ({"backend": "auto_round:gptq:exllamav2"}, "gptq"),
        ({"backend": "auto_round:exllamav2"}, "gptq_v2"),
        ({"packing_format": "auto_round", "backend": "awq"}, "awq"),
        ({"checkpoint_format": "gptq_v2"}, "gptq_v2"),
    ],
)
def test_packing_formats(fields: dict[str, str], format: str) -> None:
    assert ar(**fields).tensor_format == format


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 5}, "'bits'.* is 5; expected one of 2, 3, 4, 8"),
        ({"bits": "4"}, "'bits'.* is '4'; expected a whole number"),
        ({"bits": None}, "has no 'bits'"),
        ({"bits": True}, "whole number"),
        ({"group_size": None}, "has no 'group_size'"),
        ({"group_size": 12}, "is 12; expected a multiple of 8"),
        ({"group_size": 0}, "is 0; expected a multiple of 8"),
        ({"sym": 1}, "'sym'.* true or false"),
        ({"data_type": "mx_fp"}, "'data_type'.* is 'mx_fp'"),
        ({"packing_format": "mlx"}, "'packing_format'.* is 'mlx'"),
        ({"backend": "cuda"}, "'backend'.* is 'cuda'"),
        ({"act_bits": 8}, "'act_bits'.* is 8"),
        ({"spinquant_config": {"r1": True}}, "spinquant_config asks for online rotations"),
        ({"rotation_config": {"x": 1}}, "rotation_config asks"),
        ({"extra_config": {"x": {"rotation_config": {"y": 1}}}}, "extra_config..x.. asks"),
        ({"extra_config": [1]}, "'extra_config'.* an object"),
        ({"extra_config": {"x": 8}}, "'extra_config'.*'x'.* is 8"),
        ({"extra_config": {"x": {"bits": "8"}}}, "extra_config..x..: .*'bits'"),
        ({"extra_config": {"x": {"data_type": "mx_fp"}}}, "data_type 'mx_fp' at 4 bits"),
        ({"extra_config": {"x": {"group_size": 9}}}, "is 9; expected a multiple of 8"),
        ({"extra_config": {"a[": {"bits": 8}}}, r"key 'a\[', which is not a regular expression"),
        ({"block_name_to_quantize": 3}, "a list of layer names"),
    ],
)
def test_wrong_fields_are_typed_errors(change: dict[str, Any], text: str) -> None:
    with pytest.raises(QuantizationConfigError, match=text):
        AutoRoundConfig.from_config({**AR, **change})


# AutoRound: layers


def test_blocks_reach_at_dots_only() -> None:
    c = ar(block_name_to_quantize="model.layers.1")
    assert c.get_layer_config("model.layers.1.mlp.up_proj") == FOUR
    assert c.get_layer_config("model.layers.10.mlp.up_proj") == DENSE
    assert c.get_layer_config("lm_head") == DENSE


def test_lm_head_is_dense_unless_said() -> None:
    assert ar().get_layer_config("lm_head") == DENSE
    assert ar().get_layer_config("head", is_lm_head=True) == DENSE
    assert ar(lm_head=True).get_layer_config("lm_head") == FOUR
    assert ar(lm_head=True, block_name_to_quantize="m").get_layer_config("lm_head") == FOUR
    c = ar(block_name_to_quantize="m", extra_config={"lm_head": {"bits": 4, "group_size": None}})
    assert c.get_layer_config("lm_head", is_lm_head=True) == FOUR


def test_exact_then_first_regex_then_default() -> None:
    c = ar(
        extra_config={
            r".*\.v_proj$": {"bits": 16, "data_type": "float"},
            f"{Q}.v_proj": {"sym": False},
            r"self_attn": {"bits": 2},  # no pattern: a name that no layer has
            r"self_attn.+": {"bits": 8},
        }
    )
    assert c.get_layer_config(f"{Q}.v_proj") == LayerScheme(4, 128, False)
    assert c.get_layer_config("model.layers.1.self_attn.v_proj") == LayerScheme(16, 128, True)
    assert c.get_layer_config(f"{Q}.o_proj") == EIGHT
    assert c.get_layer_config("model.layers.0.mlp.down_proj") == FOUR


def test_exact_entries_count_outside_the_blocks() -> None:
    c = ar(
        block_name_to_quantize=["m.layers"],
        extra_config={"mtp.fc": {"sym": False}, "mtp.*": {"group_size": 32}},
    )
    assert c.get_layer_config("mtp.fc") == LayerScheme(4, 128, False)
    assert not c.get_layer_config("mtp.other").quantized


def test_fused_layers_resolve_by_sibling() -> None:
    names = [f"{Q}.{x}_proj" for x in "qkv"]
    c = ar(extra_config={n: {"bits": 8} for n in names})
    assert c.get_layer_config(f"{Q}.qkv_proj") == EIGHT
    c = ar(extra_config={n: {"bits": 8} for n in names[:2]})
    with pytest.raises(ValueError, match=r"qkv_proj.*disagree.*q_proj.*k_proj.*v_proj"):
        c.get_layer_config(f"{Q}.qkv_proj")
    c = ar(
        extra_config={
            ".*up_proj.*": {"bits": 16},
            "model.layers.0.mlp.gate_proj": {"bits": 16, "group_size": 32},
        }
    )
    assert not c.get_layer_config("model.layers.0.mlp.gate_up_proj").quantized
    # An entry for the fused layer itself; exact, and by pattern.
    assert (
        ar(extra_config={f"{Q}.qkv_proj": {"bits": 8}}).get_layer_config(f"{Q}.qkv_proj") == EIGHT
    )
    assert ar(extra_config={".*qkv.*": {"bits": 8}}).get_layer_config(f"{Q}.qkv_proj") == EIGHT
    # .*v_proj.* hits "qkv_proj" too; what is said of the siblings counts.
    c = ar(extra_config={".*v_proj.*": {"bits": 8}, f"{Q}.v_proj": {"bits": 4}})
    assert c.get_layer_config(f"{Q}.qkv_proj") == FOUR


def test_fused_names_are_whole_components() -> None:
    c = ar(extra_config={"m.in_proj_qkvz": {"bits": 8}, "m.xgate_proj": {"bits": 16}})
    assert c.get_layer_config("m.in_proj_qkvz") == EIGHT
    assert c.get_layer_config("m.xqkv_proj") == FOUR
    assert c.get_layer_config("m.qkv_proj_x") == FOUR


def test_experts_must_agree() -> None:
    e = "model.layers.0.mlp.experts"
    agree = {f"{e}.{i}.{p}_proj": {"bits": 8} for i in range(2) for p in ("gate", "up", "down")}
    assert ar(extra_config=agree).get_layer_config(e, is_fused_moe=True) == EIGHT
    agree[f"{e}.1.up_proj"] = {"bits": 4}
    with pytest.raises(ValueError, match=rf"{e}.*8 bits.*0\.gate_proj.*4 bits.*1\.up_proj"):
        ar(extra_config=agree).get_layer_config(e, is_fused_moe=True)
    other = {f"{e[:-1]}_other.0.up_proj": {"bits": 8}, f"{e}2.0.up_proj": {"bits": 8}}
    assert ar(extra_config=other).get_layer_config(e, is_fused_moe=True) == FOUR


def test_patterns_count_for_experts() -> None:
    e = "model.layers.0.mlp.experts"

    def scheme(**extra: Any) -> LayerScheme:
        return ar(extra_config=extra["extra"]).get_layer_config(e, is_fused_moe=True)

    assert scheme(extra={r".*\.experts\..*": {"bits": 8}}) == EIGHT
    assert scheme(extra={r".*mlp\.gate.*": {"bits": 16}}) == FOUR  # the router
    with pytest.raises(ValueError, match="disagree"):
        scheme(extra={r".*\.experts\..*down_proj": {"bits": 8}})
    with pytest.raises(ValueError, match="disagree"):
        scheme(extra={f"{e}.0.up_proj": {"bits": 4}, r".*experts\.77\..*": {"bits": 8}})
    all_three = {rf".*experts\.\d+\.{p}_proj": {"bits": 16} for p in ("gate", "up", "down")}
    assert not scheme(extra=all_three).quantized


def test_modules_to_not_convert_reach_at_dots_only() -> None:
    c = ar(modules_to_not_convert=["mlp.gate", "model.layers.1."])
    assert not c.get_layer_config("model.layers.0.mlp.gate").quantized
    assert c.get_layer_config("model.layers.0.mlp.gate_proj").quantized
    assert not c.get_layer_config("model.layers.1.mlp.experts.0.up_proj").quantized
