"""Writes docs/language.md, the reference of the kernel language, from the docstrings of
amxq.language: ``python docs/make_reference.py``."""

from __future__ import annotations

import inspect
from pathlib import Path

from amxq.language import control, core, math, memory

PAGE = Path(__file__).resolve().parent / "language.md"

HEAD = """\
# The kernel language

`import amxq.language as tl`. This page is generated from the docstrings: `python
docs/make_reference.py`.

A kernel is a function under `@amxq.jit`, launched as `kernel[grid](arguments…, META=…)`; one
*program* runs for every index of the grid. The language is Triton's: a kernel that uses what this
page lists needs other imports and device names, the tutorials in docs/tutorials show it. Triton's
sorting, random numbers and `tl.softmax` are not there; nor are `break`, `continue` and `return`
inside of loops, as in Triton.

{introduction}

**Statements.** Assignments, also to tuples and augmented ones; `for` over `range`, `tl.range`
and `tl.static_range`; `while`; `if`, `elif`, `else`; `return`, in a kernel without a value,
anywhere but in a loop. What depends on constants only is decided while the kernel is compiled;
a branch or a loop on values of the run time carries the variables that it changes, which keep
their shape and type. Scalars are compared, also as `a < b < c`, and joined by `and`, `or`,
`not`; tiles too, element by element. Functions of one's own are called if they are under
`@amxq.jit` too; they take keyword and default arguments and return a value or a tuple.

**Types.** `tl.int1`, `int8` to `int64`, `uint8` to `uint64`, `bfloat16`, `float16`, `float32`,
`float64`. Tensors arrive as pointers, Python integers as int32 (int64 where they do not fit),
floats as float32. `/` of integers gives float32; `//` and `%` truncate towards zero, as in C
and Triton, but constants among themselves are computed by Python, which rounds down; shifts of
signed numbers keep the sign. `num_warps=` and `num_stages=` of a launch are taken and do nothing.

**Values** have `shape`, `dtype` and `T`, and the methods {methods}. Tiles are indexed with `:`
and `None` only.

**Errors** of compilation are `amxq.errors.CompilationError`: file, line, column, the line with a
caret, what to do, and the calls that led there.
"""


def page() -> str:
    """The whole text."""
    from amxq.frontend.builtins import METHODS

    introduction = inspect.cleandoc(core.__doc__ or "").split("\n\n", 1)[1]
    methods = ", ".join(f"`{name}`" for name in sorted(METHODS))
    parts = [HEAD.format(introduction=introduction, methods=methods)]
    titles = (
        (core, "Programs, tiles, shapes, reductions, multiplication"),
        (math, "Element-wise functions"),
        (memory, "Memory"),
        (control, "Loops, compile time, hints, printing"),
    )
    for module, title in titles:
        parts.append(f"## {title}\n")
        if module is not core:
            parts.append(inspect.cleandoc(module.__doc__ or "") + "\n")
        for name, function in vars(module).items():
            if name.startswith("_") or getattr(function, "__module__", "") != module.__name__:
                continue
            if hasattr(function, "__wrapped__") or name == "constexpr":
                parts.append(f"### {name}\n\n{_signature(name, function)}\n")
                parts.append(_text(function) + "\n")
    return "\n".join(parts)


def _signature(name: str, function: object) -> str:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    shown = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)
    return f"    tl.{name}({shown})".replace(repr(core.float32), "float32")


def _text(function: object) -> str:
    """The docstring with its argument list as a Markdown one."""
    lines: list[str] = []
    for line in inspect.getdoc(function).replace("``", "`").splitlines():  # type: ignore[union-attr]
        line = line.replace(":func:", "")
        if line == "Args:":
            continue
        if line.startswith("        "):
            line = f"  {line.strip()}"
        elif line.startswith("    "):
            line = f"* {line.strip()}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
