"""``amxq.explain``: what became of a kernel, loop by loop of its machine code.

The kernel is compiled once more, with debug metadata and LLVM's comments, to the same
instructions. Each loop's are counted by kind, by source line, and by the units of a CPU that they
keep busy according to the table in :mod:`amxq.codegen.ports`.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from amxq.codegen import ports
from amxq.codegen.assembly import Instruction, Loop, read_loops
from amxq.errors import ArgumentError
from amxq.runtime.compiler import CompiledKernel, Launchable

_MULTIPLIERS = ("tile dot", "bf16 dot", "int8 dot", "int8 products", "fma")
_FILES = {"zmm": "vector", "tmm": "tile", "k": "mask"}
_CAPACITY = {"vector": 32, "tile": 8, "mask": 8, "general": 16}


@dataclass(frozen=True)
class LoopReport:
    """One loop, without the loops inside it; all numbers are for one iteration.

    Attributes:
        label, parent: names of the loop and of the one around it in the assembly.
        instructions: how many.
        kinds, mnemonics: how many of each.
        loaded, stored: bytes, of ``"arrays"`` and of ``"scratch"`` (the stack, so the L1 cache).
        registers: how many different ones of each file are used.
        vector_spills, other_spills: instructions that move vector or other registers to and
            from the stack because there are too few.
        multiplier: the kind of instruction that does the multiplying, empty if none does.
        multiply_adds: how many those do.
        units: cycles that groups of ports are busy at least, and ``"issue"``.
        cycles: the largest of ``units``: no iteration takes less.
        occupancy: the share of ``cycles`` that the multiplying instructions alone would take.
        lines: (file, line) → kinds, for the lines of the source that the instructions are from.
    """

    label: str
    parent: str | None
    instructions: int
    kinds: Counter[str]
    mnemonics: Counter[str]
    loaded: Counter[str]
    stored: Counter[str]
    registers: Counter[str]
    vector_spills: int
    other_spills: int
    multiplier: str
    multiply_adds: int
    units: dict[str, float]
    cycles: float
    occupancy: float
    lines: dict[tuple[str, int], Counter[str]]

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max(self.units, key=lambda unit: self.units[unit])


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; ``print`` shows it.

    Attributes:
        kernel, target: what was compiled, for what.
        constants: what is compiled in.
        cpu: whose costs are used.
        loops: of the kernel's source, in the order of the code; not those that hand out programs.
        outside: mnemonics outside of all loops, run once for each thread and launch.
    """

    kernel: str
    target: str
    constants: dict[str, object]
    cpu: str
    loops: tuple[LoopReport, ...]
    outside: Counter[str]

    @property
    def main_loop(self) -> LoopReport | None:
        """The loop that multiplies most in one iteration, None if none does."""
        most = max(self.loops, key=lambda loop: loop.multiply_adds, default=None)
        return most if most is not None and most.multiply_adds else None

    def __str__(self) -> str:
        head = f"{self.kernel} for {self.target}, costs of {self.cpu}"
        constants = ", ".join(f"{name} = {value}" for name, value in self.constants.items())
        parts = [f"{head}\ncompiled in: {constants or 'nothing'}"]
        return "\n\n".join(parts + [_text(loop, self) for loop in self.loops])


def explain(compiled: Launchable, cpu: str | None = None) -> Explanation:
    """Explains a compiled kernel: ``print(amxq.explain(compiled))``.

    Args:
        compiled: what a launch or ``kernel.warmup`` returns.
        cpu: whose costs: ``"emerald_rapids"`` or ``"zen4"``; default: Zen 4 for target
            avx512_bf16, else Emerald Rapids.

    Raises:
        ArgumentError: it is no compiled kernel, or there is no such CPU, or that CPU lacks an
            instruction.
    """
    if not isinstance(compiled, CompiledKernel):
        kernel = getattr(compiled, "kernel_source", None)
        name = "kernel" if kernel is None else kernel.name
        what = f"a {type(compiled).__name__}" if kernel is None else name
        raise ArgumentError(
            f"{what} is no compiled kernel: give what {name}.warmup(…) or a launch returns"
        )
    name = cpu or ("zen4" if compiled.target.name == "avx512_bf16" else "emerald_rapids")
    if name not in ports.CPUS:
        raise ArgumentError(f"cpu is {cpu!r}, expected one of {', '.join(ports.CPUS)}")
    text, tiles = compiled.annotated()
    loops, outside = read_loops(text, "range")
    try:
        reports = tuple(_report(loop, ports.CPUS[name], tiles) for loop in loops)
    except KeyError as kind:
        raise ArgumentError(f"cpu {name!r} has no instruction for {kind}: take another") from None
    return Explanation(
        compiled.source.name,
        compiled.target.name,
        dict(compiled.constants),
        name,
        _of_source(reports),
        Counter(instruction.mnemonic for instruction in outside),
    )


def _of_source(reports: Sequence[LoopReport]) -> tuple[LoopReport, ...]:
    """Those with instructions of the source."""
    parents = {report.label: report.parent for report in reports if not report.lines}

    def around(report: LoopReport) -> str | None:
        parent = report.parent
        while parent in parents:
            parent = parents[parent]
        return parent

    return tuple(replace(r, parent=around(r)) for r in reports if r.lines)


