"""Packed checkpoints: a checkpoint's INT4 layers as the kernels read them, loaded by mapping files.

A folder holds ``amxq_packed.json``, the manifest: version, the source's quantisation, its layers,
and the files with their checksums; ``amxq-N.safetensors``, the tensors, a layer's under
``LAYER.qweight``, ``.scales``, ``.zeros`` and ``.perm`` (see packed.py), all others as the source
has them; and copies of the source's small files, config.json and the tokenizer among them. Any
target reads it. Tensors are mapped, so that loading costs as little as computing checksums;
weights begin on cache lines, because a file's data begins at a page and they come first.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amxq.errors import AmxqError, CheckpointError, QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.base import LayerMethod, QuantizationConfig, check_bits
from amxq.quantization.checkpoint import Checkpoint
from amxq.quantization.detect import folder_path, from_block, read_block, read_json
from amxq.quantization.experts import expert_part, group_experts
from amxq.quantization.files import File, TensorFiles, is_plain_name
from amxq.quantization.packed import PANEL, PackedWeight
from amxq.quantization.scheme import LayerScheme
from amxq.quantization.stored import Parts, StoredLayer
from amxq.quantization.tensor_file import Entry, MappedFile, write_file

MANIFEST = "amxq_packed.json"
VERSION = 2

_FORMAT = "amxq packed checkpoint"
_PARTS = Parts("qweight", "scales", "zeros", "perm", None)
_SHARD_BYTES = 1 << 30
_PAGE = 4096
_CHUNK = 1 << 20
_NO_WORDS = torch.empty(0, dtype=torch.int64, device="cpu")
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_AGAIN = "pack the source again with amxq pack"


class PackedFile(File):
    """A file of a packed checkpoint: what is read of it is compared with its checksums.

    Args:
        checksums: one for each mebibyte, as :func:`_chunk_checksums` computes them.

    Attributes:
        verifying: somebody compares the whole file, so that reading need not.
    """

    def __init__(self, path: Path, checksums: list[int]) -> None:
        self.path = path
        self._checksums = checksums
        self._mapped = MappedFile(path)
        self._sound: set[int] = set()
        self.verifying = False
        self._lock = threading.Lock()

    def read(self, name: str, entry: Entry) -> torch.Tensor:
        """One tensor, mapped. Raises as :meth:`verify`."""
        if not self.verifying:
            self.verify(entry.begin, entry.end)
        return self._mapped.tensor(name, entry)

    def lend(self, name: str, entry: Entry) -> torch.Tensor:
        """As :meth:`read`: layers keep the tensors."""
        return self.read(name, entry)

    def release(self) -> None:
        """Nothing is lent."""

    def verify(self, begin: int = 0, end: int | None = None) -> None:
        """Compare the checksums of the parts that hold bytes begin to end, each part once.

        Raises:
            CheckpointError: the file has changed since packing.
        """
        first, last = begin // _CHUNK, -(-(end or len(self._mapped.mapping)) // _CHUNK)
        with self._lock:
            if self._sound.issuperset(range(first, last)):
                return
            part = memoryview(self._mapped.mapping)[first * _CHUNK : last * _CHUNK]
            if _chunk_checksums(part) != self._checksums[first:last]:
                raise CheckpointError(
                    f"{str(self.path)!r} has not the checksums that it was packed with; the file "
                    f"is damaged: {_AGAIN}"
                )
            self._sound.update(range(first, last))


class PackedFiles(TensorFiles):
    """The tensors of a packed checkpoint, mapped and checked against their files' checksums."""

    def __init__(self, folder: Path, checksums: Mapping[str, list[int]]) -> None:
        self._checksums = checksums
        self._files: list[PackedFile] = []
        super().__init__(folder)

    def verify(self) -> None:
        """Compare the files with all checksums that have not been compared yet.

        Raises:
            CheckpointError: a file has changed since packing.
        """
        for file in self._files:
            file.verifying = True
        try:
            for file in self._files:
                file.verify()
        finally:
            for file in self._files:
                file.verifying = False

    def _take(self) -> None:
        for name, checksums in self._checksums.items():
            if not is_plain_name(name):
                raise CheckpointError(
                    f"{MANIFEST} names the file {name!r}; expected the plain name of a "
                    f".safetensors file in the same folder; {_AGAIN}"
                )
            entries = self._open(name)
            file = PackedFile(self.folder / name, checksums)
            file.verify(0, min((entry.begin for entry in entries.values()), default=1))
            self._add(file, entries)
            self._files.append(file)


