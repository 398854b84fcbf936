"""Kernels that compiled code once got wrong, made small: the interpreter says what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq import knobs

N = 8


@amxq.jit
def maximum_of_halves(x, y, N: tl.constexpr):
    """It called fmaxf, which no object may."""
    at = tl.arange(0, N)
    value = tl.load(x + at).to(tl.float16)
    tl.store(y + at, tl.maximum(value, 1 << 40) > tl.minimum(value, 0.5))


@amxq.jit
def shifts_by_many(x, y, N: tl.constexpr):
    """Counts beyond the width were undefined: now they count modulo the width."""
    at = tl.arange(0, N)
    value = tl.load(x + at).to(tl.int32)
    tl.store(y + at, (value << at * 9) ^ (value >> at * 7))


@amxq.jit
def left_of_the_array(x, y, N: tl.constexpr):
    """A constant negative offset was not checked."""
    block = tl.make_block_ptr(x + 4, (4,), (1,), (-2,), (N,), (0,))
    tl.store(y + tl.arange(0, N), tl.load(block, boundary_check=(0,)))


@amxq.jit
def fused_bfloat16(x, y, N: tl.constexpr):
    """LLVM was asked for a fused multiplication of 16-bit integers."""
    value = tl.load(x + tl.arange(0, N)).to(tl.bfloat16)
    tl.store(y + tl.arange(0, N), tl.fma(value, value, value))


KERNELS = [maximum_of_halves, shifts_by_many, left_of_the_array, fused_bfloat16]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kernel_source.name)
def test_kernel(on_each: str, kernel: Callable[..., Any]) -> None:
    x = torch.tensor([0.0, -1.0, 2.5, torch.nan, torch.inf, -torch.inf, 1e5, -70000.0])
    got, want = torch.zeros(N, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    kernel[(1,)](x, got, N=N)
    with knobs.INTERPRET.scope("1"):
        kernel[(1,)](x, want, N=N)
    assert got.tolist() == want.tolist()
