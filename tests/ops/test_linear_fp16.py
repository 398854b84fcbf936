"""fp16 activations on CPUs with AMX-FP16: one multiplication instead of two bf16 ones, emulated in
a process of its own, as no CPU here has it (and on the rig: tests/rig)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import CompilationError, TargetError
from amxq.runtime import amx, cpu, targets

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, json, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests/ops"]
importlib.import_module("tests.without_amx")
import numpy as np
import torch
import amxq
from amxq import emulator
from amxq.runtime import cpu, doctor
from linear_reference import assert_exact, draw

with_fp16 = cpu.flags() | {{"amx_fp16"}}
cpu.flags = lambda: with_fp16
rng = np.random.default_rng(0)
for m in (1, 7, 24, 40, 130):
    for symmetric in (True, False):
        weight = draw(rng, 72, 192, 64, symmetric=symmetric)
        w = amxq.pack(*weight.tensors("plain"), format="plain")
        wide = 10.0 ** rng.uniform(-6, 3, (m, 1))  # denormal fp16 numbers count
        x = torch.from_numpy(rng.standard_normal((m, 192)) * wide).half()
        assert_exact(amxq.linear(x, *w), weight, x)
x[3, 5] = float("inf")
assert not amxq.linear(x, *w)[3].isfinite().any() and amxq.linear(x, *w)[4].isfinite().all()
before = emulator.counts()["TDPBF16PS"]
amxq.linear(x.bfloat16(), *w)
print(json.dumps([before, emulator.counts(), doctor.render(doctor.report()), amxq.get_target()]))
"""


def test_linear_of_fp16_activations() -> None:
    missing = targets.missing_flags(targets.TABLE["amx"], cpu.flags() | amx.FLAGS)
    if missing:
        pytest.skip(f"emulating AMX needs a CPU with {', '.join(missing)}")
    program = PROGRAM.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bf16_before, counts, doctor, target = json.loads(done.stdout)
    assert bf16_before == 0 < counts["TDPBF16PS"] and counts["TDPFP16PS"] > 0
    assert "by AMX-FP16" in doctor and target == "amx"


@amxq.jit
def fp16_dots(x, qweight, scales, out, M: tl.constexpr, SECOND: tl.constexpr):
    w = tl.int4_tensor(qweight, scales, None, [64, 32], 64, [64, 32])
    q = w.load([0, 0])
    y = tl.make_tensor_descriptor(out, [M, 32], [32, 1], [M, 32])
    a = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [M, 64])
    y.store([0, 0], tl.dot(a.load([0, 0], boundary_check=()), q))
    if SECOND:
        b = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [SECOND, 64])
        z = tl.make_tensor_descriptor(out, [M, 32], [32, 1], [SECOND, 32])
        z.store([0, 0], tl.dot(b.load([0, 0], boundary_check=()), q))


def compiled(target: str, second: int = 0):
    types = {"x": torch.float16, "qweight": torch.uint8, "scales": torch.float32}
    return fp16_dots.warmup(**types, out=torch.float32, M=64, SECOND=second, target=target)


def test_kernels_of_fp16_are_compiled_for_amx_with_fp16_only() -> None:
    kernel = compiled("amx+fp16")
    assert "tdpfp16ps" in kernel.asm["asm"] and "tdpbf16ps" not in kernel.asm["asm"]
    assert kernel.target.name == "amx+fp16"
    for name in targets.TARGETS:
        with pytest.raises(CompilationError, match="AMX-FP16 only"):
            compiled(name)
    with pytest.raises(CompilationError, match="ninth tile register"):
        compiled("amx+fp16", second=4)


def test_amx_fp16_is_no_target_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="unknown target"):
        targets.set_target("amx+fp16")
    monkeypatch.setenv("AMXQ_TARGET", "amx+fp16")
    with pytest.raises(TargetError, match="not a target"):
        targets.requested_target()
    if not targets.has_amx_fp16() and not targets.emulates_amx():
        with pytest.raises(TargetError, match="amx_fp16|/proc/cpuinfo"):
            targets.require_runnable("amx+fp16")
