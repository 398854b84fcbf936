"""amxq: INT4 language models on x86 CPUs. See README.md and docs/.

Importing it registers ``torch.ops.amxq``. LLVM, safetensors and transformers are imported when
they are first needed.
"""

from amxq import errors
from amxq.errors import AmxqError
from amxq.integrations.layers import Int4Linear
from amxq.integrations.loader import load_model
from amxq.ops.linear import linear
from amxq.quantization import PackedWeight, dequantize, load_layer, pack
from amxq.runtime.jit import jit
from amxq.runtime.targets import available_targets, get_target, set_target, target

__version__ = "0.1.0"

__all__ = [
    "AmxqError",
    "Int4Linear",
    "PackedWeight",
    "available_targets",
    "cdiv",
    "dequantize",
    "errors",
    "get_target",
    "jit",
    "linear",
    "load_layer",
    "load_model",
    "next_power_of_2",
    "pack",
    "set_target",
    "target",
]


def cdiv(x: int, y: int) -> int:
    """x divided by y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n < 1)."""
    return 1 << max(n - 1, 0).bit_length()
