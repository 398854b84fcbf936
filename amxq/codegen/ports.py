"""What an instruction does and which units of a core it keeps busy: the cost model's table.

:data:`RULES` sorts mnemonics into kinds, the first that fits; :data:`CPUS` says for each kind
how many operations go to which ports, as uops.info writes it: ``"1*05 1*5"`` is one operation
for port 0 or 5 and one for port 5. The least time that a loop can take is that of its most
crowded set of ports (:func:`pressure`); latencies, caches, and of the front end all but the
number of instructions it starts a cycle, are not modelled.

Costs of tile instructions, VPERMW and dot products come from :mod:`amxq.codegen.instructions`; for
Emerald Rapids docs/amx.md measured FMA, permutes, shifts, logic, loads and stores too. The rest
are the ports in Intel's optimisation manual and in AMD's guide for family 19h, not measured.

Ports of Emerald Rapids: 0, 1 and 5 vectors (1 closed to 512 bits), with 6 and A integers; 2, 3
and B loads (B closed to 512 bits); S a store of 64 bytes; T the tile unit. Of Zen 4: a to d vectors
of 256 bits, twice for 512; L and M loads of 32 bytes; S a store of 32 bytes; i to l integers.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from amxq.codegen.assembly import Instruction
from amxq.codegen.instructions import TABLE

RULES: tuple[tuple[str, str], ...] = (
    (r"tdp\w+", "tile dot"),
    (r"tileload\w+", "tile load"),
    (r"tilestored", "tile store"),
    (r"tilezero", "tile zero"),
    (r"ldtilecfg|sttilecfg|tilerelease", "tile configuration"),
    (r"prefetch\w+", "prefetch"),
    (r"vdpbf16ps", "bf16 dot"),
    (r"vpdp\w+", "int8 dot"),
    (r"vpmaddubsw", "int8 products"),
    (r"vfn?m(add|sub)\w+", "fma"),
    (r"vp?gather\w+", "gather"),
    (r"vp?scatter\w+", "scatter"),
    (r"v(div|sqrt)\w+", "divide"),
    (r"vpermw", "vpermw"),
    (r"vps(ll|rl|ra)\w+|vpro[lr]\w+|vpsh[lr]d\w+", "shift"),
    (r"vpmov[sz]x\w+", "widen"),
    (r"vpmov\w+", "narrow"),
    (r"vcvt\w+", "convert"),
    (r"vp?cmp\w+|vp?test\w+", "compare"),
    (r"vp?broadcast\w+", "broadcast"),
    (r"vp?(perm|unpck|shuf|align|pack|ins|ext|compress|expand|multishift)\w+", "permute"),
    (r"vmov([hl]|s[hl]dup|ddup)\w*", "permute"),
    (r"v(add|sub|mul|min|max|rndscale|round|scalef|get|range|rcp|rsqrt|reduce|fix)\w+", "float"),
    (r"vpm(ul|add)\w+", "integer multiply"),
    (r"vp(add|sub|min|max|abs)\w+", "integer"),
    (r"vp?(and|or|xor|ternlog|blend)\w*", "logic"),
    (r"vmov\w+|vp?maskmov\w+|vlddqu|vzero\w+", "move"),
    (r"v\w+", "other vector"),
    (r"k\w+", "mask"),
    (r"j\w+", "branch"),
    (r"call\w*|ret\w*", "call"),
    (r"\w+", "scalar"),
)


@dataclass(frozen=True)
class Cpu:
    """The ports of one CPU.

    Attributes:
        wide, narrow: kind → operations, for 512-bit vectors and for others.
        load, store: operations of 64 bytes, and of fewer.
        units: what to call groups of ports in reports.
        issue: instructions that it starts a cycle.
    """

    name: str
    wide: dict[str, str]
    narrow: dict[str, str]
    load: tuple[str, str]
    store: tuple[str, str]
    units: dict[str, str]
    issue: int


def _cycles(name: str, cpu: str, ports: int = 1) -> float:
    return TABLE[name].cost(cpu).cycles * ports


def _emerald_rapids() -> Cpu:
    cycles = functools.partial(_cycles, cpu="emerald_rapids")
    everywhere = {
        "tile dot": f"{cycles('tdpbf16ps')}*T",
        "tile load": f"{cycles('tileloadd', ports=2)}*23",
        "tile store": f"{cycles('tilestored')}*S",
        "tile zero": "1*0156A",
        "tile configuration": "1*0156A",
        "prefetch": "1*23B",
        "gather": "16*23 8*05",
        "scatter": "16*S 16*05",
        "mask": "1*0",
        "branch": "1*06",
        "call": "1*6",
        "scalar": "1*0156A",
        "compare": "1*5",
        "widen": "1*5",
        "narrow": "2*5",
    }
    wide = {
        "bf16 dot": f"{cycles('vdpbf16ps', ports=2)}*05",
        "int8 dot": f"{cycles('vpdpbusd', ports=2)}*05",
        "fma": "1*05",
        "divide": "16*0",
        "vpermw": "1*0 1*5",
        "shift": "1*0",
        "convert": "1*05 1*5",
        "broadcast": "1*5",
        "permute": "1*5",
        "float": "1*05",
        "integer multiply": "1*05",
        "int8 products": "1*05",
        "integer": "1*05",
        "logic": "1*05",
        "move": "1*05",
        "other vector": "1*05",
    }
    narrow = {
        **wide,
        "bf16 dot": "2*01",
        "int8 dot": "1*01",
        "fma": "1*01",
        "divide": "5*0",
        "vpermw": "1*01 1*5",
        "shift": "1*01",
        "convert": "1*01",
        "permute": "1*15",
        "float": "1*01",
        "integer multiply": "1*01",
        "int8 products": "1*01",
        "integer": "1*015",
        "logic": "1*015",
        "move": "1*015",
        "other vector": "1*015",
    }
    return Cpu(
        "emerald_rapids",
        {**everywhere, **wide},
        {**everywhere, **narrow},
        ("1*23", "1*23B"),
        ("1*S", "0.5*S"),
        {"tile unit": "T", "loads": "23B", "stores": "S", "vectors": "015"},
        6,
    )


def _zen4() -> Cpu:
    everywhere = {
        "prefetch": "1*LM",
        "gather": "16*LM 8*abcd",
        "scatter": "16*S 16*abcd",
        "mask": "1*ab",
        "branch": "1*ij",
        "call": "1*ij",
        "scalar": "1*ijkl",
    }
    narrow = {
        "bf16 dot": f"{_cycles('vdpbf16ps', 'zen4')}*ab",
        "int8 dot": f"{_cycles('vpdpbusd', 'zen4')}*ab",
        "fma": "1*ab",
        "divide": "5*b",
        "vpermw": "1*bc",
        "shift": "1*bc",
        "convert": "1*cd",
        "compare": "1*ab",
        "widen": "1*bc",
        "narrow": "1*bc",
        "broadcast": "1*bc",
        "permute": "1*bc",
        "float": "1*abcd",
        "integer multiply": "1*ad",
        "int8 products": "1*ad",
        "integer": "1*abcd",
        "logic": "1*abcd",
        "move": "1*abcd",
        "other vector": "1*abcd",
    }
    wide = {kind: f"{usage} {usage}" for kind, usage in narrow.items()}
    return Cpu(
        "zen4",
        {**everywhere, **wide},
        {**everywhere, **narrow},
        ("2*LM", "1*LM"),
        ("2*S", "1*S"),
        {"loads": "LM", "stores": "S", "vectors": "abcd", "integers": "ijkl"},
        6,
    )


CPUS: dict[str, Cpu] = {cpu.name: cpu for cpu in (_emerald_rapids(), _zen4())}

_OWN_LOADS, _OWN_STORES = ("tile load", "gather"), ("tile store", "scatter")
"""Kinds whose operations in the tables include those of memory."""

_RULES = tuple((re.compile(pattern), kind) for pattern, kind in RULES)
_ONLY_READS = re.compile(r"(cmp|test|bt|push|call|jmp|i?div|i?mul)\w*")
_ONLY_WRITES = re.compile(r"(v?p?(mask)?mov|v?p?ext|k?mov|set|vp?compress|vcvt)\w*")
_SIZES = {"b": 1, "w": 2, "d": 4, "l": 4, "q": 8}
_BROADCAST = {
    "b": 1,
    "w": 2,
    "d": 4,
    "ss": 4,
    "q": 8,
    "sd": 8,
    "x2": 16,
    "128": 16,
    "x4": 32,
    "x8": 32,
}
_PARTIAL = re.compile(
    r"v\w*[^p](ss|sd)|vmov([dq])|vcvt(ph2ps|ps2ph)\w?|v(?:ext|ins)\w*(32x4|64x2|128|64x4|32x8)"
)


@functools.cache
def kind_of(mnemonic: str) -> str:
    """What the instruction does: one of the kinds in :data:`RULES`."""
    return next(kind for pattern, kind in _RULES if pattern.fullmatch(mnemonic))


def stores(instruction: Instruction) -> bool:
    """Whether it writes memory."""
    kind = kind_of(instruction.mnemonic)
    written = bool(instruction.memory) and instruction.operands[-1] == instruction.memory
    return written and kind != "prefetch" and not _ONLY_READS.fullmatch(instruction.mnemonic)


def loads(instruction: Instruction) -> bool:
    """Whether it reads memory."""
    if not instruction.memory or kind_of(instruction.mnemonic) in (*_OWN_STORES, "prefetch"):
        return False
    return not (stores(instruction) and _ONLY_WRITES.fullmatch(instruction.mnemonic))


def bytes_moved(instruction: Instruction) -> int:
    """Bytes that it reads or writes in memory; of a whole tile for those of tiles."""
    name, kind, width = instruction.mnemonic, kind_of(instruction.mnemonic), instruction.width
    if kind in ("tile load", "tile store"):
        return 1024
    if match := re.search(r"\{1to(\d+)\}", instruction.memory):
        return width // int(match[1])
    if kind == "broadcast":
        return next(size for end, size in _BROADCAST.items() if name.endswith(end))
    if match := re.fullmatch(r"vpmov(?:[sz]x|s|us)?([bwdq])([bwdq])", name):
        small, large = sorted(_SIZES[letter] for letter in match.groups())
        return width * small // large
    if match := _PARTIAL.fullmatch(name):
        scalar, integer, half, part = match.groups()
        if half:
            return width // 2
        return {"ss": 4, "sd": 8, "d": 4, "q": 8, "64x4": 32, "32x8": 32}.get(
            scalar or integer or part, 16
        )
    return width or _SIZES.get(name[-1], 8)


def usage(instruction: Instruction, cpu: Cpu) -> list[tuple[float, str]]:
    """The instruction's operations: how many go to which ports. KeyError if the CPU has none."""
    kind = kind_of(instruction.mnemonic)
    terms = (cpu.wide if instruction.width == 64 else cpu.narrow)[kind].split()
    reads, writes = loads(instruction), stores(instruction)
    if kind in ("move", "broadcast") or re.match("k?mov", instruction.mnemonic):
        terms = terms if not (reads or writes) else []
    part = 0 if (reads or writes) and bytes_moved(instruction) == 64 else 1
    if reads and kind not in _OWN_LOADS:
        terms.append(cpu.load[part])
    if writes and kind not in _OWN_STORES:
        terms.append(cpu.store[part])
    return [(float(count), ports) for count, _, ports in (t.partition("*") for t in terms)]


def pressure(operations: Iterable[tuple[float, str]]) -> float:
    """The cycles that operations take at least, spread over their ports as well as possible:
    the most crowded union of their sets of ports decides."""
    amounts: dict[frozenset[str], float] = {}
    for count, ports in operations:
        amounts[frozenset(ports)] = amounts.get(frozenset(ports), 0.0) + count
    best = 0.0
    for size in range(1, len(amounts) + 1):
        for some in itertools.combinations(amounts, size):
            union = frozenset().union(*some)
            total = sum(amount for ports, amount in amounts.items() if ports <= union)
            best = max(best, total / len(union))
    return best
