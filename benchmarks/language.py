"""Kernels written in the language beside torch: ``python -m benchmarks language``.

Both run in this process on the same operands and take turns, forwards and backwards; a time is
the median of all calls of all turns. The first column counts the compilation of the kernel,
nothing cached. The kernels are those of docs/tutorials.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import amxq
import benchmarks
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
Case = tuple[Callable[[], Any], Callable[[], Any]]


def _tutorial(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, _TUTORIALS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vector_add(n: int) -> Case:
    add, x, y = _tutorial("01_vector_add").add, torch.randn(n), torch.randn(n)
    return lambda: add(x, y), lambda: x + y


def softmax(rows: int, n: int) -> Case:
    ours, x = _tutorial("02_fused_softmax").softmax, torch.randn(rows, n)
    return lambda: ours(x), lambda: torch.softmax(x, 1)


def layer_norm(rows: int, n: int) -> Case:
    ours = _tutorial("05_layer_norm").layer_norm
    x, w, b = torch.randn(rows, n), torch.randn(n), torch.randn(n)
    return lambda: ours(x, w, b, 1e-5), lambda: F.layer_norm(x, (n,), w, b)


def matmul(n: int, dtype: torch.dtype) -> Case:
    ours = _tutorial("03_matrix_multiplication").matmul
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return lambda: ours(a, b), lambda: torch.matmul(a, b)


def packed_matmul(n: int, anew: bool) -> Case:
    """With b packed beforehand, or in each call."""
    tutorial = _tutorial("03_packed_matrix_multiplication")
    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    packed = tutorial.pack(b)
    return (
        lambda: tutorial.matmul(a, tutorial.pack(b) if anew else packed, n),
        lambda: torch.matmul(a, b),
    )


def attention(heads: int, t: int, d: int) -> Case:
    ours = _tutorial("06_attention").attention
    q, k, v = (torch.randn(1, heads, t, d).bfloat16() for _ in range(3))
    return lambda: ours(q, k, v), lambda: F.scaled_dot_product_attention(q, k, v)


CASES: dict[str, Callable[[], Case]] = {
    "vector add, 16 M fp32": lambda: vector_add(1 << 24),
    "softmax, 4096 x 781 fp32": lambda: softmax(4096, 781),
    "softmax, 2048 x 8192 fp32": lambda: softmax(2048, 8192),
    "layer norm, 4096 x 4096 fp32": lambda: layer_norm(4096, 4096),
    "matmul, 1024^3 fp32": lambda: matmul(1024, torch.float32),
    "matmul, 1024^3 bf16": lambda: matmul(1024, torch.bfloat16),
    "matmul, 1024^3 bf16, b packed before": lambda: packed_matmul(1024, False),
    "matmul, 1024^3 bf16, b packed in the call": lambda: packed_matmul(1024, True),
    "attention, 8 heads, T = 1024, D = 64, bf16": lambda: attention(8, 1024, 64),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} language", description=__doc__)
    parser.add_argument("--targets", default=",".join(amxq.available_targets()))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    print(machine(), "\n")
    chosen = {name: make for name, make in CASES.items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AMXQ_CACHE_DIR"] = folder  # the first call compiles
        print(table([_measure(name, chosen[name](), args) for name in chosen]))
    return 0


def _measure(name: str, case: Case, args: argparse.Namespace) -> Row:
    """Milliseconds of torch, and for each target how many times amxq's time torch takes."""
    ours, theirs = case
    targets = args.targets.split(",")
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {who: [] for who in (*targets, "torch")}
    theirs()
    for target in targets:
        with amxq.target(target):
            start = time.perf_counter()
            ours()
            first[target] = time.perf_counter() - start
    for turn in range(args.rounds):
        for who in list(times)[:: 1 if turn % 2 == 0 else -1]:
            if who == "torch":
                times[who] += _calls(theirs)
                continue
            with amxq.target(who):
                times[who] += _calls(ours)
    torch_ms = quantile(times["torch"], 0.5)
    row: Row = {"torch / amxq": name, "first call, ms": 1e3 * max(first.values())}
    row |= {"torch, ms": torch_ms}
    return row | {target: torch_ms / quantile(times[target], 0.5) for target in targets}


def _calls(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of a few calls, the first of which finds caches as another left them."""
    times: list[float] = []
    end = time.perf_counter() + 0.06
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:]
