"""What this machine's cores can do at most: ``python -m benchmarks limits``.

First, on every CPU, the multiply units' rates and the bandwidth of memory, measured with code of
amxq's own compiler. Then costs of single instructions, of the steps that an int4 kernel is made
of, peak rates and read bandwidth again, in assembly: these need AVX-512 or AMX. Prints tables in
Markdown, the ones in docs/amx.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct
import time
from collections.abc import Iterable
from typing import Any

import benchmarks
from amxq.runtime.targets import available_targets
from benchmarks import clock
from benchmarks.bandwidth import bandwidth
from benchmarks.native import Buffer, machine
from benchmarks.peaks import rows as peaks_rows
from benchmarks.report import Row, table
from benchmarks.stream import stream

_TILES = "\n".join(f"tileloadd tmm{t}, [rdi + rbx + {1024 * t}]" for t in range(8))
WITH_TILES = f"ldtilecfg [r12]\nmov rbx, 64\n{_TILES}"
WITH_VECTORS = "\n".join(f"vmovdqu64 zmm{i}, [rdi + {64 * i}]" for i in range(32))


class Bench:
    """Runs loops on buffers of plausible data (bf16 numbers around 1) and collects rows."""

    def __init__(self) -> None:
        import numpy as np

        numbers = np.random.default_rng(0).standard_normal(1 << 19, np.float32).view(np.uint32)
        self.a, self.b, self.config = Buffer(64 << 20), Buffer(1 << 20), Buffer(4096)
        for buffer in (self.a, self.b):
            buffer.fill((numbers >> 16).astype(np.uint16).tobytes())

    def run(self, name: str, body: Iterable[str] | str, per: float = 1, **options: Any) -> Row:
        """One row: cycles per ``body`` / ``per``.

        Options: ``before``, ``rows`` of tiles 0..5 (A and C), ``samples``.
        """
        rows = options.get("rows", 16)
        counts = [rows] * 6 + [16, 16] + [0] * 8
        config = struct.pack("<BB14x16H16B", 1, 0, *([64] * 8 + [0] * 8), *counts)
        self.config.fill(config.ljust(4096, b"\0"))
        before = options.get("before", "")
        text = body if isinstance(body, str) else "\n".join(body)
        code = clock.loop(text, before=before, after="tilerelease" if "tile" in before else "")
        addresses = self.a.address, self.b.address, self.config.address
        found = clock.measure(code, *addresses, samples=options.get("samples", 200))
        return {
            "what": name,
            "cycles": found.cycles / per,
            "median": found.median_cycles / per,
            "ns": found.nanoseconds / per,
            "GHz": found.ghz,
        }


# --- single instructions ------------------------------------------------------------------


def tile_instructions(bench: Bench) -> list[Row]:
    out = []
    for rows in (16, 8, 4, 1):
        for kind, b in (("same B", (6, 6)), ("B changes", (6, 7))):
            body = [f"tdpbf16ps tmm{i % 4}, tmm{4 + i // 2 % 2}, tmm{b[i % 2]}" for i in range(16)]
            name = f"tdpbf16ps, {rows} rows, {kind}"
            out.append(bench.run(name, body, 16, before=WITH_TILES, rows=rows))
    for name in ("tdpbf16ps", "tdpbssd", "tdpbusd"):
        body = [f"{name} tmm0, tmm4, tmm6"] * 16
        out.append(bench.run(f"{name}, C the same tile again", body, 16, before=WITH_TILES))
    body = ["tilestored [rsi + rbx], tmm0", "tileloadd tmm0, [rsi + rbx]"]
    out.append(bench.run("chain: tilestored, tileloadd", body * 8, 8, before=WITH_TILES))
    body = ["tdpbf16ps tmm0, tmm4, tmm6", *body]
    out.append(bench.run("chain: tdpbf16ps, tilestored, tileloadd", body * 8, 8, before=WITH_TILES))
    for rows in (16, 4):
        for name, text in (
            ("tileloadd, L1", "tileloadd tmm{0}, [rsi + rbx + {1}]"),
            ("tileloaddt1, L1", "tileloaddt1 tmm{0}, [rsi + rbx + {1}]"),
            ("tilestored, L1", "tilestored [rsi + rbx + {1}], tmm{0}"),
        ):
            body = [text.format(i % 6, 1024 * i) for i in range(8)]
            out.append(bench.run(f"{name}, {rows} rows", body, 8, before=WITH_TILES, rows=rows))
    for size in (256, 1024):
        walk = [f"tileloadd tmm{i}, [r8 + rbx + {1024 * i}]" for i in range(8)]
        walk += ["add rax, 8192", f"and rax, {size * 1024 - 1}", "lea r8, [rsi + rax]"]
        setup = f"{WITH_TILES}\nxor eax, eax\nmov r8, rsi"
        out.append(bench.run(f"tileloadd, {size} KB in turn (L2)", walk, 8, before=setup))
    for stride in (4096, 4096 + 64):
        body = [f"tileloadd tmm{i % 4}, [rsi + rbx + {64 * (i % 4)}]" for i in range(8)]
        setup = f"{WITH_TILES}\nmov rbx, {stride}"
        out.append(bench.run(f"tileloadd, L1, rows {stride} bytes apart", body, 8, before=setup))
    body = [f"tilezero tmm{i % 8}" for i in range(64)]
    out.append(bench.run("tilezero", body, 64, before=WITH_TILES))
    out.append(bench.run("ldtilecfg", ["ldtilecfg [r12]"] * 8, 8, before=WITH_TILES))
    body = ["ldtilecfg [r12]", "tilerelease"] * 8
    out.append(bench.run("ldtilecfg, tilerelease", body, 8))
    return out


_VECTOR = {
    "vdpbf16ps": "vdpbf16ps {0}, zmm1, zmm2",
    "vdpbf16ps, broadcast operand": "vdpbf16ps {0}, zmm1, dword ptr [rsi]{{1to16}}",
    "vfmadd231ps": "vfmadd231ps {0}, zmm1, zmm2",
    "vpdpbusd": "vpdpbusd {0}, zmm1, zmm2",
    "vpermw": "vpermw {0}, {0}, zmm1",
    "vpermi2w": "vpermi2w {0}, zmm1, zmm2",
    "vpermb": "vpermb {0}, {0}, zmm1",
    "vpermps": "vpermps {0}, {0}, zmm1",
    "vpshufb": "vpshufb {0}, {0}, zmm1",
    "vpmultishiftqb": "vpmultishiftqb {0}, {0}, zmm1",
    "vpsrlw": "vpsrlw {0}, {0}, 4",
    "vpandd": "vpandd {0}, {0}, zmm1",
    "vpternlogd": "vpternlogd {0}, zmm1, zmm2, 0xea",
    "vcvtdq2ps": "vcvtdq2ps {0}, {0}",
    "vcvtne2ps2bf16": "vcvtne2ps2bf16 {0}, {0}, zmm1",
    "load": "vmovdqa64 {0}, [rsi]",
    "broadcast load": "vpbroadcastd {0}, dword ptr [rsi]",
    "store": "vmovdqa64 [rsi], {0}",
}
_BESIDE = ("vpermw", "vpermps", "vpsrlw", "vpandd", "load", "broadcast load", "store")


def vector_instructions(bench: Bench) -> list[Row]:
    """Throughput over 12 registers, and latency as a chain through one."""
    out = []
    for name, text in _VECTOR.items():
        body = [text.format(f"zmm{8 + i % 12}") for i in range(24)]
        row = bench.run(name, body, 24, before=WITH_VECTORS)
        if "{0}, {0}" in text or "vdp" in text or "fma" in text or "vpdp" in text:
            chain = [text.format("zmm8")] * 24
            row["latency"] = bench.run("", chain, 24, before=WITH_VECTORS)["cycles"]
        out.append(row)
    return out


def beside_a_multiply(bench: Bench) -> list[Row]:
    """Cycles of one multiply with one other instruction beside it: who shares whose port."""
    out = []
    for multiply in ("vdpbf16ps", "vpdpbusd", "vfmadd231ps", "vpsrlw"):
        row: Row = {"what": multiply}
        for other in _BESIDE:
            body = []
            for i in range(24):
                body.append(_VECTOR[multiply].format(f"zmm{8 + i % 12}"))
                text = _VECTOR[other].replace("{0}, {0}", "{0}, zmm3")
                body.append(text.format(f"zmm{20 + i % 12}"))
            row[other] = bench.run("", body, 24, before=WITH_VECTORS, samples=60)["cycles"]
        out.append(row)
    return out


# --- the steps of an int4 kernel ----------------------------------------------------------


def store_to_tile_load(bench: Bench) -> list[Row]:
    """16 vector stores fill 1 KB, a tile load reads what was stored so many tiles before."""
    out = []
    for distance in (None, 0, 1, 2, 3, 4, 8, 16):
        slots = 8 if distance is None else distance + 1
        tiles = slots * -(-8 // slots)
        body = []
        for i in range(tiles):
            body += [f"vmovdqa64 [rsi + {i % slots * 1024 + 64 * j}], zmm{j}" for j in range(16)]
            if distance is not None:
                source = (i - distance) % slots * 1024
                body.append(f"tileloadd tmm{i % 6}, [rsi + rbx + {source}]")
        what = "stores alone" if distance is None else f"load {distance} tiles behind the store"
        setup = f"{WITH_TILES}\n{WITH_VECTORS}"
        out.append(bench.run(what, body, tiles, before=setup))
    return out


def _lookup(source: int, target: int) -> list[str]:
    """A bf16 tile of 512 weights from 256 bytes: shift, and VPERMW as a table of 32 values."""
    out = []
    for q in range(4):
        out.append(f"vmovdqa64 zmm{4 * q}, [rdi + {source + 64 * q}]")
        for i in range(4):
            word, value = f"zmm{4 * q + i}", f"zmm{20 + (4 * q + i) % 8}"
            shift = f"vpsrlw {word}, zmm{4 * q}, {4 * i}\n" if i else ""
            store = f"vmovdqa64 [rsi + {target + 256 * q + 64 * i}], {value}"
            out.append(f"{shift}vpermw {value}, {word}, zmm31\n{store}")
    return out


def _exponent(source: int, target: int) -> list[str]:
    """The same as 16 + q: the nibble is shifted into the significand of 16.0, no table."""
    out = []
    for q in range(4):
        out.append(f"vmovdqa64 zmm{4 * q}, [rdi + {source + 64 * q}]")
        for i in range(4):
            value = f"zmm{20 + (4 * q + i) % 8}"
            shift = (
                f"vpsrlw {value}, zmm{4 * q}, {4 * i - 3}"
                if i
                else f"vpsllw {value}, zmm{4 * q}, 3"
            )
            store = f"vmovdqa64 [rsi + {target + 256 * q + 64 * i}], {value}"
            out.append(f"{shift}\nvpternlogd {value}, zmm31, zmm30, 0xea\n{store}")
    return out


def _bytes(source: int, target: int) -> list[str]:
    """An int8 tile of 1024 weights from 512 bytes: two ANDs and a shift for 128 weights."""
    out = []
    for q in range(8):
        store = f"vmovdqa64 [rsi + {target + 128 * q}]"
        out.append(f"vmovdqa64 zmm{q}, [rdi + {source + 64 * q}]")
        out.append(f"vpandd zmm{20 + q}, zmm{q}, zmm31\n{store}, zmm{20 + q}")
        store = f"vmovdqa64 [rsi + {target + 128 * q + 64}]"
        out.append(f"vpsrlw zmm{8 + q}, zmm{q}, 4\nvpandd zmm{8 + q}, zmm{8 + q}, zmm31")
        out.append(f"{store}, zmm{8 + q}")
    return out


_DEQUANTISERS = {
    "none": (None, "tdpbf16ps", 0),
    "table": (_lookup, "tdpbf16ps", 256),
    "exponent": (_exponent, "tdpbf16ps", 256),
    "int8": (_bytes, "tdpbssd", 512),
}


def _interleave(one: list[str], other: list[str]) -> list[str]:
    """Spread ``other`` evenly over ``one``."""
    keyed = [((i + 0.5) / len(x), line) for x in (one, other) for i, line in enumerate(x)]
    return [line for _, line in sorted(keyed, key=lambda pair: pair[0])]


def kernel_steps(bench: Bench) -> list[Row]:
    """One step of K (32 bf16 or 64 int8 values deep) of a block of m × n tiles of C.

    n B tiles are dequantised to a ring in memory, loaded ``behind`` steps later, m A tiles are
    loaded from L1, m·n dot products follow; vector and tile work alternate unless said.
    """
    out = []
    for kind in ("table", "exponent", "int8"):
        make, _, size = _DEQUANTISERS[kind]
        assert make is not None
        body = [line for i in range(8) for line in make(size * i, 1024 * i)]
        row = bench.run(f"dequantise a tile: {kind}", body, 8, before=WITH_VECTORS)
        out.append(row)
    cases = [(1, 1, x, 2, True) for x in _DEQUANTISERS] + [
        (1, 2, x, 2, True) for x in _DEQUANTISERS
    ]
    cases += [(2, 2, x, 2, True) for x in _DEQUANTISERS] + [
        (3, 1, x, 2, True) for x in _DEQUANTISERS
    ]
    cases += [(2, 2, "table", behind, True) for behind in (0, 1, 3)] + [(2, 2, "table", 2, False)]
    for m, n, kind, behind, alternate in cases:
        make, dot, size = _DEQUANTISERS[kind]
        slots, body = behind + 1, []
        steps = slots * -(-4 // slots)
        for step in range(steps):
            vector: list[str] = []
            for j in range(n if make else 0):
                assert make is not None
                vector += make((step * n + j) % 8 * size, (step % slots * n + j) * 1024)
            ring = (step - behind) % slots * n * 1024
            tile = [
                f"tileloadd tmm{m * n + i}, [rsi + rbx + {32768 + (step * m + i) % 8 * 1024}]"
                for i in range(m)
            ]
            for j in range(n):
                b = 7 - j % (8 - m * n - m)
                tile.append(f"tileloadd tmm{b}, [rsi + rbx + {ring + 1024 * j}]")
                tile += [f"{dot} tmm{i * n + j}, tmm{m * n + i}, tmm{b}" for i in range(m)]
            body += _interleave(vector, tile) if alternate else vector + tile
        name = f"{m} × {n} tiles, {kind}, {behind} behind" + ("" if alternate else ", in blocks")
        setup = f"{WITH_TILES}\n{WITH_VECTORS}"
        out.append(bench.run(name, body, steps, before=setup))
    return out


# --- rates --------------------------------------------------------------------------------


def peaks(bench: Bench) -> list[Row]:
    """Sustained rates of one core in 10**9 operations a second (a multiply-add counts two)."""
    out = []
    for dot, operations in (("tdpbf16ps", 16384), ("tdpbssd", 32768)):
        load = [f"tileloadd tmm{4 + i}, [rsi + rbx + {1024 * i}]" for i in range(4)]
        multiply = [f"{dot} tmm{i}, tmm{4 + i // 2}, tmm{6 + i % 2}" for i in range(4)]
        row = bench.run(f"{dot}, 2 × 2 tiles from L1", load + multiply, 4, before=WITH_TILES)
        out.append(row | {"G/s": operations * 2 / 2 / row["ns"]})
    for name, operations in (("vdpbf16ps", 64), ("vpdpbusd", 128), ("vfmadd231ps", 32)):
        body = [_VECTOR[name].format(f"zmm{8 + i % 12}") for i in range(24)]
        row = bench.run(name, body, 24, before=WITH_VECTORS)
        out.append(row | {"G/s": operations / row["ns"]})
    return out


SECTIONS = {
    "machine": lambda _: peaks_rows(),
    "tile instructions": tile_instructions,
    "vector instructions": vector_instructions,
    "beside a multiply": beside_a_multiply,
    "store to tile load": store_to_tile_load,
    "kernel steps": kernel_steps,
    "peaks": peaks,
    "bandwidth": lambda _: bandwidth(),
    "stream of weights": lambda _: stream(),
}
_TARGETS = {  # what a section's instructions need; the others need AMX
    "machine": "avx2",
    "vector instructions": "avx512_bf16",
    "beside a multiply": "avx512_bf16",
    "bandwidth": "avx512",
}


def _best(one: list[Row], other: list[Row]) -> list[Row]:
    """Row by row the less disturbed of two rounds: fewer cycles, more bytes a second."""
    out = []
    for a, b in zip(one, other, strict=True):
        if "cycles" in a:
            out.append(min(a, b, key=lambda row: row["cycles"]))
        else:
            pick = min if "vpermw" in a else max
            out.append({k: v if isinstance(v, str) else pick(v, b[k]) for k, v in a.items()})
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"{benchmarks.PROGRAM} limits", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)}; default all")
    parser.add_argument("--rounds", type=int, default=1, help="keep the best of so many")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are: {', '.join(SECTIONS)}")
    bench = Bench()
    runnable = available_targets()
    result: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
    for name in options.sections or SECTIONS:
        if _TARGETS.get(name, "amx") not in runnable:
            print(f"\n{name.capitalize()}: this CPU does not run {_TARGETS.get(name, 'amx')}")
            continue
        rows = SECTIONS[name](bench)
        for _ in range(options.rounds - 1):
            rows = _best(rows, SECTIONS[name](bench))
        result[name] = rows
        print(f"\n### {name.capitalize()}\n\n{table(rows)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
