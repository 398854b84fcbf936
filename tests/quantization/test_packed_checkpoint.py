"""Packed checkpoints: the same bits as from the source, and nothing believed that has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_folders import AR, DOWN, UP, layer, name, write
from safetensors.torch import load_file

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.quantization import Checkpoint, PackedCheckpoint, load_layer, pack_checkpoint
from amxq.quantization.packed_checkpoint import MANIFEST

FIXTURES = (
    "ar-ar-g32-asym",
    "ar-llmc-g32-asym",
    "gm-v2-g32-asym-act",
    "lc-gptq-w4a16-g32-sym",
    "lmhead-awq-g32-sym",
    "odd-ar-g128-sym",
    "tiny-mixtral-ar-g128-asym",
)


@pytest.mark.parametrize("stem", FIXTURES)
def test_the_same_tensors_as_from_the_source(fixtures: Path, tmp_path: Path, stem: str) -> None:
    source = Checkpoint.open(fixtures / "checkpoints" / stem)
    done: list[str] = []
    pack_checkpoint(source.folder, tmp_path / "out", on_layer=done.append, shard_bytes=100_000)
    packed = Checkpoint.open(tmp_path / "out")
    assert isinstance(packed, PackedCheckpoint)
    assert packed.quantized_layers() == source.quantized_layers() and len(done) == len(
        source.quantized_layers()
    )
    assert packed.quantization.name == source.quantization.name
    for prefix in source.quantized_layers():
        for mine, theirs in zip(packed.load_layer(prefix), source.load_layer(prefix), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))
        assert packed.load_layer(prefix).qweight.data_ptr() % 64 == 0
    assert sorted(packed.plain_tensors()) == sorted(source.plain_tensors())
    for plain in source.plain_tensors():
        assert torch.equal(packed.read(plain), source.read(plain))
    assert packed.config == source.config
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    up, down = layer(0, "gptq")[1], layer(1, "gptq", sym=False)[1]
    norm = {"weight": torch.ones(8)}
    write(source, {**AR, "sym": False}, norm=norm, **{name(UP): up, name(DOWN): down})
    (source / "model.py").write_text("raise SystemExit")
    pack_checkpoint(source, tmp_path / "packed")
    return tmp_path / "packed"


def test_what_is_written(folder: Path) -> None:
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["amxq-1.safetensors", MANIFEST, "config.json"]
    tensors = load_file(folder / "amxq-1.safetensors")  # any reader of safetensors reads it
    assert tensors[f"{DOWN}.zeros"].dtype == torch.uint8 and f"{UP}.zeros" not in tensors
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == 2 and list(manifest["files"]) == ["amxq-1.safetensors"]


def test_mapped_weights_can_be_written_without_changing_the_file(folder: Path) -> None:
    before = (folder / "amxq-1.safetensors").read_bytes()
    load_layer(folder, UP).qweight.zero_()
    assert (folder / "amxq-1.safetensors").read_bytes() == before


def change_manifest(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, **values}))

    return change


def flip(at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "amxq-1.safetensors"
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return change


def truncate(folder: Path) -> None:
    path = folder / "amxq-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


LAYER = {"bits": 4, "group_size": 32, "sym": True, "out_features": 1, "in_features": 8}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (change_manifest(version=1), "version 1; this amxq reads .*version 2"),
        (change_manifest(format="other"), "format 'other'"),
        (change_manifest(files={"../amxq-1.safetensors": [1]}), "plain name"),
        (change_manifest(files={"absent.safetensors": [1]}), "is missing"),
        (change_manifest(files={}), "no tensor"),
        (change_manifest(files={"amxq-1.safetensors": []}), "has not the checksums"),
        (change_manifest(files={"amxq-1.safetensors": [1.5]}), "is damaged"),
        (change_manifest(files=[]), "is damaged"),
        (change_manifest(layers={"x": 1}), "is damaged"),
        (change_manifest(layers={"x": {**LAYER, "format": "gptq"}}), r"no tensor 'x\.qweight'"),
        (change_manifest(layers={UP: {**LAYER, "format": "other"}}), "is damaged"),
        (change_manifest(quantization_config={}), "is damaged"),
        (flip(-1), "has not the checksum"),
        (flip(4096), "has not the checksum"),
        (flip(12), "disagree|has not the checksum|no sound"),
        (truncate, "no sound safetensors"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "amxq-1.safetensors").unlink(), "is missing"),
    ],
)
def test_damage_is_noticed(folder: Path, damage: Callable[[Path], None], text: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=text):
        checkpoint = Checkpoint.open(folder)
        for prefix in checkpoint.quantized_layers():
            checkpoint.load_layer(prefix)
        for plain in checkpoint.plain_tensors():
            checkpoint.read(plain)


def test_what_is_not_packed(folder: Path, tmp_path: Path, fixtures: Path) -> None:
    with pytest.raises(CheckpointError, match="packed already"):
        pack_checkpoint(folder, tmp_path / "again")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        pack_checkpoint(tmp_path / "source", folder)
    with pytest.raises(QuantizationConfigError, match=r"down_proj'.*got 8-bit"):
        pack_checkpoint(fixtures / "checkpoints" / "mix8_16-ar-g32-sym", tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "empty").mkdir()
    pack_checkpoint(tmp_path / "source", tmp_path / "empty")
    shutil.rmtree(tmp_path / "source")
    load_layer(tmp_path / "empty", UP)


def test_scales_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    up, down = layer(2, "gptq")[1], layer(3, "gptq")[1]
    up["scales"][0, 0], down["scales"][1, 3] = float("nan"), float("inf")
    write(tmp_path, AR, good=layer(4, "gptq")[1], **{name(UP): up, name(DOWN): down})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.load_layer("good")
    with pytest.raises(CheckpointError, match=r"2 of 3 layers have scales.*down_proj, .*up_proj"):
        checkpoint.load_layer(UP)
    checkpoint.allow_nonfinite = True
    assert checkpoint.load_layer(UP).scales.isnan().sum() == 1
    assert "has scales that are NaN or infinite" in caplog.text
