"""The int4 linear's AMX code gives the bits that hardware gave, on tiles or emulated.

DIGESTS are of an Intel Xeon, family 6 model 207 stepping 2 (Emerald Rapids), 2026-11-30.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from amxq.runtime import cpu, targets

PROGRAM = """
import hashlib, json
import numpy as np, torch, amxq

def bits(M, N, K, group, zeros, dtype):
    rng = np.random.default_rng(M + N + K)
    q = torch.from_numpy(rng.integers(0, 16, (N, K), dtype=np.uint8))
    scales = torch.from_numpy(rng.standard_normal((N, K // group)).astype(np.float16))
    z = torch.from_numpy(rng.integers(0, 16, (N, K // group), dtype=np.uint8)) if zeros else None
    x = torch.from_numpy(rng.standard_normal((M, K), dtype=np.float32)).to(dtype)
    y = amxq.linear(x, *amxq.pack(q, scales, z, format="plain"))
    exact = x.double() @ amxq.dequantize(amxq.pack(q, scales, z, format="plain")).double().T
    assert (y.double() - exact).norm() < 3e-3 * exact.norm()
    return hashlib.sha256(y.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

print(json.dumps([
    bits(1, 64, 256, 128, False, torch.bfloat16),
    bits(5, 100, 104, 8, True, torch.bfloat16),
    bits(16, 64, 256, 64, True, torch.float32),
    bits(37, 96, 256, 32, True, torch.float16),
    bits(130, 40, 512, 128, False, torch.bfloat16),
]))
"""

DIGESTS = [
    "9415b1afec4c935e",
    "fc3a2bafecf22772",
    "adb87701f8a5d997",
    "37162dfd9d755473",
    "a0dc8b98f990f06b",
]


def test_linear_gives_the_bits_of_hardware() -> None:
    missing = targets.missing_flags(targets.TABLE["amx"], cpu.flags() | targets.amx.FLAGS)
    if missing:
        pytest.skip(f"emulating AMX needs a CPU with {', '.join(missing)}")
    environment = dict(os.environ, AMXQ_TARGET="amx", AMXQ_EMULATE="1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == DIGESTS
