"""The 90 configurations from the wild: each gets its verdict, and each layer its scheme."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from amxq.errors import QuantizationConfigError
from amxq.quantization import LayerScheme, load_quantization_config

L0 = "model.layers.0"
MLP, Q = f"{L0}.mlp.up_proj", f"{L0}.self_attn.q_proj"
VLM = "model.language_model.layers.0.mlp"
DENSE = None

Scheme = tuple[int, int, bool]

#: {configuration: {layer: (bits, group_size, sym), or None for unquantised}}.
ACCEPTED: dict[str, dict[str, Scheme | None]] = {
    "ar-0122-qwen35-list-blocks-mtp": {
        f"{VLM}.up_proj": (4, 128, True),
        "model.language_model.layers.0.linear_attn.in_proj_a": DENSE,
        "model.language_model.layers.10.linear_attn.in_proj_a": (4, 128, True),
        "mtp.layers.0.mlp.up_proj": (4, 128, True),
        "model.visual.blocks.0.mlp.fc1": DENSE,
        "lm_head": DENSE,
    },
    "ar-0123-bart-encoder-list": {
        "model.encoder.layers.0.fc1": (4, 128, True),
        "model.decoder.layers.0.fc1": DENSE,
    },
    "ar-0123-gemma4-vlm-string-block": {
        f"{VLM}.up_proj": (4, 128, True),
        "model.vision_tower.encoder.layers.0.mlp.fc1": DENSE,
    },
    "ar-0123-gpt2-conv1d": {"transformer.h.0.attn.c_attn": (4, 128, True), "lm_head": DENSE},
    "ar-0123-plain": {MLP: (4, 128, True), "lm_head": DENSE},
    "ar-0123-tts-list-embeddings": {
        MLP: DENSE,
        "local_transformer.layers.0.mlp.up_proj": (4, 128, True),
        "local_transformer_lm_heads.3": (4, 128, True),
    },
    "ar-0130-deepseekv4-head-only": {"head": DENSE, "layers.0.ffn.gate": (4, 128, True)},
    "ar-0130-modelfree-audio-suffix": {
        "model.audio_tower.layers.0.self_attn.k_proj.linear": DENSE,
        "model.audio_tower.layers.1.self_attn.k_proj.linear": (4, 128, True),
    },
    "ar-0142-modelfree-norms": {MLP: (4, 128, True), "model.layers.12.self_attn.k_norm": DENSE},
    "ar-042-backend-asym": {MLP: (4, 32, False)},
    "ar-042-backend-sym": {MLP: (4, 32, True)},
    "ar-051-gptq-qwen3-14b": {MLP: (4, 128, True), "lm_head": DENSE},
    "ar-extra-config-mtp": {MLP: (4, 128, True), "mtp.0.fc": (8, 128, True), "mtp.1.fc": DENSE},
    "ar-method-key": {MLP: (4, 128, True)},
    "ar-modelfree-packing-auto_round-but-gptq-zeros": {MLP: (4, 128, True)},
    "ar-nosym": {MLP: (4, 64, True)},
    "ar-omni-transformer-blocks": {
        "transformer_blocks.0.attn.to_q": (4, 128, True),
        "single_transformer_blocks.0.proj_mlp": (4, 128, True),
        "proj_out": DENSE,
    },
    "ar-partname-extra-config": {
        f"{L0}.fc1": DENSE,
        f"{L0}.self_attn.k_proj": (4, 128, True),
        "k_proj": (8, 128, True),
    },
    "ar-regex-mlp-gate-g64": {
        f"{VLM}.gate": DENSE,
        f"{VLM}.up_proj": (4, 64, True),
        f"{VLM}.gate_proj": DENSE,
        f"{VLM}.experts.0.gate_proj": (4, 64, True),
    },
    "ar-thinker-comma-blocks": {
        "thinker.model.layers.0.mlp.up_proj": (8, 128, True),
        "thinker.model.layers.1.mlp.up_proj": (4, 128, True),
        "thinker.model.experts.0": (4, 128, True),
        "talker.model.layers.0.mlp.up_proj": DENSE,
    },
    "awq-empty-skip-list": {MLP: (4, 128, False)},
    "awq-minicpmo-null-skip": {MLP: (4, 128, False)},
    "awq-minicpmo-skip-list": {
        "vpm.encoder.layers.0.mlp.fc1": DENSE,
        "llm.model.layers.0.mlp.up_proj": (4, 128, False),
        "llm.model.layers.0.mlp.tts_proj": (4, 128, False),
        "llm.lm_head": DENSE,
    },
    "awq-nested-text-config-only": {MLP: (4, 128, False)},
    "awq-nozp-gemm": {MLP: (4, 32, True)},
    "awq-wbit-qgroupsize": {MLP: (4, 128, False)},
    "ct-notargets-static-actorder": {MLP: (4, 128, True)},
    "ct-old-compression-config-key": {MLP: (4, 128, True), "lm_head": DENSE},
    "ct-regex-two-groups": {
        Q: (4, 32, True),
        MLP: (8, 64, True),
        "model.layers.1.self_attn.v_proj": DENSE,
        "lm_head": DENSE,
    },
    "ct-sparsity-dense": {MLP: (4, 128, True), "lm_head": DENSE},
    "ct-w4a16-asym-mtp": {
        MLP: (4, 128, False),
        "model.language_model.mtp.layers.0.mlp.up_proj": DENSE,
        "model.language_model.mtp.layers.1.mlp.up_proj": (4, 128, False),
    },
    "gptq-dynamic-anchored-manifest-conflict": {
        f"{L0}.mlp.gate_proj": (4, 32, True),
        Q: (4, 32, True),
    },
    "gptq-dynamic-glm45air": {
        MLP: (4, 128, True),
        f"{L0}.mlp.shared_experts.up_proj": DENSE,
        "lm_head": DENSE,
    },
    "gptq-dynamic-readme": {
        "model.layers.18.mlp.gate_proj": (4, 32, True),
        "model.layers.19.mlp.gate_proj": (8, 64, True),
        "model.layers.20.mlp.gate_proj": DENSE,
        f"{L0}.mlp.down_proj": DENSE,
        MLP: (4, 128, True),
    },
    "gptq-dynamic-skip-all-but-first": {MLP: (4, 128, True), "model.layers.9.mlp.x": DENSE},
    "gptq-dynamic-tinyllama-sample": {
        "model.layers.9.mlp.up_proj": (4, 128, True),
        "model.layers.12.mlp.up_proj": (8, 128, True),
        "model.layers.20.mlp.up_proj": (8, 64, True),
    },
    "gptq-exllama-actorder-g32": {MLP: (4, 32, True)},
    "gptq-gptqmodel174-dynamic-null": {MLP: (4, 32, True)},
    "gptq-marlin-flag-false": {MLP: (4, 128, True)},
    "gptq-minicpm-sala-gptqmodel570": {
        MLP: (4, 128, True),
        f"{L0}.self_attn.o_gate": DENSE,
        f"{L0}.self_attn.z_proj": DENSE,
    },
    "gptq-missing-desc-act": {MLP: (4, 32, True)},
    "gptq-optimum-wikitext2": {MLP: (4, 128, True), "transformer.h.0.mlp.fc": DENSE},
    "gptq-planar-gptq_p-4bit": {MLP: (4, 128, True)},
    "gptq-qwenvl-int4-noquantmethod": {MLP: (4, 128, True)},
    "gptq-tinyllama-thebloke-actorder": {MLP: (4, 128, True)},
    "gptq-v2-format-key-only": {MLP: (4, 32, True)},
    "gptq-v2-meta-quantizer-string": {MLP: (4, 64, False)},
    "gptq-v2-mixedprecision-nosym": {MLP: (4, 128, True)},
    "gptq-v2-native": {MLP: (4, 32, False)},
    "gptq-with-packing-format": {MLP: (4, 128, True)},
    "gptq-wizardmega-minimal": {MLP: (4, 128, True)},
}

#: {configuration: what its error says}.
REFUSED = {
    "ar-fake": "'data_type'.* is 'nv_fp'",
    "ar-missing-bits": "has no 'bits'",
    "ar-mlx": "'packing_format'.* is 'mlx'",
    "ar-mxfp4": "'data_type'.* is 'mx_fp'",
    "ar-nvfp4": "'data_type'.* is 'nv_fp'",
    "ar-packing-other": "'packing_format'.* is 'other'",
    "ar-spelled-autoround": "has no 'group_size'",
    "ar-spinquant-mxfp4": "spinquant_config asks for online rotations",
    "ar-spinquant-online": "spinquant_config asks for online rotations",
    "ar-w2-asym": "got 2-bit",
    "awq-3bit": "got 3-bit",
    "awq-gemv": "'gemv'",
    "awq-gemv-uppercase": "'GEMV'",
    "awq-marlin-version": "'marlin'",
    "awq-minimal": "has no 'q_group_size' or 'group_size'",
    "awq-optimum-exllama": "has no 'q_group_size' or 'group_size'",
    "bnb": "quant_method is 'bitsandbytes'",
    "ct-int8-blockname": "format is 'int8'",
    "ct-mixed-precision": "no config_groups",
    "ct-mxfp8": "format is 'mxfp8-quantized'",
    "ct-noconfiggroups": "no config_groups",
    "ct-w8a16": "got 8-bit",
    "doc-auto-gptq-spelling": "quant_method is 'auto-gptq'",
    "exl3-float-bits": "quant_method is 'exl3'",
    "fp8-qwen36": "quant_method is 'fp8'",
    "gptq-checkpoint-format-marlin": "'marlin'",
    "gptq-dynamic-and-extra-config": "no quant_method",
    "gptq-dynamic-lmhead-embed": "got 3-bit",
    "gptq-genz70b-3bit": "got 3-bit",
    "gptq-gguf-wrapper": "'gguf'",
    "gptq-kullm-8bit-g128": "got 8-bit",
    "gptq-marlin-flag-true": "Marlin",
    "gptq-pack-dtype-int16": "'int16'",
    "gptq-planar-gptq_p-3bit": "'gptq_p' at 3 bits",
    "gptq-unknown-key": "has no 'group_size'",
    "gptq-wizard30b-8bit-channel-actorder": "got 8-bit",
    "mxfp4-gptoss": "quant_method is 'mxfp4'",
    "notours-onnx-quantize-config": "no quant_method",
    "qvq-fractional-bits": "quant_method is 'qvq'",
}

#: Judged otherwise than the list does, for the reasons that docs/checkpoints.md gives.
JUDGED = {
    "ar-modelfree-packing-auto_round-but-gptq-zeros",
    "ar-thinker-comma-blocks",
    "awq-marlin-version",
    "awq-optimum-exllama",
}


@pytest.fixture(scope="module")
def cases(fixtures: Path) -> dict[str, dict[str, Any]]:
    return {
        path.stem: json.loads(path.read_text()) for path in (fixtures / "configs").glob("*.json")
    }


def block(case: dict[str, Any]) -> dict[str, Any]:
    return dict(case["quantization_config"] or case["model_context"])


def test_every_configuration_has_its_verdict(cases: dict[str, dict[str, Any]]) -> None:
    assert set(cases) == ACCEPTED.keys() | REFUSED.keys()
    for name, case in cases.items():
        if name not in JUDGED:
            assert case["right_behaviour"].startswith("accept") == (name in ACCEPTED), name


@pytest.mark.parametrize("name", ACCEPTED)
def test_layers(cases: dict[str, dict[str, Any]], name: str) -> None:
    config = load_quantization_config(block(cases[name]))
    for layer, expected in ACCEPTED[name].items():
        found = config.get_layer_config(layer)
        if expected is None:
            assert not found.quantized, layer
        else:
            assert found == LayerScheme(*expected), layer


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(cases: dict[str, dict[str, Any]], name: str) -> None:
    with pytest.raises(QuantizationConfigError) as error:
        load_quantization_config(block(cases[name]))
    assert re.search(REFUSED[name], str(error.value))


def test_zeros_and_packing(cases: dict[str, dict[str, Any]]) -> None:
    def format(name: str) -> str:
        return load_quantization_config(block(cases[name])).tensor_format

    assert format("ar-042-backend-sym") == "gptq"
    assert format("ar-042-backend-asym") == "gptq_v2"
    assert format("ar-051-gptq-qwen3-14b") == format("gptq-with-packing-format") == "gptq"
    for name in ("format-key-only", "meta-quantizer-string", "mixedprecision-nosym", "native"):
        assert format(f"gptq-v2-{name}") == "gptq_v2"
    assert format("gptq-planar-gptq_p-4bit") == "gptq_v2"
    assert format("awq-wbit-qgroupsize") == "awq"
