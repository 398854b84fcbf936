"""Compiled kernels on disk: what a second process compiles, and what it does not trust."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.ir.parser import parse_function
from amxq.ir.printer import print_function
from amxq.runtime.cache import ObjectCache
from amxq.runtime.loader import DamagedObject, load

SCRIPT = """
import sys, torch, amxq, amxq.language as tl
import amxq.codegen.compile as compile_module

@amxq.jit
def add_one(x, N: tl.constexpr):
    at = x + tl.arange(0, N)
    tl.store(at, tl.load(at) + 1)

compiled = 0
optimise = compile_module.optimise

def counting(*args):
    global compiled
    compiled += 1
    return optimise(*args)

compile_module.optimise = counting
for n in (16, 32):
    x = torch.zeros(n)
    add_one[(1,)](x, N=n)
    assert (x == 1).all()
kernel = add_one.warmup(torch.float32, N=16)
if len(sys.argv) > 1:
    print(len(kernel.asm[sys.argv[1]]))
print(compiled)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def compiled(script: Path, *args: str, **environment: str) -> int:
    """How often a fresh process compiled."""
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {
        "AMXQ_CACHE_DIR": str(script.parent / "objects"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    env |= environment
    done = subprocess.run(
        [sys.executable, str(script), *args], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def entries(script: Path) -> list[Path]:
    return sorted(p for p in (script.parent / "objects").rglob("*") if p.is_file())


def test_what_fresh_processes_compile(script: Path, tmp_path: Path) -> None:
    assert compiled(script) == 2
    assert compiled(script, "obj") == 0
    assert compiled(script, "asm") == 1  # stages are made when they are asked for

    before = {p: p.read_bytes() for p in entries(script)}
    first, second = sorted(before, key=lambda p: -len(before[p]))[:2]
    first.write_bytes(before[first][: len(before[first]) // 2])
    damaged = bytearray(before[second])
    damaged[-40] ^= 1
    second.write_bytes(damaged)
    assert compiled(script) == 2
    assert {p: p.read_bytes() for p in entries(script)} == before

    # A right checksum over a wrong object: replaced too.
    key = first.stem
    ObjectCache(first.parent).put(key, b"\x7fELF" + bytes(100))
    assert compiled(script) == 1
    assert {p: p.read_bytes() for p in entries(script)} == before

    assert compiled(script, AMXQ_ALWAYS_COMPILE="1") == 2
    folder = tmp_path / "dump"
    # each the object first, then all its stages
    assert compiled(script, AMXQ_KERNEL_DUMP=str(folder), AMXQ_TARGET="avx2") == 4
    kernels = list(folder.iterdir())
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.name.startswith("add_one-avx2-")
        *passes, asm, llir, obj = sorted(p.name for p in kernel.iterdir())
        assert [asm, llir, obj] == ["kernel.asm", "kernel.llir", "kernel.obj"]
        assert [int(p.split("_")[0]) for p in passes] == list(range(len(passes)))
        assert passes[0] == "0_front_end.tir" and len(passes) > 2
        texts = [(kernel / name).read_text() for name in passes]
        assert "tile<" in texts[0] and "tile<" not in texts[-1]
        assert all(print_function(parse_function(text)) == text for text in texts)
        assert (kernel / "kernel.obj").read_bytes().startswith(b"\x7fELF")


def test_a_damaged_object_is_noticed_or_harmless_to_load() -> None:
    """Never another error, whatever the bytes of the headers and tables say."""

    @amxq.jit
    def kernel(x, N: tl.constexpr):
        tl.store(x + tl.arange(0, N), 0.0)

    image = kernel.warmup(torch.float32, N=512).asm["obj"]
    random = Random(0)
    noticed = 0
    for _ in range(300):
        damaged = bytearray(image)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(image))] = random.choice((0, 1, 127, 128, 255))
        try:
            load("kernel", bytes(damaged[: random.choice((len(image), random.randrange(99999)))]))
        except DamagedObject as error:
            assert "object of kernel 'kernel' is damaged" in str(error)
            noticed += 1
    assert noticed > 50