def _report(loop: Loop, cpu: ports.Cpu, tiles: tuple[tuple[int, int], ...]) -> LoopReport:
    found = [(i, ports.kind_of(i.mnemonic)) for i in loop.instructions]
    multiplier = next((m for m in _MULTIPLIERS if any(kind == m for _, kind in found)), "")
    operations = [ports.usage(i, cpu) for i in loop.instructions]
    multiplying = [o for (_, kind), o in zip(found, operations) if kind == multiplier]
    busy = [operation for some in operations for operation in some]
    units = {
        unit: ports.pressure((n, p) for n, p in busy if set(p) <= set(names))
        for unit, names in cpu.units.items()
    }
    units["issue"] = len(found) / cpu.issue
    cycles = max(ports.pressure(busy), *units.values())
    if cycles > max(units.values()) + 0.01:
        units["ports shared by several"] = cycles
    loads = {ports for term in cpu.load for _, _, ports in (term.partition("*"),)}
    compute = [(n, p) for some in multiplying for n, p in some if p not in loads]
    loaded: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    lines: dict[tuple[str, int], Counter[str]] = {}
    for instruction in loop.instructions:
        where = "scratch" if instruction.on_stack else "arrays"
        if ports.loads(instruction):
            loaded[where] += ports.bytes_moved(instruction)
        if ports.stores(instruction):
            stored[where] += ports.bytes_moved(instruction)
        if instruction.place is not None:
            lines.setdefault(instruction.place, Counter())[_shown(instruction)] += 1
    registers = frozenset().union(*(i.registers for i in loop.instructions))
    return LoopReport(
        label=loop.label,
        parent=loop.parent,
        instructions=len(found),
        kinds=Counter(_shown(i) for i in loop.instructions),
        mnemonics=Counter(i.mnemonic for i in loop.instructions),
        loaded=loaded,
        stored=stored,
        registers=Counter(_FILES.get(r.rstrip("0123456789"), "general") for r in registers),
        vector_spills=sum(i.spill_bytes >= 16 for i in loop.instructions),
        other_spills=sum(0 < i.spill_bytes < 16 for i in loop.instructions),
        multiplier=multiplier,
        multiply_adds=sum(_multiply_adds(i, tiles) for i, kind in found if kind == multiplier),
        units=units,
        cycles=cycles,
        occupancy=ports.pressure(compute) / cycles if cycles else 0.0,
        lines=dict(sorted(lines.items())),
    )


def _shown(instruction: Instruction) -> str:
    """The kind, with moves told apart."""
    kind = ports.kind_of(instruction.mnemonic)
    if kind in ("move", "broadcast") and ports.loads(instruction):
        return "load" if kind == "move" else "broadcast load"
    return "store" if kind == "move" and ports.stores(instruction) else kind


def _multiply_adds(instruction: Instruction, tiles: tuple[tuple[int, int], ...]) -> int:
    name = instruction.mnemonic
    if name.startswith("tdp"):
        _, a, c = (int(operand.removeprefix("%tmm")) for operand in instruction.operands)
        (rows, row_bytes), (_, depth_bytes) = tiles[c], tiles[a]
        return rows * (row_bytes // 4) * (depth_bytes // (2 if name.endswith("ps") else 1))
    if name == "vdpbf16ps":
        return instruction.width // 2
    if name.startswith("vp"):
        return instruction.width
    return 1 if name[-2] == "s" else instruction.width // {"s": 4, "d": 8}.get(name[-1], 2)


# --- as text ----------------------------------------------------------------------------------


def _text(loop: LoopReport, whole: Explanation) -> str:
    where = f" in {loop.parent}" if loop.parent else ""
    units = [(unit, cycles) for unit, cycles in loop.units.items() if cycles >= 0.5]
    units.sort(key=lambda item: -item[1])
    lines = [
        f"loop {loop.label}{where}: {loop.instructions} instructions",
        f"  at least {loop.cycles:.0f} cycles: "
        + ", ".join(f"{cycles:.0f} {unit}" for unit, cycles in units),
    ]
    if loop.multiplier:
        each = 1000 * loop.instructions / loop.multiply_adds
        lines.append(
            f"  {loop.multiply_adds} multiply-adds by {loop.multiplier}: occupancy "
            f"{loop.occupancy:.0%}, {loop.multiply_adds / loop.cycles:.0f} a cycle, "
            f"{each:.2f} instructions for 1000"
        )
    for verb, moved in (("loads", loop.loaded), ("stores", loop.stored)):
        amounts = " and ".join(
            f"{count} bytes of {place}" for place, count in sorted(moved.items())
        )
        lines.append(f"  {verb} {amounts or 'nothing'}")
    capacity = {**_CAPACITY, "vector": 16} if whole.target == "avx2" else _CAPACITY
    used = ", ".join(f"{loop.registers[f]} of {n} {f}" for f, n in capacity.items())
    lines.append(
        f"  registers {used}; spills: {loop.vector_spills} vector, {loop.other_spills} other"
    )
    lines += _source(loop)
    return "\n".join(lines)


def _source(loop: LoopReport) -> list[str]:
    made: list[str] = []
    file = ""
    for (path, line), kinds in loop.lines.items():
        if path != file:
            made.append(f"  {Path(path).name}")
            file = path
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        made.append(f"  {line:5}  {linecache.getline(path, line).strip()[:60]:60}  {counts}")
    return made
