"""LLVM's assembly text, read back: instructions, the loops they are in, and their source lines.

It takes the AT&T syntax with comments that LLVM prints (``set_asm_verbosity``): loops, and which
instructions spill registers, are what LLVM says they are. Lines come from ``.loc`` directives,
which :mod:`amxq.codegen.debug` causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_LABEL = re.compile(r"\.L(BB\d+_\d+):|# %bb\.\d+:")
_LOOP = re.compile(
    r"in Loop: Header=(BB\d+_\d+)|(This (?:Inner )?Loop Header)|Parent Loop (BB\d+_\d+)"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
_SPILL = re.compile(r"(\d+)-byte (?:Folded )?(Spill|Reload)")
_OPERAND = re.compile(r"(?:[^,(]|\([^)]*\))+")
_REGISTER = re.compile(r"%([a-z][a-z0-9]*)")
_MEMORY = re.compile(r"\((%[a-z0-9]+)?(?:,(%[a-z0-9]+))?[,0-9]*\)")
_GENERAL = re.compile(r"[re]?([abcd])[xlh]|[re]?(si|di|bp|sp)l?|(r\d+)[dwb]?")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        operands: in AT&T's order, the destination last.
        loop: the label of the innermost loop around it, or None.
        place: file and line of the source, None where LLVM does not know.
        on_stack: whether its operand in memory is on the stack: scratch memory, or a spill.
        spill: ``"Spill"`` or ``"Reload"`` of ``spill_bytes`` if it moves a register that
            LLVM could not keep, else empty.
    """

    mnemonic: str
    operands: tuple[str, ...]
    loop: str | None
    place: tuple[str, int] | None
    on_stack: bool
    spill: str
    spill_bytes: int

    @cached_property
    def memory(self) -> str:
        """The operand in memory, or an empty string."""
        found = [o for o in self.operands if _MEMORY.search(o)]
        return found[-1] if found and not self.mnemonic.startswith("lea") else ""

    @cached_property
    def registers(self) -> frozenset[str]:
        """Names of all registers but rip, whatever their width: rax, zmm0, k1, tmm0."""
        names = {_whole(name) for o in self.operands for name in _REGISTER.findall(o)}
        return frozenset(names - {"rip"})

    @cached_property
    def width(self) -> int:
        """Bytes of the widest vector register, 0 without any."""
        names = [name for o in self.operands for name in _REGISTER.findall(o)]
        return max(
            ({"x": 16, "y": 32, "z": 64}[n[0]] for n in names if n[1:3] == "mm" and n[0] in "xyz"),
            default=0,
        )


@dataclass(frozen=True)
class Loop:
    """A loop: its label, the one around it, and its instructions outside of inner loops."""

    label: str
    parent: str | None
    instructions: tuple[Instruction, ...]


def read_loops(text: str, function: str) -> tuple[list[Loop], list[Instruction]]:
    """The loops of a function in the order of its text, and its instructions outside of all."""
    parents: dict[str, str | None] = {}
    inside: dict[str | None, list[Instruction]] = {None: []}
    for instruction in _instructions(text, function, parents):
        inside.setdefault(instruction.loop, []).append(instruction)
    loops = [Loop(label, parent, tuple(inside.get(label, ()))) for label, parent in parents.items()]
    return loops, inside[None]


def _instructions(
    text: str, function: str, parents: dict[str, str | None]
) -> Iterator[Instruction]:
    """Walks the text; fills ``parents`` with the loops on its way."""
    files: dict[str, str] = {}
    label = loop = parent = None
    place: tuple[str, int] | None = None
    active = False
    stack = {"rsp", "rbp"}
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        code = code.strip()
        if match := _FILE.match(line.strip()):
            files[match[1]] = "/".join(part for part in match.groups()[1:] if part)
        if not line.startswith((" ", "\t")) and code.endswith(":") and not code.startswith("."):
            active = code == f"{function}:"
        if not active:
            continue
        if match := _LABEL.match(line):
            label, loop, parent = match[1], None, None
        for inner, header, outer in _LOOP.findall(comment):
            if header:
                assert label is not None
                loop, parents[label] = label, parent
            else:
                loop, parent = inner or loop, outer or parent
        if code.startswith(".loc"):
            _, file, number, *_ = code.split()
            place = (files[file], int(number)) if number != "0" else None
        elif code and not code.startswith(".") and not code.endswith(":"):
            mnemonic, _, rest = code.partition("\t")
            operands = tuple(o.strip() for o in _OPERAND.findall(rest))
            spill = _SPILL.search(comment)
            size, kind = (int(spill[1]), spill[2]) if spill else (0, "")
            on_stack = _follow(mnemonic, operands, stack)
            yield Instruction(mnemonic, operands, loop, place, on_stack, kind, size)


def _follow(mnemonic: str, operands: tuple[str, ...], stack: set[str]) -> bool:
    """Whether a memory operand's base is in ``stack``, the registers that hold addresses on the
    stack, which is kept up to date in the order of the text."""
    bases = [match[1][1:] for o in operands if (match := _MEMORY.search(o)) and match[1]]
    on_stack = any(base in stack for base in bases)
    last = _whole(operands[-1][1:]) if operands and operands[-1].startswith("%") else ""
    if last and last not in ("rsp", "rbp"):
        copied = mnemonic == "movq" and operands[0][1:] in stack
        if copied or (on_stack and mnemonic.startswith("lea")):
            stack.add(last)
        elif not mnemonic.startswith(("cmp", "test", "add", "sub")):
            stack.discard(last)
    return on_stack


def _whole(name: str) -> str:
    if re.fullmatch(r"[xyz]mm\d+", name):
        return "z" + name[1:]
    match = _GENERAL.fullmatch(name)
    if match is None:
        return name
    letter, pointer, number = match.groups()
    return f"r{letter}x" if letter else number or f"r{pointer}"
