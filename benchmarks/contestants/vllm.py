"""vLLM's CPU kernels: its own W4A16 ("bf16"), and SGLang's W4A8, which its wheel carries ("int8").

Only the wheel's library of operators is loaded, so it can be installed with --no-deps.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Array, Linear

VARIANTS = {"bf16": {"int8": False}, "int8": {"int8": True}}
Packed = tuple[Callable[[torch.Tensor], torch.Tensor], int]

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def unavailable() -> str:
    return without("vllm")


@functools.cache
def operators() -> object:
    """The wheel's operators, loaded."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    torch.ops.load_library(Path(found.origin).parent / "_C.abi3.so")
    torch.cpu._init_amx()  # asks the system for tiles, where there are any
    return torch.ops._C


def _words(values: Array) -> torch.Tensor:
    """int32 [..., n / 8]: eight 4-bit values a word, the first one lowest."""
    eight = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    words = np.bitwise_or.reduce(eight << np.arange(0, 32, 4, dtype=np.uint32), -1)
    return torch.from_numpy(words.view(np.int32))


def _awq(values: Array) -> torch.Tensor:
    return _words(values.reshape(*values.shape[:-1], -1, 8)[..., _AWQ].reshape(values.shape))


def _scales(scales: Array) -> torch.Tensor:
    return torch.from_numpy(scales).bfloat16().t().contiguous()


def packed_int8(q: Array, scales: Array, zeros: Array) -> tuple[torch.Tensor, ...]:
    """(weight, zeros, scales) of a matrix [n, k] as SGLang's W4A8 takes them."""
    packed: tuple[torch.Tensor, ...] = operators().convert_weight_packed_scale_zp(  # type: ignore[attr-defined]
        _awq(q.T), _awq(zeros.T), _scales(scales), 0
    )
    return packed


def pack(problem: Linear, int8: bool) -> Packed:
    known = operators()
    if int8:
        packed = packed_int8(problem.q, problem.scales, problem.zeros)
        call = functools.partial(_int8, known, *packed)
        return call, sum(t.numel() * t.element_size() for t in packed)
    scales = _scales(problem.scales)
    words = _words(problem.q.T)
    words = words.view(problem.k, -1, 2).transpose(0, 1).reshape(-1, problem.k * 2).contiguous()
    zeros = None if problem.symmetric else _words(problem.zeros.T)
    size = sum(4 * t.numel() for t in (words, zeros) if t is not None) + 2 * scales.numel()
    return functools.partial(_bf16, known, words, scales, zeros, problem.n), size


def _bf16(
    known: object,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    n: int,
    x: torch.Tensor,
) -> torch.Tensor:
    y = x.new_empty(len(x), n)
    kind = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    known.cpu_gemm_wna16(x, words, y, scales, zeros, None, 8, kind)  # type: ignore[attr-defined]
    return y


def _int8(
    known: object, weight: object, zeros: object, scales: object, x: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = known.int4_scaled_mm_cpu(  # type: ignore[attr-defined]
        x, weight, zeros, scales, None
    )
    return y


def size(packed: Packed) -> int:
    return packed[1]


def call(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return packed[0](x)
