"""amxq's experts beside others: ``python -m benchmarks experts``.

As :mod:`benchmarks.linear`, whose processes and statistics these are. Each call has other tokens
and so reads other experts from memory. Beside the times: what reading the experts that a call
touches would take at the bandwidth measured just before, and what its multiplications are a
second.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

import benchmarks
from benchmarks import contestants
from benchmarks.bandwidth import read_rate
from benchmarks.linear import measure
from benchmarks.native import machine
from benchmarks.problems import Experts
from benchmarks.report import Row, number, table

#: (experts, topk, hidden, inner): Qwen3-30B-A3B's layers, and OLMoE's.
SHAPES = "128x8x2048x768,64x8x2048x1024"


def render(rows: list[Row]) -> str:
    """For each shape and number of threads a Markdown table: µs a call, and in brackets how many
    times as long as the first contestant (~: disturbed); then the error."""
    out = []
    for key in dict.fromkeys((r["shape"], r["threads"]) for r in rows):
        part = [r for r in rows if (r["shape"], r["threads"]) == key]
        first = {r["m"]: r["us"] for r in part if r["who"] == part[0]["who"]}
        shape, threads = key
        rate = part[0]["bytes_per_second"]
        out.append(
            f"\n{shape}, group {part[0]['group']}, {threads} thread{'s' * (threads > 1)}, "
            f"µs a call; memory {rate / 1e9:.1f} GB/s\n"
        )
        lines: list[Row] = []
        for who in dict.fromkeys(r["who"] for r in part):
            line: Row = {"": who}
            for r in (r for r in part if r["who"] == who):
                ratio = r["us"] / first[r["m"]] if r["m"] in first else None
                others = f" (×{number(ratio)})" if ratio and who != part[0]["who"] else ""
                line[f"M = {r['m']}"] = "~" * r["disturbed"] + number(r["us"]) + others
            errors = [r["error"] for r in part if r["who"] == who and r["error"] is not None]
            line["error"] = f"{max(errors):.2%}" if errors else "?"
            lines.append(line)
        own = [r for r in part if r["who"] == part[0]["who"]]
        limits: Row = {"": "*read limit of INT4*"}
        speeds: Row = {"": f"*GFLOP/s of {part[0]['who']}*"}
        for r in own:
            limits[f"M = {r['m']}"] = number(r["touched_bytes"] / rate * 1e6)
            speeds[f"M = {r['m']}"] = number(r["flops"] / r["us"] / 1e3)
        out.append(table([*lines, limits, speeds]))
    return "\n".join(out)


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} experts", description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="E x topk x H x I, comma between shapes")
    parser.add_argument("--m", type=_numbers, default=[1, 4, 8, 64, 512], help="tokens")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true", help="with zero points")
    parser.add_argument("--threads", type=_numbers, default=[1, 2])
    who = f"of {', '.join(contestants.EXPERTS[1:])}"
    parser.add_argument("--peers", default="amxq_int8,torch_grouped,vllm,zentorch", help=who)
    parser.add_argument("--targets", default="", help="amxq's, comma between; default: its choice")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each contestant")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    options = parser.parse_args(arguments)
    names = [f"amxq@{target}" for target in options.targets.split(",") if target] or ["amxq"]
    names += [name for name in options.peers.split(",") if name]
    for name in names:
        if name.partition("@")[0] not in contestants.EXPERTS:
            parser.error(f"no contestant {name!r}; there are: {', '.join(contestants.EXPERTS)}")
    rows: list[Row] = []
    for shape in options.shapes.split(","):
        sizes = [int(x) for x in shape.split("x")]
        problem = Experts(*sizes, options.group, not options.asymmetric)
        for threads in options.threads:
            rate = read_rate(threads)
            for row in measure(problem, options.m, names, threads, options.rounds, 0):
                m = row["m"]
                row |= {"shape": shape, "bytes_per_second": rate}
                row["touched_bytes"] = problem.touched_bytes(m)
                row["flops"] = 6 * m * problem.topk * problem.hidden * problem.inner
                rows.append(row)
    if not rows:
        print("nobody could take part", file=sys.stderr)
        return 1
    print(render(rows))
    about = machine() | {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
    print(f"\n{about['model name']}; {about['date']}; load {about['load']:.1f} at the end")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0
