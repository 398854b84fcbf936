"""Scenarios: a compiled AMX kernel, and arithmetic against models written in Python."""

from __future__ import annotations

import ctypes
import threading
import time
from fractions import Fraction
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from amxq import emulator
from emulator_lab import arena, cases
from emulator_lab import assembler as a
from emulator_lab.probe import Probe
from emulator_lab.scenario_golden import _machine

# C[M, N] += A[M, K] * B in steps of 32 x 32 x 32; B holds pairs of k: [K / 2, N, 2]
_KERNEL = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)

define void @matmul(ptr %cfg, ptr %a, ptr %b, ptr %c, i64 %m, i64 %n, i64 %k) {
entry:
  call void @llvm.x86.ldtilecfg(ptr %cfg)
  %sa = shl i64 %k, 1
  %sb = shl i64 %n, 2
  br label %rows
rows:
  %i = phi i64 [0, %entry], [%i2, %rows_end]
  br label %columns
columns:
  %j = phi i64 [0, %rows], [%j2, %columns_end]
  %ia = mul i64 %i, %sa
  %a0 = getelementptr i8, ptr %a, i64 %ia
  %sa16 = shl i64 %sa, 4
  %a1 = getelementptr i8, ptr %a0, i64 %sa16
  %jb = shl i64 %j, 2
  %b0 = getelementptr i8, ptr %b, i64 %jb
  %b1 = getelementptr i8, ptr %b0, i64 64
  call void @llvm.x86.tilezero(i8 0)
  call void @llvm.x86.tilezero(i8 1)
  call void @llvm.x86.tilezero(i8 2)
  call void @llvm.x86.tilezero(i8 3)
  br label %depth
depth:
  %l = phi i64 [0, %columns], [%l2, %depth]
  %al = shl i64 %l, 1
  %half = lshr i64 %l, 1
  %bl = mul i64 %half, %sb
  %a0l = getelementptr i8, ptr %a0, i64 %al
  %a1l = getelementptr i8, ptr %a1, i64 %al
  %b0l = getelementptr i8, ptr %b0, i64 %bl
  %b1l = getelementptr i8, ptr %b1, i64 %bl
  call void @llvm.x86.tileloadd64(i8 4, ptr %a0l, i64 %sa)
  call void @llvm.x86.tileloadd64(i8 5, ptr %a1l, i64 %sa)
  call void @llvm.x86.tileloadd64(i8 6, ptr %b0l, i64 %sb)
  call void @llvm.x86.tileloadd64(i8 7, ptr %b1l, i64 %sb)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 4, i8 6)
  call void @llvm.x86.tdpbf16ps(i8 1, i8 4, i8 7)
  call void @llvm.x86.tdpbf16ps(i8 2, i8 5, i8 6)
  call void @llvm.x86.tdpbf16ps(i8 3, i8 5, i8 7)
  %l2 = add i64 %l, 32
  %more = icmp ult i64 %l2, %k
  br i1 %more, label %depth, label %columns_end
columns_end:
  %ic = mul i64 %i, %sb
  %icj = add i64 %ic, %jb
  %c0 = getelementptr i8, ptr %c, i64 %icj
  %sb16 = shl i64 %sb, 4
  %c1 = getelementptr i8, ptr %c0, i64 64
  %c2 = getelementptr i8, ptr %c0, i64 %sb16
  %c3 = getelementptr i8, ptr %c1, i64 %sb16
  call void @llvm.x86.tilestored64(i8 0, ptr %c0, i64 %sb)
  call void @llvm.x86.tilestored64(i8 1, ptr %c1, i64 %sb)
  call void @llvm.x86.tilestored64(i8 2, ptr %c2, i64 %sb)
  call void @llvm.x86.tilestored64(i8 3, ptr %c3, i64 %sb)
  %j2 = add i64 %j, 32
  %jmore = icmp ult i64 %j2, %n
  br i1 %jmore, label %columns, label %rows_end
rows_end:
  %i2 = add i64 %i, 32
  %imore = icmp ult i64 %i2, %m
  br i1 %imore, label %rows, label %done
