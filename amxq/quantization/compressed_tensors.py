"""The quantization_config of compressed-tensors: llm-compressor, AutoRound's llm_compressor export.

Read is what ``format: pack-quantized`` stores for weights of integers: W4A16, one scale for a group
or for a channel, with or without zero points, in one or several ``config_groups``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from amxq.errors import QuantizationConfigError
from amxq.quantization import fields
from amxq.quantization.base import QuantizationConfig
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
    reaches,
)

_FORMAT = "pack-quantized"
_ADVICE = "export the model as W4A16 in format pack-quantized"

# "weight" and "dynamic" are newer names of static and group.
_ACT_ORDERS = {None: False, "static": False, "weight": False, "group": True, "dynamic": True}

_REGEX = "re:"


class Group(NamedTuple):
    """One of the config_groups: what it does to the layers that it targets."""

    name: str
    scheme: LayerScheme
    act_order: bool
    targets: Targets


class Targets:
    """A list of targets: exact names, ``re:`` patterns from the start, and classes of layers.

    What is looked up here are linear layers, so the class ``Linear`` holds for every name.

    Raises:
        QuantizationConfigError: the list holds something else, or a pattern does not compile.
    """

    def __init__(self, targets: list[str], where: str) -> None:
        self.names = frozenset(targets)
        self.patterns = [
            Pattern(target[len(_REGEX) :], where) for target in targets if target.startswith(_REGEX)
        ]
        self.linear = "Linear" in targets

    def names_it(self, name: str) -> bool:
        """Whether `name` is one of the targets."""
        return name in self.names

    def matches_it(self, name: str) -> bool:
        """Whether a pattern matches `name`."""
        return any(pattern.match(name) for pattern in self.patterns)


@dataclass(eq=False)
class CompressedTensorsConfig(QuantizationConfig):
    """Configuration of a compressed-tensors checkpoint; ``from_config`` reads a file's.

    A layer is unquantised if ``ignore`` names or matches it; else the group that names it counts,
    else the first whose pattern matches it, else the first that targets all linear layers.
    """

    name: ClassVar[str] = "compressed-tensors"

    groups: tuple[Group, ...]
    ignore: Targets
    assumed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The checkpoint as a whole is a 4-bit one if any part is: the others are refused by name.
        main = min(self.groups, key=lambda group: group.scheme.bits != 4).scheme
        self.weight_bits, self.group_size, self.sym = main
        self.lm_head_quantized = self.get_layer_config("lm_head").quantized

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensorsConfig:
        """Read the quantization_config of a file.

        Raises:
            QuantizationConfigError: there are no groups, or one quantises activations, to floats,
                in another format or by another strategy than groups and channels; or weights are
                sparse or transformed.
        """
        whole = fields.text(config, ["format"], _FORMAT)
        if whole not in (_FORMAT, "mixed-precision"):
            raise QuantizationConfigError(
                f"compressed-tensors format is {whole!r}; expected {_FORMAT!r}; {_ADVICE}"
            )
        if config.get("transform_config"):
            raise QuantizationConfigError(
                "transform_config asks for online transforms, which amxq does not apply: the "
                "weights would be read without error and give wrong text; export the model "
                "without them"
            )
        sparse = fields.text(fields.table(config, ["sparsity_config"]), ["format"], "dense")
        if sparse != "dense":
            raise QuantizationConfigError(
                f"sparsity_config['format'] is {sparse!r}; expected 'dense'; export the model "
                f"without compressing zeros"
            )
        said = fields.mapping(config, ["config_groups"])
        if not said:
            raise QuantizationConfigError(
                f"compressed-tensors configuration has no config_groups; it has "
                f"{fields.keys(config)}; without them nothing says how layers are quantised: "
                f"{_ADVICE}"
            )
        groups = tuple(_group(name, entry, whole) for name, entry in said.items())
        ignore = Targets(fields.names(config, ["ignore"], commas=False) or [], "ignore")
        assumed = {
            f"{name}.targets": ["Linear"]
            for name, entry in said.items()
            if entry.get("targets") is None
        }
        return cls(groups, ignore, assumed)

    @property
    def tensor_format(self) -> Format:
        """``"gptq_v2"``: transposed, the tensors are GPTQ's with zeros as they are."""
        return "gptq_v2"

    def get_layer_config(
        self, name: str, *, is_lm_head: bool = False, is_fused_moe: bool = False
    ) -> LayerScheme:
        """How the layer ``name`` is quantised.

        Raises:
            QuantizationConfigError: what is fused into this layer disagrees.
        """
        check_name(name)
        if is_fused_moe:
            sources = self._expert_schemes(name)
            return agreed(name, sources) if sources else self._resolved(name)
        siblings = fused_siblings(name, FUSED_LAYERS)
        if siblings and (any(map(self._touched, siblings)) or not self._touched(name)):
            return agreed(name, {s: self._resolved(s) for s in siblings})
        return self._resolved(name)

    def group_of(self, name: str) -> Group | None:
        """The group that quantises ``name``, or None."""
        if self.ignore.names_it(name) or self.ignore.matches_it(name) or self.ignore.linear:
            return None
        for finds in (Targets.names_it, Targets.matches_it):
            for group in self.groups:
                if finds(group.targets, name):
                    return group
        return next((group for group in self.groups if group.targets.linear), None)

    def _resolved(self, name: str) -> LayerScheme:
        group = self.group_of(name)
        return UNQUANTIZED if group is None else group.scheme

    def _lists(self) -> list[Targets]:
        return [self.ignore, *(group.targets for group in self.groups)]

    def _touched(self, name: str) -> bool:
        """Whether anything speaks of ``name`` itself, and not of all linear layers."""
        return self._rule(name) is not None

    def _rule(self, name: str) -> str | None:
        if any(said.names_it(name) for said in self._lists()):
            return name
        return next(
            (p.text for said in self._lists() for p in said.patterns if p.match(name)), None
        )

    def _expert_schemes(self, name: str) -> dict[str, LayerScheme]:
        below = {n for listed in self._lists() for n in listed.names if reaches(name, n)}
        patterns = [pattern.text for said in self._lists() for pattern in said.patterns]
        said = expert_schemes(name, patterns, self._rule, self._resolved)
        return said | {layer: self._resolved(layer) for layer in sorted(below)}


