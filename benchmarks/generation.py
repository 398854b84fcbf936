"""Tokens per second of whole models: ``python -m benchmarks generation``.

A model of Qwen2.5-0.5B's shapes with random weights, or two folders of a real one. Each contestant
lives in a process of its own and they take turns: one prompt, then greedy tokens one by one, with
transformers' Python around them in each case.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.loading import write_models
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_WORKER = """
import json, sys, time, torch, amxq
what, folder, threads, prompt, count = sys.argv[1:]
torch.set_num_threads(int(threads))
if what == "transformers bf16":
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
else:
    precision = "int8" if what.endswith("int8") else "bf16"
    model, _ = amxq.load_model(folder, target="auto", precision=precision)
ids = torch.randint(3, 1000, (1, int(prompt)), generator=torch.Generator().manual_seed(0))
print("ready", flush=True)
for line in sys.stdin:
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        first = time.perf_counter() - start
        steps = []
        for _ in range(int(count)):
            start = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            steps.append(time.perf_counter() - start)
    print(json.dumps([first, sorted(steps)[len(steps) // 2]]), flush=True)
"""


def measure(
    folders: dict[str, pathlib.Path], threads: int, prompt: int, count: int, turns: int
) -> list[Row]:
    """One row for each contestant: tokens a second of the prompt and after it."""
    workers: dict[str, Any] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in folders}
    try:
        for name, folder in folders.items():
            arguments = [name, str(folder), str(threads), str(prompt), str(count)]
            worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            workers[name] = worker
            if worker.stdout.readline() != "ready\n":
                raise RuntimeError(f"{name}: exit status {worker.wait()}; run it by hand")
        for turn in range(turns + 1):
            for name, worker in workers.items():
                worker.stdin.write("go\n")
                worker.stdin.flush()
                found = json.loads(worker.stdout.readline())
                if turn:  # the first one compiles and fills caches
                    times[name].append(found)
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    rows = []
    for name, found in times.items():
        row: Row = {"": name}
        for i, (what, tokens) in enumerate((("prompt", prompt), ("generation", 1))):
            ratios = [t[i] / own[i] for t, own in zip(times[next(iter(times))], found, strict=True)]
            low, middle, high = (quantile(ratios, q) for q in (0.1, 0.5, 0.9))
            row[f"{what}, tokens/s"] = tokens / quantile([t[i] for t in found], 0.5)
            row[f"{what}, times the first"] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append(row)
    return rows


def main(arguments: list[str]) -> int:
    """The command; returns an exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks generation", description=__doc__)
    parser.add_argument("--int4", type=pathlib.Path, help="an INT4 checkpoint's folder")
    parser.add_argument("--dense", type=pathlib.Path, help="the same model's, unquantised")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--count", type=int, default=24, metavar="TOKENS")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="of the random model")
    given = parser.parse_args(arguments)
    if (given.int4 is None) != (given.dense is None):
        parser.error("--int4 and --dense belong together")
    with tempfile.TemporaryDirectory() as scratch:
        if given.int4 is None:
            written = write_models(pathlib.Path(scratch), given.layers)
            dense, int4 = written["transformers"], written["amxq, packed"]
        else:
            dense, int4 = given.dense, given.int4
        folders = {"transformers bf16": dense, "amxq": int4, "amxq int8": int4}
        rows = measure(folders, given.threads, given.prompt, given.count, given.turns)
    print(f"prompt of {given.prompt} tokens, {given.threads} threads\n")
    print(table(rows))
    print(f"\n{machine()}")
    return 0
