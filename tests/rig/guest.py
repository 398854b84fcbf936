"""What runs in the rig's guest, or on the host where the emulator is asked the same questions.

    python guest.py cases WHERE OUT      random programs of tile instructions → OUT/cases.npz
    python guest.py record OUT           recorded operands of hardware → OUT/record.npz, faults.json
    python guest.py fp16 WHERE OUT       TDPFP16PS on random operands → OUT/fp16.npz
    python guest.py system OUT           doctor, status, targets → OUT/system.json
    python guest.py launches CPU OUT     recorded launches of kernels again → OUT/*.npz

It needs NumPy and llvmlite, not torch and not pytest.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "emulator"), str(ROOT / "tests" / "amx")]

CASES = 400
INTEGERS = ("TDPBSSD", "TDPBUSD", "TDPBUUD")  # the rig computes TDPBSUD as TDPBUSD


def cases(where: str, out: Path, floats: str = "TDPBF16PS", integers: bool = True) -> None:
    """The result tile of single dots with random shapes, tile numbers and values of every kind."""
    from emulator_lab import cases as programs
    from emulator_lab import golden
    from emulator_lab.runners import DirectRunner, Runner

    if where == "emulator":
        from emulator_lab.scenario_golden import _machine

        runner: Runner = DirectRunner(_machine())
    else:
        from amxq.runtime import amx

        amx.ensure_permission()
        runner = Runner()
    families = {"float": (floats,)} | ({"integer": INTEGERS} if integers else {})
    found: dict[str, Any] = {}
    for family, names in families.items():
        results = []
        for seed in range(CASES):
            outcome = runner.run(programs.dot_case(seed, names), seed, False)
            tile = outcome.memory[programs.C_AT : programs.C_AT + 1024]
            assert outcome.signal == 0
            results.append(np.frombuffer(tile, np.uint32))
        found[family] = np.array(results)
    if integers:
        found["special"] = golden.special_results(runner)
    np.savez_compressed(out / "cases.npz", **found)


def record(out: Path) -> None:
    """tests/amx/data once more: results of every dot, and the signals of wrong code."""
    import amx_programs
    import record_hardware

    results = {}
    with np.load(record_hardware.DATA / "dots.npz") as arrays:
        for key in arrays:
            case, _, operand = key.rpartition("/")
            name = case.partition("/")[0]
            if operand != "c" or name == "tdpbsud":
                continue
            c = arrays[key].view(np.float32 if name == "tdpbf16ps" else np.int32)
            x = (c, arrays[f"{case}/a"], arrays[f"{case}/b"])
            got = amx_programs.tile_dot(name, *(operand[None] for operand in x))[0]
            results[case.replace("/", ":")] = got.view(np.uint32)
    np.savez_compressed(out / "record.npz", **results)
    wrong = [name for name in record_hardware.FAULTS if not name.startswith("sttilecfg")]
    faults = {name: record_hardware.run_fault(name) for name in wrong}
    (out / "faults.json").write_text(json.dumps(faults))


def system(out: Path) -> None:
    """What amxq finds out about the machine before and after the permission is asked for."""
    from amxq.runtime import amx, doctor, targets

    before = amx.status()
    amx.ensure_permission()
    (out / "system.json").write_text(
        json.dumps(
            {
                "hardware": before.hardware,
                "usable": amx.status().usable,
                "permission": amx.status().permission,
                "targets": targets.available_targets(),
                "doctor": doctor.render(doctor.report()),
            }
        )
    )


def launches(cpu: str, out: Path) -> None:
    """Every recorded launch on one thread and on two, each with its own copy of the memory."""
    from amxq.runtime import amx
    from amxq.runtime.loader import load

    amx.ensure_permission()
    for description in json.loads((HERE / "launches" / "index.json").read_text()):
        if description["cpu"] != cpu:
            continue
        stem = description["stem"]
        code = load(description["kernel"], (HERE / "launches" / f"{stem}.o").read_bytes())
        after = {}
        for threads in (1, 2):
            with np.load(HERE / "launches" / f"{stem}.npz") as stored:
                memory = [np.array(stored[f"before{i}"]) for i in range(description["regions"])]
            _launch(code, description, memory, threads)
            after |= {f"threads{threads}:{i}": region for i, region in enumerate(memory)}
        np.savez_compressed(out / f"{stem}.npz", **after)


def _launch(code: Any, launch: dict[str, Any], memory: list[Any], threads: int) -> None:
    omp = ctypes.CDLL("libgomp.so.1")
    values = [
        memory[value[0]].ctypes.data + value[1] if isinstance(value, list) else value
        for value in launch["arguments"]
    ]
    functions = (omp.omp_get_thread_num, omp.GOMP_parallel)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    data = struct.pack(f"<3q2Q{launch['codes']}", *launch["grid"], *addresses, *values)
    ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)(code.entry)(data, threads)
    if threads > 1:
        assert _threads() > threading.active_count(), "OpenMP started no second thread"


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def main() -> None:
    what, *arguments = sys.argv[1:]
    out = Path(arguments[-1])
    out.mkdir(parents=True, exist_ok=True)
    if what == "cases":
        cases(arguments[0], out)
    elif what == "fp16":
        cases(arguments[0], out, floats="TDPFP16PS", integers=False)
    elif what == "launches":
        launches(arguments[0], out)
    else:
        {"record": record, "system": system}[what](out)


if __name__ == "__main__":
    main()
