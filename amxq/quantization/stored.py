"""How one quantised layer is stored: told by its tensors' names, shapes and dtypes.

Two families are known, both below the layer's name: GPTQ's and AWQ's ``qweight``, ``scales``,
``qzeros``, ``g_idx``, and compressed-tensors' ``weight_packed``, ``weight_scale``,
``weight_zero_point``, ``weight_g_idx``, ``weight_shape``. The latter, transposed, are GPTQ's words
with zeros as they are (v2), and are treated as such from here on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from amxq.errors import CheckpointError
from amxq.quantization.base import LayerMethod, QuantizationConfig
from amxq.quantization.files import TensorFiles
from amxq.quantization.packed import BLOCK, PANEL
from amxq.quantization.packing import Format
from amxq.quantization.scheme import LayerScheme

_KNOWN_BITS = (4, 8, 2, 3)
_AGAIN = "the files are damaged or of another format: download or export the checkpoint again"


class Parts(NamedTuple):
    """The last names of a layer's tensors; ``shape`` is compressed-tensors' own."""

    weight: str
    scales: str
    zeros: str
    g_idx: str
    shape: str | None

    def __str__(self) -> str:
        """The family, for people."""
        return "compressed-tensors" if self.shape else "GPTQ or AWQ"


GPTQ = Parts("qweight", "scales", "qzeros", "g_idx", None)
COMPRESSED = Parts(
    "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
)
FAMILIES = {family.weight: family for family in (GPTQ, COMPRESSED)}


@dataclass(frozen=True)
class StoredLayer:
    """One quantised layer of a checkpoint, as its headers describe it.

    Attributes:
        prefix: its name.
        parts: which family its tensors belong to.
        method: how it is built; bits, group size and symmetry are in ``method.scheme``.
        out_features, in_features: N and K.
        experts: E, or None for one layer.
    """

    prefix: str
    parts: Parts
    method: LayerMethod
    out_features: int
    in_features: int
    experts: int | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight, without its scales."""
        columns, blocks = -(-self.out_features // PANEL) * PANEL, -(-self.in_features // BLOCK)
        return 4 * columns * blocks * (self.experts or 1)

    def tensor_names(self) -> list[str]:
        """The names of all tensors that this layer's weight may consist of."""
        return [f"{self.prefix}.{part}" for part in self.parts if part]

    def true_format(self, files: TensorFiles) -> Format:
        """The method's format, or what the stored zeros of a symmetric GPTQ layer say instead.

        Raises:
            CheckpointError: the zeros cannot be read.
        """
        if self.parts is not GPTQ:
            return self.method.format
        zeros = files.lend(f"{self.prefix}.{self.parts.zeros}")
        return self.method.true_format(zeros, self.out_features)

    def read(
        self, files: TensorFiles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """qweight, scales, zeros and g_idx, oriented as GPTQ or AWQ store them.

        Raises:
            CheckpointError: one cannot be read.
        """
        weight, scales, zeros, g_idx = (
            files.lend(f"{self.prefix}.{part}") if f"{self.prefix}.{part}" in files else None
            for part in self.parts[:4]
        )
        assert weight is not None and scales is not None  # their headers have been seen
        if self.parts is not COMPRESSED:
            return weight, scales, zeros, g_idx
        if g_idx is not None and not g_idx.is_floating_point() and bool((g_idx < 0).any()):
            g_idx = None  # compressed-tensors writes -1 for "in order"
        K, group = self.in_features, self.method.scheme.group_size
        if g_idx is None and K % BLOCK:  # only an order can say that K ends inside a word
            g_idx = torch.arange(K, device="cpu") // (K if group == -1 else group)
        return weight.t(), scales.t(), None if zeros is None else zeros.t(), g_idx


def stored_parts(files: TensorFiles) -> dict[str, Parts]:
    """{layer: the family of its tensors} of all quantised layers, in the files' order."""
    found = {}
    for name in files:
        prefix, _, part = name.rpartition(".")
        if prefix and part in FAMILIES:
            found[prefix] = FAMILIES[part]
    return found


def stored_layer(
    quantization: QuantizationConfig, files: TensorFiles, prefix: str, said: LayerScheme
) -> StoredLayer:
    """Bits, group size and layout from the shapes; symmetry from the configuration.

    Args:
        said: what the configuration says of this layer; it decides where shapes leave a choice.

    Raises:
        CheckpointError: the layer's tensors are incomplete or contradict each other.
    """
    parts = GPTQ if f"{prefix}.{GPTQ.weight}" in files else COMPRESSED
    shapes = _shapes(files, prefix, parts)
    q, s, z = shapes[parts.weight], shapes[parts.scales], shapes.get(parts.zeros)
    N, G = s[-1], s[-2]
    layout: Format = "gptq" if q[-1] == N else "awq"
    fits = q[-1] == (N if layout == "gptq" else None if z is None else z[-1])
    if z is not None:
        fits = fits and z[-2] == G and z[:-2] == q[:-2]
    if not fits or s[:-2] != q[:-2]:
        raise _contradiction(prefix, parts, shapes)
    bits, K = _bits_and_width(files, prefix, parts, shapes, said, layout)
    group = _group_size((said.group_size, quantization.group_size), K, G)
    if group is None:
        group = _group_of_order(files, f"{prefix}.{parts.g_idx}", G)
    if group is None:
        raise CheckpointError(
            f"layer {prefix!r} has {G} groups for K = {K}; expected "
            f"{-(-K // quantization.group_size)} with the configuration's group_size "
            f"{quantization.group_size}, and no other can be told from the shapes; correct "
            f"group_size in the configuration"
        )
    sym = said.sym if said.quantized else quantization.sym
    format = quantization.tensor_format
    if parts is COMPRESSED:
        sym, format = z is None, "gptq_v2"
    elif (layout == "awq") != (format == "awq"):
        format = layout
    method = LayerMethod(quantization, prefix, LayerScheme(bits, group, sym), "linear", format)
    return StoredLayer(prefix, parts, method, N, K, q[0] if len(q) == 3 else None)


def _shapes(files: TensorFiles, prefix: str, parts: Parts) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's weight, scales and zeros, compressed-tensors' transposed."""
    shapes = {}
    for part in parts[:3]:
        name = f"{prefix}.{part}"
        if name not in files:
            if part == parts.zeros and parts is COMPRESSED:
                continue
            raise CheckpointError(
                f"layer {prefix!r} has no tensor {name!r}; its files are incomplete: download or "
                f"export the checkpoint again"
            )
        if part != parts.scales and files.dtype(name) != "I32":
            raise CheckpointError(
                f"{name} is stored as {files.dtype(name)}; expected I32, as {parts} packs it; "
                f"export the checkpoint with 4-bit integers"
            )
        shape = files.shape(name)
        shapes[part] = shape[::-1] if parts is COMPRESSED else shape
    ranks = {len(shape) for shape in shapes.values()}
    if ranks not in ({2}, {3}) or (parts is COMPRESSED and ranks != {2}):
        raise _contradiction(prefix, parts, shapes)
    if any(0 in shape for shape in shapes.values()):
        raise _contradiction(prefix, parts, shapes)
    return shapes


def _bits_and_width(
    files: TensorFiles,
    prefix: str,
    parts: Parts,
    shapes: dict[str, tuple[int, ...]],
    said: LayerScheme,
    layout: Format,
) -> tuple[int, int]:
    """The bits of a weight and K: zeros tell the one, the weight, or weight_shape, the other."""
    rows, N = shapes[parts.weight][-2], shapes[parts.scales][-1]
    zeros = shapes.get(parts.zeros)
    exact = _said_width(files, prefix, parts, N)
    fitting = [
        bits
        for bits in (said.bits, *_KNOWN_BITS)
        if bits in _KNOWN_BITS
        and (zeros is None or _words(N, bits) == zeros[-1])
        and (exact is None or _words(exact, bits) == rows)
    ]
    if not fitting:
        raise _contradiction(prefix, parts, shapes)
    bits = fitting[0]
    if exact is not None:
        return bits, exact
    K = rows * 32 // bits if layout == "gptq" else rows
    g_idx = f"{prefix}.{parts.g_idx}"
    if g_idx in files and layout == "gptq":
        (*_, count) = files.shape(g_idx) or (0,)
        K = count if K - BLOCK < count < K else K
    return bits, K


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _said_width(files: TensorFiles, prefix: str, parts: Parts, N: int) -> int | None:
    """K as compressed-tensors' weight_shape [N, K] says it; None if there is none."""
    name = f"{prefix}.{parts.shape}"
    if parts.shape is None or name not in files:
        return None
    if files.dtype(name) not in ("I64", "I32") or files.shape(name) != (2,):
        raise CheckpointError(
            f"{name} is {files.dtype(name)} {list(files.shape(name))}; expected I64 [2], the "
            f"weight's shape; {_AGAIN}"
        )
    rows, columns = files.lend(name).tolist()
    if rows != N or columns < 1:
        raise CheckpointError(
            f"{name} says [{rows}, {columns}], but the scales have {N} rows; {_AGAIN}"
        )
    return int(columns)


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


def _group_of_order(files: TensorFiles, g_idx: str, G: int) -> int | None:
    """Act order with an unknown group size: all groups but the last are as large as the largest."""
    if g_idx not in files or files.dtype(g_idx) not in ("I32", "I64") or not files.nbytes(g_idx):
        return None
    groups = files.lend(g_idx).flatten().clamp(0, G - 1)
    return int(torch.bincount(groups).max())


def _contradiction(
    prefix: str, parts: Parts, shapes: dict[str, tuple[int, ...]]
) -> CheckpointError:
    if parts is COMPRESSED:
        shapes = {part: shape[::-1] for part, shape in shapes.items()}
        expected = "weight_packed [N, K/8], weight_scale [N, G], weight_zero_point [N/8, G]"
    else:
        expected = (
            "GPTQ (qweight [K/8, N], scales [G, N], qzeros [G, N/8]) or AWQ (qweight [K, N/8], "
            "the others alike)"
        )
    found = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
    return CheckpointError(
        f"layer {prefix!r} has {found}, which do not fit each other; expected {expected}; {_AGAIN}"
    )
