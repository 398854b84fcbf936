"""Runs a program on the interpreter and on targets, and compares what they stored.

How exactly they must agree, the interpreter itself tells: it runs the program again with the
roundings disturbed in which compiled code may differ (a product that may be fused into a sum, the
order of a sum, an elementary function, the sign of the zero that min and max return). What does not
move must be equal bit for bit (NaNs are all the same, and so are zeros); what moves may differ by a
multiple of that.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from typing import Any

import numpy as np
import torch

import amxq.interpreter.kernel
from amxq import knobs
from amxq.errors import CompilationError
from amxq.interpreter.evaluator import Evaluated, Evaluator
from amxq.ir import hardware as hw
from amxq.ir import ops
from amxq.ir.types import BF16, F16, F32, F64, I1, I32, U8, DType, scalar_of
from amxq.runtime.jit import JITFunction, pointers
from amxq.runtime.targets import target
from tests.fuzz.expressions import OUTPUTS, PARAMETERS, PROGRAMS, TYPES, Program

TORCH = {pointer.element: dtype for dtype, pointer in pointers().items()}
SLACK = 4
LIMITS = ("too large to unroll", "is too large", "scratch memory")
"""Messages of kernels that are refused for their size, which is no disagreement."""
_numbers = itertools.count()


class Disagreement(AssertionError):
    """A target stores something else than the interpreter."""


# --- data ---------------------------------------------------------------------------------


@functools.cache
def numbers(dtype: DType, kind: str, seed: int, count: int) -> torch.Tensor:
    """Numbers: few small ones, of all sizes, or with the extremes among them."""
    g = np.random.default_rng([seed, TYPES.index(dtype), len(kind)])
    if dtype == I1:
        return torch.from_numpy(g.integers(0, 2, count).astype(bool))
    if not dtype.is_float:
        low = -(1 << dtype.bits - 1) if dtype.is_signed else 0
        high = low + (1 << dtype.bits) - 1
        held = np.dtype(f"{'i' if dtype.is_signed else 'u'}{dtype.bits // 8}")
        x = g.integers(max(low, -5), 6, count).astype(held)
        if kind != "small":
            wide = g.integers(low, high, count, dtype=held, endpoint=True)
            x = np.where(g.random(count) < 0.5, wide, x)
        if kind == "special":
            x[g.integers(0, count, count // 8)] = g.choice(np.array([low, high], held))
        return torch.from_numpy(x)
    x = g.integers(-20, 21, count) / 4
    if kind != "small":
        x = g.standard_normal(count) * 10.0 ** g.integers(-3, 4, count)
    if kind == "special":
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 65504.0, 3e38, -1e-7, 2.0**31, 2.0**63]
        x = np.where(g.random(count) < 0.2, g.choice(edges, count), x)
    return torch.from_numpy(x).to(TORCH[dtype])


def arguments(program: Program) -> dict[str, Any]:
    """What a program is launched with; it writes to the buffers and outputs only."""
    count = PROGRAMS * program.span
    found: dict[str, Any] = {
        f"in_{t}": numbers(t, program.data, program.seed, count) for t in TYPES
    }
    factors = "small" if program.seed % 2 else "wide"
    found |= {f"dot_{t}": numbers(t, factors, 7, count) for t in (BF16, F16, F32, F64)}
    found["packed"] = numbers(U8, "wide", 7, count)
    found |= {f"buffer_{t}": numbers(t, "small", 8, count).clone() for t in (I32, F32)}
    for i, dtype in enumerate((*program.outputs, *[F32] * OUTPUTS)[:OUTPUTS]):
        found[f"out_{i}"] = torch.zeros(count, dtype=TORCH[dtype])
    found |= {"n": 37, "big": (1 << 40) + 3, "real": 0.75}
    assert list(found) == PARAMETERS
    return found


# --- running ------------------------------------------------------------------------------


def kernel_of(program: Program) -> JITFunction:
    file = f"<fuzz {next(_numbers)}>"
    lines = program.source.splitlines(keepends=True)
    linecache.cache[file] = (len(program.source), None, lines, file)
    scope: dict[str, Any] = {"__name__": "fuzz"}
    exec(compile(program.source, file, "exec"), scope)
    kernel = scope["kernel"]
    assert isinstance(kernel, JITFunction)
    return kernel


def run(kernel: JITFunction, program: Program) -> list[torch.Tensor]:
    given = arguments(program)
    kernel[(PROGRAMS,)](**given)
    names = [f"out_{i}" for i in range(len(program.outputs))] + ["buffer_i32", "buffer_f32"]
    return [given[name] for name in names]


class Disturbed(Evaluator):
    """An interpreter that rounds otherwise where compiled code may."""

    seed = 0

    def __init__(self, grid: tuple[int, int, int]) -> None:
        super().__init__(grid)
        self.random = np.random.default_rng(self.seed)

    def _either(self, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of either sign, several units large: two of them hardly cancel out."""
        return self.random.choice([-1.0, 1.0], shape) * self.random.uniform(low, high, shape)

    def _moved(self, x: np.ndarray, where: np.ndarray, units: float) -> np.ndarray:
        """``x`` moved by up to ``units`` of the last place."""
        eps = np.finfo(x.dtype).eps
        by = self._either(0.5, 1.0, x.shape) * units * eps
        moved = (x * (1 + by)).astype(x.dtype)
        tiny = np.finfo(x.dtype).tiny * self.random.choice([-1, 0, 1], x.shape)
        moved = np.where(np.abs(x) < np.finfo(x.dtype).tiny, x + tiny, moved)
        return np.where(where & np.isfinite(x), moved, x).astype(x.dtype)

    def on_bitcast(self, op: hw.Bitcast) -> np.ndarray:
        """The sign and the payload of a NaN are nobody's business."""
        result, x = np.asarray(super().on_bitcast(op)), _array(op.operand)
        if x.dtype.kind != "f" or result.dtype.kind == "f":
            return result
        other = self.random.integers(0, 256, (*x.shape, result.dtype.itemsize), np.uint8)
        other = other.view(result.dtype)[..., 0]
        sign = result.dtype.type(1) << result.dtype.type(8 * result.dtype.itemsize - 1)
        other = np.where((other ^ result) & sign != 0, other, other ^ sign)
        return np.where(np.isnan(x), other, result).astype(result.dtype)

    def on_binary(self, op: ops.Binary) -> np.ndarray:
        result = np.asarray(super().on_binary(op))
        a, b = _array(op.lhs), _array(op.rhs)
        if result.dtype.kind != "f":
            return result
        if op.kind in ("min", "max"):
            flip = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
            return np.where(flip & (self.random.random(a.shape) < 0.5), -result, result)
        if op.kind == "mul" and scalar_of(op.result.type) in (F32, F64):
            exact = np.asarray(a.astype(np.longdouble) * b == result)
            return self._moved(result, ~exact, 4.0)
        return result

    def on_unary(self, op: ops.Unary) -> np.ndarray:
        result = np.asarray(super().on_unary(op))
        if op.kind not in ops.MATH:
            return result
        if scalar_of(op.result.type) in (BF16, F16):  # rounded once more: the neighbour may be it
            half = {BF16: 2.0**-8, F16: 2.0**-11}[scalar_of(op.result.type)]
            by = 1 + half * self.random.choice([-1.0, 1.0], result.shape)
            return np.where(np.isfinite(result), result * by, result).astype(result.dtype)
        return self._moved(result, np.ones(result.shape, bool), 8.0)

    def on_reduce(self, op: ops.Reduce) -> np.ndarray:
        result = np.asarray(super().on_reduce(op))
        x = _array(op.operand)
        if result.dtype.kind != "f":
            return result
        if op.kind != "add":
            flip = (result == 0) & (self.random.random(result.shape) < 0.5)
            return np.where(flip, -result, result)
        return self._summed(result, np.moveaxis(x, op.axis, -1))

    def _summed(self, result: np.ndarray, x: np.ndarray) -> np.ndarray:
        """A sum along the last axis moved by a rounding of the sum of magnitudes, unless all
        terms are whole multiples of a number that leaves room for the sum."""
        with np.errstate(all="ignore"):
            size = np.abs(x).sum(-1, dtype=np.longdouble)
            grain = 2.0**-3
            whole = np.all((x / grain == np.round(x / grain)), -1)
            exact = whole & (size / grain < 2.0 ** np.finfo(result.dtype).nmant)
            by = np.asarray(size * np.finfo(result.dtype).eps * self._either(4.0, 8.0, size.shape))
            moved = (result + by).astype(result.dtype)
        return np.where(exact | ~np.isfinite(result), result, moved).astype(result.dtype)

    def on_dot(self, op: ops.Dot) -> np.ndarray:
        result = np.asarray(super().on_dot(op))
        if result.dtype.kind != "f":
            return result
        a, b = _array(op.lhs).astype(np.float64), _array(op.rhs).astype(np.float64)
        b = b - 8 if str(scalar_of(op.rhs.type)) == "u4" else b
        terms = a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :]
        if op.acc is not None:
            terms = np.concatenate([terms, _array(op.acc)[..., None]], -1)
        return self._summed(result, terms)


