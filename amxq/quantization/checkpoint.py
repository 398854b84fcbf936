"""A quantised checkpoint folder: what is in it, and its layers as packed weights.

The configuration says how layers were meant to be quantised; the tensors say how they are, and
they win: exporters have listed dense layers as quantised and said nothing of quantised ones. Where
the two disagree, one warning for each checkpoint says so.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from amxq.errors import CheckpointError, QuantizationConfigError, did_you_mean
from amxq.quantization.base import LayerMethod, QuantizationConfig, check_bits
from amxq.quantization.detect import load_quantization_config, read_json
from amxq.quantization.files import TensorFiles
from amxq.quantization.inputs import Inputs, is_finite
from amxq.quantization.names import some
from amxq.quantization.packed import SCALE_DTYPES, PackedWeight
from amxq.quantization.packing import Format, pack_all
from amxq.quantization.scheme import UNQUANTIZED, LayerScheme
from amxq.quantization.stored import FAMILIES, Parts, StoredLayer, stored_layer, stored_parts
from amxq.runtime import memory

logger = logging.getLogger(__name__)

# Last names of what has a matrix but multiplies nothing: embeddings and norms.
_NO_LAYER = re.compile("embed|norm|^wte$|^wpe$")


# So much of the files is packed at once: enough for all threads, little beside a model.
_BATCH_BYTES = 24 << 20


class Checkpoint:
    """A checkpoint folder, opened: headers are read, weights are not.

    Attributes:
        folder: its path.
        files: names, shapes and dtypes of all tensors.
        quantization: how it is quantised.
        allow_nonfinite: take layers whose scales are NaN or infinite, with a warning.
    """

    allow_nonfinite = False

    def __init__(self, files: TensorFiles, quantization: QuantizationConfig) -> None:
        self.files = files
        self.folder = files.folder
        self.quantization = quantization
        self._schemes: dict[str, LayerScheme] = {}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Open a folder: its quantisation first, then the headers of its files.

        A packed checkpoint (``amxq pack``) is opened as one.

        Raises:
            QuantizationConfigError: no quantisation, or one that is not supported.
            CheckpointError: files are missing, damaged, or contradict each other.
        """
        from amxq.quantization import packed_checkpoint

        if packed_checkpoint.is_packed(folder):
            return packed_checkpoint.PackedCheckpoint.open(folder)
        quantization = load_quantization_config(folder)
        return cls(TensorFiles(folder), quantization)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(
                f"{str(self.folder)!r} has no config.json; expected the folder of a whole model"
            )
        return read_json(self.folder / "config.json")

    def quantized_layers(self) -> dict[str, LayerScheme]:
        """{tensor prefix: scheme} of all layers whose tensors are quantised, in the files' order.

        Schemes are what the tensors say. Layers of other bits than 4 are listed too;
        ``load_layer`` refuses them.

        Raises:
            CheckpointError: a layer's tensors contradict each other or are incomplete.
        """
        return {prefix: layer.method.scheme for prefix, layer in self._layers.items()}

    def plain_tensors(self) -> list[str]:
        """Names of all tensors that are not part of a quantised weight: to be read as they are."""
        packed: set[str] = set()
        for prefix, layer in self._layers.items():
            packed.update((*layer.tensor_names(), f"{prefix}.weight"))
        return [name for name in self.files if name not in packed]

    def verify(self) -> None:
        """Compare files with checksums, where the checkpoint has them. Meanwhile tensors are read
        without: call it in a thread, and use what was read when it returns.

        Raises:
            CheckpointError: a file has changed.
        """

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, mapped from its file.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        return self.files.read(name)

    def method(self, prefix: str) -> LayerMethod:
        """The method that builds one quantised layer, by what its tensors say.

        Raises:
            CheckpointError: there is no such layer, or it is dense.
        """
        return self.stored(prefix).method

    def stored(self, prefix: str) -> StoredLayer:
        """How one quantised layer is stored. Raises as :meth:`method`."""
        if isinstance(prefix, str) and prefix in self._layers:
            return self._layers[prefix]
        if f"{prefix}.weight" in self.files:
            raise CheckpointError(
                f"layer {prefix!r} is not quantised: {self.why_plain(prefix)}; "
                f"read {prefix + '.weight'!r} instead"
            )
        raise CheckpointError(
            f"there is no quantised layer {prefix!r} in {str(self.folder)!r}"
            f"{did_you_mean(prefix, self._layers)}"
        )

    def load_layer(self, prefix: str) -> PackedWeight:
        """One quantised layer, packed.

        Raises:
            CheckpointError: no such layer, or its tensors are damaged.
            QuantizationConfigError: it is not 4-bit, or its settings are not supported.
        """
        packed = pack_all([self._checked(prefix)])[0]
        memory.use_huge_pages()
        return packed

    def load_layers(self, prefixes: Iterable[str]) -> Iterator[tuple[str, PackedWeight]]:
        """Many quantised layers with their names, packed in batches, in the order given.

        Raises as :meth:`load_layer`.
        """
        batch: dict[str, Inputs] = {}
        size = 0
        for prefix in prefixes:
            batch[prefix] = self._checked(prefix)
            size += batch[prefix].qweight.nbytes
            if size >= _BATCH_BYTES:
                yield from zip(batch, pack_all(list(batch.values())), strict=True)
                batch, size = {}, 0
        yield from zip(batch, pack_all(list(batch.values())), strict=True)

    def _checked(self, prefix: str) -> Inputs:
        layer = self.stored(prefix)
        self._check_servable(layer)
        qweight, scales, zeros, g_idx = layer.read(self.files)
        if scales.dtype in SCALE_DTYPES and not is_finite(scales):
            if not self.allow_nonfinite:
                raise self._nonfinite()
            logger.warning("layer %r has scales that are NaN or infinite", prefix)
        return layer.method.checked(qweight, scales, zeros, g_idx, allow_nonfinite=True)

    def _check_servable(self, layer: StoredLayer) -> None:
        prefix = layer.prefix
        try:
            check_bits(layer.method.scheme.bits)
        except QuantizationConfigError as error:
            raise QuantizationConfigError(f"layer {prefix!r}: {error}") from None
        self.quantization.check_loadable()

    def _nonfinite(self) -> CheckpointError:
        """The error for scales that are not finite: it names all layers that have some."""
        bad = []
        for prefix, layer in self._layers.items():
            scales = self.files.lend(f"{prefix}.{layer.parts.scales}")
            if scales.dtype in SCALE_DTYPES and not is_finite(scales):
                bad.append(prefix)
        return CheckpointError(
            f"{len(bad)} of {len(self._layers)} layers have scales that are NaN or infinite: "
            f"{some(bad)}; the checkpoint is damaged or was quantised to overflow: quantise it "
            f"again, or allow it with allow_nonfinite=True"
        )

    def why_plain(self, prefix: str) -> str | None:
        """Why a layer is not quantised, in a few words; None if it is.

        Raises:
            CheckpointError: the files hold no such layer.
        """
        if any(f"{prefix}.{part}" in self.files for part in FAMILIES):
            return None
        if f"{prefix}.weight" not in self.files:
            layers = (name.rpartition(".")[0] for name in self.files)
            raise CheckpointError(
                f"there is no layer {prefix!r} in {str(self.folder)!r}"
                f"{did_you_mean(prefix, dict.fromkeys(layers))}"
            )
        if len(self.files.shape(f"{prefix}.weight")) != 2 or _NO_LAYER.search(_last(prefix)):
            return "only layers that multiply by a matrix are quantised"
        try:
            scheme = self.quantization.get_layer_config(prefix)
        except QuantizationConfigError as error:
            return str(error)
        if scheme.quantized:
            return f"dense in the files, though the configuration says {scheme.bits} bits"
        return "the configuration leaves it in 16 bits"

    @cached_property
    def _layers(self) -> dict[str, StoredLayer]:
        return self._find_layers()

    def quantized_parts(self) -> dict[str, Parts]:
        """{layer: the family of its tensors} of all quantised layers, sound or not."""
        return stored_parts(self.files)

    def describe(self, prefix: str) -> StoredLayer:
        """How one layer of :meth:`quantized_parts` is stored.

        Raises:
            CheckpointError: its tensors contradict each other or are incomplete.
        """
        return stored_layer(self.quantization, self.files, prefix, self._said(prefix))

    def _find_layers(self) -> dict[str, StoredLayer]:
        quantization, files = self.quantization, self.files
        layers: dict[str, StoredLayer] = {}
        differences: dict[str, list[str]] = {}
        for prefix in self.quantized_parts():
            layers[prefix] = self.describe(prefix)
            said, found = self._said(prefix), layers[prefix].method
            for what in _differences(said, quantization.tensor_format, found):
                differences.setdefault(what, []).append(prefix)
            if f"{prefix}.weight" in files:
                differences.setdefault("quantised and dense at once", []).append(prefix)
        for prefix in self.dense_layers():
            if self._said(prefix).quantized:
                differences.setdefault("said to be quantised, but dense", []).append(prefix)
        if differences:
            logger.warning(
                "%s: configuration and tensors disagree, the tensors win: %s",
                self.folder.name,
                "; ".join(f"{what}: {some(where, 3)}" for what, where in differences.items()),
            )
        return layers

    def dense_layers(self) -> list[str]:
        """Unquantised layers with a matrix for a weight, other than embeddings and norms."""
        found, quantised = [], self.quantized_parts()
        for name in self.files:
            prefix, _, part = name.rpartition(".")
            if part == "weight" and len(self.files.shape(name)) == 2:
                if prefix not in quantised and not _NO_LAYER.search(_last(prefix)):
                    found.append(prefix)
        return found

    def _said(self, prefix: str) -> LayerScheme:
        """What the configuration says of a layer; unquantised if it contradicts itself."""
        if prefix not in self._schemes:
            try:
                self._schemes[prefix] = self.quantization.get_layer_config(prefix)
            except QuantizationConfigError as error:
                logger.warning("%s; the tensors decide", error)
                self._schemes[prefix] = UNQUANTIZED
        return self._schemes[prefix]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def load_layer(folder: str | os.PathLike[str], prefix: str) -> PackedWeight:
    """One quantised layer of a checkpoint, by its tensor prefix, packed.

    Args:
        folder: a checkpoint folder with safetensors files.
        prefix: for instance ``"model.layers.0.mlp.down_proj"``.

    Raises:
        CheckpointError: no such folder or layer; files are missing, truncated or contradict
            each other.
        QuantizationConfigError: the checkpoint or the layer is quantised in a way that is not
            supported.
    """
    return Checkpoint.open(folder).load_layer(prefix)


def _differences(said: LayerScheme, format: Format, method: LayerMethod) -> list[str]:
    found = method.scheme
    different = []
    if not said.quantized:
        different.append("said to be unquantised, but quantised")
    elif said.bits != found.bits:
        different.append(f"said to have {said.bits} bits, but {found.bits}")
    elif said.group_size != found.group_size and found.group_size != -1:
        different.append(f"said to have group size {said.group_size}, but {found.group_size}")
    if (format == "awq") != (method.format == "awq"):
        different.append(f"said to be packed as {format}, but {method.format}")
    return different
