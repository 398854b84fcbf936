"""Record what this CPU's AMX and AVX-512 instructions compute, for machines without them.

    PYTHONPATH=. python tests/amx/record_hardware.py

writes tests/amx/data/*.npz (operands and results) and hardware.json (which machine, when, and
the signals that wrong tile code raises). Run it only on hardware: an emulator's answers are
not evidence. test_instruction_meanings.py reads the files.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import signal
import sys
from typing import Any

import amx_programs
import numpy as np
import operands

from benchmarks.native import machine

DATA = pathlib.Path(__file__).parent / "data"
# rows of A, columns of C, depth in 4-byte groups
SHAPES = ((16, 16, 16), (1, 16, 16), (7, 5, 3), (16, 1, 16), (3, 16, 1), (8, 12, 9), (1, 1, 1))

FAULTS: dict[str, tuple[str, tuple[tuple[int, int], ...], int]] = {}


def _fault(name: str, body: str, *tiles: tuple[int, int], palette: int = 1) -> None:
    FAULTS[name] = (body, tiles or ((16, 64),) * 8, palette)


_LOAD_CONFIG = "call void @llvm.x86.ldtilecfg(ptr %config)\n"
_DOT = _LOAD_CONFIG + "call void @llvm.x86.tdpbf16ps(i8 {}, i8 {}, i8 {})"
_ZERO = _LOAD_CONFIG + "call void @llvm.x86.tilezero(i8 {})"
_fault("nothing wrong", _DOT.format(0, 1, 2))
_fault("no configuration", "call void @llvm.x86.tilezero(i8 0)")
_fault(
    "after tilerelease",
    _LOAD_CONFIG + "call void @llvm.x86.tilerelease()\ncall void @llvm.x86.tilezero(i8 0)",
)
_fault("palette 0 clears", _ZERO.format(0), palette=0)
_fault("palette 2", _LOAD_CONFIG, palette=2)
_fault("17 rows", _LOAD_CONFIG, (17, 64))
_fault("65 bytes a row", _LOAD_CONFIG, (16, 65))
_fault("rows without bytes", _LOAD_CONFIG, (16, 0))
_fault("bytes without rows", _LOAD_CONFIG, (0, 64))
_fault("tile 8 configured", _LOAD_CONFIG, *[(16, 64)] * 9)
_fault("tilezero of an unconfigured tile", _ZERO.format(1), (16, 64))
_fault("dot: C twice", _DOT.format(0, 0, 1))
_fault("dot: A is B", _DOT.format(0, 1, 1))
_fault("dot: rows of A and C differ", _DOT.format(0, 1, 2), (16, 64), (8, 64), (16, 64))
_fault("dot: depth of A and B differ", _DOT.format(0, 1, 2), (16, 64), (16, 32), (16, 64))
_fault("dot: columns of B and C differ", _DOT.format(0, 1, 2), (16, 64), (16, 64), (16, 32))
_fault("dot: width of C no multiple of 4", _DOT.format(0, 1, 2), (16, 62), (16, 64), (16, 62))
_fault("dot: width of A no multiple of 4", _DOT.format(0, 1, 2), (16, 64), (16, 62), (16, 64))
_LOAD = _LOAD_CONFIG + "call void @llvm.x86.tileloadd64(i8 0, ptr {}, i64 {})"
_fault("load from address 0", _LOAD.format("null", 64))
_fault(
    "load from a non-canonical address",
    _LOAD.format("inttoptr (i64 -9223372036854775808 to ptr)", 64),
)
_fault("load: width no multiple of 4", _LOAD.format("%memory", 64), (3, 62))
_STORE = _LOAD_CONFIG + "call void @llvm.x86.tilestored64(i8 0, ptr {}, i64 {})"
_fault("store: width no multiple of 4", _STORE.format("%memory", 64), (3, 62))
_fault("tilezero: width no multiple of 4", _ZERO.format(0), (3, 62))
_fault("store to address 0", _STORE.format("null", 64))
_fault("load, stride 0", _LOAD.format("%memory", 0))
_fault("sttilecfg without a configuration", "call void @llvm.x86.sttilecfg(ptr %memory)")


def dots(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Every tile dot product, arrays named <instruction>/<case>/<operand>."""
    out: dict[str, np.ndarray[Any, Any]] = {}

    def record(name: str, case: str, c: Any, a: Any, b: Any) -> None:
        result = amx_programs.tile_dot(name, c, a, b)
        for operand, value in (("c", c), ("a", a), ("b", b), ("result", result)):
            # NumPy's files keep NaN payloads, but integers leave no doubt
            out[f"{name}/{case}/{operand}"] = value.view(f"u{value.itemsize}")[0]

    for m, n, k in SHAPES:
        where = f"{m}x{n}x{k}"
        for kind in operands.BF16_KINDS:
            for c_kind in ("normal", "bits") if m * n == 256 else ("bits",):
                c = operands.accumulators(rng, c_kind, (1, m, n))
                a = operands.bf16(rng, kind, (1, m, 2 * k))
                b = operands.bf16(rng, kind, (1, k, 2 * n))
                record("tdpbf16ps", f"{where} {kind} {c_kind}", c, a, b)
        for name in ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"):
            c = operands.integers(rng, (1, m, n), np.int32)
            a = operands.integers(rng, (1, m, 4 * k), np.uint8)
            b = operands.integers(rng, (1, k, 4 * n), np.uint8)
            record(name, where, c, a, b)
    record("tdpbf16ps", "tininess", *operands.tininess((16, 16, 16)))
    return out


