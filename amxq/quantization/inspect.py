"""What is in a checkpoint folder and what amxq would do with it, told without reading weights.

Headers are read, and stored zero points where they decide between GPTQ v1 and v2. What cannot be
run is part of the answer: a layer of 8 bits is a row with a reason, and a quantisation that amxq
does not know is a problem beside the layers that the files hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from amxq.errors import AmxqError, CheckpointError
from amxq.quantization import packed_checkpoint
from amxq.quantization.base import QuantizationConfig
from amxq.quantization.checkpoint import Checkpoint
from amxq.quantization.detect import folder_path, from_block, read_block
from amxq.quantization.files import TensorFiles
from amxq.quantization.names import some
from amxq.quantization.packed import BLOCK
from amxq.quantization.scheme import is_expert_name
from amxq.quantization.stored import COMPRESSED, GPTQ, StoredLayer
from amxq.runtime import targets

_FORMATS = {"gptq": "GPTQ v1", "gptq_v2": "GPTQ v2", "awq": "AWQ"}
_WEIGHTS = (".qweight", ".weight_packed", ".weight")

T = TypeVar("T")


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        shape: [N, K], of experts stacked [E, N, K].
        format: how it is stored: ``"GPTQ v1"``, ``"AWQ"``, …, or a dtype.
        stored_bytes, packed_bytes: in the files, and loaded.
        bits, group_size, symmetric: None for what is not quantised.
        act_order: None where only the contents of g_idx say it.
        kernel: what will run, or "".
        note: why it is unquantised, or why it cannot run.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    stored_bytes: int
    packed_bytes: int
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    kernel: str = ""
    note: str = ""


@dataclass
class Inspection:
    """A checkpoint folder, as :func:`inspect_checkpoint` found it.

    Attributes:
        method: its quant_method; "" if nothing says so.
        settings: the global bits, group size and symmetry.
        assumed: {key that the configuration lacks: what is used instead}.
        guard: what the target guard says.
        problems: what keeps the whole checkpoint from being loaded; empty if nothing does.
        layers: quantised layers, then unquantised ones.
        other_tensors, other_bytes: embeddings, norms, biases.
        packed: the folder is one that ``amxq pack`` wrote.
        readable: headers of all weights could be read; if not, layers are missing here.
    """

    folder: str
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    guard: str = ""
    problems: list[str] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    other_tensors: int = 0
    other_bytes: int = 0
    packed: bool = False
    readable: bool = True

    @property
    def verdict(self) -> str:
        """Whether ``amxq.load_model`` takes the checkpoint, in a few words."""
        failing = [row.name for row in self.layers if not row.kernel and row.note]
        if not self.readable:
            return "refuses, as its weights cannot be read, see the problems above"
        if self.problems:
            return "refuses, see the problems above"
        if self.guard.startswith("refuses"):
            return "refuses on this machine, see the target guard above"
        if failing:
            return f"refuses, because of {len(failing)} layers: {some(failing, 3)}"
        return "takes it"

    def as_dict(self) -> dict[str, Any]:
        """Everything as what JSON knows."""
        return {**asdict(self), "verdict": self.verdict}


def inspect_checkpoint(folder: str | os.PathLike[str]) -> Inspection:
    """What is in a checkpoint folder, and what amxq would do with it.

    Raises:
        CheckpointError: there is no such folder. Everything else is told in the result.
    """
    path = folder_path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{str(folder)!r} is not a folder; expected that of a checkpoint")
    found = Inspection(str(path), packed=packed_checkpoint.is_packed(path))
    config = _told(found, lambda: _configuration(path, found))
    if found.packed:
        checkpoint = _told(found, lambda: Checkpoint.open(path))
        files = checkpoint.files if checkpoint else None
    else:
        files = _told(found, lambda: TensorFiles(path))
        checkpoint = Checkpoint(files, config) if files and config else None
    if files is None:
        found.readable = False
        return found
    rows = _unknown_rows(files) if checkpoint is None else _rows(checkpoint, found)
    rest = set(files)
    for row, names in rows:
        found.layers.append(row)
        rest.difference_update(names)
    found.other_tensors = len(rest)
    found.other_bytes = sum(map(files.nbytes, rest))
    return found


def _told(found: Inspection, look: Callable[[], T]) -> T | None:
    """What `look` returns; an error becomes one of the problems."""
    try:
        return look()
    except AmxqError as error:
        found.problems.append(str(error))
        return None


def _configuration(path: Path, found: Inspection) -> QuantizationConfig:
    block = read_block(path)
    said = block.get("quant_method") or block.get("method") or ""
    found.method = said[:80] if isinstance(said, str) else ""
    config = from_block(block)
    found.method = config.name
    found.settings = {
        "bits": config.weight_bits,
        "group_size": config.group_size,
        "symmetric": config.sym,
    }
    found.assumed = dict(config.assumed)
    _told(found, config.check_loadable)
    try:
        config.check_cpu_support(4)
        found.guard = f"runs on target {targets.get_target()}"
    except AmxqError as error:
        found.guard = f"refuses: {error}"
    return config


def _rows(checkpoint: Checkpoint, found: Inspection) -> Iterator[tuple[LayerRow, list[str]]]:
    """Every layer's row and the tensors that it speaks of: quantised layers, then dense ones."""
    files = checkpoint.files
    runs = not found.problems and not found.guard.startswith("refuses")
    for prefix, parts in checkpoint.quantized_parts().items():
        names = [f"{prefix}.{part}" for part in parts if f"{prefix}.{part}" in files]
        try:
            row = _quantised_row(checkpoint, checkpoint.describe(prefix), runs)
        except AmxqError as error:
            shape, size = files.shape(names[0]), sum(map(files.nbytes, names))
            row = LayerRow(prefix, shape, str(parts), size, size, note=str(error))
        yield row, names
    for prefix in checkpoint.dense_layers():
        name = f"{prefix}.weight"
        row = _plain_row(files, name, "torch" if runs else "", checkpoint.why_plain(prefix) or "")
        yield row, [name]


