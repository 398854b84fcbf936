"""Reading single fields of a quantisation configuration: aliases, defaults, types.

``null`` counts as absent everywhere: exporters write it for what they did not set. Values are shown
shortened in messages, because a hostile file's may be endless or contain themselves.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from amxq.errors import QuantizationConfigError

Config = Mapping[str, Any]

_MISSING = object()
_MAX_DEPTH = 8

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120


def shown(value: object) -> str:
    """A value for a message, shortened."""
    try:
        return _repr.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, for one
        return f"a {type(value).__name__} that cannot be shown"


def keys(config: Config) -> str:
    """The keys that a configuration has, for a message."""
    names = sorted(map(str, config))
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(name[:80] for name in names[:40]) + more


def present(config: Config, keys: Sequence[str]) -> bool:
    """Whether one of the keys is there with a value."""
    return any(config.get(key) is not None for key in keys)


def assumed(config: Config, defaults: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """{first name of a field: its default} for all fields of which no name is there."""
    return {
        aliases[0]: value for aliases, value in defaults.items() if not present(config, aliases)
    }


def raw(config: Config, aliases: Sequence[str], default: object = _MISSING) -> Any:
    """The first of ``aliases`` that has a value.

    Raises:
        QuantizationConfigError: none has, and there is no default.
    """
    for key in aliases:
        if config.get(key) is not None:
            return config[key]
    if default is _MISSING:
        wanted = " or ".join(repr(k) for k in aliases)
        raise QuantizationConfigError(
            f"quantization_config has no {wanted}; it has {keys(config)}; "
            f"add {wanted} as the exporter used it"
        )
    return default


def integer(config: Config, aliases: Sequence[str], default: object = _MISSING) -> Any:
    """A whole number of 32 bits; 4.0 and "4" are refused, because no exporter writes them."""
    value = raw(config, aliases, default)
    if value is not default and (type(value) is not int or abs(value) >= 1 << 31):
        raise _wrong(aliases, value, "a whole number")
    return value


def boolean(config: Config, aliases: Sequence[str], default: object = _MISSING) -> Any:
    """true or false."""
    value = raw(config, aliases, default)
    if value is not default and not isinstance(value, bool):
        raise _wrong(aliases, value, "true or false")
    return value


def text(config: Config, aliases: Sequence[str], default: object = _MISSING) -> Any:
    """A string."""
    value = raw(config, aliases, default)
    if value is not default and not isinstance(value, str):
        raise _wrong(aliases, value, "a string")
    return value


def table(config: Config, aliases: Sequence[str]) -> dict[str, Any]:
    """An object with string keys; {} when absent."""
    value = raw(config, aliases, {})
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(aliases, value, "an object")
    return dict(value)


def mapping(config: Config, aliases: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """{layer or regex: {field: value}}, or None when absent."""
    value = raw(config, aliases, None)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(aliases, value, "an object of layer names or regular expressions")
    for key, entry in value.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            raise QuantizationConfigError(
                f"quantization_config[{aliases[0]!r}][{shown(key)}] is {shown(entry)}; expected an "
                f"object with fields such as bits and group_size; correct the file"
            )
    return {key: dict(entry) for key, entry in value.items()}


def names(config: Config, aliases: Sequence[str], *, commas: bool = True) -> list[str] | None:
    """Layer names: a string, a list, or nested lists; None when there are none.

    Args:
        commas: split strings on commas.
    """
    value = raw(config, aliases, None)
    flat: list[str] = []

    def collect(item: object, depth: int) -> None:
        if isinstance(item, str):
            parts = item.split(",") if commas else [item]
            flat.extend(part.strip() for part in parts if part.strip())
        elif isinstance(item, Sequence) and depth < _MAX_DEPTH:
            for inner in item:
                collect(inner, depth + 1)
        else:
            raise _wrong(aliases, value, "a string or a list of layer names")

    if value is not None:
        collect(value, 0)
    return flat or None


def numbers(config: Config, aliases: Sequence[str]) -> list[int]:
    """A list of whole numbers."""
    value = raw(config, aliases)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _wrong(aliases, value, "a list of whole numbers")
    return value


def check_group_size(group_size: int, where: str) -> None:
    """A group size that the kernels take: a multiple of 8, or -1.

    Raises:
        QuantizationConfigError: any other value.
    """
    if group_size != -1 and (group_size < 1 or group_size % 8):
        raise QuantizationConfigError(
            f"{where} is {shown(group_size)}; expected a multiple of 8, or -1 for one group of all "
            f"input features; quantise with group size 32, 64 or 128"
        )


def _wrong(aliases: Sequence[str], value: object, expected: str) -> QuantizationConfigError:
    return QuantizationConfigError(
        f"quantization_config[{aliases[0]!r}] is {shown(value)}; expected {expected}; correct the "
        f"file"
    )