done:
  call void @llvm.x86.tilerelease()
  ret void
}
"""


class Kernel:
    """The matmul above, compiled for Sapphire Rapids."""

    def __init__(self) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(_KERNEL)
        target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
        machine = target.create_target_machine(cpu="sapphirerapids", opt=3)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        pointers, sizes = [ctypes.c_void_p] * 4, [ctypes.c_int64] * 3
        kind = ctypes.CFUNCTYPE(None, *pointers, *sizes)
        self._call = kind(self._engine.get_function_address("matmul"))
        self._config = np.frombuffer(a.config(dict.fromkeys(range(8), (16, 64))), np.uint8)

    def __call__(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """left bf16 bits uint16 [M, K], right [K, N] -> float32 [M, N]; multiples of 32."""
        (m, k), n = left.shape, right.shape[1]
        pairs = np.ascontiguousarray(right.reshape(k // 2, 2, n).transpose(0, 2, 1))
        out = np.empty((m, n), np.float32)
        places = [x.ctypes.data for x in (self._config, left, pairs, out)]
        self._call(*places, m, n, k)
        return out


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def reference(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The same sums in the same order in NumPy; a product of two bf16 is exact in fp32."""
    x, y = _widen(left), _widen(right)
    total = np.zeros((len(x), y.shape[1]), np.float32)
    for block in range(0, x.shape[1], 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(block, block + 32):
            chains[k % 2] += x[:, k : k + 1] * y[k]
        total += chains[0] + chains[1]
    return total


def _bf16(rng: np.random.RandomState, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def matmul(m: int, n: int, k: int) -> dict[str, Any]:
    """One call: bits against NumPy, seconds, counts."""
    emulator.install()
    kernel, rng = Kernel(), np.random.RandomState(3)
    left, right = _bf16(rng, m, k), _bf16(rng, k, n)
    start = time.perf_counter()
    out = kernel(left, right)
    seconds = time.perf_counter() - start
    same = out.view(np.uint32) == reference(left, right).view(np.uint32)
    counts = {name: number for name, number in emulator.counts().items() if number}
    return {
        "same": bool(same.all()),
        "seconds": seconds,
        "counts": counts,
        "traps": emulator.traps(),
    }


def threads(number: int) -> list[bool]:
    """Several threads at once, each on its own matrices."""
    emulator.install()
    kernel = Kernel()
    results: list[bool] = []

    def work(seed: int) -> None:
        rng = np.random.RandomState(seed)
        for _ in range(4):
            left, right = _bf16(rng, 32, 256), _bf16(rng, 256, 64)
            out = kernel(left, right)
            results.append(
                bool((out.view(np.uint32) == reference(left, right).view(np.uint32)).all())
            )

    group = [threading.Thread(target=work, args=(seed,)) for seed in range(number)]
    for thread in group:
        thread.start()
    for thread in group:
        thread.join()
    return results


def _rounded(value: Fraction) -> Fraction:
    """To the nearest fp32, ties to even, results below 2**-126 to zero; no overflow here."""
    if value == 0:
        return value
    exponent = 0
    magnitude = abs(value)
    while magnitude >= 2:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 1:
        magnitude, exponent = magnitude * 2, exponent - 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = Fraction(round(abs(value) / unit)) * unit
    rounded = Fraction(0) if rounded < Fraction(2) ** -126 else rounded
    return -rounded if value < 0 else rounded


def half_precision(number: int) -> list[str]:
    """TDPFP16PS against exact rational arithmetic: 1 x 1 tiles, four pairs of k.

    The order is the manual's: two chains of fused multiply-adds, their sum, C; denormal
    halves count, results are rounded to fp32 and flushed.
    """
    probe_memory = arena.Arena()
    probe = Probe()
    emulator.install()
    wrong = []
    for seed in range(number):
        rng = np.random.RandomState(seed)
        halves = rng.randint(0, 0x7C00, 16).astype(np.uint16)  # denormals to the largest
        if seed % 3 == 0:
            halves %= 0x0500  # mostly denormal
        halves |= (rng.randint(0, 2, 16) << 15).astype(np.uint16)
        start = np.float32(rng.standard_normal() * 2.0 ** rng.randint(-40, 20))
        high = probe_memory.high
        shapes = {0: (1, 4), 1: (1, 16), 2: (4, 4)}
        high[:64] = np.frombuffer(a.config(shapes), np.uint8)
        high[cases.C_AT : cases.C_AT + 4] = np.array([start]).view(np.uint8)
        high[cases.A_AT : cases.A_AT + 16] = halves[:8].view(np.uint8)
        for k in range(4):
            at = cases.B_AT + 64 * k
            high[at : at + 4] = halves[8 + 2 * k : 10 + 2 * k].view(np.uint8)
        program = a.memory("LDTILECFG", 0, a.Mem(a.RDI))
        for tile, disp in ((0, cases.C_AT), (1, cases.A_AT), (2, cases.B_AT)):
            program += a.memory("TILELOADD", tile, a.Mem(a.RDI, a.RDX, disp=disp))
        program += a.tdp("TDPFP16PS", 0, 1, 2)
        program += a.memory("TILESTORED", 0, a.Mem(a.RDI, a.RDX, disp=cases.C_AT))
        fault = probe.run(program, {a.RDI: arena.HIGH, a.RDX: 64})
        exact = [Fraction(float(v)) for v in halves.view(np.float16)]
        chains = [Fraction(0), Fraction(0)]
        for k in range(8):
            chains[k % 2] = _rounded(exact[k] * exact[8 + k] + chains[k % 2])
        want = float(_rounded(Fraction(float(start)) + _rounded(chains[0] + chains[1])))
        got = float(high[cases.C_AT : cases.C_AT + 4].view(np.float32)[0])
        if fault is not None or got != want:
            wrong.append(f"{seed}: {fault} {got!r} instead of {want!r}")
    return wrong


def half_precision_special() -> list[str]:
    """NaN and infinities as in TDPBF16PS, on 1 x 1 tiles: (A pair, B pair, C) -> C's bits."""
    one, infinity, nan = 0x3C00, 0x7C00, 0x7E01
    table = [
        ((nan, one), (0x7E02, one), 0, 0x7FC02000),
        ((one, 0xFE03), (one, one), 0, 0xFFC06000),
        ((0x7D00, one), (one, one), 0, 0x7FE00000),
        ((infinity, one), (0, one), 0, 0xFFC00000),
        ((infinity, one), (one, one), 0xFF800000, 0xFFC00000),
        ((infinity, one), (one, one), 0x7FC00003, 0x7FC00003),
        ((0x0001, 0), (0x0001, 0), 0, 0x27800000),
        ((one, 0), (one, 0), 0x00000001, 0x3F800000),
        ((0, 0), (0, 0), 0x00000001, 0x00000000),
    ]
    from emulator_lab.runners import DirectRunner

    runner = DirectRunner(_machine())
    wrong = []
    for left, right, start, want in table:
        program = a.memory("LDTILECFG", 0, a.Mem(a.RDI))
        for tile, disp in ((0, cases.C_AT), (1, cases.A_AT), (2, cases.B_AT)):
            program += a.memory("TILELOADD", tile, a.Mem(a.RDI, a.RDX, disp=disp))
        program += a.tdp("TDPFP16PS", 0, 1, 2)
        program += a.memory("TILESTORED", 0, a.Mem(a.RDI, a.RDX, disp=cases.C_AT))
        memory = {
            cases.CONFIG: a.config({0: (1, 4), 1: (1, 4), 2: (1, 4)}),
            cases.C_AT: np.array([start], np.uint32).tobytes(),
            cases.A_AT: np.array(left, np.uint16).tobytes(),
            cases.B_AT: np.array(right, np.uint16).tobytes(),
        }
        case = cases.Case(program, {a.RDI: arena.HIGH, a.RDX: 64}, memory)
        outcome = runner.run(case, 0, False)
        got = int(np.frombuffer(outcome.memory[cases.C_AT : cases.C_AT + 4], np.uint32)[0])
        if got != want:
            wrong.append(f"{left} {right} {start:08x}: {got:08x} instead of {want:08x}")
    return wrong
