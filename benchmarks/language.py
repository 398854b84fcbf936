"""Kernels written in the language beside torch: ``python -m benchmarks language``.

Both run in this process on the same operands and take turns, forwards and backwards; a time is
the median of all calls of all turns. The first column counts the compilation of the kernel,
nothing cached. Matrix multiplication is the one of docs/tutorials.
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
import amxq.language as tl
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
Case = tuple[Callable[[], Any], Callable[[], Any]]


@amxq.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@amxq.jit
def softmax_kernel(out, x, stride, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tile = tl.load(x + row * stride + at, mask=at < n, other=-float("inf"))
    weight = tl.exp(tile - tl.max(tile, 0))
    tl.store(out + row * stride + at, weight / tl.sum(weight, 0), mask=at < n)


@amxq.jit
def layer_norm_kernel(x, w, b, out, stride, n, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < n
    tile = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, tile - tl.sum(tile, 0) / n, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
    scaled = centred * scale * tl.load(w + at, mask=inside) + tl.load(b + at, mask=inside)
    tl.store(out + row * stride + at, scaled, mask=inside)


def vector_add(n: int) -> Case:
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    grid = (amxq.cdiv(n, 4096),)
    return lambda: add_kernel[grid](x, y, out, n, BLOCK=4096), lambda: torch.add(x, y, out=out)


def softmax(rows: int, n: int) -> Case:
    x, out = torch.randn(rows, n), torch.empty(rows, n)
    block = amxq.next_power_of_2(n)
    return (
        lambda: softmax_kernel[(rows,)](out, x, n, n, BLOCK=block),
        lambda: torch.softmax(x, 1, out=out),
    )


def layer_norm(rows: int, n: int) -> Case:
    x, w, b, out = torch.randn(rows, n), torch.randn(n), torch.randn(n), torch.empty(rows, n)
    block = amxq.next_power_of_2(n)
    return (
        lambda: layer_norm_kernel[(rows,)](x, w, b, out, n, n, 1e-5, BLOCK=block),
        lambda: F.layer_norm(x, (n,), w, b),
    )


def matmul(n: int, dtype: torch.dtype) -> Case:
    name = "03_matrix_multiplication"
    spec = importlib.util.spec_from_file_location(name, _TUTORIALS / f"{name}.py")
    assert spec and spec.loader
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return lambda: tutorial.matmul(a, b), lambda: torch.matmul(a, b)


CASES: dict[str, Callable[[], Case]] = {
    "vector add, 16 M fp32": lambda: vector_add(1 << 24),
    "softmax, 4096 x 781 fp32": lambda: softmax(4096, 781),
    "softmax, 2048 x 8192 fp32": lambda: softmax(2048, 8192),
    "layer norm, 4096 x 4096 fp32": lambda: layer_norm(4096, 4096),
    "matmul, 1024^3 fp32": lambda: matmul(1024, torch.float32),
    "matmul, 1024^3 bf16": lambda: matmul(1024, torch.bfloat16),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("benchmarks language", description=__doc__)
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
