"""AutoRound's quantization_config, in its GPTQ and AWQ packings.

Versions since 0.4.2 are read. The rules, and where other loaders differ, are in docs/design.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amxq.errors import QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.base import (
    LayerMethod,
    QuantizationConfig,
    check_bits,
    check_target,
    scheme_of,
)
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
    has_path,
    is_lm_head_name,
    is_regex,
    reaches,
)

logger = logging.getLogger(__name__)

# What the GPTQ-style fields mean when a file does not give them, and the keys that give them.
_GPTQ_DEFAULTS: dict[str, Any] = {
    "lm_head_quantized": False,
    "desc_act": False,
    "dynamic": {},
    "checkpoint_format": "",
    "true_sequential": False,
    "static_groups": False,
}
_GPTQ_KEYS = {name: (name,) for name in _GPTQ_DEFAULTS} | {
    "lm_head_quantized": ("lm_head", "lm_head_quantized")
}

DEFAULT_PACKING = "auto_round:auto_gptq"

# GPTQ layout whose zeros are stored as they are; the other GPTQ packings store z - 1.
_ZEROS_AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")


@dataclass(eq=False)
class AutoRoundConfig(QuantizationConfig):
    """Configuration of an AutoRound checkpoint; ``from_config`` reads a file's.

    Raises:
        QuantizationConfigError: bits, data_type, packing_format, backend or group_size is not one
            that is understood, or a key of extra_config is no regular expression.
    """

    name: ClassVar[str] = "auto-round"

    SUPPORTED_BITS: ClassVar[tuple[int, ...]] = (2, 3, 4, 8)
    SUPPORTED_DTYPES: ClassVar[tuple[str, ...]] = ("int",)
    SUPPORTED_FORMATS: ClassVar[tuple[str, ...]] = (
        "auto_round:auto_gptq",
        "auto_round:auto_awq",
        "auto_round",
        "auto_round:gptqmodel",
        "auto_round:gptq",
        "auto_round:awq",
        "auto_round:exllamav2",
        "auto_round:gptq:exllamav2",
        "auto_gptq",
        "auto_awq",
        "gptq",
        "awq",
        "auto",
    )
    SUPPORTED_BACKENDS: ClassVar[tuple[str, ...]] = (
        "auto",
        "gptq",
        "gptq:marlin",
        "awq",
        "awq:marlin",
        "marlin",
    )

    weight_bits: int
    group_size: int
    sym: bool = True
    packing_format: str = DEFAULT_PACKING
    block_name_to_quantize: list[str] | str | None = None
    extra_config: dict[str, dict[str, Any]] | None = None
    data_type: str = "int"
    backend: str = "auto"
    lm_head_quantized: bool = False
    desc_act: bool = False
    dynamic: dict[str, Any] | None = None
    checkpoint_format: str = ""
    true_sequential: bool = False
    static_groups: bool = False
    gptq_defaulted_config_keys: tuple[str, ...] = ()
    modules_to_not_convert: list[str] | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    packed_modules_mapping: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict(FUSED_LAYERS)
    )

    def __post_init__(self) -> None:
        _one_of("bits", self.weight_bits, self.SUPPORTED_BITS)
        _one_of("data_type", self.data_type, self.SUPPORTED_DTYPES)
        _one_of("packing_format", self.packing_format, self.SUPPORTED_FORMATS)
        # AutoRound 0.4 kept the packing format under "backend".
        _one_of("backend", self.backend, self.SUPPORTED_BACKENDS + self.SUPPORTED_FORMATS)
        fields.check_group_size(self.group_size, "quantization_config['group_size']")
        self.block_name_to_quantize = fields.names(
            {"block_name_to_quantize": self.block_name_to_quantize}, ["block_name_to_quantize"]
        )
        self.dynamic = self.dynamic or {}
        self._default = LayerScheme(self.weight_bits, self.group_size, self.sym)
        self._extra = self.extra_config or {}
        self._regexes: dict[str, Pattern] = {
            key: Pattern(key, "quantization_config['extra_config']")
            for key in self._extra
            if is_regex(key)
        }
        for key, entry in self._extra.items():
            if entry.get("rotation_config") or entry.get("spinquant_config"):
                raise _rotated(f"extra_config[{fields.shown(key)}]")
            scheme_of(entry, self._default, f"extra_config[{fields.shown(key)}]")
        self._logged_gptq_defaults = False

    def __repr__(self) -> str:
        return (
            f"AutoRoundConfig(weight_bits={self.weight_bits}, group_size={self.group_size}, "
            f"sym={self.sym}, packing_format={self.packing_format!r})"
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AutoRoundConfig:
        """Read the quantization_config of a file.

        Raises:
            QuantizationConfigError: a field is missing, of the wrong type, or of a kind that
                would give wrong weights silently (rotations, quantised activations).
        """
        for key in ("spinquant_config", "rotation_config"):
            if config.get(key):
                raise _rotated(key)
        data_type = fields.text(config, ["data_type"], "int")
        _one_of("data_type", data_type, cls.SUPPORTED_DTYPES)
        act_bits = fields.integer(config, ["act_bits"], 16)
        if act_bits < 16:
            raise QuantizationConfigError(
                f"quantization_config['act_bits'] is {act_bits}; expected 16 or none: only weights "
                f"are read in 4 bits; export with activations left in 16 bits (scheme W4A16)"
            )
        backend = fields.text(config, ["backend", "vllm_backend", "sglang_backend"], "auto")
        old_packing = backend if backend.startswith("auto_round") else DEFAULT_PACKING
        return cls(
            weight_bits=fields.integer(config, ["bits"]),
            group_size=fields.integer(config, ["group_size"]),
            sym=fields.boolean(config, ["sym"], True),
            packing_format=fields.text(config, ["packing_format"], old_packing),
            block_name_to_quantize=fields.names(
                config, ["block_name_to_quantize", "to_quant_block_names", "quant_block_list"]
            ),
            extra_config=fields.mapping(config, ["extra_config"]),
            data_type=data_type,
            backend=backend,
            lm_head_quantized=fields.boolean(config, _GPTQ_KEYS["lm_head_quantized"], False),
            desc_act=fields.boolean(config, ["desc_act"], False),
            dynamic=fields.mapping(config, ["dynamic"]),
            checkpoint_format=fields.text(config, ["checkpoint_format"], ""),
            true_sequential=fields.boolean(config, ["true_sequential"], False),
            static_groups=fields.boolean(config, ["static_groups"], False),
            gptq_defaulted_config_keys=tuple(
                name for name, keys in _GPTQ_KEYS.items() if not any(k in config for k in keys)
            ),
            modules_to_not_convert=fields.names(config, ["modules_to_not_convert"]),
            assumed=fields.assumed(
                config,
                {
                    ("sym",): True,
                    ("packing_format",): old_packing,
                    ("data_type",): "int",
                    **{keys: _GPTQ_DEFAULTS[name] for name, keys in _GPTQ_KEYS.items()},
                },
            ),
        )

    @property
    def tensor_format(self) -> Format:
        """The packing of the tensors, from packing_format, backend and checkpoint_format."""
        said = f"{self.packing_format} {self.backend}"
        if "awq" in self.packing_format or ("awq" in said and "gptq" not in said):
            return "awq"
        as_is = self.packing_format in _ZEROS_AS_THEY_ARE
        return "gptq_v2" if as_is or self.checkpoint_format == "gptq_v2" else "gptq"

    def get_layer_config(
        self, name: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerScheme:
        """How the layer ``name`` is quantised: exact entry, then fused rules, regex, default.

        Raises:
            QuantizationConfigError: what is fused into this layer disagrees.
        """
        check_name(name)
        if name in self._extra:
            return self._resolved(name, True)
        quantized = self._quantized_by_default(name, is_lm_head or is_lm_head_name(name))
        if is_fused_moe:
            sources = self._expert_schemes(name, quantized)
            return agreed(name, sources) if sources else self._resolved(name, quantized)
        siblings = fused_siblings(name, self.packed_modules_mapping)
        # Patterns such as .*v_proj.* hit the fused name qkv_proj by accident: what is said of a
        # sibling counts before what is said of the whole.
        if siblings and (any(map(self._touched, siblings)) or not self._touched(name)):
            return agreed(name, {s: self._resolved(s, quantized) for s in siblings})
        return self._resolved(name, quantized)

    def check_cpu_support(self, weight_bits: int) -> None:
        """Refuse other bits than 4 and, unless another target is asked for, CPUs without AMX.

        Raises:
            QuantizationConfigError: not 4 bits; or no usable AMX and no target asked for.
            TargetError: the target asked for does not run on this CPU.
        """
        check_bits(weight_bits)
        check_target(strict=True)

    def check_gptq_support(self) -> None:
        """Refuse act order, which AutoRound's GPTQ packing does not have.

        Raises:
            QuantizationConfigError: desc_act is set.
        """
        if self.desc_act:
            raise QuantizationConfigError(
                "quantization_config['desc_act'] is True; the AutoRound loader takes "
                "desc_act=False only, as AutoRound's exporter writes no act order. If this is a "
                "GPTQ act-order checkpoint, set quant_method to 'gptq': that method supports it."
            )

    def log_gptq_default_assumptions_once(self) -> None:
        """Name, in one INFO line per object, the GPTQ-style fields that the file did not give."""
        if self._logged_gptq_defaults or not self.gptq_defaulted_config_keys:
            return
        self._logged_gptq_defaults = True
        used = {key: _GPTQ_DEFAULTS[key] for key in self.gptq_defaulted_config_keys}
        logger.info(
            "AutoRound GPTQ config does not specify %s; using defaults %s.",
            ", ".join(used),
            used,
        )

    def get_gptq_config_kwargs(self, weight_bits: int, group_size: int) -> dict[str, Any]:
        """The GPTQ-style settings of a layer, defaults made explicit and logged once.

        Raises:
            QuantizationConfigError: desc_act is set.
        """
        self.log_gptq_default_assumptions_once()
        self.check_gptq_support()
        return {
            "weight_bits": weight_bits,
            "group_size": group_size,
            "lm_head_quantized": self.lm_head_quantized,
            "desc_act": self.desc_act,
            "dynamic": self.dynamic,
            "checkpoint_format": self.checkpoint_format,
            "true_sequential": self.true_sequential,
            "static_groups": self.static_groups,
        }

    def check_loadable(self) -> None:
        """Log the GPTQ-style defaults, if the packing is GPTQ's, and refuse other bits, act order.

        Raises:
            QuantizationConfigError: the global bits are not 4, or desc_act is set.
        """
        super().check_loadable()
        if self.tensor_format != "awq":
            self.log_gptq_default_assumptions_once()
            self.check_gptq_support()

    def apply_gptq_quant_layer(self, layer: object, prefix: str) -> LayerMethod | None:
        """The method that will build ``layer`` in GPTQ packing, or None: leave it unquantised.

        Raises:
            QuantizationConfigError: a guard refuses: bits, target or act order.
            TargetError: the target asked for does not run on this CPU.
        """
        method = self._method_of(layer, prefix)
        if method is None:
            return None
        self.log_gptq_default_assumptions_once()
        self.check_cpu_support(method.scheme.bits)
        self.get_gptq_config_kwargs(method.scheme.bits, method.scheme.group_size)
        format: Format = "gptq" if method.format == "awq" else method.format
        return LayerMethod(self, prefix, method.scheme, method.kind, format)

    def apply_awq_quant_layer(self, layer: object, prefix: str) -> LayerMethod | None:
        """The method that will build ``layer`` in AWQ packing, or None: leave it unquantised.

        Raises:
            QuantizationConfigError: a guard refuses: bits or target.
            TargetError: the target asked for does not run on this CPU.
        """
        method = self._method_of(layer, prefix)
        if method is None:
            return None
        self.check_cpu_support(method.scheme.bits)
        return LayerMethod(self, prefix, method.scheme, method.kind, "awq")

    def get_quant_method(self, layer: object, prefix: str) -> LayerMethod | None:
        """The method that will build ``layer``, by this checkpoint's packing, after all guards."""
        if self.tensor_format == "awq":
            return self.apply_awq_quant_layer(layer, prefix)
        return self.apply_gptq_quant_layer(layer, prefix)

    def _quantized_by_default(self, name: str, is_lm_head: bool) -> bool:
        if any(has_path(name, part) for part in self.modules_to_not_convert or ()):
            return False
        blocks = self.block_name_to_quantize or ()
        if any(reaches(block, name) for block in blocks):
            return True
        return self.lm_head_quantized if is_lm_head else not blocks

    def _entry(self, name: str) -> str | None:
        """The key of extra_config that decides for ``name``: itself, or the first regex."""
        if name in self._extra:
            return name
        return next((key for key, regex in self._regexes.items() if regex.search(name)), None)

    def _touched(self, name: str) -> bool:
        return self._entry(name) is not None

    def _resolved(self, name: str, quantized: bool) -> LayerScheme:
        key = self._entry(name)
        base = self._default if quantized or key == name else UNQUANTIZED
        if key is None:
            return base
        return scheme_of(self._extra[key], base, f"extra_config[{fields.shown(key)}]")

    def _expert_schemes(self, name: str, quantized: bool) -> dict[str, LayerScheme]:
        """What extra_config says of layers below the fused experts ``name``, by where it is said.

        Plain entries are taken as they are: the exporter writes one for every layer.
        """
        plain = {
            key: self._resolved(key, quantized)
            for key in self._extra
            if key not in self._regexes and reaches(name, key)
        }

        def rule(layer: str) -> str | None:
            key = self._entry(layer)
            return key if key in self._regexes else None

        return plain | expert_schemes(
            name, self._regexes, rule, lambda layer: self._resolved(layer, quantized)
        )


def _one_of(field_name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted or isinstance(value, bool):
        raise QuantizationConfigError(
            f"quantization_config[{field_name!r}] is {fields.shown(value)}; expected one of "
            f"{', '.join(map(str, accepted))}; export the model in one of these"
        )


def _rotated(where: str) -> QuantizationConfigError:
    return QuantizationConfigError(
        f"{where} asks for online rotations, which amxq does not apply: the weights would be read "
        f"without error and give wrong text; export the model without rotation"
    )