def vectors(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Every vector instruction, arrays named <instruction>/<operand>."""
    kinds = [(x, y) for x in operands.BF16_KINDS for y in operands.C_KINDS for _ in range(3)]
    c = np.concatenate([operands.accumulators(rng, y, (1, 16)) for _, y in kinds])
    a, b = (np.concatenate([operands.bf16(rng, x, (1, 32)) for x, _ in kinds]) for _ in "ab")
    dp = amx_programs.vector("vdpbf16ps", c, a, b)
    acc = operands.integers(rng, (32, 16), np.int32)
    u, s = (operands.integers(rng, (32, 64), np.uint8) for _ in "us")
    table, index = (operands.integers(rng, (16, 32), np.uint16) for _ in "ti")
    x, y = (operands.integers(rng, (32, 32), np.uint16) for _ in "xy")
    return {
        "vdpbf16ps/c": c.view(np.uint32), "vdpbf16ps/a": a, "vdpbf16ps/b": b,
        "vdpbf16ps/result": dp.view(np.uint32),
        "vpdpbusd/c": acc, "vpdpbusd/a": u, "vpdpbusd/b": s,
        "vpdpbusd/result": amx_programs.vector("vpdpbusd", acc, u, s),
        "vpmaddubsw/a": u, "vpmaddubsw/b": s,
        "vpmaddubsw/result": amx_programs.vector("vpmaddubsw", u, s),
        "vpmaddwd/a": x, "vpmaddwd/b": y,
        "vpmaddwd/result": amx_programs.vector("vpmaddwd", x, y),
        "vpermw/c": table, "vpermw/a": index,
        "vpermw/result": amx_programs.vector("vpermw", table, index),
    }  # fmt: skip


def copies(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """TILELOADD and TILESTORED with odd strides and sizes, <case>/{source, target, result}."""
    out = {}
    for stride, target_stride, rows, width in ((64, 64, 16, 64), (80, 96, 5, 12), (0, 65, 3, 8)):
        source, target = (operands.integers(rng, (1100,), np.uint8) for _ in "st")
        case = f"{stride} {target_stride} {rows} {width}"
        result = amx_programs.tile_copy(source, stride, target, target_stride, rows, width)
        out |= {f"{case}/source": source, f"{case}/target": target, f"{case}/result": result}
    return out


def run_fault(name: str) -> str:
    """The name of the signal that a case of FAULTS raises, or an empty string."""
    body, tiles, palette = FAULTS[name]
    number = amx_programs.signal_of(body, amx_programs.tile_config(*tiles, palette=palette))
    return signal.Signals(number).name if number else ""


def main() -> None:
    # before the permission is asked for
    unpermitted = run_fault("nothing wrong")
    for name in ("tdpbf16ps", "vdpbf16ps", "vpdpbusd", "vpermw"):
        if reason := amx_programs.why_not(name):
            sys.exit(f"nothing recorded: {reason}")
    rng = np.random.default_rng(20261130)
    DATA.mkdir(exist_ok=True)
    for file, arrays in (("dots", dots(rng)), ("vectors", vectors(rng)), ("copies", copies(rng))):
        np.savez_compressed(DATA / f"{file}.npz", **arrays)
    note = {
        "what": "operands and results of instructions as this CPU executed them",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "faults": {"no permission": unpermitted} | {name: run_fault(name) for name in FAULTS},
    }
    (DATA / "hardware.json").write_text(json.dumps(note, indent=2) + "\n")


if __name__ == "__main__":
    main()
