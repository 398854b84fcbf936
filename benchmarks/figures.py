"""Recorded figures as tables and pictures: ``python -m benchmarks figures FILE...``.

Takes what ``python -m benchmarks linear --json FILE`` wrote, several runs together: tables,
where a peer is faster than amxq, and with ``--plot`` a picture for each shape and number of
threads: the roofline, and every contestant's time over amxq's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import benchmarks
from benchmarks.report import Row, number, table

_CASE = ("n", "k", "group", "symmetric", "threads")


def merged(files: Iterable[pathlib.Path]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of all files, of what was measured twice the later ones, and the highest limits."""
    found: dict[tuple[Any, ...], Row] = {}
    limits: dict[str, Any] = {"multiply": {}, "read": {}}
    for file in files:
        content = json.loads(file.read_text())
        for row in content["rows"]:
            found[tuple(row[name] for name in (*_CASE, "m", "who"))] = row
        _highest(limits, content.get("limits", {}))
    rows = list(found.values())
    order = {who: i for i, who in enumerate(dict.fromkeys(row["who"] for row in rows))}

    def place(r: Row) -> tuple[Any, ...]:
        return r["n"], r["k"], not r["symmetric"], r["group"], r["threads"], r["m"], order[r["who"]]

    return sorted(rows, key=place), limits


