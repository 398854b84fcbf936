"""What amxq costs beside its kernels: ``python -m benchmarks overhead``.

Import beyond torch, first call with an empty and with a warm cache of compiled kernels, and
the cost of a call on a layer so small that its arithmetic does not count. Each figure comes
from processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import benchmarks
from benchmarks.contestants import amxq as contestant
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_IMPORT = """
import time, torch
start = time.perf_counter()
import amxq
print(time.perf_counter() - start)
"""

_FIRST_CALLS = """
import time, torch, amxq
q = torch.randint(0, 16, (256, 512), dtype=torch.uint8)
w = amxq.pack(q, torch.rand(256, 4).bfloat16(), format="plain")
times = []
for m in (1, 1, 64, 64):
    x = torch.randn(m, 512).bfloat16()
    start = time.perf_counter()
    amxq.linear(x, *w)
    times.append(time.perf_counter() - start)
print(*times)
"""

_CALLS = """
import time, torch, amxq
torch.set_num_threads(1)
q = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
w = amxq.pack(q, torch.rand(32, 1).bfloat16(), format="plain")
dense = amxq.dequantize(w).bfloat16()
x = torch.randn(1, 64).bfloat16()
calls = {
    "amxq.linear": lambda: amxq.linear(x, *w),
    "torch.ops.amxq.linear": lambda: torch.ops.amxq.linear(x, *w),
    "torch linear, bf16": lambda: torch.nn.functional.linear(x, dense),
}
with torch.inference_mode():
    for name, call in calls.items():
        samples = []
        for _ in range(6000):
            start = time.perf_counter_ns()
            call()
            samples.append(time.perf_counter_ns() - start)
        print(sorted(samples[1000:])[2500] / 1e9, name)
"""


def run(code: str, cache: str) -> list[str]:
    """The lines that a fresh Python prints for ``code``, with its kernel cache in ``cache``.

    Raises RuntimeError with what it wrote to standard error if it fails.
    """
    environment = dict(os.environ, AMXQ_CACHE_DIR=cache, PYTHONPYCACHEPREFIX=f"{cache}-bytecode")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed: modules are compiled once
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.splitlines()


def measure(repetitions: int) -> list[Row]:
    """One row a figure: median and best in milliseconds."""
    found: dict[str, list[float]] = {}

    def add(what: str, seconds: str | float) -> None:
        found.setdefault(what, []).append(1000 * float(seconds))

    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(repetitions):
            add("import amxq, torch imported before", run(_IMPORT, scratch)[0])
            cache = os.path.join(scratch, str(turn))
            for state in ("empty", "warm"):
                first, again, first_large, again_large = run(_FIRST_CALLS, cache)[0].split()
                add(f"first call, M = 1, {state} cache", first)
                add(f"first call, M = 64, {state} cache", first_large)
            add("second call, M = 1", again)
            add("second call, M = 64", again_large)
        for _ in range(repetitions):
            for line in run(_CALLS, scratch):
                seconds, _, name = line.partition(" ")
                add(f"call on 1 × 64 × 32: {name}", seconds)
    return [
        {"what": what, "median, ms": f"{quantile(v, 0.5):.4g}", "best, ms": f"{min(v):.4g}"}
        for what, v in found.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} overhead", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if reason := contestant.unavailable():
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    rows = measure(options.repetitions)
    print(table(rows))
    if options.json:
        about: dict[str, Any] = machine() | {"date": time.strftime("%Y-%m-%d")}
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0
