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
        if sys.argv[1:2] and sys.argv[1] not in ("-h", "--help"):
            print(f"there is no benchmark {sys.argv[1]!r}\n")
        print(f"usage: {benchmarks.PROGRAM} WHAT [--help]\n")
        for name, text in SUBJECTS.items():
            print(f"  {name:10} {text}")
        return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    raise SystemExit(main())
