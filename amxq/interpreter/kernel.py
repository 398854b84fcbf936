"""Launches on the interpreter: every program of the grid, one after the other."""

from __future__ import annotations

import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

from amxq.errors import CompilationError, OutOfBoundsError
from amxq.frontend import wording
from amxq.frontend.builtins import HANDLERS
from amxq.frontend.semantic import Mistake, Semantic, text_of
from amxq.frontend.shapes import beyond
from amxq.frontend.source import KernelSource
from amxq.interpreter import steps
from amxq.interpreter.evaluator import Beyond, Evaluated, Evaluator
from amxq.interpreter.memory import Memory, Outside
from amxq.interpreter.proxies import Proxy, unwrap, wrap
from amxq.interpreter.rewrite import interpretable, is_kernels
from amxq.ir.types import PointerType, Type
from amxq.language.core import interpreting


class InterpretedKernel:
    """Stands for a compiled kernel where ``AMXQ_INTERPRET=1``: the same ``launch``, and no stages.

    Attributes:
        params: name → type of the arguments that are passed at run time, in order.
    """

    def __init__(
        self, source: KernelSource, types: dict[str, Type], constants: dict[str, Any]
    ) -> None:
        self.source, self.params, self.constants = source, types, constants

    def launch(
        self, grid: tuple[int, int, int], args: Sequence[Any], num_threads: int | None = None
    ) -> None:
        """Runs the grid on this thread. ``args`` are tensors and numbers in the order of
        ``params``; an address in place of a tensor is good for the rest of its storage.

        Raises:
            OutOfBoundsError: an access left a tensor.
            CompilationError: the kernel breaks a typing rule.
        """
        function = interpretable(self.source, steps)
        program = _Program(grid)
        values = {
            name: program.argument(name, type_, value)
            for (name, type_), value in zip(self.params.items(), args, strict=True)
        }
        before = interpreting.set(program)
        try:
            for z, y, x in itertools.product(*map(range, reversed(grid))):
                program.b.program = (x, y, z)
                function(**values, **self.constants)
        except _OF_PYTHON as problem:
            frames = _frames(problem.__traceback__)
            if not is_kernels(frames[0][0]):
                raise  # of something else that the kernel calls
            raise _located(CompilationError, *_explained(problem), frames) from problem
        finally:
            interpreting.reset(before)

    def bind(
        self, grid: tuple[int, int, int], args: Sequence[Any], threads: int
    ) -> Callable[[], None]:
        """A launch, ready to be called."""
        return functools.partial(self.launch, grid, args)


class _Program:
    """The program that runs: its numbers, and the typing rules bound to them."""

    def __init__(self, grid: tuple[int, int, int]) -> None:
        self.b = Evaluator(grid)
        self.sem = Semantic(self.b)

    def argument(self, name: str, type_: Type, value: Any) -> Any:
        if not isinstance(type_, PointerType):
            return self.call(self.b.constant, value, type_)
        return self.call(lambda: Evaluated.pointer(type_, Memory.of(name, value)))

    def call(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A rule of the language, applied to what a kernel hands over."""
        try:
            kwargs = {name: unwrap(x) for name, x in kwargs.items()}
            return wrap(self.sem, self.call, rule(*map(unwrap, args), **kwargs))
        except Mistake as mistake:
            raise _at_the_kernels_line(CompilationError, str(mistake), mistake.hint) from None
        except Outside as outside:
            hint = "give the access a mask, or make the tensor larger"
            raise _at_the_kernels_line(OutOfBoundsError, str(outside), hint) from None

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of the language, or a jit function, called by a kernel."""
        if function in HANDLERS:
            args = tuple(map(self._function, args))
            kwargs = {name: self._function(x) for name, x in kwargs.items()}
            try:
                return self.call(HANDLERS[function], self.sem, *args, **kwargs)
            except TypeError as problem:
                # the builtin's handler is named after it, with an underscore before
                text = str(problem).removeprefix("_")
                raise _at_the_kernels_line(CompilationError, text, "") from None
        source = function.kernel_source
        bound = self.call(lambda: source.bind(list(args), kwargs))
        return interpretable(source, steps)(**bound)

    def _function(self, value: Any) -> Any:
        """A jit function that is handed to a builtin, as a function of values."""
        if isinstance(value, Proxy) or not hasattr(value, "kernel_source"):
            return value
        return functools.partial(self._combined, value)

    def _combined(self, function: Any, *args: Any) -> Any:
        try:
            return unwrap(self(function, wrap(self.sem, self.call, args), {}))
        except Beyond:
            raise beyond(function.kernel_source.name) from None


# --- mistakes ---------------------------------------------------------------------------

_OF_PYTHON = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""What Python raises where the compiler finds a mistake."""

_Place = tuple[CodeType, int, int]
"""The code, line and instruction that a frame is at."""


def _frames(trace: TracebackType | None) -> list[_Place]:
    """Of an exception, the innermost first."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    return frames[::-1]


def _explained(problem: BaseException) -> tuple[str, str]:
    """Message and hint."""
    if isinstance(problem, UnboundLocalError):
        return str(problem), "give it a value before the loop or the if"
    if isinstance(problem, NameError):
        return str(problem), ""
    if isinstance(problem, AttributeError) and problem.name is not None:
        return wording.missing_attribute(problem.obj, problem.name, dir(problem.obj))
    if isinstance(problem, TypeError) and Proxy.__name__ in str(problem):
        text = text_of(problem).replace(Proxy.__name__, "value of the run time")
        return text, "use a function of tl"
    return text_of(problem), ""


def _at_the_kernels_line(
    error: type[CompilationError], message: str, hint: str
) -> CompilationError:
    frame: FrameType | None = sys._getframe()
    frames = []
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("amxq."):
            frames.append((frame.f_code, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back
    return _located(error, message, hint, frames)


def _located(
    error: type[CompilationError], message: str, hint: str, frames: list[_Place]
) -> CompilationError:
    """The error at the first of the frames, which the innermost is, called by those of kernels."""
    if not frames:
        return error(message, hint=hint)
    places = [_place(*frames[0])]
    for frame in frames[1:]:
        if is_kernels(frame[0]) and (place := _place(*frame))[:2] != places[-1][:2]:
            places.append(place)
    (file, line, column, text), *calls = places
    made = error(message, file=file, line=line, column=column, source_line=text, hint=hint)
    made.calls = tuple(calls)
    return made


def _place(code: CodeType, line: int, instruction: int) -> tuple[str, int, int, str]:
    """File, line, column and text of the line."""
    column = 0
    if hasattr(code, "co_positions"):  # Python 3.11
        place = next(itertools.islice(code.co_positions(), instruction // 2, None))
        column = place[2] or 0
    return code.co_filename, line, column, linecache.getline(code.co_filename, line).rstrip("\n")
