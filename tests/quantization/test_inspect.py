"""What ``amxq inspect`` finds, in every fixture and in folders that cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quant_folders import AR, DOWN, UP, layer, name, write

from amxq import cli
from amxq.errors import CheckpointError
from amxq.quantization import Checkpoint, pack_checkpoint
from amxq.quantization.files import TensorFiles
from amxq.quantization.inspect import inspect_checkpoint
from amxq.quantization.inspect_text import render


def test_rows_agree_with_what_loads(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_TARGET", "auto")
    for folder in sorted((fixtures / "checkpoints").iterdir()):
        found = inspect_checkpoint(folder)
        assert json.loads(json.dumps(found.as_dict()))["layers"]
        assert found.verdict in render(found)
        if found.problems:
            assert all(not row.kernel for row in found.layers)
            continue
        checkpoint = Checkpoint.open(folder)
        rows = {row.name: row for row in found.layers}
        for prefix, scheme in checkpoint.quantized_layers().items():
            row = rows[prefix]
            assert (row.bits, row.group_size, row.symmetric) == scheme
            if scheme.bits == 4:
                packed = checkpoint.load_layer(prefix)
                assert row.shape == (packed.out_features, packed.in_features)
                assert row.act_order in (None, packed.perm is not None)
                exact = row.act_order is not None and (packed.zeros is None) == scheme.sym
                assert packed.nbytes == row.packed_bytes or not exact
        stored = sum(row.stored_bytes for row in found.layers) + found.other_bytes
        assert stored == sum(map(checkpoint.files.nbytes, checkpoint.files))


def test_only_headers_and_zeros_are_read(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = TensorFiles.read

    def watched(self: TensorFiles, tensor: str) -> torch.Tensor:
        read.add(tensor.rpartition(".")[2])
        return original(self, tensor)

    monkeypatch.setattr(TensorFiles, "read", watched)
    for stem in ("ar-ar-g32-sym", "gm-v2-g32-asym-act", "ar-awq-g32-asym", "lc-rtn-mixed"):
        inspect_checkpoint(fixtures / "checkpoints" / stem)
    assert read <= {"qzeros", "weight_shape"}


def test_notes_and_verdicts(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_TARGET", "auto")

    def shown(stem: str) -> str:
        return render(inspect_checkpoint(fixtures / "checkpoints" / stem))

    assert "refuses, because of 6 layers: model.layers.[0-1].mlp" in shown("lc-rtn-mixed")
    assert "8 bits: only 4-bit layers run" in shown("lc-rtn-mixed")
    assert "fused_moe, " in shown("tiny-qwen3moe-ar-g128-sym")
    assert "problem: AWQ version is 'gemv'" in shown("autoawq-gemv-g32")
    assert "got 8-bit" in shown("w8-ar-g32-sym")
    assert "dense in the files, though the configuration says" in shown("lmheadrtn2-ar-g32-sym")
    text = shown("ar-ar-g32-sym")
    assert "amxq.load_model: takes it" in text
    assert "not said, so taken as: lm_head = False, desc_act = False" in text
    assert "2 × model.layers.[0-1].mlp.down_proj" in text


def test_the_target_guard_speaks(fixtures: Path, plain_machine: None) -> None:
    found = inspect_checkpoint(fixtures / "checkpoints" / "ar-ar-g32-sym")
    assert found.guard.startswith("refuses: AutoRound checkpoints run on Intel AMX")
    assert found.verdict.startswith("refuses on this machine")
    assert not any(row.kernel for row in found.layers if row.bits)
    assert inspect_checkpoint(fixtures / "checkpoints" / "ar-gptq-g32-sym").guard == (
        "runs on target avx2"
    )


def test_mislabelled_zeros(tmp_path: Path) -> None:
    write(tmp_path, AR, **{name(UP): layer(0, "gptq_v2")[1], name(DOWN): layer(1, "gptq")[1]})
    formats = {row.name: row.format for row in inspect_checkpoint(tmp_path).layers}
    assert formats == {UP: "GPTQ v2, labelled GPTQ v1", DOWN: "GPTQ v1"}


def test_packed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_TARGET", "auto")
    source = tmp_path / "source"
    source.mkdir()
    write(source, AR, **{name(UP): layer(0, "gptq")[1]})
    pack_checkpoint(source, tmp_path / "packed")
    found = inspect_checkpoint(tmp_path / "packed")
    (row,) = found.layers
    assert found.packed and row.packed_bytes == row.stored_bytes and found.verdict == "takes it"


def test_broken_layers_and_files_are_told(tmp_path: Path) -> None:
    broken = {k: v for k, v in layer(0, "gptq")[1].items() if k != "scales"}
    write(tmp_path, AR, **{name(UP): broken, name(DOWN): layer(1, "gptq")[1]})
    rows = {row.name: row for row in inspect_checkpoint(tmp_path).layers}
    assert "no tensor" in rows[UP].note and rows[UP].bits is None and rows[DOWN].bits == 4
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config.json").write_text("[]")
    found = inspect_checkpoint(tmp_path)
    assert len(found.problems) == 2 and not found.layers
    assert "no sound safetensors" in render(found)
    assert not found.readable and found.verdict.startswith("refuses, as its weights cannot be read")
    with pytest.raises(CheckpointError, match="not a folder"):
        inspect_checkpoint(tmp_path / "absent")


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, AR, **{"evil\x1b[2J\u202e": layer(0, "gptq")[1]})
    text = render(inspect_checkpoint(tmp_path), every_layer=True)
    assert "\x1b" not in text and "\\x1b[2J\\u202e" in text


def test_the_command(fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(fixtures / "checkpoints" / "ar-gptq-g32-sym")
    assert cli.main(["inspect", folder, "--all"]) == 0
    assert "\nmodel.layers.1.mlp.up_proj " in capsys.readouterr().out
    assert cli.main(["inspect", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "gptq"
    assert cli.main(["pack", folder, str(tmp_path / "out")]) == 0
    assert "14 layers packed" in capsys.readouterr().err
    assert cli.main(["pack", folder, str(tmp_path / "out")]) == 2
    assert cli.main(["inspect", str(tmp_path / "absent")]) == 2


@pytest.mark.parametrize("damage", ["cut", "cut shard", "none"])
def test_weights_that_cannot_be_read_are_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    write(tmp_path, AR, **{name(UP): layer(0, "gptq")[1]})
    assert cli.main(["inspect", str(tmp_path)]) == 0
    capsys.readouterr()
    weights = tmp_path / "model.safetensors"
    if damage == "none":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.rename(tmp_path / "model-1.safetensors")
        (tmp_path / "model-2.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{")
    for options in ([], ["--json"]):
        assert cli.main(["inspect", str(tmp_path), *options]) == 2
        shown = capsys.readouterr()
        assert "refuses, as its weights cannot be read" in shown.out
        assert "the weights in" in shown.err and "cannot be read" in shown.err
