"""``amxq.linear``: special numbers, threads, processes."""

from __future__ import annotations

import math
import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from linear_reference import TINY32, assert_exact, draw

import amxq
from amxq.runtime.targets import get_target

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def packed(n: int = 72, k: int = 192, group: int = 64, *, symmetric: bool = True, seed: int = 0):
    weight = draw(np.random.default_rng(seed), n, k, group, symmetric=symmetric)
    return weight, amxq.pack(*weight.tensors("plain"), format="plain", group_size=group)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_stays_in_its_row(
    on: str, dtype: torch.dtype, symmetric: bool, value: float
) -> None:
    weight, w = packed(symmetric=symmetric)
    for m in (1, 40):
        x = randn(m, 192).to(dtype)
        clean = amxq.linear(x, *w)
        bad = x.clone()
        bad[m // 2, 77] = value
        got = amxq.linear(bad, *w)
        others = torch.arange(m) != m // 2
        assert torch.equal(got[others], clean[others])
        row = got[m // 2]
        assert not row.isfinite().any()
        if symmetric and not math.isnan(value):
            factor = torch.from_numpy(weight.difference[:, 77] * weight.scale[:, 77])
            expected = factor * value  # inf · 0 is NaN
            torch.testing.assert_close(row.double(), expected, rtol=0, atol=0, equal_nan=True)


def test_nans_of_every_payload(on: str) -> None:
    """Also those that live in the low bits of an fp32 number, which bf16 does not have."""
    _, w = packed()
    x = torch.zeros(3, 192)
    bits = x.view(torch.int32)
    bits[0, 0], bits[1, 1], bits[2, 2] = 0x7F800001, 0x7FC00000, -0x7FFFFF
    assert amxq.linear(x, *w).isnan().all()


def test_zero_scales_and_zero_activations(on: str) -> None:
    weight, w = packed(symmetric=False)
    zero = w._replace(scales=torch.zeros_like(w.scales))
    x = randn(7, 192)
    for dtype in FLOATS:
        assert (amxq.linear(x.to(dtype), *zero) == 0).all()
        assert (amxq.linear(torch.zeros(7, 192, dtype=dtype), *w) == 0).all()
    bias = randn(72)
    assert torch.equal(amxq.linear(x, *zero, bias=bias), bias.expand(7, 72))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_huge_and_tiny_activations(on: str, scale: float, dtype: torch.dtype) -> None:
    weight, w = packed(symmetric=False)
    x = (randn(5, 192) * scale).to(dtype)
    assert_exact(amxq.linear(x, *w), weight, x)


def test_results_beyond_fp16_are_infinite(on: str) -> None:
    _, w = packed()
    x = torch.full((2, 192), 60000.0, dtype=torch.float16)
    exact = amxq.linear(x.float(), *w)
    got = amxq.linear(x, *w)
    beyond = exact.abs() >= 65520
    assert beyond.any() and torch.equal(got[beyond], exact[beyond].sign().half() * math.inf)
    assert got[exact.abs() < 65000].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormal_activations_are_kept_or_count_as_zero(on: str, dtype: torch.dtype) -> None:
    """VDPBF16PS and TDPBF16PS take bf16 denormals as zero; fp16's are normal bf16 numbers."""
    weight, w = packed()
    x = torch.zeros(3, 192, dtype=dtype)
    x[0, ::5] = torch.finfo(dtype).tiny / 2
    x[1, ::5] = torch.finfo(dtype).smallest_normal
    x[2] = randn(192).to(dtype)
    x[2, 3] = torch.finfo(dtype).tiny / 4
    got = amxq.linear(x, *w)
    assert_exact(got, weight, x)
    if dtype == torch.float16:
        assert (got.double().numpy()[0] != 0).any() or weight.exact(x)[0].max() < 2.0**-25
    else:
        assert got[0].abs().max() <= 192 * 8 * TINY32


def test_fp32_denormals_of_the_processor_mode_do_not_matter() -> None:
    weight, w = packed()
    x = randn(4, 192).half()
    want = amxq.linear(x, *w)
    assert torch.set_flush_denormal(True)
    try:
        assert torch.equal(amxq.linear(x, *w), want)
    finally:
        torch.set_flush_denormal(False)


# --- determinism ----------------------------------------------------------------------------


CASES = [(1, torch.bfloat16), (7, torch.float32), (150, torch.bfloat16)]


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_same_bits_on_any_number_of_threads(on: str, symmetric: bool) -> None:
    _, w = packed(n=200, symmetric=symmetric)
    for m, dtype in CASES:
        x, bias = randn(m, 192).to(dtype), randn(200)
        torch.set_num_threads(1)
        want = amxq.linear(x, *w, bias=bias)
        for threads in (2, 3, 8, 1):
            torch.set_num_threads(threads)
            assert torch.equal(amxq.linear(x, *w, bias=bias), want)


def test_the_number_of_threads_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, w = packed(n=200)
    x = randn(3, 192)
    want = amxq.linear(x, *w)
    for text in ("1", "2", "5"):
        monkeypatch.setenv("AMXQ_NUM_THREADS", text)
        assert torch.equal(amxq.linear(x, *w), want)


def test_concurrent_python_threads(on: str) -> None:
    """Calls from many threads, some of them the first of their shape, do not disturb each other.
    Each thread has tile registers and a target of its own."""
    torch.set_num_threads(2)
    jobs = [(packed(n, 192, 64, symmetric=n % 2 == 0, seed=n), m) for n in (33, 64) for m in (1, 6)]
    inputs = [(weight, w, randn(m, 192, seed=m)) for (weight, w), m in jobs]
    name = get_target()

    def work(index: int) -> list[torch.Tensor]:
        results = []
        for turn in range(12):
            _, w, x = inputs[(index + turn) % len(inputs)]
            with amxq.target(name):
                results.append(amxq.linear(x, *w))
        return results

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6)))
    for index, results in enumerate(found):
        for turn, got in enumerate(results):
            weight, w, x = inputs[(index + turn) % len(inputs)]
            assert_exact(got, weight, x)
            assert torch.equal(got, amxq.linear(x, *w))


