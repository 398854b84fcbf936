"""``python -m benchmarks WHAT [options]``."""

from __future__ import annotations

import importlib
import sys

import benchmarks

SUBJECTS = {
    "linear": "amxq's int4 linear beside other implementations",
    "figures": "tables and plots of what linear recorded, several runs together",
    "experts": "amxq's mixture of experts beside other implementations",
    "generation": "tokens per second of whole models, beside transformers and llama.cpp",
    "loading": "loading a model, beside transformers and from the packed form",
    "language": "kernels written in the language beside torch",
    "overhead": "import, first call, compilation, the cost of a call",
    "limits": "what this machine's cores and memory can do at most",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        mistaken = sys.argv[1:] not in ([], ["-h"], ["--help"])
        lines = [f"there is no benchmark {sys.argv[1]!r}\n"] if mistaken else []
        lines.append(f"usage: {benchmarks.PROGRAM} WHAT [--help]\n")
        lines += [f"  {name:10} {text}" for name, text in SUBJECTS.items()]
        print("\n".join(lines), file=sys.stderr if mistaken else sys.stdout)
        return 2 if mistaken else 0
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
