"""A quantised checkpoint folder: what is in it, and its layers as packed weights.

The configuration says how layers were meant to be quantised; the tensors say how they are, and
they win: exporters have listed dense layers as quantised and said nothing of quantised ones. Where
the two disagree, one warning for each checkpoint says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.quantization.base import LayerMethod, check_bits
from amxq.quantization.detect import AnyConfig, load_quantization_config, read_json
from amxq.quantization.files import TensorFiles
from amxq.quantization.packed import BLOCK, PackedWeight
from amxq.quantization.packing import Format
from amxq.quantization.scheme import UNQUANTIZED, LayerScheme

logger = logging.getLogger(__name__)

# The tensors of a quantised layer; beside them only the bias is read as it is.
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")

_KNOWN_BITS = (4, 8, 2, 3)


class Checkpoint:
    """A checkpoint folder, opened: headers are read, weights are not.

    Attributes:
        folder: its path.
        files: names, shapes and dtypes of all tensors.
        quantization: AutoRoundConfig, GPTQConfig or AWQConfig.
    """

    def __init__(self, files: TensorFiles, quantization: AnyConfig) -> None:
        self.files = files
        self.folder = files.folder
        self.quantization = quantization

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Open a folder: its quantisation first, then the headers of its files.

        Raises:
            QuantizationConfigError: no quantisation, or one that is not supported.
            CheckpointError: files are missing, damaged, or contradict each other.
        """
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
        return {prefix: method.scheme for prefix, method in self._methods.items()}

    def plain_tensors(self) -> list[str]:
        """Names of all tensors that are not part of a quantised weight: to be read as they are."""
        packed: set[str] = set()
        for prefix in self._methods:
            packed.update(f"{prefix}.{part}" for part in (*_PACKED_PARTS, "weight"))
        return [name for name in self.files if name not in packed]

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        return self.files.read(name)

    def method(self, prefix: str) -> LayerMethod:
        """The method that builds one quantised layer, by what its tensors say.

        Raises:
            CheckpointError: there is no such layer, or it is dense.
        """
        if prefix in self._methods:
            return self._methods[prefix]
        if f"{prefix}.weight" in self.files:
            raise CheckpointError(
                f"layer {prefix!r} is not quantised: {self.why_plain(prefix)}; "
                f"read {prefix + '.weight'!r} instead"
            )
        close = _close(prefix, self._methods)
        raise CheckpointError(
            f"there is no quantised layer {prefix!r} in {str(self.folder)!r}"
            + (f"; did you mean {' or '.join(map(repr, close))}?" if close else "")
        )

    def load_layer(self, prefix: str) -> PackedWeight:
        """One quantised layer, packed.

        Raises:
            CheckpointError: no such layer, or its tensors are damaged.
            QuantizationConfigError: it is not 4-bit, or its settings are not supported.
        """
        method = self.method(prefix)
        try:
            check_bits(method.scheme.bits)
        except QuantizationConfigError as error:
            raise QuantizationConfigError(f"layer {prefix!r}: {error}") from None
        self.quantization.check_loadable()
        g_idx = f"{prefix}.g_idx"
        return method.build(
            self.read(f"{prefix}.qweight"),
            self.read(f"{prefix}.scales"),
            self.read(f"{prefix}.qzeros"),
            self.read(g_idx) if g_idx in self.files else None,
        )

    def why_plain(self, prefix: str) -> str:
        """Why a layer is not quantised, in a few words."""
        try:
            scheme = self.quantization.get_layer_config(prefix)
        except QuantizationConfigError as error:
            return str(error)
        if scheme.quantized:
            return f"dense in the files, though the configuration says {scheme.bits} bits"
        return "the configuration leaves it in 16 bits"

    @cached_property
    def _methods(self) -> dict[str, LayerMethod]:
        quantization, files = self.quantization, self.files
        methods: dict[str, LayerMethod] = {}
        differences: dict[str, list[str]] = {}
        for name in files:
            prefix, _, part = name.rpartition(".")
            if part == "qweight" and prefix:
                said = self._said(prefix)
                methods[prefix] = _method_from_tensors(quantization, files, prefix, said)
                for what in _differences(said, quantization.tensor_format, methods[prefix]):
                    differences.setdefault(what, []).append(prefix)
                if f"{prefix}.weight" in files:
                    differences.setdefault("quantised and dense at once", []).append(prefix)
        for name in files:
            prefix, _, part = name.rpartition(".")
            if part == "weight" and prefix not in methods and self._looks_quantizable(prefix):
                differences.setdefault("said to be quantised, but dense", []).append(prefix)
        if differences:
            logger.warning(
                "%s: configuration and tensors disagree, the tensors win: %s",
                self.folder.name,
                "; ".join(f"{what}: {_listed(where)}" for what, where in differences.items()),
            )
        return methods

    def _said(self, prefix: str) -> LayerScheme:
        """What the configuration says of a layer; unquantised if it contradicts itself."""
        try:
            return self.quantization.get_layer_config(prefix)
        except QuantizationConfigError as error:
            logger.warning("%s; the tensors decide", error)
            return UNQUANTIZED

    def _looks_quantizable(self, prefix: str) -> bool:
        last = prefix.rpartition(".")[2]
        if "embed" in last or "norm" in last or len(self.files.shape(f"{prefix}.weight")) != 2:
            return False
        return self._said(prefix).quantized


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


