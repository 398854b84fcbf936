"""Fixtures of the compiler's tests: every runnable target, one thread, a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amxq import knobs
from amxq.ir.ops import Function
from amxq.ir.parser import parse_function
from amxq.ir.printer import print_function
from amxq.runtime.targets import TABLE, available_targets, target


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels of these tests neither come from nor go to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMXQ_CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        patch.delenv("AMXQ_KERNEL_DUMP", raising=False)
        patch.delenv("AMXQ_ALWAYS_COMPILE", raising=False)
        patch.setattr("amxq.runtime.compiler.print_function", _print_and_parse)
        yield


def _print_and_parse(function: Function) -> str:
    """Checks for every kernel, at every stage, that the printed text parses to the same."""
    text = print_function(function)
    if len(text) < 200_000:  # the largest ones take seconds
        assert print_function(parse_function(text)) == text
    return text


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_a_width() -> list[str]:
    """The best runnable target of each vector width: those of one width differ in dots only."""
    best = {TABLE[name].vector_bits: name for name in reversed(available_targets())}
    return [best[bits] for bits in sorted(best, reverse=True)]


@pytest.fixture(params=[*one_a_width(), "interpreter"])
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for each vector width and on the interpreter; launches inside use it."""
    if request.param == "interpreter":
        with knobs.INTERPRET.scope("1"):
            yield request.param
        return
    with target(request.param):
        yield request.param


@pytest.fixture(params=available_targets())
def on_each(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for each target that this CPU runs."""
    with target(request.param):
        yield request.param