def _highest(kept: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _highest(kept.setdefault(name, {}), value)
        else:
            kept[name] = max(value, kept.get(name, 0))


def render(rows: list[Row]) -> str:
    """For each shape and number of threads a Markdown table: µs a call, and in brackets how
    many times as long as the first contestant (~: disturbed); then error, spread and size."""
    out = []
    for case, part in _cases(rows):
        first = {r["m"]: r["us"] for r in part if r["who"] == part[0]["who"]}
        out.append(f"\n{case}, µs a call\n")
        lines: list[Row] = []
        for who in dict.fromkeys(r["who"] for r in part):
            mine = [r for r in part if r["who"] == who]
            line: Row = {"": who}
            for r in mine:
                ratio = r["us"] / first[r["m"]] if r["m"] in first else None
                others = f" (×{number(ratio)})" if ratio and who != part[0]["who"] else ""
                mark = "~" if r["disturbed"] else ""
                line[f"M = {r['m']}"] = mark + number(r["us"]) + others
            errors = [r["error"] for r in mine if r["error"] is not None]
            spread = max((r["us_p90"] - r["us_p10"]) / r["us"] for r in mine)
            cpu = max(r["cpu_us"] / r["us"] for r in mine)
            line["error"] = f"{max(errors):.2%}" if errors else "?"
            line["spread, at most"] = f"{spread:.0%}"
            line["CPU / wall time"] = f"{cpu:.2f}"
            line["MB"] = mine[0]["bytes"] / 1e6
            line["pack, s"] = mine[0]["pack_seconds"]
            lines.append(line)
        out.append(table(lines))
    return "\n".join(out)


def nearest(rows: list[Row]) -> list[Row]:
    """For each case the fastest peer of each M as a multiple of amxq's time, 16-bit activations
    over "bf16" and 8-bit ones over "int8"; below 1 the peer is faster."""
    out = []
    quantising = _quantising(rows)
    columns = {f"M = {m}": "" for m in sorted({r["m"] for r in rows})}
    for case, part in _cases(rows):
        for own, eight_bits in (("amxq", False), ("amxq_int8", True)):
            line: Row = {"": case, "activations": "int8" if eight_bits else "bf16"}
            line |= columns
            for m in dict.fromkeys(r["m"] for r in part):
                times = {r["who"]: r["us"] for r in part if r["m"] == m}
                peers = {
                    who: us
                    for who, us in times.items()
                    if (who in quantising) == eight_bits and not who.startswith("amxq")
                }
                if own in times and peers:
                    who = min(peers, key=lambda name: peers[name])
                    line[f"M = {m}"] = f"{number(peers[who] / times[own])} {who}"
            if any(line[column] for column in columns):
                out.append(line)
    return out


def _quantising(rows: list[Row]) -> set[str]:
    """Who quantises activations to 8 bits: their error is above what 16 bits can explain."""
    return {r["who"] for r in rows if (r["error"] or 0) > 0.004}


def _cases(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """(what it is, its rows), a shape, a way of quantising and a number of threads each."""
    out = []
    for key in dict.fromkeys(tuple(r[name] for name in _CASE) for r in rows):
        n, k, group, symmetric, threads = key
        text = f"{n} × {k}, group {group}{'' if symmetric else ', asymmetric'}, "
        text += f"{threads} thread{'s' * (threads > 1)}"
        out.append((text, [r for r in rows if tuple(r[name] for name in _CASE) == key]))
    return out


def plot(rows: list[Row], limits: dict[str, Any], file: pathlib.Path) -> None:
    """Draw a roofline and a chart of ratios for each case to a picture file (matplotlib).

    The roofline's abscissa is multiply-adds and bytes of an INT4 weight with bf16 scales alone,
    the same for all; so contestants that read more than that stay below the slope.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text: small, and can be searched
    cases = _cases(rows)
    size = (13, 4.8 * len(cases))
    figure, axes = pyplot.subplots(len(cases), 2, figsize=size, squeeze=False)
    quantising = _quantising(rows)
    everyone = list(dict.fromkeys(r["who"] for r in rows))
    colours = pyplot.get_cmap("tab20")
    for (left, right), (case, part) in zip(axes, cases, strict=True):
        base = {r["m"]: r["us"] for r in part if r["who"] == part[0]["who"]}
        for who in dict.fromkeys(r["who"] for r in part):
            mine = [r for r in part if r["who"] == who]
            style = {
                "color": colours(everyone.index(who) % 20),
                "marker": "s" if who in quantising else "o",
                "linestyle": "--" if who in quantising else "-",
                "linewidth": 2.5 if who.startswith("amxq") else 1,
                "markersize": 4,
                "label": who,
            }
            rates = [2 * r["m"] * r["n"] * r["k"] / r["us"] / 1e3 for r in mine]
            left.plot([_intensity(r) for r in mine], rates, **style)
            shared = [r for r in mine if r["m"] in base]
            ratios = [r["us"] / base[r["m"]] for r in shared]
            right.plot([r["m"] for r in shared], ratios, **style)
        _roof(left, limits, part)
        left.set(xscale="log", yscale="log", xlabel="operations a byte of INT4 weights")
        left.set(ylabel="10⁹ operations a second", title=case)
        right.set(xscale="log", yscale="log", xlabel="M", ylabel=f"time / {part[0]['who']}'s")
        right.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def _intensity(row: Row) -> float:
    return float(2 * row["m"] / (0.5 + 2 / row["group"]))


def _roof(axis: Any, limits: dict[str, Any], part: list[Row]) -> None:
    """Draw what the machine allows: memory with pages of either size, and each instruction."""
    threads = part[0]["threads"]
    low, high = (f(_intensity(r) for r in part) for f in (min, max))
    top = threads * max(limits.get("multiply", {}).values(), default=0) / 1e9
    for pages, rate in limits.get("read", {}).get(str(threads), {}).items():
        end = min(high, top * 1e9 / rate) if top else high
        line, place = ("-", "bottom") if pages == "2 MB" else (":", "top")
        axis.plot([low, end], [low * rate / 1e9, end * rate / 1e9], line, color="grey")
        text = f"{rate / 1e9:.1f} GB/s, pages of {pages}"
        axis.annotate(text, (low, low * rate / 1e9), fontsize=6, va=place)
    for i, (name, rate) in enumerate(limits.get("multiply", {}).items()):
        axis.axhline(threads * rate / 1e9, color="grey", linewidth=0.8)
        place = {"ha": "right", "va": "bottom", "fontsize": 6}
        axis.annotate(name, (high * (0.5 if i % 2 else 1), threads * rate / 1e9), **place)


def main(arguments: list[str]) -> int:
    """The command; returns an exit status."""
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} figures", description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="written by linear --json")
    parser.add_argument("--plot", type=pathlib.Path, help="draw there: .svg, .png, .pdf")
    parser.add_argument("--nearest", action="store_true", help="only who comes nearest to amxq")
    options = parser.parse_args(arguments)
    rows, limits = merged(options.files)
    if not options.nearest:
        print(render(rows))
    print(f"\nThe fastest peer's time over amxq's\n\n{table(nearest(rows))}")
    if options.plot:
        plot(rows, limits, options.plot)
    return 0
