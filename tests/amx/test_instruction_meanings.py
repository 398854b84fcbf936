"""The NumPy meanings of instructions against what a CPU with AMX computed, and against this CPU.

The record in data/ comes from record_hardware.py; comparing with it needs no special CPU.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import amx_programs
import numpy as np
import operands
import pytest
import record_hardware

from amxq.codegen.instructions import TABLE
from amxq.runtime import cpu

DATA = pathlib.Path(__file__).parent / "data"
RECORD = json.loads((DATA / "hardware.json").read_text())
TILE_DOTS = ("tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")
ACCUMULATOR = {"tdpbf16ps": np.float32, "vdpbf16ps": np.float32, "vpermw": np.uint16}

LLVM_ARGUMENTS = {  # result type and constant arguments of one call; tile dots are the default
    "ldtilecfg": "void(ptr null)",
    "tilerelease": "void()",
    "tilezero": "void(i8 0)",
    "tileloadd": "void(i8 0, ptr null, i64 64)",
    "tileloaddt1": "void(i8 0, ptr null, i64 64)",
    "tilestored": "void(i8 0, ptr null, i64 64)",
    "vpermw": "<32 x i16>(<32 x i16> %0, <32 x i16> %1)",
    "vdpbf16ps": "<16 x float>(<16 x float> %0, <32 x bfloat> %1, <32 x bfloat> %2)",
    "vpdpbusd": "<16 x i32>(<16 x i32> %0, <64 x i8> %1, <64 x i8> %2)",
    "vpmaddubsw": "<32 x i16>(<64 x i8> %0, <64 x i8> %1)",
    "vpmaddwd": "<16 x i32>(<32 x i16> %0, <32 x i16> %1)",
}
VECTORS = ("vdpbf16ps", "vpdpbusd", "vpmaddubsw", "vpmaddwd", "vpermw")


def on_this_cpu(name: str) -> Any:
    """Mark a parameter: this instruction itself runs, or the test is skipped by name."""
    reason = amx_programs.why_not(name)
    marks = [pytest.mark.skipif(bool(reason), reason=reason or "it can")]
    if "amx_tile" in TABLE[name].requires:
        marks.append(pytest.mark.amx)
    if name == "vdpbf16ps" and cpu.vendor() != "GenuineIntel":
        # the order of its two fused steps has been seen on Intel's hardware only
        marks.append(pytest.mark.xfail(reason="the order is verified on Intel CPUs only"))
    return pytest.param(name, marks=marks)


def same_bits(got: Any, expected: Any) -> None:
    """Equal bit for bit; for floats, np.testing would forgive NaN payloads and signed zeros."""
    integer = f"u{expected.itemsize}"
    np.testing.assert_array_equal(got.view(integer), expected.view(integer))


def groups(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The record's arrays, (<everything before the last slash>, {operand: array})."""
    cases: dict[str, dict[str, Any]] = {}
    with np.load(DATA / f"{file}.npz") as arrays:
        for key, value in arrays.items():
            case, _, operand = key.rpartition("/")
            cases.setdefault(case, {})[operand] = value
    yield from cases.items()


@pytest.mark.parametrize("name", TILE_DOTS)
def test_tile_dots_agree_with_the_record(name: str) -> None:
    cases = [(case, x) for case, x in groups("dots") if case.startswith(f"{name}/")]
    assert len(cases) >= len(record_hardware.SHAPES)
    for _, x in cases:
        c = x["c"].view(ACCUMULATOR.get(name, np.int32))
        same_bits(TABLE[name].meaning(c, x["a"], x["b"]), x["result"])


def test_vectors_agree_with_the_record() -> None:
    cases = dict(groups("vectors"))
    assert set(cases) == set(VECTORS)
    for name, x in cases.items():
        given = [x[operand] for operand in "ab" if operand in x]
        if "c" in x:
            given.insert(0, x["c"].view(ACCUMULATOR.get(name, np.int32)))
        same_bits(TABLE[name].meaning(*given), x["result"])


def test_loads_and_stores_agree_with_the_record() -> None:
    for case, x in groups("copies"):
        stride, target_stride, rows, width = map(int, case.split())
        tile = TABLE["tileloadd"].meaning(x["source"], stride, rows, width)
        assert tile.shape == (16, 64) and not tile[rows:].any() and not tile[:, width:].any()
        TABLE["tilestored"].meaning(tile, x["target"], target_stride, rows, width)
        same_bits(x["target"], x["result"])


@pytest.mark.parametrize("name", [on_this_cpu(name) for name in TILE_DOTS[1:]])
def test_byte_dots_agree_with_this_cpu(name: str) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in shapes(rng):
        c = operands.integers(rng, (20, m, n), np.int32)
        a = operands.integers(rng, (20, m, 4 * k), np.uint8)
        b = operands.integers(rng, (20, k, 4 * n), np.uint8)
        same_bits(amx_programs.tile_dot(name, c, a, b), TABLE[name].meaning(c, a, b))


