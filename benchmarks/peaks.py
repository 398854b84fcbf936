"""What the machine allows at most, by code of amxq's own compiler: multiply units and memory.

Multiplications are tile-IR, one loop an instruction; reading is a kernel in the language. So they
run on every target, beside the contestants of a measurement, and say how much of the machine
the compiler's code can reach. ``benchmarks.limits`` has the same in assembly, and much more.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import amxq
import amxq.language as tl
from amxq.codegen.llvm import emit_llvm
from amxq.ir.parser import parse_function
from amxq.ir.verifier import verify
from amxq.runtime.targets import TABLE, available_targets
from benchmarks.native import Buffer, compile_ir
from benchmarks.report import Row

_SUMS = 12  # independent sums: more than any multiplication's latency in cycles over its rate


@dataclass(frozen=True)
class Multiply:
    """A multiply instruction, the best one of its kind on a target.

    Attributes:
        target: the one whose kernels use it.
        operations: of one execution; a multiply-add counts two.
        line: in tile-IR, of sum {0}.
        types: lanes and type of a sum, lanes and types of the factors; empty: tiles.
    """

    name: str
    target: str
    operations: int
    line: str
    types: tuple[Any, ...] = ()


MULTIPLIES = (
    Multiply("TDPBF16PS", "amx", 16384, "tdpbf16ps c={0} a=4 b=6"),
    Multiply("TDPBSSD", "amx", 32768, "tdpbssd c={0} a=4 b=6"),
    Multiply(
        "VDPBF16PS",
        "avx512_bf16",
        64,
        "vdpbf16ps acc={0} a=%a b=%b",
        (16, "f32", 32, "bf16", "bf16"),
    ),
    Multiply(
        "VPDPBUSD", "avx512_bf16", 128, "vpdpbusd acc={0} a=%a b=%b", (16, "i32", 64, "u8", "i8")
    ),
    Multiply("FMA, 512 bits", "avx512", 32, "fma a=%a b=%b c={0}", (16, "f32", 16, "f32", "f32")),
    Multiply("FMA, 256 bits", "avx2", 16, "fma a=%a b=%b c={0}", (8, "f32", 8, "f32", "f32")),
)


def _tile_kernel(multiply: Multiply) -> str:
    tiles = " ".join(f"{t}:16x64" for t in range(8))
    body = "\n".join(multiply.line.format(i % 4) for i in range(8))
    return f"""func @peak(%a: ptr<u8>, %b: ptr<u8>, %y: ptr<u8>, %steps: i64) tiles {tiles} {{
        %zero = constant value=0 : i64
        %one = constant value=1 : i64
        %stride = constant value=64 : i64
        tileload t=4 pointer=%a stride=%stride once=False
        tileload t=6 pointer=%b stride=%stride once=False
        for lower=%zero upper=%steps step=%one inits=() {{ ^(%i: i64)
            {body}
            yield values=()
        }}
        yield values=()
    }}
    """


def _vector_kernel(multiply: Multiply) -> str:
    lanes, of_sum, width, of_a, of_b = multiply.types
    kind = f"vec<{lanes}x{of_sum}>"
    kinds = ", ".join([kind] * _SUMS)
    numbers = range(_SUMS)

    def names(stem: str) -> str:
        return ", ".join(f"%{stem}{i}" for i in numbers)

    def lines(text: str) -> str:
        return "\n".join(text.format(i) for i in numbers)

    parameters = f"%a_at: ptr<{of_a}>, %b_at: ptr<{of_b}>, %y: ptr<{of_sum}>, %steps: i64"
    arguments = ", ".join(f"%c{i}: {kind}" for i in numbers)
    multiplications = lines("%d{0} = " + multiply.line.format("%c{0}") + f" : {kind}")
    return f"""func @peak({parameters}) {{
        %zero = constant value=0 : i64
        %one = constant value=1 : i64
        %a = vector_load pointer=%a_at : vec<{width}x{of_a}>
        %b = vector_load pointer=%b_at : vec<{width}x{of_b}>
        {lines("%s{0} = vector_load pointer=%y : " + kind)}
        {names("r")} = for lower=%zero upper=%steps step=%one inits=({names("s")}) : {kinds} {{
            ^(%i: i64, {arguments})
            {multiplications}
            yield values=({names("d")})
        }}
        {lines("vector_store pointer=%y value=%r{0}")}
        yield values=()
    }}
    """


@functools.cache
def _compiled(multiply: Multiply) -> Callable[..., int]:
    """(address of the launch's slots, threads) -> None."""
    function = parse_function((_vector_kernel if multiply.types else _tile_kernel)(multiply))
    verify(function, "the text")
    target = TABLE[multiply.target]
    slots = {"peak_launch": (ctypes.c_void_p, ctypes.c_int64)}
    text = emit_llvm(function)
    return compile_ir(text, slots, llvm_cpu=target.llvm_cpu, features=target.llvm_features)[
        "peak_launch"
    ]


def rate(multiply: Multiply, samples: int = 100) -> float:
    """Operations a second of one core, the best of so many samples of about 100 µs."""
    run = _compiled(multiply)
    memory = torch.zeros(3, 1024, dtype=torch.uint8)
    a, b, y = (row.data_ptr() for row in memory)

    def once(steps: int) -> float:
        data = (ctypes.c_int64 * 9)(1, 1, 1, 0, 0, a, b, y, steps)
        start = time.perf_counter()
        run(ctypes.addressof(data), 1)
        return time.perf_counter() - start

    once(1)
    steps = max(100, int(1e-4 / min(once(1000) for _ in range(5)) * 1000))
    work = steps * (_SUMS if multiply.types else 8) * multiply.operations
    return work / min(once(steps) for _ in range(samples))


@amxq.jit
def read_kernel(x, y, n, BLOCK: tl.constexpr):
    """Reads x [programs, n] int32 and keeps the bits of each program's part in y [BLOCK] of it."""
    at = tl.arange(0, BLOCK)
    start = x + tl.program_id(0) * n.to(tl.int64)
    bits = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, n, BLOCK):
        bits = bits | tl.load(start + i + at)
    tl.store(y + tl.program_id(0) * BLOCK + at, bits)


