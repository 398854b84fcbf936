"""Hostile configurations and headers: typed errors or an answer, soon, and nothing else.

The same inputs run few in the default suite, 100,000 under the marker ``slow``, and as atheris
chooses them under ``atheris``, which is skipped where that package is not installed.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quant_folders import AR, layer, write

from amxq.errors import AmxqError
from amxq.quantization import Checkpoint, load_quantization_config, pack_checkpoint
from amxq.quantization.detect import from_block
from amxq.quantization.files import TensorFiles
from amxq.quantization.inspect import inspect_checkpoint
from amxq.quantization.inspect_text import render
from amxq.quantization.packed_checkpoint import MANIFEST

LAYERS = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.gate_up_proj",
    "lm_head",
    "a" * 200,
)
KEYS = (
    "quant_method bits w_bit group_size q_group_size sym zero_point packing_format backend "
    "desc_act dynamic extra_config block_name_to_quantize modules_to_not_convert "
    "checkpoint_format format config_groups ignore targets weights num_bits strategy type "
    "actorder symmetric data_type lm_head version pack_dtype act_bits input_activations "
    "sparsity_config transform_config"
).split()
VALUES = (
    "auto-round", "gptq", "awq", "compressed-tensors", "auto_round:auto_awq", "auto_round",
    "pack-quantized", "group", "channel", "int", "float", "gptq_v2", "gemm", "static", "lm_head",
    "re:.*mlp.*", "(a+)+$", "-:.*gate.*", "+:(x", "model.layers.0", "Linear", ".*a.*a.*a.*a.*b",
    "\ud800", "",
)  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([4, 4, 4, 32, 128, -1, 0, 8, 16, 3, 2**40, -(2**70), 10**4000]),
    st.integers(),
    st.floats(),
    st.sampled_from(VALUES),
    st.sampled_from(LAYERS),
    st.text(max_size=12),
)
keys = st.one_of(
    st.sampled_from(KEYS), st.sampled_from(VALUES), st.sampled_from(LAYERS), st.text(max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=12,
)
good = st.sampled_from(
    [
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
    ]
)
configurations = st.builds(lambda a, b: {**a, **b}, good, st.dictionaries(keys, values, max_size=5))


def resolve(block: dict[Any, Any]) -> None:
    """Read a configuration and ask it everything."""
    config = from_block(block)
    for name in LAYERS:
        for moe in (False, True):
            try:
                config.get_layer_config(name, is_fused_moe=moe)
            except AmxqError:
                pass
    load_quantization_config(block)


def try_configuration(block: dict[Any, Any]) -> None:
    begin = time.process_time()
    try:
        resolve(block)
    except AmxqError as error:
        assert len(str(error)) < 5000
    assert time.process_time() - begin < 5


# Headers: mutations of a sound file with one layer, one dense tensor and a norm.

ENTRIES = {
    "a.qweight": ("I32", [8, 40]),
    "a.scales": ("F16", [2, 40]),
    "a.qzeros": ("I32", [2, 5]),
    "a.g_idx": ("I32", [64]),
    "b.weight": ("F32", [2, 2]),
    "c.weight_packed": ("I32", [40, 8]),
    "c.weight_scale": ("BF16", [40, 2]),
    "c.weight_shape": ("I64", [2]),
}
SIZES = {"I32": 4, "F16": 2, "F32": 4, "BF16": 2, "I64": 8}


def header_of(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A header whose tensors lie one after the other, and the length of its data."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return header, end


HEADER, LENGTH = header_of(ENTRIES)
sizes = st.sampled_from([0, 1, 2, 5, 8, 40, 64, 2**31, 2**63 - 1, 2**63, -1, 10**4000])
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["I32", "F16", "F8_E8M0", "F4", "U8", "I33", 3, None]),
        "shape": st.lists(sizes, max_size=9) | values,
        "data_offsets": st.lists(st.integers(0, LENGTH), min_size=2, max_size=2) | values,
    },
)
mutations = st.dictionaries(st.sampled_from(sorted(ENTRIES)) | keys, entries | values, max_size=2)
renames = st.dictionaries(
    st.sampled_from(sorted(ENTRIES)), st.sampled_from(sorted(ENTRIES)), max_size=2
)
# Sound files with other tensors than a layer should have.
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 16, 39, 40, 64]), min_size=1, max_size=3)
others = st.dictionaries(
    st.sampled_from(sorted(ENTRIES)), st.tuples(st.sampled_from(sorted(SIZES)), shapes), max_size=3
)
absent = st.sets(st.sampled_from(sorted(ENTRIES)), max_size=2)
flips = st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), max_size=3)
contents = st.binary(min_size=0, max_size=64)


def damaged_file(
    changes: dict[str, Any], renamed: dict[str, str], flipped: list[tuple[int, int]], data: bytes
) -> bytes:
    header: dict[str, Any] = {renamed.get(k, k): v for k, v in HEADER.items()}
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(header.get(name), dict)
        header[name] = {**header[name], **change} if both else change
    file = bytearray(file_of(header, LENGTH, data))
    for at, value in flipped:
        file[at % len(file)] = value
    return bytes(file)


def other_file(changes: dict[str, tuple[str, list[int]]], missing: set[str], data: bytes) -> bytes:
    tensors = {k: v for k, v in {**ENTRIES, **changes}.items() if k not in missing}
    return file_of(*header_of(tensors), data)


def file_of(header: dict[str, Any], length: int, data: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    body = (data or b"\x77") * (length // len(data or b"x") + 1)
    return struct.pack("<Q", len(text)) + text + body[:length]


def try_file(folder: Path, data: bytes, block: dict[Any, Any]) -> None:
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": block}), encoding="utf-8", errors="surrogatepass"
    )
    begin = time.process_time()
    render(inspect_checkpoint(folder)).encode()
    try:
        files = TensorFiles(folder)
        for name in files:
            files.read(name)
        checkpoint = Checkpoint.open(folder)
        for prefix in checkpoint.quantized_layers():
            try:
                checkpoint.load_layer(prefix).check()
            except AmxqError:
                pass
    except AmxqError as error:
        assert len(str(error)) < 5000
    assert time.process_time() - begin < 5


def as_property(
    count: int, inputs: st.SearchStrategy[Any], check: Callable[..., None]
) -> Callable[[], None]:
    """A property that holds for `inputs`; fuzz_targets.py drives the same ones."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def every(case: Any) -> None:
        check(case)

    return every