def _method_from_tensors(
    quantization: AnyConfig, files: TensorFiles, prefix: str, said: LayerScheme
) -> LayerMethod:
    """Bits, group size and layout from the shapes; symmetry from the configuration."""
    shapes = {}
    for part in ("qweight", "scales", "qzeros"):
        if f"{prefix}.{part}" not in files:
            raise CheckpointError(
                f"layer {prefix!r} has no tensor {prefix + '.' + part!r}; its files are "
                f"incomplete: download or export the checkpoint again"
            )
        shapes[part] = files.shape(f"{prefix}.{part}")
    q, s, z = shapes["qweight"], shapes["scales"], shapes["qzeros"]
    for part in ("qweight", "qzeros"):
        dtype = files.dtype(f"{prefix}.{part}")
        if dtype != "I32":
            raise CheckpointError(
                f"{prefix}.{part} is stored as {dtype}; expected I32, as GPTQ and AWQ (gemm) pack "
                f"it; export the checkpoint in one of these"
            )
    if not (len(q) == len(s) == len(z) and len(q) in (2, 3)) or 0 in (*q, *s, *z):
        raise _contradiction(prefix, shapes)
    N, G = s[-1], s[-2]
    expected = [b for b in _KNOWN_BITS if -(-N * b // 32) == z[-1]]
    layout: Format
    if q[-1] == N:
        layout = "gptq"
    elif q[-1] == z[-1]:
        layout = "awq"
    else:
        raise _contradiction(prefix, shapes)
    if not expected or z[-2] != G or len({t[:-2] for t in (q, s, z)}) != 1:
        raise _contradiction(prefix, shapes)
    bits = said.bits if said.bits in expected else expected[0]
    K = q[-2] * 32 // bits if layout == "gptq" else q[-2]
    g_idx = f"{prefix}.g_idx"
    if g_idx in files and layout == "gptq":
        (*_, count) = files.shape(g_idx) or (0,)
        K = count if K - 8 < count < K else K
    group = _group_size((said.group_size, quantization.group_size), K, G)
    if group is None and g_idx in files and files.dtype(g_idx) in ("I32", "I64"):
        # Act order with an unknown group size: all groups but the last are as large as the largest.
        groups = files.read(g_idx).flatten().clamp(0, G - 1)
        group = int(torch.bincount(groups).max())
    if group is None:
        raise CheckpointError(
            f"layer {prefix!r} has {G} groups for K = {K}; expected "
            f"{-(-K // quantization.group_size)} with the configuration's group_size "
            f"{quantization.group_size}, and no other can be told from the shapes; correct "
            f"group_size in the configuration"
        )
    sym = said.sym if said.quantized else quantization.sym
    format = quantization.tensor_format
    if (layout == "awq") != (format == "awq"):
        format = layout
    return LayerMethod(quantization, prefix, LayerScheme(bits, group, sym), "linear", format)


def _group_size(said: Iterable[int], K: int, G: int) -> int | None:
    """The first group size said that makes G groups of K, else K / G where that is sensible."""
    for group in said:
        if group == -1 and G == 1:
            return -1
        if group > 0 and -(-K // group) == G:
            return group
    if G == 1:
        return -1
    return K // G if K % (G * BLOCK) == 0 else None


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


def _contradiction(prefix: str, shapes: dict[str, tuple[int, ...]]) -> CheckpointError:
    found = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
    return CheckpointError(
        f"layer {prefix!r} has {found}, which do not fit each other; expected GPTQ (qweight "
        f"[K/8, N], scales [G, N], qzeros [G, N/8]) or AWQ (qweight [K, N/8], the others alike); "
        f"the files are damaged or of another format: download or export the checkpoint again"
    )


def _close(prefix: str, names: Iterable[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(prefix, list(names), n=2)


def _listed(names: list[str], most: int = 3) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