def read_rate(threads: int, huge: bool, megabytes: int = 128) -> float:
    """Bytes a second that so many threads read together from memory, each its own part, best of 9.

    Args:
        huge: ask for pages of 2 MB; otherwise pages of 4 KB are asked for.
        megabytes: of each thread.
    """
    size, block = megabytes << 20, 256
    buffer = Buffer(threads * size, huge=huge)
    words = (ctypes.c_int32 * (threads * size // 4)).from_address(buffer.address)
    x = torch.frombuffer(words, dtype=torch.int32)
    y = torch.empty(threads, block, dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            read_kernel[(threads,)](x, y, size // 4, BLOCK=block)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return threads * size / min(times[1:])


def limits(threads: Sequence[int]) -> dict[str, Any]:
    """{"multiply": {instruction: operations a second of one core}, "read": {threads: {pages:
    bytes a second}}}, of the instructions that this CPU has."""
    have = available_targets()
    return {
        "multiply": {m.name: rate(m) for m in MULTIPLIES if m.target in have},
        "read": {
            str(count): {
                pages: read_rate(count, huge) for pages, huge in (("2 MB", True), ("4 KB", False))
            }
            for count in threads
        },
    }


def rows(threads: Sequence[int] = (1, 2)) -> list[Row]:
    """The limits as a table's rows."""
    found = limits(threads)
    out: list[Row] = [
        {"what": name, "1 thread": value / 1e9, "unit": "10⁹ operations/s"}
        for name, value in found["multiply"].items()
    ]
    for pages in ("2 MB", "4 KB"):
        row: Row = {"what": f"reading memory, pages of {pages}"}
        for count in threads:
            row[f"{count} thread{'s' * (count > 1)}"] = found["read"][str(count)][pages] / 1e9
        out.append(row | {"unit": "GB/s"})
    return out
