"""amxq.explain: what it counts, against what is known of small kernels and of measured pairs; and
what the int4 linear's code must not lose."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq import cli
from amxq.codegen import ports
from amxq.codegen.assembly import Instruction, read_loops
from amxq.errors import ArgumentError
from amxq.ops import expert_schedule, schedule
from amxq.ops.schedule import Operands, plan
from amxq.runtime.explain import LoopReport
from amxq.runtime.targets import TARGETS

HERE = Path(__file__).name
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMXQ_CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        yield


@amxq.jit
def at_least_half(x):
    return tl.maximum(x, 0.5)


@amxq.jit
def total(x, y, n, ROWS: tl.constexpr):
    rows, at = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    sums = tl.zeros((ROWS, 64), tl.float32)
    for i in tl.range(0, n, 64):
        value = tl.load(x + rows * n + i + at)
        sums += at_least_half(value) * value
    tl.store(y + rows * 64 + at, sums)


def warm(rows: int, target: str) -> Any:
    return total.warmup(torch.float32, torch.float32, tl.int32, ROWS=rows, target=target)


def main_loop(rows: int, target: str = "avx512") -> LoopReport:
    found = amxq.explain(warm(rows, target)).main_loop
    assert found is not None
    return found


def test_counts_of_a_loop() -> None:
    loop = main_loop(2)
    assert (loop.kinds["load"], loop.kinds["float"], loop.kinds["fma"]) == (8, 8, 8)
    assert loop.kinds.total() == loop.mnemonics.total() == loop.instructions < 30
    assert loop.loaded == {"arrays": 512} and not loop.stored
    assert (loop.multiplier, loop.multiply_adds) == ("fma", 128)
    assert (loop.vector_spills, loop.other_spills) == (0, 0)
    assert loop.registers["tile"] == 0 and 8 < loop.registers["vector"] <= 32
    assert (loop.units["loads"], loop.units["vectors"], loop.cycles) == (4, 8, 8)
    assert (loop.bound, loop.occupancy) == ("vectors", 0.5)
    narrow = main_loop(1, "avx2")
    assert (narrow.kinds["fma"], narrow.multiply_adds, narrow.loaded["arrays"]) == (8, 64, 256)
    assert narrow.units["loads"] == pytest.approx(8 / 3)


def test_lines_of_the_source_also_of_called_functions() -> None:
    assert Path(total.kernel_source.file).name == HERE
    lines = {line: kinds for (_, line), kinds in main_loop(2).lines.items()}
    assert lines[line_of("return", at_least_half)] == {"float": 8}
    assert lines[line_of("value = ")]["load"] == 8
    assert lines[line_of("sums +=")] == {"fma": 8}
    assert set(lines) <= {line_of("return", at_least_half)} | set(
        range(line_of("rows, at"), line_of("tl.store") + 1)
    )


def line_of(text: str, function: Any = total) -> int:
    lines, first = inspect.getsourcelines(function.kernel_source.function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_registers_are_those_of_the_machine() -> None:
    for loop in amxq.explain(warm(15, "avx2")).loops:
        assert loop.registers["vector"] <= 16 and loop.registers["general"] <= 16
    everything = "vfmadd231ps .LCPI0_1(%rip), %ymm3, %xmm3 {%k1}"
    assert instruction(everything).registers == {"zmm3", "k1"}
    assert instruction("movzbl %r8b, %eax").registers == {"r8", "rax"}


ASSEMBLY = """\
other:
	retq
range:                                  # @range
# %bb.0:                                # %entry
	.file	1 "/folder#1" "kernel.py"
	.loc	1 7 0
	leaq	64(%rsp), %rbx
	movq	%rax, 8(%rsp)                   # 8-byte Spill
.LBB2_1:                                # %head1
                                        # =>This Loop Header: Depth=1
                                        #     Child Loop BB2_2 Depth 2
	.loc	1 8 0 is_stmt 1
	vmovaps	(%rbx), %ymm1