def _quantised_row(checkpoint: Checkpoint, layer: StoredLayer, runs: bool) -> LayerRow:
    files, scheme = checkpoint.files, layer.method.scheme
    note = ""
    if scheme.bits != 4:
        note = f"{scheme.bits} bits: only 4-bit layers run; leave it in 16 bits, or use 4"
    expert = layer.experts or is_expert_name(layer.prefix)
    kernel = "fused_moe" if expert else "int4_linear"
    format = _FORMATS[layer.method.format]
    if layer.parts is COMPRESSED:
        format = "compressed-tensors"
    elif layer.true_format(files) != layer.method.format:
        format = f"{_FORMATS[layer.true_format(files)]}, labelled {format}"
    shape = (layer.out_features, layer.in_features)
    order = _act_order(checkpoint, layer)
    packed = isinstance(checkpoint, packed_checkpoint.PackedCheckpoint)
    stored = sum(files.nbytes(name) for name in layer.tensor_names() if name in files)
    return LayerRow(
        layer.prefix,
        (layer.experts, *shape) if layer.experts else shape,
        format,
        stored,
        stored if scheme.bits != 4 or packed else _packed_bytes(files, layer, order is not False),
        *scheme,
        act_order=order,
        kernel=f"{kernel}, {targets.get_target()}" if runs and not note else "",
        note=note,
    )


def _act_order(checkpoint: Checkpoint, layer: StoredLayer) -> bool | None:
    """Whether features are permuted, as far as names and configuration say."""
    if f"{layer.prefix}.{layer.parts.g_idx}" not in checkpoint.files:
        return False
    if layer.parts is not GPTQ:  # the others have an index only where it says something
        return True
    config = checkpoint.quantization
    return None if "desc_act" in config.assumed else bool(getattr(config, "desc_act", False))


def _packed_bytes(files: TensorFiles, layer: StoredLayer, order: bool) -> int:
    """Bytes of the packed weight, by the layout's definition (packed.py)."""
    N, K, scheme = layer.out_features, layer.in_features, layer.method.scheme
    rows = BLOCK * -(-K // BLOCK)
    group = rows if scheme.group_size == -1 else math.gcd(scheme.group_size, rows)
    scales = f"{layer.prefix}.{layer.parts.scales}"
    width = files.nbytes(scales) // math.prod(files.shape(scales)) + (not scheme.sym)
    scale_bytes = N * (rows // group) * width * (layer.experts or 1)
    return layer.packed_bytes + scale_bytes + (4 * K if order or K != rows else 0)


def _unknown_rows(files: TensorFiles) -> Iterator[tuple[LayerRow, list[str]]]:
    """What the files hold when the configuration cannot be read."""
    note = "not looked into: the configuration is not one that amxq reads"
    for name in files:
        if name.endswith(_WEIGHTS) and len(files.shape(name)) >= 2:
            yield _plain_row(files, name, "", note), [name]


def _plain_row(files: TensorFiles, name: str, kernel: str, note: str) -> LayerRow:
    size, dtype = files.nbytes(name), files.dtype(name)
    layer = name.rpartition(".")[0]
    return LayerRow(layer, files.shape(name), dtype, size, size, kernel=kernel, note=note)