def _group(name: str, entry: Mapping[str, Any], whole: str) -> Group:
    where = f"config_groups[{name!r}]"
    targets = fields.names(entry, ["targets"], commas=False) or ["Linear"]
    what = f"{where}, which targets {', '.join(targets)[:200]},"
    format = fields.text(entry, ["format"], _FORMAT if whole == _FORMAT else None)
    weights = fields.table(entry, ["weights"])
    if format != _FORMAT:
        raise QuantizationConfigError(f"{what} has format {format!r}; {_ADVICE}")
    for key in ("input_activations", "output_activations"):
        if entry.get(key):
            bits = fields.table(entry, [key]).get("num_bits")
            raise QuantizationConfigError(
                f"{what} has {key} of {bits!r} bits; expected none: only weights are read in "
                f"4 bits; {_ADVICE}"
            )
    kind = fields.text(weights, ["type"], "int")
    bits = fields.integer(weights, ["num_bits"])
    strategy = fields.text(weights, ["strategy"], "group" if weights.get("group_size") else None)
    if kind != "int" or strategy not in ("group", "channel") or not 1 < bits < 16:
        raise QuantizationConfigError(
            f"{what} has weights of type {kind!r}, {bits} bits, strategy {strategy!r}; expected "
            f"'int', 4, and 'group' or 'channel'; {_ADVICE}"
        )
    size = -1 if strategy == "channel" else fields.integer(weights, ["group_size"])
    fields.check_group_size(size, f"{where}['weights']['group_size']")
    sym = fields.boolean(weights, ["symmetric"], True)
    order = fields.text(weights, ["actorder"], None)
    if order not in _ACT_ORDERS:
        raise QuantizationConfigError(
            f"{what} has actorder {order!r}; expected one of {', '.join(map(str, _ACT_ORDERS))}"
        )
    scheme = LayerScheme(bits, size, sym)
    return Group(name, scheme, _ACT_ORDERS[order], Targets(targets, f"{where}['targets']"))