class PackedCheckpoint(Checkpoint):
    """A packed checkpoint, opened: as :class:`Checkpoint`, but its layers need no packing."""

    files: PackedFiles

    def __init__(
        self, files: PackedFiles, quantization: QuantizationConfig, layers: dict[str, StoredLayer]
    ) -> None:
        super().__init__(files, quantization)
        self._packed = layers

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> PackedCheckpoint:
        """Open a packed folder: manifest and headers are read.

        Raises:
            CheckpointError: it is no packed checkpoint, was written by another version, or is
                damaged.
        """
        path = folder_path(folder)
        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != _FORMAT or manifest.get("version") != VERSION:
            raise CheckpointError(
                f"{str(path / MANIFEST)!r} has format {fields.shown(manifest.get('format'))}, "
                f"version {fields.shown(manifest.get('version'))}; this amxq reads "
                f"{_FORMAT!r}, version {VERSION}: {_AGAIN}"
            )
        try:
            quantization = from_block(fields.table(manifest, ["quantization_config"]))
            said = fields.mapping(manifest, ["layers"]) or {}
            files = fields.table(manifest, ["files"])
            checksums = {file: fields.numbers(files, [file]) for file in files}
            layers = {name: _layer(name, entry, quantization) for name, entry in said.items()}
        except QuantizationConfigError as error:
            raise CheckpointError(
                f"{str(path / MANIFEST)!r} is damaged ({error}); {_AGAIN}"
            ) from None
        checkpoint = cls(PackedFiles(path, checksums), quantization, layers)
        for layer in layers.values():
            for part in (_PARTS.weight, _PARTS.scales):
                checkpoint.files.shape(f"{layer.prefix}.{part}")
        return checkpoint

    def load_layer(self, prefix: str) -> PackedWeight:
        """One layer, mapped.

        Raises:
            CheckpointError: no such layer, or the file is damaged.
        """
        layer = self.stored(prefix)
        qweight, scales, zeros, perm = layer.read(self.files)
        packed = PackedWeight(qweight, scales, zeros, perm)
        try:
            packed.check()
        except AmxqError as error:
            raise CheckpointError(f"layer {prefix!r} is damaged ({error}); {_AGAIN}") from None
        return packed

    def load_stack(self, experts: Sequence[Sequence[str]]) -> PackedWeight | None:
        """Layers of experts as one stack [E, N, K], mapped: of each expert one, or several whose
        rows lie one above the other. None where the files hold them in another way.

        Raises as :meth:`load_layer`.
        """
        names = [name for layers in experts for name in layers]
        count, each = len(experts), len(experts[0])
        rows = self.stored(names[0]).out_features
        if each > 1 and rows % PANEL:
            return None
        parts: list[torch.Tensor | None] = []
        for part in (_PARTS.weight, _PARTS.scales, _PARTS.zeros):
            held = [f"{name}.{part}" for name in names if f"{name}.{part}" in self.files]
            if not held:
                parts.append(None)
                continue
            joined = self.files.read_joined(held) if len(held) == len(names) else None
            if joined is None:
                return None
            parts.append(joined.view(count, each * joined.shape[1], *joined.shape[2:]))
        if any(f"{name}.{_PARTS.g_idx}" in self.files for name in names):
            return None  # orders have to be compared
        weight, scales, zeros = parts
        assert weight is not None and scales is not None
        try:
            return PackedWeight(weight, scales, zeros).check()
        except AmxqError as error:
            raise CheckpointError(f"layer {names[0]!r} is damaged ({error}); {_AGAIN}") from None

    def load_layers(self, prefixes: Iterable[str]) -> Iterator[tuple[str, PackedWeight]]:
        """Many layers with their names, mapped. Raises as :meth:`load_layer`."""
        return ((prefix, self.load_layer(prefix)) for prefix in prefixes)

    def verify(self) -> None:
        """Compare all files with the checksums that they were packed with.

        Raises:
            CheckpointError: a file has changed.
        """
        self.files.verify()

    def quantized_parts(self) -> dict[str, Parts]:
        """{layer: the family of its tensors} of all quantised layers."""
        return dict.fromkeys(self._packed, _PARTS)

    def describe(self, prefix: str) -> StoredLayer:
        """How one layer is stored, as the manifest says."""
        return self._packed[prefix]

    def _find_layers(self) -> dict[str, StoredLayer]:
        return self._packed


