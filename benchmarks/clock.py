"""Cycles of the core's own clock, on machines whose clock moves and whose cores are shared.

The time stamp counter ticks at a fixed rate, the core does not (2.0 to 2.9 GHz within seconds
where this was written). So each sample of a loop is followed by a sample of a loop whose
length in cycles is known, a chain of dependent additions, and is expressed in it.

The other hyperthread of the core may belong to a neighbour and take half of a shared unit;
such samples come out up to twice as long. The figure given is the 20th percentile: what the
core does when it is left alone for 50 µs. The median says how often it was.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.native import compile_ir

_SAVED = "rax rbx rcx rdx r8 r9 r10 r11".split()
_CLOBBERS = ",".join(
    f"~{{{name}}}"
    for name in ("memory", "dirflag", "fpsr", "flags", *_SAVED, *(f"zmm{i}" for i in range(32)))
)
_CHAIN, _CHAIN_ROUNDS, _SAMPLE_NS = 64, 600, 50_000


@dataclass(frozen=True)
class Sample:
    """One loop's cost: cycles and nanoseconds of an iteration, the clock meanwhile in GHz."""

    cycles: float
    median_cycles: float
    nanoseconds: float
    ghz: float


def loop(body: str, *, before: str = "", after: str = "") -> Callable[..., int]:
    """A function (count, a, b, c) that runs ``body`` count times.

    Args:
        body: assembly in Intel's syntax, one instruction a line. rsi, rdi and r12 hold a, b
            and c; rax, rbx, rcx, rdx, r8 to r11 and all vector and tile registers are free.
        before, after: assembly outside of the loop.
    """
    lines = [*before.splitlines(), "9:", *body.splitlines(), "dec r13", "jnz 9b"]
    text = "\\0A".join(line.strip() for line in [*lines, *after.splitlines()] if line.strip())
    ties = "={r13},={rsi},={rdi},={r12},0,1,2,3"
    code = f"""define i64 @loop(i64 %count, i64 %a, i64 %b, i64 %c) {{
      %r = call {{i64, i64, i64, i64}} asm sideeffect inteldialect "{text}", "{ties},{_CLOBBERS}"
           (i64 %count, i64 %a, i64 %b, i64 %c)
      ret i64 0
    }}"""
    return compile_ir(code, {"loop": (ctypes.c_int64,) * 4})["loop"]


@functools.cache
def _chain() -> tuple[Callable[..., int], float]:
    """The loop of known length, and the nanoseconds that a call costs around its loop."""
    chain = loop("add rax, rbx\n" * _CHAIN)
    empty = loop("nop")
    times = []
    for _ in range(2000):
        start = time.perf_counter_ns()
        empty(1, 0, 0, 0)
        times.append(time.perf_counter_ns() - start)
    return chain, float(sorted(times)[len(times) // 2])


def measure(run: Callable[..., int], a: int, b: int, c: int, *, samples: int = 200) -> Sample:
    """Time a :func:`loop`, half of the samples on each of the first two CPUs it may use.

    Args:
        a, b, c: its arguments.
    """
    chain, overhead = _chain()
    now = time.perf_counter_ns
    run(1, a, b, c)
    start = now()
    run(100, a, b, c)
    count = max(1, int(100 * _SAMPLE_NS / max(now() - start - overhead, 1)))
    allowed = os.sched_getaffinity(0)
    found = []
    try:
        for cpu in sorted(allowed)[:2]:
            os.sched_setaffinity(0, {cpu})
            run(count, a, b, c)
            for _ in range(samples // 2):
                start = now()
                run(count, a, b, c)
                middle = now()
                chain(_CHAIN_ROUNDS, 0, 0, 0)
                end = now()
                ghz = _CHAIN_ROUNDS * _CHAIN / (end - middle - overhead)
                each = (middle - start - overhead) / count
                found.append((each * ghz, each, ghz))
    finally:
        os.sched_setaffinity(0, allowed)
    found.sort()
    cycles, nanoseconds, ghz = found[len(found) // 5]
    return Sample(cycles, found[len(found) // 2][0], nanoseconds, ghz)
