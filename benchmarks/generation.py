"""Tokens per second of whole models: ``python -m benchmarks generation``.

A model of Qwen2.5-0.5B's shapes with random weights, or a real one. Each contestant lives in a
process of its own and they take turns: one prompt, then greedy tokens one by one. amxq's models
have transformers' Python around them; llama.cpp (package llama-cpp-python, see
``benchmarks.contestants``) computes its own quantisations of the same model, through C calls.
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
from benchmarks import contestants
from benchmarks.gguf_model import write_gguf
from benchmarks.loading import write_models
from benchmarks.native import machine
from benchmarks.report import Row, quantile, table

_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    token = begin()
    first = time.perf_counter() - start
    steps = []
    for _ in range(count):
        start = time.perf_counter()
        token = go_on(token)
        steps.append(time.perf_counter() - start)
    print(json.dumps([first, sorted(steps)[len(steps) // 2]]), flush=True)
"""

_TORCH = (
    """
import json, sys, time, torch, amxq
what, folder, threads, prompt, count = sys.argv[1:3] + [int(n) for n in sys.argv[3:]]
torch.set_num_threads(threads)
torch.set_grad_enabled(False)
if what == "transformers bf16":
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
else:
    precision = "int8" if what == "amxq int8" else "bf16"
    head = "int8" if what.endswith("8-bit head") else None
    model, _ = amxq.load_model(folder, target="auto", precision=precision, head=head)
ids = torch.randint(3, 1000, (1, prompt), generator=torch.Generator().manual_seed(0))

def step(tokens, cache):
    global out
    with torch.inference_mode():
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        word = out.logits[0, -1].float().numpy().argmax()  # torch's own takes 0.7 ms in bf16
        return torch.tensor([[int(word)]])

def begin():
    return step(ids, None)

def go_on(token):
    return step(token, out.past_key_values)
"""
    + _LOOP
)

_LLAMA = (
    """
import ctypes, json, sys, time, numpy, llama_cpp as c
what, file, threads, prompt, count = sys.argv[1:3] + [int(n) for n in sys.argv[3:]]
quiet = c.llama_log_callback(lambda *_: None)
c.llama_log_set(quiet, None)
model = c.llama_model_load_from_file(file.encode(), c.llama_model_default_params())
options = c.llama_context_default_params()
options.n_ctx, options.n_threads, options.n_threads_batch = prompt + count + 8, threads, threads
options.n_batch = options.n_ubatch = max(512, prompt)
context = c.llama_init_from_model(model, options)
words = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
ids = numpy.random.default_rng(0).integers(3, 1000, prompt)

def step(*tokens):
    given = (c.llama_token * len(tokens))(*tokens)
    if c.llama_decode(context, c.llama_batch_get_one(given, len(tokens))):
        sys.exit("llama_decode failed")
    logits = c.llama_get_logits_ith(context, -1)
    return int(numpy.ctypeslib.as_array(logits, (words,)).argmax())

def begin():
    c.llama_memory_clear(c.llama_get_memory(context), True)
    return step(*ids)

go_on = step
"""
    + _LOOP
)

_QUANTISE = """
import ctypes, sys, llama_cpp as c
source, target, kind = sys.argv[1:]
options = c.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = int(kind), True
status = c.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options))
sys.exit(int(status))
"""
_KINDS = {"llama.cpp Q4_0": 2, "llama.cpp Q4_K_M": 15}  # llama.cpp's numbers of file types

_OURS = ("amxq", "amxq int8", "amxq, 8-bit head")


def quantised(source: pathlib.Path, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """{contestant: its GGUF}, made by llama.cpp from another one; nothing where it is missing."""
    python = contestants.python("llamacpp")
    out = {}
    for name, kind in _KINDS.items():
        file = folder / f"{kind}.gguf"
        command = [python, "-c", _QUANTISE, str(source), str(file), str(kind)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"{name} does not take part: {reason}", file=sys.stderr)
        else:
            out[name] = file
    return out


def measure(
    models: dict[str, pathlib.Path], threads: int, prompt: int, count: int, turns: int
) -> list[Row]:
    """One row for each contestant: tokens a second of the prompt and after it."""
    workers: dict[str, Any] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    try:
        for name, model in models.items():
            arguments = [name, str(model), str(threads), str(prompt), str(count)]
            start = [sys.executable, "-c", _TORCH]
            if name in _KINDS:
                start = [contestants.python("llamacpp"), "-c", _LLAMA]
            worker = subprocess.Popen(
                [*start, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=dict(os.environ, OMP_NUM_THREADS=str(threads)),
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
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} generation", description=__doc__)
    parser.add_argument("--int4", type=pathlib.Path, help="an INT4 checkpoint's folder")
    parser.add_argument("--dense", type=pathlib.Path, help="the same model's, unquantised")
    parser.add_argument(
        "--gguf",
        type=pathlib.Path,
        help="for llama.cpp; default: made of --dense",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--count", type=int, default=24, metavar="TOKENS")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="of the random model")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    given = parser.parse_args(arguments)
    if (given.int4 is None) != (given.dense is None):
        parser.error("--int4 and --dense belong together")
    with tempfile.TemporaryDirectory() as scratch:
        work = pathlib.Path(scratch)
        dense, int4, gguf = given.dense, given.int4, given.gguf
        if int4 is None:
            written = write_models(work, given.layers)
            dense, int4, gguf = (
                written["transformers"],
                written["amxq, packed"],
                work / "model.gguf",
            )
            write_gguf(dense, gguf)
        elif gguf is None:
            gguf = work / "model.gguf"
            try:
                write_gguf(dense, gguf)
            except ValueError as problem:
                print(f"llama.cpp does not take part: {problem}", file=sys.stderr)
                gguf = None
        models = {"transformers bf16": dense} | dict.fromkeys(_OURS, int4)
        models |= quantised(gguf, work) if gguf else {}
        rows = measure(models, given.threads, given.prompt, given.count, given.turns)
    print(f"prompt of {given.prompt} tokens, {given.threads} threads\n")
    print(table(rows))
    print(f"\n{machine()}; {time.strftime('%Y-%m-%d')}")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0
