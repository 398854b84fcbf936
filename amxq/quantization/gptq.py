"""The quantization_config of GPTQ checkpoints: AutoGPTQ, GPTQModel, Optimum, AutoRound's export.

Act order, zeros of both versions and ``dynamic`` rules are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amxq.errors import QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.base import QuantizationConfig, scheme_of
from amxq.quantization.packing import Format
from amxq.quantization.patterns import Pattern
from amxq.quantization.scheme import (
    FUSED_LAYERS,
    UNQUANTIZED,
    LayerScheme,
    agreed,
    check_name,
    expert_schemes,
    fused_siblings,
    is_lm_head_name,
    reaches,
)

# GPTQModel's planar format is, at 4 bits, word for word gptq_v2.
_FORMATS = {"": "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2", "gptq_p": "gptq_v2"}


# What the fields mean that a file may leave out, for the record; g_idx decides on act order.
_DEFAULTS: dict[tuple[str, ...], Any] = {
    ("desc_act",): False,
    ("sym",): True,
    ("lm_head", "lm_head_quantized"): False,
    ("checkpoint_format", "format"): "gptq",
}


@dataclass(eq=False)
class GPTQConfig(QuantizationConfig):
    """Configuration of a GPTQ checkpoint; ``from_config`` reads a file's.

    ``dynamic`` maps regular expressions, matched from the start of a layer's name, the first
    match in order counting, to overrides: ``-:pattern`` leaves the layer unquantised,
    ``+:pattern`` or a bare pattern changes bits, group_size, desc_act or sym.

    Raises:
        QuantizationConfigError: the format or group size is not one that is understood, or a
            pattern does not compile.
    """

    name: ClassVar[str] = "gptq"

    weight_bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = True
    lm_head_quantized: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None
    checkpoint_format: str = ""
    true_sequential: bool = False
    static_groups: bool = False
    block_name_to_quantize: list[str] | None = None
    meta: Any = None
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_format(self.checkpoint_format, self.weight_bits)
        fields.check_group_size(self.group_size, "quantization_config['group_size']")
        self.dynamic = self.dynamic or {}
        self._default = LayerScheme(self.weight_bits, self.group_size, self.sym)
        self._rules: list[tuple[str, Pattern, bool]] = []
        for key, entry in self.dynamic.items():
            pattern = key[2:] if key.startswith(("-:", "+:")) else key
            skip = key.startswith("-:")
            self._rules.append((key, Pattern(pattern, "quantization_config['dynamic']"), skip))
            if not skip:
                scheme_of(entry, self._default, f"dynamic[{fields.shown(key)}]")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPTQConfig:
        """Read the quantization_config of a file.

        Raises:
            QuantizationConfigError: a field is missing or of the wrong type, or the tensors are
                of a layout that is not GPTQ's (Marlin, other word sizes).
        """
        if config.get("is_marlin_format"):
            raise QuantizationConfigError(
                "quantization_config['is_marlin_format'] is true: the weights are permuted for "
                "Marlin kernels and cannot be read as GPTQ; export the model with format gptq"
            )
        word = fields.text(config, ["pack_dtype"], "int32")
        if word != "int32":
            raise QuantizationConfigError(
                f"quantization_config['pack_dtype'] is {fields.shown(word)}; expected 'int32'; "
                f"export the model with pack_dtype int32"
            )
        said = {
            key: fields.text(config, [key]).lower()
            for key in ("checkpoint_format", "format")
            if fields.present(config, [key])
        }
        if len(set(said.values())) > 1:
            raise QuantizationConfigError(
                f"quantization_config contradicts itself: {said}; expected one format under both "
                f"keys; correct the file"
            )
        weight_bits = fields.integer(config, ["bits"])
        checkpoint_format = next(iter(said.values()), "")
        _check_format(checkpoint_format, weight_bits)
        return cls(
            weight_bits=weight_bits,
            checkpoint_format=checkpoint_format,
            group_size=fields.integer(config, ["group_size"]),
            desc_act=fields.boolean(config, ["desc_act"], False),
            sym=fields.boolean(config, ["sym"], True),
            lm_head_quantized=fields.boolean(config, ["lm_head", "lm_head_quantized"], False),
            dynamic=fields.mapping(config, ["dynamic"]),
            true_sequential=fields.boolean(config, ["true_sequential"], False),
            static_groups=fields.boolean(config, ["static_groups"], False),
            block_name_to_quantize=fields.names(
                config, ["block_name_to_quantize", "to_quant_block_names"]
            ),
            meta=config.get("meta"),
            assumed=fields.assumed(config, _DEFAULTS),
        )

    @property
    def tensor_format(self) -> Format:
        """``"gptq_v2"`` if the zeros are stored as they are, else ``"gptq"``."""
        return "gptq_v2" if _FORMATS[self.checkpoint_format] == "gptq_v2" else "gptq"

    def get_layer_config(
        self, name: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerScheme:
        """How the layer ``name`` is quantised: first matching dynamic rule, else the default.

        Raises:
            QuantizationConfigError: what is fused into this layer disagrees.
        """
        check_name(name)
        is_lm_head = is_lm_head or is_lm_head_name(name)
        if is_fused_moe:
            sources = expert_schemes(name, self.dynamic or (), self._key, self._resolved)
            return agreed(name, sources) if sources else self._resolved(name, is_lm_head)
        siblings = fused_siblings(name, FUSED_LAYERS)
        if siblings and (any(map(self._rule, siblings)) or self._rule(name) is None):
            return agreed(name, {s: self._resolved(s, is_lm_head) for s in siblings})
        return self._resolved(name, is_lm_head)

    def _rule(self, name: str) -> tuple[str, bool] | None:
        """The key of the first rule that matches ``name``, and whether it skips."""
        for key, regex, skip in self._rules:
            if regex.match(name):
                return key, skip
        return None

    def _key(self, name: str) -> str | None:
        rule = self._rule(name)
        return rule[0] if rule else None

    def _resolved(self, name: str, is_lm_head: bool = False) -> LayerScheme:
        blocks = self.block_name_to_quantize or ()
        if is_lm_head:
            base = self._default if self.lm_head_quantized else UNQUANTIZED
        else:
            inside = not blocks or any(reaches(block, name) for block in blocks)
            base = self._default if inside else UNQUANTIZED
        rule = self._rule(name)
        if rule is None:
            return base
        key, skip = rule
        if skip:
            return UNQUANTIZED
        return scheme_of((self.dynamic or {})[key], self._default, f"dynamic[{fields.shown(key)}]")


def _check_format(checkpoint_format: str, weight_bits: int) -> None:
    known = checkpoint_format in _FORMATS
    if not known or (checkpoint_format == "gptq_p" and weight_bits != 4):
        raise QuantizationConfigError(
            f"GPTQ checkpoint_format is {fields.shown(checkpoint_format)} at {weight_bits} bits; "
            f"expected gptq or gptq_v2 (gptq_p with 4 bits); export the model in one of these"
        )
