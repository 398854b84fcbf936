"""amxq: INT4 language models on x86 CPUs. See README.md and docs/.

Importing it registers ``torch.ops.amxq``; the other parts are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from amxq import errors as errors
from amxq.errors import AmxqError as AmxqError

if TYPE_CHECKING:
    from amxq import testing as testing
    from amxq.integrations.layers import Int4Linear as Int4Linear
    from amxq.integrations.loader import load_model as load_model
    from amxq.ops.fused_moe import fused_moe as fused_moe
    from amxq.ops.gated import gated_linear as gated_linear
    from amxq.ops.linear import linear as linear
    from amxq.ops.multi import multi_linear as multi_linear
    from amxq.ops.route import route as route
    from amxq.quantization import PackedWeight as PackedWeight
    from amxq.quantization import dequantize as dequantize
    from amxq.quantization import load_layer as load_layer
    from amxq.quantization import pack as pack
    from amxq.quantization import stack_experts as stack_experts
    from amxq.runtime.autotuner import Config as Config
    from amxq.runtime.autotuner import autotune as autotune
    from amxq.runtime.explain import explain as explain
    from amxq.runtime.heuristics import heuristics as heuristics
    from amxq.runtime.jit import jit as jit
    from amxq.runtime.targets import available_targets as available_targets
    from amxq.runtime.targets import get_target as get_target
    from amxq.runtime.targets import set_target as set_target
    from amxq.runtime.targets import target as target

__version__ = "0.1.0"

_HOMES = {
    "Config": "amxq.runtime.autotuner",
    "Int4Linear": "amxq.integrations",
    "PackedWeight": "amxq.quantization",
    "autotune": "amxq.runtime.autotuner",
    "available_targets": "amxq.runtime.targets",
    "dequantize": "amxq.quantization",
    "explain": "amxq.runtime.explain",
    "fused_moe": "amxq.ops.fused_moe",
    "gated_linear": "amxq.ops.gated",
    "get_target": "amxq.runtime.targets",
    "heuristics": "amxq.runtime.heuristics",
    "jit": "amxq.runtime.jit",
    "linear": "amxq.ops.linear",
    "load_layer": "amxq.quantization",
    "load_model": "amxq.integrations",
    "multi_linear": "amxq.ops.multi",
    "pack": "amxq.quantization",
    "route": "amxq.ops.route",
    "set_target": "amxq.runtime.targets",
    "stack_experts": "amxq.quantization",
    "target": "amxq.runtime.targets",
    "testing": "amxq.testing",
}

__all__ = ["AmxqError", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'amxq' has no attribute {name!r}")
    module = importlib.import_module(home)
    value = module if home == f"amxq.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "cdiv", "next_power_of_2"]


def cdiv(x: int, y: int) -> int:
    """x divided by y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n < 1)."""
    return 1 << max(n - 1, 0).bit_length()


try:
    importlib.import_module("amxq.ops.linear")
    importlib.import_module("amxq.ops.fused_moe")
    importlib.import_module("amxq.ops.gated")
    importlib.import_module("amxq.ops.multi")
    importlib.import_module("amxq.ops.normalize")
    importlib.import_module("amxq.ops.route")
except ImportError:
    # Without a usable torch the names above raise when they are used, and the doctor still runs.
    pass