def is_packed(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a packed checkpoint, sound or not."""
    return (folder_path(folder) / MANIFEST).is_file()


def pack_checkpoint(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    on_layer: Callable[[str], None] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> PackedCheckpoint:
    """Write a checkpoint's packed form.

    Args:
        folder: the checkpoint.
        out: where the packed one goes; it appears when it is complete.
        on_layer: called with the name of each layer once it is packed.
        shard_bytes: a file is closed when it holds so many bytes; about what this takes in memory.

    Raises:
        CheckpointError: the checkpoint is damaged or packed already, `out` exists and is not
            empty, or writing fails.
        QuantizationConfigError: it holds a layer that is not 4-bit, or is not supported.
    """
    source = Checkpoint.open(folder)
    target = folder_path(out)
    if isinstance(source, PackedCheckpoint):
        raise CheckpointError(f"{str(folder)!r} is packed already; copy it instead")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{str(target)!r} exists and is not an empty folder; name another")
    for prefix, scheme in source.quantized_layers().items():
        try:
            check_bits(scheme.bits)
        except QuantizationConfigError as error:
            raise QuantizationConfigError(f"layer {prefix!r}: {error}") from None
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(source, partial, on_layer, shard_bytes)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(f"{str(target)!r} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return PackedCheckpoint.open(target)


def _write(
    source: Checkpoint, folder: Path, on_layer: Callable[[str], None] | None, shard_bytes: int
) -> None:
    files: dict[str, list[int]] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"amxq-{len(files) + 1}.safetensors"
        write_file(folder / file, dict(sorted(shard.items(), key=_aligned)))
        files[file] = _chunk_checksums(memoryview(MappedFile(folder / file).mapping))
        shard.clear()

    size = 0
    for tensors in _tensors(source, on_layer):
        shard.update(tensors)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size >= shard_bytes:
            flush()
            size = 0
    if shard:
        flush()
    for path in sorted(source.folder.iterdir()):
        copied = path.suffix in _COPIED and not path.name.endswith(".safetensors.index.json")
        if path.is_file() and copied:
            shutil.copyfile(path, folder / path.name)
    layers = {
        prefix: {
            **source.stored(prefix).method.scheme._asdict(),
            "format": source.stored(prefix).method.format,
            "out_features": source.stored(prefix).out_features,
            "in_features": source.stored(prefix).in_features,
            "experts": source.stored(prefix).experts,
        }
        for prefix in source.quantized_layers()
    }
    manifest = {
        "format": _FORMAT,
        "version": VERSION,
        "quantization_config": read_block(source.folder),
        "layers": layers,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _tensors(
    source: Checkpoint, on_layer: Callable[[str], None] | None
) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors of the packed form, together those that belong into one file."""
    for layers in _together(source.quantized_layers()):
        tensors = {}
        for prefix, packed in source.load_layers(layers):
            for part, tensor in zip(_PARTS[:4], packed, strict=True):
                if tensor is not None:
                    tensors[f"{prefix}.{part}"] = tensor
            if on_layer is not None:
                on_layer(prefix)
        yield tensors
    for name in source.plain_tensors():
        yield {name: source.read(name)}


def _together(layers: Iterable[str]) -> Iterator[list[str]]:
    """All layers, those of a module's experts together, in the order of its stacks: gate 0, up 0,
    gate 1, … and down 0, down 1, …, so that a stack can be mapped."""
    layers = list(layers)
    modules = group_experts(layers)
    done: set[str] = set()
    for layer in layers:
        part = expert_part(layer)
        group = modules[part[0]] if part is not None else None
        if group is None or group.stacked:
            yield [layer]
        elif group.prefix not in done:
            done.add(group.prefix)
            single, stacks = group.single, (("gate_up",), ("gate", "up"), ("down",))
            yield [
                single[part][expert]
                for stack in stacks
                for expert in sorted({e for part in stack for e in single.get(part, ())})
                for part in stack
                if expert in single.get(part, ())
            ]


def _layer(name: str, entry: dict[str, Any], quantization: QuantizationConfig) -> StoredLayer:
    """One layer of the manifest. Raises QuantizationConfigError."""
    scheme = LayerScheme(
        fields.integer(entry, ["bits"]),
        fields.integer(entry, ["group_size"]),
        fields.boolean(entry, ["sym"]),
    )
    fields.check_group_size(scheme.group_size, f"layer {name!r}: group_size")
    format = fields.text(entry, ["format"])
    if scheme.bits != 4 or format not in ("gptq", "gptq_v2", "awq"):
        raise QuantizationConfigError(f"layer {name!r} has {scheme.bits} bits, format {format!r}")
    return StoredLayer(
        name,
        _PARTS,
        LayerMethod(quantization, name, scheme, "linear", format),
        fields.integer(entry, ["out_features"]),
        fields.integer(entry, ["in_features"]),
        fields.integer(entry, ["experts"], None),
    )


def _aligned(item: tuple[str, torch.Tensor]) -> tuple[bool, int]:
    """Packed weights first, multiples of 128 bytes each, then the widest dtypes."""
    name, tensor = item
    weight = tensor.dtype == torch.uint8 and name.endswith(f".{_PARTS.weight}")
    return not weight, -tensor.element_size()


def _chunk_checksums(data: memoryview) -> list[int]:
    """For each mebibyte CRC-32 of the sums of its pages' 64-bit words, and of what is left over.

    Six times as fast as the CRC-32 of all bytes (Emerald Rapids, one thread: 20 and 3.5 GB/s), and
    it still notices any changed word and any pages that changed places.
    """
    whole = len(data) // _PAGE * _PAGE
    words = torch.frombuffer(data, dtype=torch.int64, count=whole // 8) if whole else _NO_WORDS
    sums = words.view(-1, _PAGE // 8).sum(dim=1).numpy().data
    pages = _CHUNK // _PAGE
    checksums = [zlib.crc32(sums[at : at + pages]) for at in range(0, len(sums), pages)]
    if whole < len(data):
        last = checksums.pop() if whole % _CHUNK else 0
        checksums.append(zlib.crc32(data[whole:], last))
    return checksums
