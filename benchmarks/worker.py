"""One contestant in a process of its own, driven by lines of JSON on its standard input.

    python -m benchmarks.worker KIND NAME THREADS        KIND: linear or experts

Requests: {"do": "prepare", "problem": {...}, "cold_bytes": n}, {"do": "time", "m": m,
"calls": n}, {"do": "result", "m": m, "file": path}. Each is answered by one line; an error is
answered as {"error": text}. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks import contestants
from benchmarks.problems import PROBLEMS


class Worker:
    """Holds copies of one layer, so many that the next one is no longer in a cache."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.contestant = kind, contestants.load(name, kind)
        self.copies: list[Any] = []
        self.inputs: dict[int, list[tuple[Any, ...]]] = {}
        self.turn = 0

    def prepare(self, problem: dict[str, Any], cold_bytes: int) -> dict[str, Any]:
        if reason := self.contestant.unavailable():
            return {"unavailable": reason}
        self.problem, self.copies, self.inputs = PROBLEMS[self.kind](**problem), [], {}
        self.problem.make()  # now: not part of packing
        start = time.perf_counter()
        first = self.contestant.pack(self.problem)
        seconds = time.perf_counter() - start
        size = self.contestant.size(first)
        self.copies = [first]
        while len(self.copies) * size < cold_bytes:
            self.copies.append(self.contestant.pack(self.problem))
        return {"bytes": size, "copies": len(self.copies), "pack_seconds": seconds}

    def _call(self, inputs: list[tuple[Any, ...]]) -> torch.Tensor:
        self.turn += 1
        given = inputs[self.turn % len(inputs)]
        y: torch.Tensor = self.contestant.call(*given, self.copies[self.turn % len(self.copies)])
        return y

    def time(self, m: int, calls: int) -> dict[str, Any]:
        """[wall ns, process CPU ns, involuntary switches] of each call."""
        x = self._input(m)
        samples = []
        for _ in range(calls):
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            self._call(x)
            wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
            after = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            samples.append((wall, cpu, after - switches))
        return {"samples": samples}

    def result(self, m: int, file: str) -> dict[str, Any]:
        np.save(file, self._call(self._input(m)[:1]).float().numpy())
        return {}

    def _input(self, m: int) -> list[tuple[Any, ...]]:
        """What calls take in turns; floating numbers are bf16 unless the contestant converts x."""
        if m not in self.inputs:
            tensors = [tuple(map(torch.from_numpy, given)) for given in self.problem.inputs(m)]
            rounded = [
                tuple(t.bfloat16() if t.is_floating_point() else t for t in given)
                for given in tensors
            ]
            self.inputs[m] = [(self.contestant.given(x), *rest) for x, *rest in rounded]
            for given in self.inputs[m]:  # which kernels are compiled may depend on the routing
                self._call([given])
            if len(self.inputs) == 1:  # what is remembered of a weight is known from then on
                for _ in range(2 * len(self.copies)):
                    self._call(self.inputs[m])
        return self.inputs[m]


def main() -> None:
    kind, name, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    worker = Worker(kind, name)
    with torch.inference_mode():
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(worker, request.pop("do"))(**request)
            except Exception as error:  # the other side decides what to make of it
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
