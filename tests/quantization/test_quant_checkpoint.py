"""Checkpoint folders: made here, contradictory ones, and the real exporters' fixtures."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quant_reference as reference
import torch
from quant_folders import AR, DOWN, UP, layer, name, same, write
from safetensors.torch import load_file

from amxq.errors import AmxqError, CheckpointError, QuantizationConfigError
from amxq.quantization import Checkpoint, dequantize, load_layer, load_quantization_config


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(
    ("packing", "format"),
    [
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round", "gptq_v2"),
        ("auto_round:gptqmodel", "gptq_v2"),
        ("auto_round:auto_awq", "awq"),
    ],
)
def test_autoround_packings(tmp_path: Path, packing: str, format: str, sym: bool) -> None:
    weight, tensors = layer(0, format, sym=sym)
    config = {**AR, "sym": sym, "packing_format": packing}
    assert same(write(tmp_path, config, **{name(UP): tensors}), UP, weight)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({**AR}, "gptq_v2"),
        ({**AR, "packing_format": "auto_round"}, "gptq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, "gptq_v2"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
            "gptq",
        ),
    ],
)
def test_mislabelled_symmetric_zeros_are_read_right_and_said_once(
    tmp_path: Path, config: dict[str, Any], stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    up, up_tensors = layer(1, stored)
    down, down_tensors = layer(2, stored)
    write(tmp_path, config, **{name(UP): up_tensors, name(DOWN): down_tensors})
    checkpoint = Checkpoint.open(tmp_path)
    with caplog.at_level(logging.WARNING, logger="amxq"):
        for prefix, weight in ((UP, up), (DOWN, down)):
            w = checkpoint.load_layer(prefix)
            assert w.zeros is None
            assert np.array_equal(dequantize(w).numpy(), weight.exact())
    (record,) = caplog.records
    assert "symmetric" in record.getMessage() and "v1" in record.getMessage()


def test_asymmetric_zeros_are_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight, tensors = layer(3, "gptq", sym=False)
    weight.z = np.full_like(weight.s, 9, dtype=np.uint8)  # stored as 8: no mistake here
    tensors["qzeros"] = torch.from_numpy(weight.tensors("gptq")[2])  # type: ignore[arg-type]
    write(tmp_path, {**AR, "sym": False}, **{name(UP): tensors})
    assert same(tmp_path, UP, weight)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_tensors_win_and_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head, head_tensors = layer(4, "gptq")
    dense = {"weight": torch.zeros(8, 8)}
    write(
        tmp_path,
        {**AR, "group_size": 64, "extra_config": {UP: {"bits": 16}}},
        lm_head=head_tensors,
        **{
            name(UP): layer(5, "awq")[1],
            name(DOWN): dense,
            "model__embed_tokens": {"weight": torch.zeros(8, 8)},
            "model__norm": {"weight": torch.zeros(8)},
        },
    )
    checkpoint = Checkpoint.open(tmp_path)
    with caplog.at_level(logging.WARNING, logger="amxq"):
        layers = checkpoint.quantized_layers()
        checkpoint.quantized_layers()
    assert {p: tuple(s) for p, s in layers.items()} == {
        "lm_head": (4, 32, True),
        UP: (4, 32, True),
    }
    (record,) = caplog.records
    text = record.getMessage()
    for said in ("unquantised, but quantised: ", "dense: " + DOWN, "packed as gptq, but awq"):
        assert said in text
    assert "embed_tokens" not in text and "norm" not in text
    assert np.array_equal(dequantize(checkpoint.load_layer("lm_head")).numpy(), head.exact())
    plain = {f"{DOWN}.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert set(checkpoint.plain_tensors()) == plain
    with pytest.raises(CheckpointError, match="dense in the files, though"):
        checkpoint.load_layer(DOWN)


def test_other_bits_are_seen_in_the_tensors(tmp_path: Path) -> None:
    _, four = layer(6, "gptq")
    eight = {
        "qweight": torch.zeros(16, 40, dtype=torch.int32),
        "scales": torch.ones(2, 40),
        "qzeros": torch.zeros(2, 10, dtype=torch.int32),
    }
    config = {**AR, "extra_config": {DOWN: {"bits": 8}}}
    checkpoint = Checkpoint.open(write(tmp_path, config, **{name(UP): four, name(DOWN): eight}))
    assert {p: s.bits for p, s in checkpoint.quantized_layers().items()} == {UP: 4, DOWN: 8}
    with pytest.raises(QuantizationConfigError, match=rf"{DOWN}.*got 8-bit"):
        checkpoint.load_layer(DOWN)


def test_act_order_with_a_group_size_that_only_g_idx_knows(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    groups = (np.arange(72) // 40)[rng.permutation(72)]
    weight = reference.Weight(
        rng.integers(0, 16, (16, 72), dtype=np.uint8),
        None,
        rng.standard_normal((16, 2)).astype(np.float16),
        groups,
    )
    weight.z = np.full_like(weight.s, 8, dtype=np.uint8)
    q, s, z = (torch.from_numpy(t.copy()) for t in weight.tensors("gptq"))  # type: ignore[union-attr]
    tensors = {"qweight": q, "scales": s, "qzeros": z, "g_idx": torch.from_numpy(groups).int()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    assert same(write(tmp_path, config, **{name(UP): tensors}), UP, weight)


def test_autoround_with_act_order_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {**AR, "desc_act": True}, **{name(UP): layer(8, "gptq")[1]})
    with pytest.raises(QuantizationConfigError, match="desc_act=False only"):
        load_layer(tmp_path, UP)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, AR, **{name(UP): layer(9, "gptq")[1]}))
    with pytest.raises(CheckpointError, match=f"did you mean '{UP}'"):
        checkpoint.load_layer(UP.replace("up_proj", "up_prj"))
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        checkpoint.read("nothing")
    assert checkpoint.config["quantization_config"] == AR
    (tmp_path / "config.json").rename(tmp_path / "c.json")
    (tmp_path / "quantization_config.json").write_text(json.dumps(AR))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        _ = Checkpoint.open(tmp_path).config


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"scales": None}, r"no tensor .*up_proj\.scales"),
        ({"qzeros": None}, r"no tensor .*up_proj\.qzeros"),
        ({"qweight": torch.zeros(8, 40, dtype=torch.int16)}, "stored as I16"),
        ({"qweight": torch.zeros(8, 41, dtype=torch.int32)}, "do not fit"),
        ({"qweight": torch.zeros(320, dtype=torch.int32)}, "do not fit"),
        ({"qzeros": torch.zeros(3, 5, dtype=torch.int32)}, "do not fit"),
        ({"qzeros": torch.zeros(2, 9, dtype=torch.int32)}, "do not fit"),
        (
            {"scales": torch.zeros(3, 40), "qzeros": torch.zeros(3, 5, dtype=torch.int32)},
            "3 groups",
        ),
        ({"scales": torch.full((2, 40), float("nan"))}, "1 of 1 layers .*NaN.*up_proj"),
        ({"scales": torch.zeros(2, 40, dtype=torch.float64)}, "up_proj.*float64"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, "up_proj.*64 input features into group 0"),
        ({"g_idx": torch.full((64,), 9, dtype=torch.int32)}, r"up_proj.*g_idx\[0\] is 9"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, r"g_idx has shape \[3\]"),
        ({"g_idx": torch.zeros(64)}, "g_idx has dtype torch.float32"),
    ],
)
def test_contradicting_tensors(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    tensors = {**layer(10, "gptq")[1], **change}
    write(tmp_path, AR, **{name(UP): {k: v for k, v in tensors.items() if v is not None}})
    with pytest.raises(CheckpointError, match=text):
        load_layer(tmp_path, UP)


# The real exporters

_REFUSED = {
    "autoawq-gemv-g32": "gemv",
    "w2-ar-g32-asym": "2-bit",
    "w8-ar-g32-sym": "8-bit",
}


def test_every_layer_of_the_fixtures_is_exact(fixtures: Path) -> None:
    compared = 0
    for folder in sorted((fixtures / "checkpoints").iterdir()):
        if folder.name in _REFUSED:
            with pytest.raises(QuantizationConfigError, match=_REFUSED[folder.name]):
                Checkpoint.open(folder)
            continue
        checkpoint = Checkpoint.open(folder)
        layers = checkpoint.quantized_layers()
        with np.load(folder / "ref.npz") as references:
            for key in references.files:
                if not key.startswith("W."):
                    continue
                prefix = key[2:]
                if layers[prefix].bits == 8:
                    with pytest.raises(QuantizationConfigError, match="8-bit"):
                        checkpoint.load_layer(prefix)
                    continue
                got = dequantize(checkpoint.load_layer(prefix)).numpy()
                assert np.array_equal(got, references[key]), (folder.name, prefix)
                compared += 1
        for prefix, scheme in layers.items():
            if scheme.bits == 4:
                checkpoint.load_layer(prefix).check()
    assert compared >= 60


def test_dense_and_quantised_heads(fixtures: Path, caplog: pytest.LogCaptureFixture) -> None:
    def open_one(stem: str) -> Checkpoint:
        caplog.clear()
        checkpoint = Checkpoint.open(fixtures / "checkpoints" / stem)
        checkpoint.quantized_layers()
        return checkpoint

    assert "lm_head" in open_one("lmhead-ar-g32-sym").quantized_layers()
    assert not caplog.records
    assert "lm_head" in open_one("lmhead-awq-g32-sym").quantized_layers()
    assert "unquantised, but quantised: lm_head" in caplog.text
    checkpoint = open_one("lmheadrtn2-ar-g32-sym")
    assert "lm_head" not in checkpoint.quantized_layers()
    assert "lm_head.weight" in checkpoint.plain_tensors()
    assert "quantised, but dense: lm_head" in caplog.text
    with pytest.raises(CheckpointError, match="not quantised: dense in the files, though the conf"):
        checkpoint.load_layer("lm_head")


def test_why_a_layer_is_plain(fixtures: Path) -> None:
    checkpoint = Checkpoint.open(fixtures / "checkpoints" / "ar-ar-g32-sym")
    quantised = next(iter(checkpoint.quantized_layers()))
    assert checkpoint.why_plain(quantised) is None
    assert checkpoint.why_plain("lm_head") == "the configuration leaves it in 16 bits"
    with pytest.raises(CheckpointError, match="lm_head' is not quantised: the configuration le"):
        checkpoint.load_layer("lm_head")
    assert "multiply by a matrix" in str(checkpoint.why_plain("model.embed_tokens"))
    with pytest.raises(CheckpointError, match=f"no layer 'q.*did you mean '{quantised}'"):
        checkpoint.why_plain(f"q{quantised}")


@pytest.mark.parametrize(
    "stem",
    [
        "smollm2-ar-g128-sym-rtn",
        "smollm2-ar-g64-sym-i20",
        "smollm2-awq-g64-asym-i20",
        "smollm2-gm-g64-sym-act",
    ],
)
def test_layers_of_real_models(fixtures: Path, stem: str) -> None:
    folder = fixtures / "real_layers" / stem
    described = json.loads((folder / "layers.json").read_text())
    config = load_quantization_config(described["quantization_config"])
    tensors = load_file(folder / "layers.safetensors")
    with np.load(folder / "ref.npz") as references:
        for prefix, facts in described["layers"].items():
            method = config.layer_method(prefix)
            assert method is not None
            parts = {
                part: tensors[f"{prefix}.{part}"]
                for part in ("qweight", "scales", "qzeros", "g_idx")
                if f"{prefix}.{part}" in tensors
            }
            W = dequantize(method.build(**parts)).numpy()
            assert hashlib.sha256(W.tobytes()).hexdigest() == facts["sha256_W_fp32_rowmajor"]
            y = references[f"{prefix}.x"].astype(np.float64) @ W.astype(np.float64).T
            assert np.allclose(y, references[f"{prefix}.y"], rtol=1e-12, atol=1e-9)


def test_errors_are_amxq_errors() -> None:
    for error in (CheckpointError, QuantizationConfigError):
        assert issubclass(error, AmxqError) and issubclass(error, ValueError)
