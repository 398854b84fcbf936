"""GPTQModel's W4A16 kernel for AVX512-BF16, built from the package's sources at first use.

Only its C++ sources are used, so the package can be installed with --no-deps; building takes a
compiler, ninja and about two minutes, once.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import torch

from amxq.runtime import cpu
from benchmarks.contestants import without
from benchmarks.problems import Linear

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]

_NAME = "int4_qzero_group_scaled_cpu"
_FLAGS = "-O3 -std=c++20 -fopenmp -mfma -mf16c -mavx512f -mavx512bf16 -mavx512vl -mavx512dq "
_FLAGS += "-mavx512bw -mavx512vbmi"  # the package's own


def unavailable() -> str:
    if missing := without("gptqmodel"):
        return missing
    tools = [name for name in ("ninja", "g++") if not shutil.which(name)]
    if tools:
        return f"needs {' and '.join(tools)} to build its kernel"
    return "" if "avx512_bf16" in cpu.flags() else "needs a CPU with AVX512-BF16"


@functools.cache
def _operators() -> object:
    from torch.utils.cpp_extension import load

    found = importlib.util.find_spec("gptqmodel")  # importing it would need its dependencies
    assert found is not None and found.origin is not None
    sources = Path(found.origin).parent.parent / "gptqmodel_ext" / _NAME
    load(
        f"gptqmodel_{_NAME}",
        [str(file) for file in sorted(sources.glob("*.cpp"))],
        extra_cflags=_FLAGS.split(),
        extra_include_paths=[str(sources)],
        extra_ldflags=["-fopenmp"],
        is_python_module=False,
    )
    return getattr(torch.ops, f"gptqmodel_{_NAME}")


def pack(problem: Linear) -> Packed:
    _operators()
    # rows n and n + 16 of each 32 share a byte, two columns beside each other
    q = problem.q.reshape(problem.n // 32, 2, 16, problem.k // 2, 2)
    pairs = (q[:, 0] | (q[:, 1] << 4)).transpose(0, 2, 1, 3)
    weight = torch.from_numpy(np.ascontiguousarray(pairs)).view(problem.n, problem.k // 2)
    zeros = torch.from_numpy(np.ascontiguousarray(problem.zeros.T))
    scales = torch.from_numpy(np.ascontiguousarray(problem.scales.T))
    return weight, zeros, scales, problem.group


def size(packed: Packed) -> int:
    return sum(t.numel() * t.element_size() for t in packed[:3])


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    y: torch.Tensor = _operators().gemm_int4_qzero_group_scaled_cpu_forward(  # type: ignore[attr-defined]
        x, *packed, None
    )
    return y
