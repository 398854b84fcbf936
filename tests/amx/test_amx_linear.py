"""The int4 linear's AMX code gives the bits that hardware gave, on tiles or emulated
(``make test-emulated``).

DIGESTS are of an Intel Xeon, family 6 model 207 stepping 2 (Emerald Rapids), 2026-11-30.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

import amxq
from amxq.runtime.targets import has_amx_fp16, target

DIGESTS = {
    (1, 64, 256, 128, False, torch.bfloat16): "9415b1afec4c935e",
    (5, 100, 104, 8, True, torch.bfloat16): "fc3a2bafecf22772",
    (16, 64, 256, 64, True, torch.float32): "ad44de29b92842e0",
    (37, 96, 256, 32, True, torch.float16): "37162dfd9d755473",
    (130, 40, 512, 128, False, torch.bfloat16): "a0dc8b98f990f06b",
    (1, 64, 256, 128, False, torch.bfloat16, "int8"): "2ca02e716e75cffc",
    (23, 100, 104, 8, True, torch.float32, "int8"): "a104b07087ba454d",
    (130, 40, 512, 128, False, torch.float16, "int8"): "9f0542dca65662ed",
}


def bits(
    M: int, N: int, K: int, group: int, zeros: bool, dtype: torch.dtype, precision: str = "bf16"
) -> str:
    """The first half of a SHA-256 over the result."""
    rng = np.random.default_rng(M + N + K)
    q = torch.from_numpy(rng.integers(0, 16, (N, K), dtype=np.uint8))
    scales = torch.from_numpy(rng.standard_normal((N, K // group)).astype(np.float16))
    z = torch.from_numpy(rng.integers(0, 16, (N, K // group), dtype=np.uint8)) if zeros else None
    x = torch.from_numpy(rng.standard_normal((M, K), dtype=np.float32)).to(dtype)
    y = amxq.linear(x, *amxq.pack(q, scales, z, format="plain"), precision=precision)
    exact = x.double() @ amxq.dequantize(amxq.pack(q, scales, z, format="plain")).double().T
    assert (y.double() - exact).norm() < (3e-3 if precision == "bf16" else 1e-2) * exact.norm()
    return hashlib.sha256(y.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.amx
@pytest.mark.parametrize("case", DIGESTS, ids=str)
def test_linear_gives_the_bits_of_hardware(case: tuple[Any, ...]) -> None:
    if case[-1] == torch.float16 and has_amx_fp16():
        pytest.skip("recorded without AMX-FP16, which this CPU has")
    with target("amx"):
        assert bits(*case) == DIGESTS[case]
