"""Reading single fields of a quantisation configuration: aliases, defaults, types.

``null`` counts as absent everywhere: exporters write it for what they did not set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amxq.errors import QuantizationConfigError

Config = Mapping[str, Any]

_MISSING = object()


def present(config: Config, keys: Sequence[str]) -> bool:
    """Whether one of the keys is there with a value."""
    return any(config.get(key) is not None for key in keys)


def raw(config: Config, keys: Sequence[str], default: object = _MISSING) -> Any:
    """The first of ``keys`` that has a value.

    Raises:
        QuantizationConfigError: none has, and there is no default.
    """
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is _MISSING:
        names = " or ".join(repr(k) for k in keys)
        raise QuantizationConfigError(
            f"quantization_config has no {names}; it has {sorted(map(str, config))}; "
            f"add {names} as the exporter used it"
        )
    return default


def integer(config: Config, keys: Sequence[str], default: object = _MISSING) -> Any:
    """A whole number; 4.0 and "4" are refused, because no exporter of these formats writes them."""
    value = raw(config, keys, default)
    if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(keys, value, "a whole number")
    return value


def boolean(config: Config, keys: Sequence[str], default: object = _MISSING) -> Any:
    """true or false."""
    value = raw(config, keys, default)
    if value is not default and not isinstance(value, bool):
        raise _wrong(keys, value, "true or false")
    return value


def text(config: Config, keys: Sequence[str], default: object = _MISSING) -> Any:
    """A string."""
    value = raw(config, keys, default)
    if value is not default and not isinstance(value, str):
        raise _wrong(keys, value, "a string")
    return value


def mapping(config: Config, keys: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """{layer or regex: {field: value}}, or None when absent."""
    value = raw(config, keys, None)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(keys, value, "an object of layer names or regular expressions")
    for key, entry in value.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            raise QuantizationConfigError(
                f"quantization_config[{keys[0]!r}][{key!r}] is {entry!r}; expected an object with "
                f"fields such as bits and group_size; correct the file"
            )
    return {key: dict(entry) for key, entry in value.items()}


def names(config: Config, keys: Sequence[str]) -> list[str] | None:
    """Layer names: a string split on commas, a list, or nested lists; None when there are none."""
    value = raw(config, keys, None)
    flat: list[str] = []

    def collect(item: object) -> None:
        if isinstance(item, str):
            flat.extend(part.strip() for part in item.split(",") if part.strip())
        elif isinstance(item, Sequence):
            for inner in item:
                collect(inner)
        else:
            raise _wrong(keys, value, "a string or a list of layer names")

    if value is not None:
        collect(value)
    return flat or None


def check_group_size(group_size: int, where: str) -> None:
    """A group size that the kernels take: a multiple of 8, or -1.

    Raises:
        QuantizationConfigError: any other value.
    """
    if group_size != -1 and (group_size < 1 or group_size % 8):
        raise QuantizationConfigError(
            f"{where} is {group_size}; expected a multiple of 8, or -1 for one group of all input "
            f"features; quantise with group size 32, 64 or 128"
        )


def _wrong(keys: Sequence[str], value: object, expected: str) -> QuantizationConfigError:
    return QuantizationConfigError(
        f"quantization_config[{keys[0]!r}] is {value!r}; expected {expected}; correct the file"
    )