.LBB2_2:                                #   Parent Loop BB2_1 Depth=1
                                        # =>  This Inner Loop Header: Depth=2
	vmovups	32(%rsp), %ymm0                 # 32-byte Reload
	.loc	1 0 0
	vaddps	128(%rsp), %ymm0, %ymm1         # 32-byte Folded Reload
	jne	.LBB2_2
# %bb.3:                                #   in Loop: Header=BB2_1 Depth=1
	jne	.LBB2_1
# %bb.4:
	vmovups	(%rdi), %ymm0
.Lfunc_end2:
"""


def test_loops_spills_and_lines_of_a_text() -> None:
    (outer, inner), outside = read_loops(ASSEMBLY, "range")
    assert (outer.label, outer.parent) == ("BB2_1", None)
    assert (inner.label, inner.parent) == ("BB2_2", "BB2_1")
    assert [i.mnemonic for i in outer.instructions] == ["vmovaps", "jne"]
    assert [i.mnemonic for i in inner.instructions] == ["vmovups", "vaddps", "jne"]
    assert [i.mnemonic for i in outside] == ["leaq", "movq", "vmovups"]
    spills = [(i.spill, i.spill_bytes) for i in (*outside, *inner.instructions) if i.spill]
    assert spills == [("Spill", 8), ("Reload", 32), ("Reload", 32)]
    assert [i.place for i in inner.instructions] == [("/folder#1/kernel.py", 8), None, None]
    assert outer.instructions[0].on_stack and not outside[2].on_stack  # by way of rbx


def test_the_annotated_code_is_the_code_that_runs() -> None:
    for target in TARGETS:
        compiled = warm(2, target)
        plain, annotated = compiled.asm["asm"], compiled.annotated()[0]
        assert instructions(annotated) == instructions(plain)


def instructions(text: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(".") and not line.endswith(":")]


def test_text_and_wrong_arguments() -> None:
    compiled = warm(2, "avx512")
    text = str(amxq.explain(compiled))
    assert text.startswith("total for avx512, costs of emerald_rapids\ncompiled in: ROWS = 2\n")
    assert "loads 512 bytes of arrays" in text and HERE in text and "0 vector, 0 other" in text
    assert "sums += at_least_half(value) * value" in text
    assert amxq.explain(compiled, cpu="zen4").cpu == "zen4"
    with pytest.raises(ArgumentError, match=r"^total is no .*give what total\.warmup\("):
        amxq.explain(total)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cpu is 'arm', expected one of emerald_rapids, zen4"):
        amxq.explain(compiled, cpu="arm")
    with pytest.raises(ArgumentError, match="'zen4' has no instruction for 'tile"):
        amxq.explain(linear(32), cpu="zen4")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["explain", "--m", "8", "--n", "64", "--k", "128", "--target", "avx512_bf16"]) == 0
    )
    text = capsys.readouterr().out
    assert "int4_linear for avx512_bf16, costs of zen4" in text and "by bf16 dot" in text
    assert cli.main(["explain", "--k", "100"]) == 2
    assert cli.main(["explain", "--target", "mmx"]) == 2
    assert "unknown target 'mmx'" in capsys.readouterr().err


# --- the table ------------------------------------------------------------------------------


def instruction(text: str) -> Instruction:
    mnemonic, _, operands = text.partition(" ")
    _, (found,) = read_loops(f"f:\n\t{mnemonic}\t{operands}\n", "f")
    return found


@pytest.mark.parametrize(
    ("operations", "cycles"),
    [
        ([], 0),
        ([(2, "05")], 1),
        ([(1, "0"), (1, "5"), (2, "05")], 2),
        ([(3, "0"), (1, "05")], 3),
        ([(1, "0"), (3, "05")], 2),
        ([(1, "01"), (1, "15"), (1, "05")], 1),
        ([(4, "01"), (2, "T")], 2),
    ],
)
def test_pressure(operations: list[tuple[float, str]], cycles: float) -> None:
    assert ports.pressure(operations) == cycles


LOAD, STORE = "vmovaps (%rax), %zmm9", "vmovaps %zmm9, (%rax)"
CODE = {
    "vdpbf16ps": "vdpbf16ps %zmm1, %zmm2, %zmm3",
    "vpdpbusd": "vpdpbusd %zmm1, %zmm2, %zmm3",
    "fma": "vfmadd231ps %zmm1, %zmm2, %zmm3",
    "vpermw": "vpermw %zmm1, %zmm2, %zmm3",
    "vpermps": "vpermps %zmm1, %zmm2, %zmm3",
    "shift": "vpsrlw $4, %zmm2, %zmm3",
    "and": "vpandd %zmm1, %zmm2, %zmm3",
    "load": LOAD,
    "broadcast load": "vpbroadcastd (%rax), %zmm9",
    "store": STORE,
}
MEASURED = {  # docs/amx.md, "Beside a multiply"
    "vdpbf16ps": {"vpermw": 3.0, "shift": 2.5, "and": 2.5, "broadcast load": 2.0, "store": 2.0},
    "fma": {"vpermw": 1.5, "vpermps": 1.0, "shift": 1.0, "and": 1.0, "load": 0.55, "store": 1.2},
    "vpdpbusd": {"vpermw": 1.5, "vpermps": 1.0, "shift": 1.0, "and": 1.0, "broadcast load": 0.55},
    "shift": {"vpermw": 1.95, "vpermps": 1.0, "shift": 1.95, "and": 1.0, "load": 1.0, "store": 1.0},
}  # fmt: skip


def test_the_table_gives_what_was_measured_for_pairs() -> None:
    cpu = ports.CPUS["emerald_rapids"]
    for first, others in MEASURED.items():
        for second, cycles in others.items():
            both = [ports.usage(instruction(CODE[name]), cpu) for name in (first, second)]
            assert ports.pressure(both[0] + both[1]) == pytest.approx(cycles, rel=0.17), (
                first,
                second,
            )


@pytest.mark.parametrize(
    ("text", "kind", "reads", "writes", "size"),
    [
        ("vmovdqu64 -64(%r9), %zmm0", "move", True, False, 64),
        ("vmovdqu16 %ymm0, (%rax,%rdi,2) {%k1}", "move", False, True, 32),
        ("vmovss %xmm0, 4(%rax)", "move", False, True, 4),
        ("vfmadd213ps 64(%rsp), %zmm0, %zmm2", "fma", True, False, 64),
        ("vmulps (%rax){1to16}, %zmm0, %zmm1", "float", True, False, 4),
        ("vbroadcasti64x4 .LCPI2_7(%rip), %zmm5", "broadcast", True, False, 32),
        ("vpbroadcastd %ecx, %zmm1", "broadcast", False, False, 64),
        ("vpxor %ymm1, %ymm1, %ymm2", "logic", False, False, 32),
        ("vmaskmovps %ymm0, %ymm1, (%rax)", "move", False, True, 32),
        ("vpmovdw %zmm5, 32(%rsp,%rcx)", "narrow", False, True, 32),
        ("vpmovzxwd (%rax), %zmm1", "widen", True, False, 32),
        ("vcvtph2ps (%rax), %ymm1", "convert", True, False, 16),
        ("tileloadd -1024(%r14,%r13), %tmm6", "tile load", True, False, 1024),
        ("tilestored %tmm1, (%r11,%r10)", "tile store", False, True, 1024),
        ("prefetcht0 -1984(%r9)", "prefetch", False, False, 8),
        ("cmpq $17, 8(%rdx)", "scalar", True, False, 8),
        ("addl $1, 8(%rdx)", "scalar", True, True, 4),
        ("movq %rax, 8(%rdx)", "scalar", False, True, 8),
        ("leaq (%rdi,%r15), %rdi", "scalar", False, False, 8),
        ("vextractf64x4 $1, %zmm0, (%rax)", "permute", False, True, 32),
        ("vpmaddubsw %ymm0, %ymm1, %ymm2", "int8 products", False, False, 32),
        ("kmovd %eax, %k1", "mask", False, False, 4),
        ("jne .LBB2_3", "branch", False, False, 8),
    ],
)
def test_what_instructions_do(text: str, kind: str, reads: bool, writes: bool, size: int) -> None:
    found = instruction(text)
    assert ports.kind_of(found.mnemonic) == kind
    assert (ports.loads(found), ports.stores(found)) == (reads, writes)
    if reads or writes:
        assert ports.bytes_moved(found) == size


def test_every_kind_has_its_ports() -> None:
    vectors = {kind for _, kind in ports.RULES if "tile" not in kind}
    for cpu in ports.CPUS.values():
        assert vectors <= set(cpu.wide) == set(cpu.narrow)


# --- what the int4 linear's code must not lose (docs/performance.md) ---------------------------


def linear(m: int, target: str = "amx", precision: str = "bf16") -> Any:
    operands = Operands(BF16, zeros=False)
    return plan(m, 4096, 128, 128, target, operands, BF16, precision).kernel


@pytest.mark.parametrize(
    ("precision", "occupancy", "limit"), [("bf16", 0.9, 3.8), ("int8", 0.8, 3.5)]
)
def test_int4_linear_on_tiles(precision: str, occupancy: float, limit: float) -> None:
    found = amxq.explain(linear(512, "amx", precision))
    loop = found.main_loop
    assert loop is not None and loop.multiplier == "tile dot"
    assert loop.occupancy >= occupancy, f"{loop.bound} takes {loop.cycles} cycles"
    assert loop.vector_spills == 0
    assert found.outside["ldtilecfg"] == 1 and found.outside["tilerelease"] == 1
    assert not sum((each.mnemonics for each in found.loops), Counter())["ldtilecfg"]
    assert 1000 * loop.instructions / loop.multiply_adds < limit


@pytest.mark.parametrize(
    ("target", "precision", "limit"),
    [
        ("avx512_bf16", "bf16", 64),
        ("avx512_bf16", "int8", 32),
        ("avx512", "bf16", 135),
        ("avx512", "int8", 56),
        ("avx2", "int8", 142),
    ],
)
def test_instructions_for_a_thousand_multiply_adds(
    target: str, precision: str, limit: float
) -> None:
    loop = amxq.explain(linear(8, target, precision)).main_loop
    assert loop is not None
    assert 1000 * loop.instructions / loop.multiply_adds < limit


@pytest.mark.parametrize(
    ("int8", "rows"),
    [(int8, rows) for int8, costs in schedule.TILE_CYCLES.items() for rows in costs],
)
def test_blocks_cost_what_the_schedule_says(int8: bool, rows: int) -> None:
    matrix = expert_schedule.Matrix(BF16, False, None, None, int8, 128)
    loop = amxq.explain(expert_schedule.expert_linear("amx", matrix, 1, rows)).main_loop
    assert loop is not None
    iterations = 128 * 32 * rows / loop.multiply_adds
    assert loop.cycles * iterations == pytest.approx(schedule.TILE_CYCLES[int8][rows], rel=0.02)


@pytest.mark.parametrize(("rows", "precision"), [(32, "bf16"), (64, "int8")])
def test_experts_have_the_occupancy_of_the_linear(rows: int, precision: str) -> None:
    """At the same rows per expert as of a linear."""
    matrix = expert_schedule.Matrix(BF16, False, None, None, precision == "int8", 128)
    own = expert_schedule.gate_up("amx", matrix, False, "silu", False, 1, rows)
    found, alone = amxq.explain(own), amxq.explain(linear(rows, "amx", precision)).main_loop
    loop = found.main_loop
    assert loop is not None and alone is not None and loop.multiplier == "tile dot"
    assert loop.occupancy >= alone.occupancy - 0.01 and loop.vector_spills == 0
    assert loop.instructions / loop.multiply_adds < 1.02 * alone.instructions / alone.multiply_adds
    assert found.outside["ldtilecfg"] == 1
