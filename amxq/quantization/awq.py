"""The quantization_config of AWQ checkpoints in GEMM layout: AutoAWQ, GPTQModel, AutoRound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amxq.errors import QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.base import QuantizationConfig
from amxq.quantization.packing import Format
from amxq.quantization.scheme import (
    FUSED_LAYERS,
    UNQUANTIZED,
    LayerScheme,
    agreed,
    check_name,
    fused_siblings,
    has_path,
    reaches,
)

# exllama and ipex are choices of a run-time backend over GEMM tensors.
_GEMM_VERSIONS = ("gemm", "exllama", "ipex")


# What the fields mean that a file may leave out, for the record.
_DEFAULTS: dict[tuple[str, ...], Any] = {
    ("zero_point",): True,
    ("version", "checkpoint_format", "format"): "gemm",
}


@dataclass(eq=False)
class AWQConfig(QuantizationConfig):
    """Configuration of an AWQ checkpoint; ``from_config`` reads a file's.

    Raises:
        QuantizationConfigError: another layout than GEMM, or a group size not understood.
    """

    name: ClassVar[str] = "awq"

    weight_bits: int
    group_size: int
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None
    lm_head_quantized: bool = False
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.version.lower() not in _GEMM_VERSIONS:
            raise QuantizationConfigError(
                f"AWQ version is {fields.shown(self.version)}, whose tensors have another layout; "
                f"expected {', '.join(_GEMM_VERSIONS)}; export the model with version gemm"
            )
        fields.check_group_size(self.group_size, "quantization_config['group_size']")
        self.sym = not self.zero_point

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AWQConfig:
        """Read the quantization_config of a file.

        Raises:
            QuantizationConfigError: a field is missing or of the wrong type, or the layout is
                not GEMM's.
        """
        word = fields.text(config, ["pack_dtype"], "int32")
        if word != "int32":
            raise QuantizationConfigError(
                f"quantization_config['pack_dtype'] is {fields.shown(word)}; expected 'int32'; "
                f"export the model with pack_dtype int32"
            )
        return cls(
            version=fields.text(config, ["version", "checkpoint_format", "format"], "gemm"),
            weight_bits=fields.integer(config, ["w_bit", "bits"]),
            group_size=fields.integer(config, ["q_group_size", "group_size"]),
            zero_point=fields.boolean(config, ["zero_point"], True),
            modules_to_not_convert=fields.names(config, ["modules_to_not_convert"]),
            lm_head_quantized=fields.boolean(config, ["lm_head", "lm_head_quantized"], False),
            assumed=fields.assumed(config, _DEFAULTS),
        )

    @property
    def tensor_format(self) -> Format:
        """``"awq"``."""
        return "awq"

    def get_layer_config(
        self, name: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerScheme:
        """How the layer ``name`` is quantised.

        Raises:
            QuantizationConfigError: what is fused into this layer disagrees.
        """
        check_name(name)
        is_lm_head = is_lm_head or name.rpartition(".")[2] == "lm_head"
        if self._skipped(name) or (is_lm_head and not self.lm_head_quantized):
            return UNQUANTIZED
        quantized = LayerScheme(self.weight_bits, self.group_size, self.sym)
        if is_fused_moe:
            below = [s for s in self.modules_to_not_convert or () if reaches(name, s)]
            if below:
                rest = {f"{name} (everything else in it)": quantized}
                return agreed(name, dict.fromkeys(below, UNQUANTIZED) | rest)
            return quantized
        siblings = fused_siblings(name, FUSED_LAYERS)
        if siblings:
            return agreed(
                name, {s: UNQUANTIZED if self._skipped(s) else quantized for s in siblings}
            )
        return quantized

    def _skipped(self, name: str) -> bool:
        return any(has_path(name, part) for part in self.modules_to_not_convert or ())