any_configuration = configurations | st.dictionaries(keys, values, max_size=8)
damaged_files = st.tuples(st.builds(damaged_file, mutations, renames, flips, contents), good)
other_files = st.tuples(st.builds(other_file, others, absent, contents), good | configurations)


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_configurations(count: int) -> None:
    as_property(count, any_configuration, try_configuration)()


@pytest.mark.parametrize("count", [200, pytest.param(25_000, marks=pytest.mark.slow)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    as_property(count, damaged_files, lambda case: try_file(tmp_path, *case))()


@pytest.mark.parametrize("count", [200, pytest.param(25_000, marks=pytest.mark.slow)])
def test_other_files(count: int, tmp_path: Path) -> None:
    as_property(count, other_files, lambda case: try_file(tmp_path, *case))()


@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_manifests_of_packed_checkpoints(count: int, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "packed"
    source.mkdir()
    write(source, AR, a=layer(0, "gptq")[1])
    pack_checkpoint(source, out)
    manifest = json.loads((out / MANIFEST).read_text())
    entry = manifest["layers"]["a"]
    inner = st.dictionaries(st.sampled_from([*entry, "experts"]), scalars, max_size=2)
    changes = st.dictionaries(st.sampled_from(list(manifest)), values, max_size=2)

    def check(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
        changed = {**manifest, "layers": {"a": {**entry, **case[1]}}, **case[0]}
        text = json.dumps(changed)
        (out / MANIFEST).write_text(text, encoding="utf-8", errors="surrogatepass")
        render(inspect_checkpoint(out))
        try:
            Checkpoint.open(out).load_layer("a")
        except AmxqError as error:
            assert len(str(error)) < 5000

    as_property(count, st.tuples(changes, inner), check)()


def test_values_that_contain_themselves() -> None:
    endless: list[Any] = []
    endless.append(endless)
    knot: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
    knot["knot"] = knot
    for key in ("block_name_to_quantize", "extra_config", "dynamic", "bits", "quant_method", "sym"):
        for value in (endless, knot, {"x": endless}, [knot]):
            try_configuration({**knot, key: value})
            try_configuration({"quant_method": "gptq", **knot, key: value})
            try_configuration(
                {**knot, "quant_method": "compressed-tensors", "config_groups": value}
            )


def test_keys_that_are_no_strings_and_numbers_that_cannot_be_shown() -> None:
    for key in ("bits", "group_size", "sym", "quant_method", "block_name_to_quantize"):
        try_configuration({"quant_method": "gptq", "bits": 4, "group_size": 32, key: 10**5000})
    try_configuration({1: 2, None: 3, "quant_method": "gptq", "bits": 4, "group_size": 32})
    try_configuration({1: 2, None: 3})
    try_configuration({"bits": 4, "group_size": 32, "desc_act": True, "dynamic": {3: {}}})


NO_PATHS = (None, 3, True, b"x", ["a"], object(), "a\0b", "x" * 5000, "x" * 300)


@pytest.mark.parametrize("value", NO_PATHS, ids=lambda value: repr(value)[:12])
def test_what_is_no_folder(value: Any, tmp_path: Path) -> None:
    for read in (load_quantization_config, Checkpoint.open, inspect_checkpoint, TensorFiles):
        with pytest.raises(AmxqError):
            read(value)
    write(tmp_path, AR, a=layer(0, "gptq")[1])
    with pytest.raises(AmxqError):
        pack_checkpoint(tmp_path, value)


@pytest.mark.parametrize("value", [None, 3, b"a", [], {}], ids=repr)
def test_what_is_no_name(value: Any, tmp_path: Path) -> None:
    write(tmp_path, AR, a=layer(0, "gptq")[1])
    checkpoint = Checkpoint.open(tmp_path)
    asked = (checkpoint.load_layer, checkpoint.read, checkpoint.method, checkpoint.why_plain)
    for ask in (*asked, checkpoint.quantization.get_layer_config):
        with pytest.raises(AmxqError):
            ask(value)
    for block in ({"quant_method": "gptq", "bits": 4, "group_size": 32}, AR):
        with pytest.raises(AmxqError):
            load_quantization_config(block).get_layer_config(value)


@pytest.mark.atheris
@pytest.mark.parametrize("target", ["configurations", "damaged_files", "other_files", "bytes"])
def test_guided_by_coverage(target: str, tmp_path: Path) -> None:
    """AMXQ_FUZZ_RUNS inputs (default 5,000) that atheris finds, or the crash that it found."""
    pytest.importorskip("atheris")
    script = Path(__file__).with_name("fuzz_targets.py")
    runs = os.environ.get("AMXQ_FUZZ_RUNS", "5000")
    command = [sys.executable, str(script), target, f"-runs={runs}", "-rss_limit_mb=8192"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Done {runs} runs" in done.stderr
