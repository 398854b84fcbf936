"""A compiled kernel as an object file and a C header, to be called without Python.

The header declares the object's entry point and wraps it in functions with the kernel's own
arguments. What it spells out is the calling convention of :mod:`amxq.codegen.llvm`: the entry point
takes the number of threads and the address of 8-byte slots, the grid's three sizes, the addresses
of omp_get_thread_num and of a function that calls another on so many threads, then the arguments;
integers as int64_t, floats as double, bool as 0 or 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import amxq
from amxq.errors import ArgumentError
from amxq.ir.types import BF16, F16, F32, F64, I1, DType, PointerType, Type
from amxq.runtime import amx

if TYPE_CHECKING:
    from amxq.runtime.compiler import CompiledKernel

_FLOATS = {BF16: "uint16_t", F16: "uint16_t", F32: "float", F64: "double", I1: "uint8_t"}

# Words of C and C++ that Python lets a parameter be called, and the header's own names.
_TAKEN = frozenset(
    """alignas alignof asm auto bool case catch char const constexpr default delete do double enum
    explicit export extern float friend goto inline int long mutable namespace new operator
    private protected public register restrict short signed sizeof static struct switch template
    this throw typedef typename typeof union unsigned using virtual void volatile
    grid_x grid_y grid_z slots""".split()
)

_HEADER = """\
/* {name}: kernel {kernel}({parameters})
 * compiled by amxq {version} for target {target}, which needs a CPU with
 * {flags}.
 * Compiled in: {constants}.
 * Taken for granted: {facts}.
 *
 * Nothing else is checked: the caller's arrays must be as large as the kernel takes them to be, and
 * aligned as their elements are. bf16 and fp16 elements are their bits, uint16_t.
 */
#ifndef AMXQ_{guard}_H
#define AMXQ_{guard}_H

{include}#include <stdint.h>
{permission}
#ifdef __cplusplus
extern "C" {{
#endif

struct {name}_slots {{
    int64_t grid[3];
    int (*thread_num)(void);
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
{fields}}};

void {name}_launch(const struct {name}_slots *slots, int64_t threads);

/* Runs all programs of the grid on the calling thread. */
static inline void {name}(int64_t grid_x, int64_t grid_y, int64_t grid_z{arguments})
{{
{checks}    struct {name}_slots slots = {{{{grid_x, grid_y, grid_z}}, 0, 0{values}}};
    if (grid_x > 0 && grid_y > 0 && grid_z > 0)
        {name}_launch(&slots, 1);
}}

#ifdef _OPENMP
#include <omp.h>

static void {name}_parallel(void (*part)(void *), void *team, unsigned threads, unsigned flags)
{{
    (void)flags;
#pragma omp parallel num_threads(threads)
    part(team);
}}

/* Runs them on OpenMP's threads. */
static inline void {name}_omp(int64_t grid_x, int64_t grid_y, int64_t grid_z{arguments})
{{
{checks}    struct {name}_slots slots = {{
        {{grid_x, grid_y, grid_z}}, omp_get_thread_num, {name}_parallel{values}}};
    if (grid_x > 0 && grid_y > 0 && grid_z > 0)
        {name}_launch(&slots, omp_get_max_threads());
}}
#endif

#ifdef __cplusplus
}}
#endif
#endif
"""

_PERMISSION = """\
#include <sys/syscall.h>
#include <unistd.h>

#ifndef AMXQ_REQUEST_AMX
#define AMXQ_REQUEST_AMX
/* Asks Linux for the use of AMX tiles, once a process, before the first kernel; 0 if granted. */
static inline int amxq_request_amx(void)
{
    return (int)syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
}
#endif
"""


def export(compiled: CompiledKernel, folder: str | Path, name: str | None) -> tuple[Path, Path]:
    """See :meth:`amxq.runtime.compiler.CompiledKernel.export`."""
    kernel = compiled.source.name
    name = kernel if name is None else name
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or name in _TAKEN:
        raise ArgumentError(f"name is {name!r}, expected an identifier of C")
    image = compiled.image if name == kernel else compiled.build_as(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.o").write_bytes(image)
    (folder / f"{name}.h").write_text(_header(compiled, name), encoding="utf-8")
    return folder / f"{name}.o", folder / f"{name}.h"


def _header(compiled: CompiledKernel, name: str) -> str:
    declared = [
        (_name_in_c(parameter, i), *_types_in_c(type_))
        for i, (parameter, type_) in enumerate(compiled.params.items())
    ]
    checks = [
        f"{n} == 1" if fact == 1 else f"{n} % {fact} == 0"
        for (parameter, _), (n, *_) in zip(compiled.params.items(), declared)
        if (fact := compiled.facts.get(parameter))
    ]
    facts = " and ".join(checks) + ", which assert() checks" if checks else "nothing"
    constants = ", ".join(f"{n} = {v!r}" for n, v in compiled.constants.items()) or "nothing"
    return _HEADER.format(
        name=name,
        kernel=compiled.source.name,
        guard=name.upper(),
        parameters=", ".join(f"{n}: {t}" for n, t in compiled.params.items()),
        version=amxq.__version__,
        target=compiled.target.name,
        flags=", ".join(sorted(compiled.target.cpu_flags)),
        constants=constants.replace("*/", "* /"),
        facts=facts,
        include="#include <assert.h>\n" if checks else "",
        checks="".join(f"    assert({check});\n" for check in checks),
        permission=_PERMISSION if amx.FLAGS <= compiled.target.cpu_flags else "",
        fields="".join(f"    {_declaration(slot, n)};\n" for n, _, slot in declared),
        arguments="".join(f", {_declaration(argument, n)}" for n, argument, _ in declared),
        # C++ refuses to narrow uint64_t in braces
        values="".join(f", {_slot_value(n, argument, slot)}" for n, argument, slot in declared),
    )


def _slot_value(name: str, argument: str, slot: str) -> str:
    return f"({slot}){name}" if argument == "uint64_t" else name


def _name_in_c(parameter: str, number: int) -> str:
    return parameter if parameter.isascii() and parameter not in _TAKEN else f"argument{number}"


def _types_in_c(type_: Type) -> tuple[str, str]:
    """Of the argument of the wrapper, and of the slot it is stored in."""
    if isinstance(type_, PointerType):
        element = _element_in_c(type_.element)
        return f"{element} *", f"{element} *"
    assert isinstance(type_, DType)
    if type_.is_float:
        return "double" if type_ == F64 else "float", "double"
    return _element_in_c(type_), "int64_t"


def _element_in_c(element: DType) -> str:
    sign = "u" if element.kind == "uint" else ""
    return _FLOATS.get(element) or f"{sign}int{element.bits}_t"


def _declaration(type_: str, name: str) -> str:
    return type_ + name if type_.endswith("*") else f"{type_} {name}"
