"""Records what real AMX answers: ``python -m emulator_lab.record`` in tests/emulator.

Needs a CPU with AMX-TILE, -INT8 and -BF16 and Linux's permission. Overwrites data/.
"""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path

import numpy as np

from emulator_lab import golden
from emulator_lab.probe import ask_for_amx
from emulator_lab.runners import Runner


def _cpu() -> dict[str, str]:
    found = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("vendor_id", "cpu family", "model", "model name", "stepping"):
            found.setdefault(key.strip(), value.strip())
        if key.strip() == "flags":
            found.setdefault("virtual", "yes" if "hypervisor" in value.split() else "no")
    return found


def main() -> None:
    if not ask_for_amx():
        raise SystemExit("this process cannot use AMX: no such CPU, or no permission")
    runner = Runner()
    arrays = {"special": golden.special_results(runner)}
    signals: dict[str, dict[str, int]] = {}
    for family in golden.FAMILIES:
        outcomes = list(golden.outcomes(runner, family))
        arrays[f"{family}_ended"] = np.array([o[:4] for o in outcomes], np.uint64)
        digests = [int.from_bytes(o.digest, "little") for o in outcomes]
        arrays[f"{family}_digest"] = np.array(digests, np.uint64)
        kinds, numbers = np.unique([o.signal for o in outcomes], return_counts=True)
        signals[family] = {str(k): int(n) for k, n in zip(kinds, numbers, strict=True)}
    golden.DATA.mkdir(exist_ok=True)
    np.savez_compressed(golden.DATA / "answers.npz", **arrays)
    about = {
        "cpu": _cpu(),
        "date": datetime.date.today().isoformat(),
        "kernel": platform.release().split("-")[0],
        "cases": {name: number for name, (_, number, _) in golden.FAMILIES.items()},
        "special": golden.SPECIAL,
        "ended by signal (0: reached the end)": signals,
        "columns of *_ended": ["signal", "si_code", "si_addr (0 for SIGILL: RIP)", "RIP offset"],
        "digest": "first 8 bytes of SHA-256 over the writable parts of both regions",
    }
    text = json.dumps(about, indent=1) + "\n"
    (golden.DATA / "answers.json").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
