"""amxq's int4 linear beside others: ``python -m benchmarks linear``.

Each contestant runs in a process of its own; within one run they take turns in short bursts,
forwards and backwards, so that a machine that is busy or changes its clock is so for all of
them. Weights rotate through so many copies that each call reads its own from memory, as in a
model. Every time is the median over the calls that were not interrupted, with the CPU time of
the process as a check, and the error against fp64 beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

import benchmarks
from benchmarks import contestants, peaks
from benchmarks.figures import plot, render
from benchmarks.native import machine
from benchmarks.problems import Linear, Problem
from benchmarks.report import Row, quantile

_ROOT = pathlib.Path(__file__).parent.parent
_PAUSE_S = 0.02  # lets the last contestant's OpenMP threads fall asleep


class Contestant:
    """The process of one contestant. ``name`` may carry a target: ``amxq@avx512``."""

    def __init__(self, name: str, threads: int, kind: str = "linear") -> None:
        self.name, self.dead = name, ""
        module, _, target = name.partition("@")
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        if target:
            environment["AMXQ_TARGET"] = target
        self._process = subprocess.Popen(
            [contestants.python(module), "-m", "benchmarks.worker", kind, module, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )

    def ask(self, do: str, **request: Any) -> Row:
        """One request; a process that has ended answers with an error from then on."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"its process ended with status {self._process.wait()}"}
        answer: Row = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def summarise(samples: list[tuple[int, int, int]]) -> Row:
    """Microseconds of a call: wall time, its 10th and 90th percentile, and CPU time.

    The wall time is the median over the calls during which no thread lost its CPU to another
    process. On a machine so busy that fewer than a fifth were left alone, it is the 10th
    percentile of all, and the row is marked as disturbed.
    """
    clean = [s for s in samples if not s[2]]
    disturbed = 5 * len(clean) < len(samples)
    wall = [s[0] / 1000 for s in (samples if disturbed else clean)]
    return {
        "us": quantile(wall, 0.1 if disturbed else 0.5),
        "disturbed": disturbed,
        "us_p10": quantile(wall, 0.1),
        "us_p90": quantile(wall, 0.9),
        "cpu_us": quantile([s[1] / 1000 for s in samples], 0.5),
        "calls": len(samples),
        "interrupted": len(samples) - len(clean),
    }


def measure(
    problem: Problem, ms: list[int], names: list[str], threads: int, rounds: int, cold_mb: float
) -> list[Row]:
    """One row for each contestant and M; contestants that cannot run are named on stderr."""
    field: list[tuple[Contestant, Row]] = []
    rows: list[Row] = []
    try:
        for name in names:
            contestant = Contestant(name, threads, problem.kind)
            spec = asdict(problem)
            ready = contestant.ask("prepare", problem=spec, cold_bytes=int(cold_mb * 1e6))
            if reason := ready.get("unavailable") or ready.get("error"):
                print(f"{name} does not take part: {reason}", file=sys.stderr)
                contestant.close()
            else:
                field.append((contestant, ready))
        for m in ms:
            for contestant, ready, summary in _take_turns(field, m, rounds):
                row = {"who": contestant.name, "threads": threads, "m": m} | asdict(problem)
                summary["error"] = _error(problem, contestant, m)
                rows.append(row | ready | summary)
    finally:
        for contestant, _ in field:
            contestant.close()
    return rows


def _take_turns(
    field: list[tuple[Contestant, Row]], m: int, rounds: int
) -> list[tuple[Contestant, Row, Row]]:
    samples: dict[str, list[Any]] = {contestant.name: [] for contestant, _ in field}
    bursts = {}
    for contestant, ready in field:
        # once through all copies where that is cheap: pages touched, kernels compiled
        answer = contestant.ask("time", m=m, calls=ready["copies"] + 2 if m <= 64 else 3)
        if "error" in answer:
            print(f"{contestant.name}, M = {m}: {answer['error']}", file=sys.stderr)
            continue
        fastest = min(wall for wall, _, _ in answer["samples"])
        bursts[contestant.name] = max(1, min(200, int(40e6 / fastest)))  # 40 ms
    taking_part = [(c, r) for c, r in field if c.name in bursts]
    for turn in range(rounds):
        for contestant, _ in taking_part if turn % 2 == 0 else taking_part[::-1]:
            time.sleep(_PAUSE_S)
            answer = contestant.ask("time", m=m, calls=bursts[contestant.name])
            # the first call of a burst finds caches and threads as another left them
            samples[contestant.name] += answer.get("samples", [])[1:] or answer.get("samples", [])
    return [(c, r, summarise(samples[c.name])) for c, r in taking_part if samples[c.name]]


def _error(problem: Problem, contestant: Contestant, m: int) -> float | None:
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "y.npy")
        if "error" in contestant.ask("result", m=m, file=file):
            return None
        return problem.error(np.load(file))


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} linear", description=__doc__)
    parser.add_argument("--shapes", default="4096x4096", help="N x K, comma between shapes")
    parser.add_argument("--m", type=_numbers, default=[1, 4, 16, 64, 512], help="rows of x")
    parser.add_argument("--group", type=int, default=128, help="-1: one for all of K")
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--threads", type=_numbers, default=[1, 2])
    who = f"of {', '.join(contestants.NAMES[1:])}"
    parser.add_argument("--peers", default="int4pack,torch_bf16", help=who)
    parser.add_argument("--targets", default="", help="amxq's, comma between; default: its choice")
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each contestant")
    parser.add_argument("--cold-mb", type=float, default=256, help="all copies of the weights")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    parser.add_argument("--plot", type=pathlib.Path, help="draw roofline and ratios (matplotlib)")
    options = parser.parse_args(arguments)
    names = [f"amxq@{target}" for target in options.targets.split(",") if target] or ["amxq"]
    names += [name for name in options.peers.split(",") if name]
    for name in names:
        if name.partition("@")[0] not in contestants.NAMES:
            parser.error(f"no contestant {name!r}; there are: {', '.join(contestants.NAMES)}")
    rows: list[Row] = []
    limits = peaks.limits(options.threads) if options.json or options.plot else {}
    for shape in options.shapes.split(","):
        n, k = (int(x) for x in shape.split("x"))
        group = k if options.group == -1 else options.group
        problem = Linear(n, k, group, not options.asymmetric)
        for threads in options.threads:
            rows += measure(problem, options.m, names, threads, options.rounds, options.cold_mb)
    if not rows:
        print("nobody could take part", file=sys.stderr)
        return 1
    print(render(rows))
    about = machine() | {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
    print(f"\n{about['model name']}, family {about['cpu family']} model {about['model']}", end="")
    print(f" stepping {about['stepping']}; {about['date']}; load {about['load']:.1f} at the end")
    if options.json:
        content = {"machine": about, "limits": limits, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        plot(rows, limits, options.plot)
    return 0
