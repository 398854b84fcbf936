"""The properties of test_fuzz.py for atheris: ``fuzz_targets.py TARGET [libFuzzer options]``.

Hypothesis makes its inputs of the bytes that the fuzzer chooses by the coverage they reach;
the target ``bytes`` takes them as a safetensors file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

with atheris.instrument_imports(include=["amxq.quantization"]):
    import test_fuzz

FOLDER = Path(tempfile.mkdtemp())


def target(name: str) -> Callable[[bytes], object]:
    """What one input is tried on."""
    if name == "bytes":
        return lambda data: test_fuzz.try_file(FOLDER, data, test_fuzz.AR)
    check = test_fuzz.try_configuration
    if name != "configurations":
        check = lambda case: test_fuzz.try_file(FOLDER, *case)  # noqa: E731
    inputs = {
        "configurations": test_fuzz.any_configuration,
        "damaged_files": test_fuzz.damaged_files,
        "other_files": test_fuzz.other_files,
    }[name]
    return test_fuzz.as_property(1, inputs, check).hypothesis.fuzz_one_input


if __name__ == "__main__":
    chosen = target(sys.argv.pop(1))
    atheris.Setup(sys.argv, chosen)
    atheris.Fuzz()
