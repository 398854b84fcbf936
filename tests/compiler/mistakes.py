"""Kernels that must not compile, with their expectations beside them.

Each kernel has one line that ends with ``# error: message | hint``, two regular expressions:
the error must point at that line and say so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amxq.errors import CompilationError

F32, I32, BF16, U8 = torch.float32, torch.int32, torch.bfloat16, torch.uint8
Cases = dict[str, tuple[Any, tuple[Any, ...]]]


def registering(cases: Cases) -> Callable[..., Any]:
    """The decorator ``@wrong(argument types…)`` that adds a kernel to ``cases``."""

    def wrong(*args: Any) -> Any:
        def register(kernel: Any) -> Any:
            cases[kernel.kernel_source.name] = kernel, args
            return kernel

        return register

    return wrong


def expected(kernel: Any) -> tuple[int, str, str]:
    """Line, message and hint that the kernel's comment announces."""
    lines, first = inspect.getsourcelines(kernel.kernel_source.function)
    for number, line in enumerate(lines, first):
        if "# error:" in line:
            text = line.split("# error:")[1].strip()
            message, _, hint = text.rpartition("|")
            return number, message.strip(), hint.strip()
    raise AssertionError("no expectation")


def check(kernel: Any, args: tuple[Any, ...], file: str) -> None:
    line, message, hint = expected(kernel)
    with pytest.raises(CompilationError) as caught:
        kernel.warmup(*args, target="avx512_bf16")
    error = caught.value
    assert re.search(message, error.message), error
    assert re.search(hint, error.hint), error
    assert (error.file, error.line) == (file, line), error
    source = error.source_line
    assert source.strip() and source[error.column] != " "
    text = str(error).splitlines()
    assert text[0] == f"{file}:{line}:{error.column + 1}: {error.message}"
    assert text[1].endswith(source) and text[2].index("^") == 4 + error.column
