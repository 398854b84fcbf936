"""Damaged files, and an index that lies: typed errors before anything is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_folders import AR, UP, layer, name, same, write
from safetensors.torch import save_file

from amxq.errors import CheckpointError
from amxq.quantization import Checkpoint, load_layer


def raw_file(header: object, body: bytes = b"", *, claim: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claim is None else claim) + text + body


ENTRY = {"dtype": "I32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234",
        raw_file(b"{", b""),
        raw_file(b"[1]", b""),
        raw_file({}, claim=2**63),
        raw_file({"a": ENTRY}, b"0" * 8),
        raw_file({"a": ENTRY}, b"0" * 32),
        raw_file({"a": {**ENTRY, "shape": [3, 2]}}, b"0" * 16),
        raw_file({"a": {**ENTRY, "shape": [2**40, 2**40]}}, b"0" * 16),
        raw_file({"a": {**ENTRY, "shape": [-2, -2]}}, b"0" * 16),
        raw_file({"a": {**ENTRY, "data_offsets": [16, 0]}}, b"0" * 16),
        raw_file({"a": {**ENTRY, "dtype": "I33"}}, b"0" * 16),
        raw_file({"a": ENTRY, "b": ENTRY}, b"0" * 16),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AR}))
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*no sound safetensors"):
        load_layer(tmp_path, UP)


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, AR, **{name(UP): layer(11, "gptq")[1]})
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in [*range(0, 64, 7), len(whole) // 2, len(whole) - 1]:
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            load_layer(tmp_path, UP)


@pytest.mark.parametrize("pad", range(8))
def test_odd_addresses_in_a_file_are_read(tmp_path: Path, pad: int) -> None:
    weight, tensors = layer(12, "gptq")
    header: dict[str, Any] = {}
    body = b""
    for part, tensor in tensors.items():
        data = tensor.numpy().tobytes()
        header[f"{UP}.{part}"] = {
            "dtype": "F16" if part == "scales" else "I32",
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    write(tmp_path, AR, x={"weight": torch.zeros(1)})
    text = json.dumps(header).encode() + b" " * pad
    (tmp_path / "model.safetensors").write_bytes(raw_file(text, body))
    assert same(tmp_path, UP, weight)
    tensor = Checkpoint.open(tmp_path).read(f"{UP}.qweight")
    assert tensor.data_ptr() % 4 == 0


def sharded(folder: Path, weight_map: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": AR}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards(tmp_path: Path) -> None:
    weight, tensors = layer(13, "gptq")
    parts = {f"{UP}.{k}": v for k, v in tensors.items()}
    save_file({f"{UP}.qweight": parts[f"{UP}.qweight"]}, tmp_path / "a.safetensors")
    rest = {k: v for k, v in parts.items() if not k.endswith("qweight")}
    save_file({**rest, "unlisted": torch.zeros(1)}, tmp_path / "b.safetensors")
    where = {k: "a.safetensors" if k.endswith("qweight") else "b.safetensors" for k in parts}
    assert same(sharded(tmp_path, where), UP, weight)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.plain_tensors() == [] and len(checkpoint.files) == 3
    # Without the index, all files count, and no name may be in two.
    (tmp_path / "model.safetensors.index.json").unlink()
    assert same(tmp_path, UP, weight)
    save_file({"unlisted": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="'unlisted' is in"):
        load_layer(tmp_path, UP)


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"a": "../out.safetensors"}, "plain name"),
        ({"a": "/etc/passwd.safetensors"}, "plain name"),
        ({"a": "sub/x.safetensors"}, "plain name"),
        ({"a": "..\\x.safetensors"}, "plain name"),
        ({"a": "x\0.safetensors"}, "plain name"),
        ({"a": ".safetensors"}, "plain name"),
        ({"a": "config.json"}, "plain name"),
        ({"a": ["x.safetensors"]}, "plain name"),
        ({"a": "absent.safetensors"}, "is missing"),
        ({"a": "folder.safetensors"}, "is missing"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "1 tensors.*'b'"),
        ({}, "weight_map"),
        ([], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weight_map: object, text: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "folder.safetensors").mkdir()
    save_file({"a": torch.zeros(1)}, folder / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match=text):
        Checkpoint.open(sharded(folder, weight_map))


def test_folders_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AR}))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a pickle"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        load_layer(tmp_path / "config.json", UP)
