"""Mistakes of a launch: arguments, grids, threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import DTypeError, LayoutError, ShapeError


@amxq.jit
def plain(x, n, BLOCK: tl.constexpr = 16):
    tl.store(x + tl.arange(0, BLOCK), n)


X = torch.zeros(16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plain(X, 1), TypeError, r"launch it as plain\[grid\]"),
        (lambda: plain[(1,)](X), TypeError, "misses the argument 'n'"),
        (lambda: plain[(1,)](X, 1, 16, 3), TypeError, "takes 3 arguments, got 4"),
        (lambda: plain[(1,)](X, 1, m=2), TypeError, "no parameter 'm'"),
        (lambda: plain[(1,)](X, 1, x=X), TypeError, "two values for 'x'"),
        (lambda: plain[(1,)](X, "1"), DTypeError, "argument 'n' is a str"),
        (lambda: plain[(1,)](X, 1 << 70), DTypeError, "does not fit 64 bits"),
        (lambda: plain[(1,)](X.numpy(), 1), DTypeError, "argument 'x' is a ndarray"),
        (lambda: plain[(1,)](X.to("meta"), 1), LayoutError, r"on meta.*\.cpu\(\)"),
        (lambda: plain[(1,)](X.to(torch.complex64), 1), DTypeError, "complex64"),
        (lambda: plain[(1,)](X, 1, BLOCK=[16]), DTypeError, "must be hashable"),
        (lambda: plain[5](X, 1), ShapeError, r"the grid is 5, expected a tuple of .*\(4,\)"),
        (lambda: plain[()](X, 1), ShapeError, r"the grid \(\) has 0 sizes"),
        (lambda: plain[(1, 1, 1, 1)](X, 1), ShapeError, "has 4 sizes, expected 1 to 3"),
        (lambda: plain[(1,)](X, 1, X), DTypeError, "'BLOCK' is a Tensor, but .* tl.constexpr"),
        (lambda: plain[(-1,)](X, 1), ShapeError, r"the grid is \(-1,\)"),
        (lambda: plain[(1.5,)](X, 1), ShapeError, r"the grid is \(1.5,\)"),
        (lambda: plain[(1 << 31,)](X, 1), ShapeError, "the grid is"),
        (lambda: plain[(1,)](X, 1, num_threads=0), ShapeError, "num_threads is 0"),
        (lambda: plain[(1 << 30, 1 << 30, 16)](X, 1), ShapeError, "18446744073709551616 programs"),
        (lambda: tl.arange(0, 4), RuntimeError, "inside an @amxq.jit kernel only"),
    ],
)
def test_wrong_launches(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert not X.any()


@amxq.jit
def tell(out, n, c: tl.constexpr, bias):
    tl.store(out, n)
    tl.store(out + 1, c[0] if c is not None else 7)
    if bias is None:
        tl.store(out + 2, 1.0)
    else:
        tl.store(out + 2, 2.0)


def test_a_second_launch_is_told_apart_from_the_first() -> None:
    """Arguments that are equal in Python, or of one class, but are compiled for differently."""
    out = torch.zeros(3)
    for n in (1, 16, 17, 1, 32, 2**40, 5, True, 16):
        for c in (None, (1,), (1.5,), (True,), (0.0,), (-0.0,)):
            for bias in (None, out, 0):
                tell[(1,)](out, n, c=c, bias=bias)
                constant = 7.0 if c is None else float(c[0])
                assert out.tolist() == [n, constant, 1.0 if bias is None else 2.0]
                assert torch.signbit(out[1]) == (c == (-0.0,) and str(c) == "(-0.0,)")