def test_two_first_calls_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from amxq.codegen import compile as compiler

    real, count = compiler.optimise, []

    def counting(*args):
        count.append(1)
        return real(*args)

    monkeypatch.setattr(compiler, "optimise", counting)
    _, w = packed(n=40, k=8 * 11, group=88)
    x = randn(3, 88).half()
    start = threading.Barrier(4)

    def first() -> torch.Tensor:
        start.wait()
        return amxq.linear(x, *w, bias=torch.ones(40, dtype=torch.float16))

    with ThreadPoolExecutor(4) as pool:
        results = [f.result() for f in [pool.submit(first) for _ in range(4)]]
    assert len(count) <= 2  # the linear, and what prepares its activations
    assert all(torch.equal(r, results[0]) for r in results)


def test_inside_of_a_parallel_region() -> None:
    """Called from a thread of an OpenMP team, a launch runs on that thread alone."""
    import ctypes

    from amxq.runtime import openmp

    _, w = packed(n=200, symmetric=False)
    xs = [randn(9, 192, seed=i) for i in range(2)]
    want = [amxq.linear(x, *w) for x in xs]
    results: dict[int, torch.Tensor] = {}
    number = ctypes.PYFUNCTYPE(ctypes.c_int)(openmp.runtime().get_thread_num)

    def inside(_: object) -> None:
        me = number()
        assert openmp.in_parallel()
        results[me] = amxq.linear(xs[me], *w)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(inside)
    parallel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )(openmp.gomp_parallel_address())
    parallel(ctypes.cast(callback, ctypes.c_void_p), None, 2, 0)
    assert sorted(results) == [0, 1]
    assert all(torch.equal(results[i], want[i]) for i in results)


# --- processes ------------------------------------------------------------------------------


def _child(queue, w, x) -> None:
    queue.put(amxq.linear(x, *w).double().numpy())


def test_fork_after_use() -> None:
    """The pool's threads do not exist in a forked child."""
    torch.set_num_threads(2)
    weight, w = packed(n=200)
    x = randn(5, 192)
    want = amxq.linear(x, *w)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        queue = context.SimpleQueue()
        child = context.Process(target=_child, args=(queue, w, x))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert np.array_equal(queue.get(), want.double().numpy())
    assert torch.equal(amxq.linear(x, *w), want)


def test_a_fresh_process_gives_the_same_bits(tmp_path) -> None:
    _, w = packed(n=96, symmetric=False)
    x = randn(5, 192)
    torch.save((tuple(w), x, amxq.linear(x, *w)), tmp_path / "case.pt")
    code = (
        "import sys, torch, amxq\n"
        "w, x, want = torch.load(sys.argv[1])\n"
        "torch.set_num_threads(2)\n"
        "assert torch.equal(amxq.linear(x, *w), want)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "case.pt")], check=True)


def test_float_state_of_the_caller_is_left_alone() -> None:
    _, w = packed()
    x = randn(3, 192)
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            amxq.linear(x, *w)
            tiny = torch.tensor([1e-40]) * torch.tensor([1.0])
            assert (tiny.item() == 0) == flush
        finally:
            torch.set_flush_denormal(False)