@pytest.mark.parametrize("kind", operands.BF16_KINDS)
@pytest.mark.parametrize("name", [on_this_cpu(name) for name in ("tdpbf16ps", "tdpfp16ps")])
def test_dots_of_16_bit_floats_agree_with_this_cpu(name: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    for m, n, k in shapes(rng):
        for c_kind in operands.C_KINDS:
            c = operands.accumulators(rng, c_kind, (20, m, n))
            a, b = (
                operands.bf16(rng, kind, (20, m, 2 * k)),
                operands.bf16(rng, kind, (20, k, 2 * n)),
            )
            same_bits(amx_programs.tile_dot(name, c, a, b), TABLE[name].meaning(c, a, b))


@pytest.mark.parametrize("name", [on_this_cpu("tdpbf16ps")])
def test_results_just_below_the_smallest_normal_number(name: str) -> None:
    x = operands.tininess((16, 16, 16))
    expected = TABLE[name].meaning(*x)
    assert 0 < np.count_nonzero(expected) < expected.size  # some round up, some are flushed
    same_bits(amx_programs.tile_dot(name, *x), expected)


@pytest.mark.parametrize("name", [on_this_cpu(name) for name in VECTORS])
def test_vectors_agree_with_this_cpu(name: str) -> None:
    rng = np.random.default_rng(3)
    for x in vector_operands(name, rng):
        same_bits(amx_programs.vector(name, *x), TABLE[name].meaning(*x))


@pytest.mark.amx
@pytest.mark.skipif(bool(amx_programs.why_no_amx()), reason=amx_programs.why_no_amx() or "AMX")
@pytest.mark.parametrize("case", record_hardware.FAULTS)
def test_wrong_tile_code_raises_the_recorded_signal(case: str) -> None:
    assert record_hardware.run_fault(case) == RECORD["faults"][case]


@pytest.mark.parametrize("name", ["tdpfp16ps"])
def test_fp16_dot_against_exact_arithmetic(name: str) -> None:
    """No hardware here has it; small integers are exact in any order, and denormal fp16 inputs
    count (Intel's manual: handled, not treated as zero)."""
    rng = np.random.default_rng(4)
    a = rng.integers(-8, 8, (4, 3, 8)).astype(np.float16)
    b = rng.integers(-8, 8, (4, 4, 2 * 5)).astype(np.float16)
    c = rng.integers(-9, 9, (4, 3, 5)).astype(np.float32)
    exact = c + np.einsum(
        "bmkp,bknp->bmn", a.reshape(4, 3, 4, 2), b.reshape(4, 4, 5, 2), dtype=np.float32
    )
    same_bits(TABLE[name].meaning(c, a.view(np.uint16), b.view(np.uint16)), exact)
    denormal = np.array([[1, 0]], np.uint16), np.array([[0x3C00, 0]], np.uint16)
    assert TABLE[name].meaning(np.zeros((1, 1), np.float32), *denormal) == 2.0**-24


@pytest.mark.parametrize("name", TABLE)
def test_the_llvm_name_becomes_the_instruction(name: str) -> None:
    arguments = LLVM_ARGUMENTS.get(name, "void(i8 0, i8 1, i8 2)")
    assembly = amx_programs.assembly(TABLE[name].llvm, arguments)
    assert name in [line.split()[0] for line in assembly.splitlines() if line.strip()]


def test_costs_have_a_source_and_unknown_cpus_are_named() -> None:
    for name, instruction in TABLE.items():
        assert name == instruction.name
        assert all(cost.source and cost.cycles > 0 for cost in instruction.costs)
    with pytest.raises(KeyError, match="emerald_rapids"):
        TABLE["tdpbf16ps"].cost("8086")


def shapes(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Rows, columns, depth: the recorded ones and a dozen others."""
    others = rng.integers(1, 17, (12, 3))
    return [*record_hardware.SHAPES, *(tuple(map(int, x)) for x in others)]  # type: ignore[misc]


def vector_operands(name: str, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    make: Callable[..., Any] = operands.integers
    if name == "vpermw":
        yield make(rng, (500, 32), np.uint16), make(rng, (500, 32), np.uint16)
    elif name == "vpmaddubsw":
        yield make(rng, (500, 64), np.uint8), make(rng, (500, 64), np.uint8)
    elif name == "vpmaddwd":
        yield make(rng, (500, 32), np.uint16), make(rng, (500, 32), np.uint16)
    elif name == "vpdpbusd":
        yield (
            make(rng, (500, 16), np.int32),
            make(rng, (500, 64), np.uint8),
            make(rng, (500, 64), np.uint8),
        )
    else:
        for kind in operands.BF16_KINDS:
            for c_kind in operands.C_KINDS:
                c = operands.accumulators(rng, c_kind, (500, 16))
                yield c, operands.bf16(rng, kind, (500, 32)), operands.bf16(rng, kind, (500, 32))
