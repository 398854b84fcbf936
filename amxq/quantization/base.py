"""What all configurations share: guards, and the method that builds one layer."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from amxq.errors import CheckpointError, QuantizationConfigError
from amxq.quantization import unpack
from amxq.quantization.inputs import Inputs, validate
from amxq.quantization.packed import PackedWeight
from amxq.quantization.packing import Format, pack_all
from amxq.quantization.scheme import LayerScheme, is_lm_head_name

logger = logging.getLogger(__name__)

Kind = Literal["linear", "experts"]


@dataclass(frozen=True)
class LayerMethod:
    """How one quantised layer is built: what ``apply_*_quant_layer`` return.

    ``build`` is what amxq's own loader calls. ``kind`` says whether ``prefix`` names one linear
    layer or a module of fused experts, each of which is then built by itself.
    """

    config: QuantizationConfig
    prefix: str
    scheme: LayerScheme
    kind: Kind
    format: Format

    def build(
        self,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        qzeros: torch.Tensor | None,
        g_idx: torch.Tensor | None = None,
        *,
        allow_nonfinite: bool = False,
    ) -> PackedWeight:
        """Pack this layer's checkpoint tensors, as amxq.pack takes them.

        Raises:
            CheckpointError: the tensors do not fit each other or the format; the layer is named.
        """
        return pack_all([self.checked(qweight, scales, qzeros, g_idx, allow_nonfinite)])[0]

    def checked(
        self,
        qweight: torch.Tensor,
        scales: torch.Tensor,
        qzeros: torch.Tensor | None,
        g_idx: torch.Tensor | None,
        allow_nonfinite: bool,
    ) -> Inputs:
        """The same tensors, checked and ready to be packed. Raises as :meth:`build`."""
        format = self.true_format(qzeros, scales.shape[-1]) if scales.dim() else self.format
        if format != self.format:
            self.config.warn_mislabelled_once(self.prefix, stored=7 if format == "gptq" else 8)
        group = self.scheme.group_size
        try:
            return validate(qweight, scales, qzeros, format, group, g_idx, allow_nonfinite)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"layer {self.prefix!r}: {error}") from error

    def true_format(self, qzeros: torch.Tensor | None, columns: int) -> Format:
        """The label, unless a symmetric layer's zeros say that it is wrong."""
        if self.format not in ("gptq", "gptq_v2") or not self.scheme.sym or qzeros is None:
            return self.format
        fits = qzeros.dtype == torch.int32 and qzeros.shape[-1:] == (-(-columns // 8),)
        if not fits or qzeros.dim() < 2 or 0 in qzeros.shape:
            return self.format  # pack says what is wrong
        said = self.format == "gptq"
        minus_one = unpack.symmetric_minus_one(qzeros, columns, minus_one=said)
        return "gptq" if minus_one else "gptq_v2"


class QuantizationConfig(ABC):
    """A checkpoint's quantisation: which layers, how many bits, which packing.

    ``assumed`` maps each key that the file does not give to the default used for it.
    """

    name: ClassVar[str]
    assumed: Mapping[str, Any]
    weight_bits: int
    group_size: int
    sym: bool
    lm_head_quantized: bool
    _warned_mislabelled: bool = False

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """Read the quantization_config of a file.

        Raises:
            QuantizationConfigError: a field is missing, of the wrong type, or not supported.
        """

    @property
    @abstractmethod
    def tensor_format(self) -> Format:
        """The packing of qweight and qzeros: ``"gptq"``, ``"gptq_v2"`` or ``"awq"``."""

    @abstractmethod
    def get_layer_config(
        self, name: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerScheme:
        """How the layer ``name`` is quantised.

        Args:
            name: its dotted path in the model.
            is_lm_head: it is the output projection; true also when its name says so.
            is_fused_moe: it holds all experts of a block.

        Raises:
            QuantizationConfigError: what is fused into this layer disagrees.
        """

    @classmethod
    def get_name(cls) -> str:
        """The quant_method that names this configuration."""
        return cls.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activation dtypes that the layers take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    def check_quantized(self, weight_bits: int) -> bool:
        """Whether so many bits mean a quantised weight."""
        return weight_bits < 16

    def check_cpu_support(self, weight_bits: int) -> None:
        """Refuse what cannot be served here: other bits than 4, or a target not at hand.

        Raises:
            QuantizationConfigError: not 4 bits.
            TargetError: the target asked for does not run on this CPU.
        """
        check_bits(weight_bits)
        check_target(strict=False)

    def check_supported(self) -> None:
        """Refuse a checkpoint that is not 4-bit in the main, whatever the machine.

        Raises:
            QuantizationConfigError: the global bits are not 4.
        """
        check_bits(self.weight_bits)

    def check_loadable(self) -> None:
        """Refuse what would read this checkpoint's weights wrongly, on whatever machine.

        Raises:
            QuantizationConfigError: the global bits are not 4, or a setting is not supported.
        """
        self.check_supported()

    def layer_method(
        self, prefix: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerMethod | None:
        """The method that builds ``prefix``, or None if it is unquantised. No guard is asked."""
        scheme = self.get_layer_config(prefix, is_lm_head=is_lm_head, is_fused_moe=is_fused_moe)
        if not scheme.quantized:
            return None
        kind: Kind = "experts" if is_fused_moe else "linear"
        return LayerMethod(self, prefix, scheme, kind, self.tensor_format)

    def get_quant_method(self, layer: object, prefix: str) -> LayerMethod | None:
        """The method that will build ``layer``, after all guards; None: leave it as it is."""
        method = self._method_of(layer, prefix)
        if method is not None:
            self.check_cpu_support(method.scheme.bits)
        return method

    def _method_of(self, layer: object, prefix: str) -> LayerMethod | None:
        kind = layer_kind(layer)
        if kind is None:
            return None
        return self.layer_method(
            prefix,
            is_lm_head=kind == "lm_head" or is_lm_head_name(prefix),
            is_fused_moe=kind == "experts",
        )

    def warn_mislabelled_once(self, prefix: str, stored: int) -> None:
        """Say, once for a configuration, that symmetric zeros contradict the label."""
        if self._warned_mislabelled:
            return
        self._warned_mislabelled = True
        logger.warning(
            "symmetric checkpoint labelled %s, but its zeros are stored as %d (first seen in "
            "layer %r): read as %s. Correct checkpoint_format or packing_format in its "
            "configuration.",
            "GPTQ v1 (zeros minus one)" if stored == 8 else "GPTQ v2 (zeros as they are)",
            stored,
            prefix,
            "v2" if stored == 8 else "v1",
        )


def check_bits(weight_bits: int) -> None:
    """Only 4-bit weights can be served.

    Raises:
        QuantizationConfigError: another number of bits.
    """
    if weight_bits != 4:
        raise QuantizationConfigError(
            f"amxq supports only 4-bit AWQ/GPTQ checkpoints because it uses the Intel AMX INT4 "
            f"backend, but got {weight_bits}-bit. Quantise the model again with bits=4, or leave "
            f"the layer in 16 bits."
        )


def check_target(*, strict: bool) -> None:
    """The instruction set asked for must be usable; strict: nobody asked means AMX.

    Raises:
        QuantizationConfigError: strict, nobody asked for a target, and there is no usable AMX.
        TargetError: the target asked for does not run here.
    """
    from amxq.runtime import targets

    requested = targets.requested_target()
    if requested is not None and requested != "auto":
        targets.require_runnable(requested)
    # An emulated AMX is available, but is never what nobody's asking would take.
    elif (
        requested is None
        and strict
        and not ("amx" in targets.available_targets() and targets.get_target() == "amx")
    ):
        raise QuantizationConfigError(
            "AutoRound checkpoints run on Intel AMX, which is required here and not usable on this "
            "machine. Generic x86 and AMD CPUs are not served by it. To run on what this CPU has, "
            "ask for a portable target: set AMXQ_TARGET=auto (or avx512_bf16, avx512, avx2), call "
            "amxq.set_target('auto'), or pass --target auto. `amxq doctor` shows what is missing."
        )


def layer_kind(layer: object) -> Literal["linear", "experts", "lm_head"] | None:
    """What a framework's layer object is, told by its class; None: no layer with a weight to pack.

    Frameworks have their own linear classes, so names are looked at. Objects that are not torch
    modules stand for linear layers unless their class is named otherwise.
    """
    names = [c.__name__.lower().replace("_", "") for c in type(layer).__mro__]
    if any("fusedmoe" in n or n.endswith("experts") for n in names):
        return "experts"
    if any("lmhead" in n for n in names):
        return "lm_head"
    if any("linear" in n or "conv1d" in n for n in names):
        return "linear"
    if isinstance(layer, torch.nn.Module) or any("embedding" in n or "norm" in n for n in names):
        return None
    return "linear"


def scheme_of(entry: Mapping[str, Any], base: LayerScheme, where: str) -> LayerScheme:
    """An override of ``base``; fields that are absent or null are inherited.

    Raises:
        QuantizationConfigError: a field of the wrong type, a data type other than integers, or a
            group size that is no multiple of 8.
    """
    from amxq.quantization import fields

    try:
        bits = fields.integer(entry, ["bits"], None)
        group_size = fields.integer(entry, ["group_size"], base.group_size)
        sym = fields.boolean(entry, ["sym"], base.sym)
        data_type = fields.text(entry, ["data_type"], "int")
    except QuantizationConfigError as error:
        raise QuantizationConfigError(f"{where}: {error}") from None
    # Exporters write "float", "fp" or nothing beside 16 bits, and may leave the bits out.
    if data_type in ("float", "fp") and bits is None:
        bits = 16
    scheme = LayerScheme(base.bits if bits is None else bits, group_size, sym)
    if scheme.quantized:
        if data_type != "int":
            raise QuantizationConfigError(
                f"{where} has data_type {data_type!r} at {scheme.bits} bits; expected 'int'; "
                f"quantise this layer to integers or leave it in 16 bits"
            )
        if scheme.bits < 1:
            raise QuantizationConfigError(f"{where} has bits {scheme.bits}; expected 4 or 16")
        fields.check_group_size(scheme.group_size, f"{where}['group_size']")
    return scheme
