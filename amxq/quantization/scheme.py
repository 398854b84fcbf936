"""How one layer is quantised, and the rules by which names in a configuration match layers.

Exporters and loaders disagree on small things here, and each disagreement has cost somebody
an accuracy of zero. The rules, shared by AutoRound, GPTQ and AWQ:

* a name reaches what lies below it at a dot: ``model.layers.1`` does not reach
  ``model.layers.10``, and ``mlp.gate`` does not reach ``mlp.gate_up_proj``;
* a key is a regular expression if it has one of ``*+?^$()[]{}|\\``, and one that does not
  compile is an error that quotes it (``patterns.py``);
* a fused layer (``qkv_proj``, ``gate_up_proj``) is recognised as a whole path component, and its
  siblings must agree;
* whatever the group sizes, layers of 16 bits or more are all the same: unquantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from amxq.errors import DTypeError, QuantizationConfigError

REGEX_CHARACTERS = frozenset("*+?^$()[]{}|\\")

FUSED_LAYERS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

# Names of one expert's layers in files: the same three matrices under two customs.
_EXPERT_LAYERS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
_PROBED_EXPERTS = 16


class LayerScheme(NamedTuple):
    """How one layer's weight is stored. 16 bits or more mean that it is not quantised."""

    bits: int
    group_size: int
    sym: bool

    @property
    def quantized(self) -> bool:
        """Whether the weight is stored in fewer than 16 bits."""
        return self.bits < 16


UNQUANTIZED = LayerScheme(16, -1, True)


def is_regex(key: str) -> bool:
    """Whether a configuration key is a regular expression and not a plain name."""
    return not REGEX_CHARACTERS.isdisjoint(key)


def reaches(prefix: str, name: str) -> bool:
    """Whether ``name`` is ``prefix`` or lies below it, at a dot boundary."""
    prefix = prefix.rstrip(".")
    return name == prefix or name.startswith(prefix + ".")


def has_path(name: str, part: str) -> bool:
    """Whether the components of ``part`` follow each other somewhere in ``name``'s."""
    wanted = part.strip(".")
    return bool(wanted) and f".{wanted}." in f".{name}."


def is_lm_head_name(name: str) -> bool:
    """Whether the last component of ``name`` says that this is the output projection."""
    return name.rpartition(".")[2] == "lm_head"


def check_name(name: object) -> None:
    """Raises DTypeError for what is no layer's name."""
    if not isinstance(name, str):
        raise DTypeError(f"the layer's name is a {type(name).__name__}; expected its dotted path")


def is_expert_name(name: str) -> bool:
    """Whether ``name`` lies below a module of experts."""
    return has_path(name, "experts")


def fused_siblings(name: str, fused: Mapping[str, Iterable[str]]) -> list[str]:
    """The layers that were fused into ``name``, or [] if it is not a fused layer.

    >>> fused_siblings("model.layers.0.mlp.gate_up_proj", FUSED_LAYERS)
    ['model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj']
    """
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        if parts[at] in fused:
            return [".".join((*parts[:at], s, *parts[at + 1 :])) for s in fused[parts[at]]]
    return []


def expert_names(name: str, patterns: Iterable[str]) -> Iterator[list[str]]:
    """Names that layers below the fused experts ``name`` may have, one list for each expert.

    A configuration does not say how many experts there are: the first ones are named, and
    those whose numbers occur in ``patterns``.
    """
    numbers = set(range(_PROBED_EXPERTS))
    for pattern in patterns:
        numbers.update(int(digits) for digits in re.findall(r"\d{1,4}", pattern))
    for whole in (name, f"{name}.gate_up_proj", f"{name}.down_proj"):
        yield [whole]
    for layers in _EXPERT_LAYERS:
        for number in sorted(numbers):
            yield [f"{name}.{number}.{layer}" for layer in layers]


def expert_schemes(
    name: str,
    patterns: Iterable[str],
    rule: Callable[[str], str | None],
    resolved: Callable[[str], LayerScheme],
) -> dict[str, LayerScheme]:
    """What patterns say of the layers of the fused experts ``name``, by where it is said.

    Of an expert that a pattern hits, the other layers count too, and so does an expert that none
    hits while others are hit: a pattern that quantises ``experts.3`` or ``down_proj`` alone
    differently is noticed.

    Args:
        patterns: the texts of all patterns.
        rule: the pattern or entry that speaks of a layer, or None.
        resolved: the scheme of a layer.
    """
    patterns = list(patterns)
    sources: dict[str, LayerScheme] = {}
    untouched: dict[tuple[str, ...], str] = {}
    touched = set()
    for expert in expert_names(name, patterns) if patterns else ():
        rules = [rule(layer) for layer in expert]
        custom = tuple(layer.rpartition(".")[2] for layer in expert)
        if not any(rules):
            untouched.setdefault(custom, expert[0])
            continue
        touched.add(custom)
        for layer, key in zip(expert, rules, strict=True):
            sources.setdefault(key or f"{layer} (nothing said)", resolved(layer))
    for custom in touched & set(untouched):
        sources[f"{untouched[custom]} (nothing said)"] = resolved(untouched[custom])
    return sources


def agreed(name: str, schemes: Mapping[str, LayerScheme]) -> LayerScheme:
    """The one scheme of all ``schemes``, which maps what each came from to it.

    Raises:
        QuantizationConfigError: they disagree; the layer and both sides are named.
    """
    sides: dict[LayerScheme, list[str]] = {}
    for source, scheme in schemes.items():
        sides.setdefault(scheme if scheme.quantized else UNQUANTIZED, []).append(source)
    if len(sides) == 1:
        return next(iter(sides))
    said = "; ".join(f"{_described(scheme)}: {_listed(names)}" for scheme, names in sides.items())
    raise QuantizationConfigError(
        f"fused layer {name!r} needs one scheme for all that it holds, but they disagree: {said}; "
        f"give them the same bits, group_size and sym, or load them as separate layers"
    )


def _described(scheme: LayerScheme) -> str:
    if not scheme.quantized:
        return "unquantised"
    kind = "sym" if scheme.sym else "asym"
    return f"{scheme.bits} bits, group size {scheme.group_size}, {kind}"


def _listed(names: list[str], most: int = 4) -> str:
    text = ", ".join(repr(n) for n in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