def _array(value: ops.Value) -> np.ndarray:
    assert isinstance(value, Evaluated)
    return value.array


# --- comparing ----------------------------------------------------------------------------


def _comparable(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def differs(got: torch.Tensor, want: torch.Tensor, moved: list[torch.Tensor]) -> np.ndarray:
    """Which elements are further apart than the disturbed runs allow."""
    x, y = _comparable(got), _comparable(want)
    others = [_comparable(m) for m in moved]
    with np.errstate(all="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        still = np.logical_and.reduce([(o == y) | ((o != o) & (y != y)) for o in others])
        if x.dtype.kind != "f":
            return ~same & still
        wide = [o.astype(np.float64) for o in others]
        room = SLACK * np.maximum.reduce([np.abs(o - y) for o in wide])
        near = (np.abs(x.astype(np.float64) - y) <= room) | ~np.isfinite(room)
    return ~same & (still | ~near)


def disturbed(kernel: JITFunction, program: Program, seeds: range) -> list[list[torch.Tensor]]:
    before = amxq.interpreter.kernel.Evaluator
    amxq.interpreter.kernel.Evaluator = Disturbed  # type: ignore[misc]
    try:
        with knobs.INTERPRET.scope("1"):
            runs = []
            for Disturbed.seed in seeds:
                runs.append(run(kernel, program))
            return runs
    finally:
        amxq.interpreter.kernel.Evaluator = before  # type: ignore[misc]


def check(program: Program, targets: list[str]) -> None:
    """Raises Disagreement, with the program, if a target does not do what the interpreter does.

    Two disturbed runs tell most of what may differ. Where that is not enough there are more:
    disturbances cancel out now and then."""
    kernel = kernel_of(program)
    with knobs.INTERPRET.scope("1"):
        want = run(kernel, program)
    moved = disturbed(kernel, program, range(2))
    for name in targets:
        try:
            with target(name):
                got = run(kernel, program)
        except CompilationError as error:
            if any(limit in error.message for limit in LIMITS):
                continue
            raise
        wrong = _first_difference(got, want, moved)
        if wrong is not None and len(moved) == 2:
            moved += disturbed(kernel, program, range(2, 10))
            wrong = _first_difference(got, want, moved)
        if wrong is not None:
            i, at, count = wrong
            raise Disagreement(
                f"{name}, result {i}, element {at} (of {count}): {got[i][at].item()!r} instead "
                f"of {want[i][at].item()!r}, disturbed {[m[i][at].item() for m in moved]}\n"
                f"data {program.data} {program.seed} {program.span}\n{program.source}"
            )


def _first_difference(
    got: list[torch.Tensor], want: list[torch.Tensor], moved: list[list[torch.Tensor]]
) -> tuple[int, int, int] | None:
    """Result, element, and how many of the result's elements differ."""
    for i, (x, y) in enumerate(zip(got, want)):
        wrong = np.flatnonzero(differs(x, y, [m[i] for m in moved]))
        if wrong.size:
            return i, int(wrong[0]), wrong.size
    return None
