"""Every error that amxq raises on purpose: one class per kind of user mistake.

Each message says what was given, what was expected, and what to do. All classes derive
from :class:`AmxqError` and from the built-in exception that fits, so that callers may
catch either.
"""

from __future__ import annotations

from collections.abc import Iterable


class AmxqError(Exception):
    """Base class of all errors raised by amxq."""


class ShapeError(AmxqError, ValueError):
    """A tensor has the wrong number of dimensions or the wrong sizes."""


class DTypeError(AmxqError, TypeError):
    """A tensor or scalar has a type that the call does not take."""


class LayoutError(AmxqError, ValueError):
    """Strides, device, alignment or packing are not what the call needs."""


class ArgumentError(AmxqError, ValueError):
    """An argument that is not a tensor has a value that the call does not take."""


class TuningError(AmxqError, RuntimeError):
    """No configuration of an autotuned kernel can be used."""


class TargetError(AmxqError, RuntimeError):
    """The instruction set asked for is unknown, or this CPU cannot run it."""


class QuantizationConfigError(AmxqError, ValueError):
    """A checkpoint's quantisation configuration is malformed or not supported."""


class CheckpointError(AmxqError, ValueError):
    """A checkpoint's files are missing, truncated, or contradict each other."""


class CacheError(AmxqError, RuntimeError):
    """The on-disk object cache cannot be used."""


class SettingError(AmxqError, ValueError):
    """An environment variable has a value that amxq cannot use."""


class CompilationError(AmxqError):
    """A kernel's source cannot be compiled.

    Args:
        message: what is wrong, in one sentence.
        file, line, column: where, 1-based line and 0-based column.
        source_line: the text of that line.
        hint: what to do instead, may be empty.

    ``calls`` are the places (file, line, column, source line) of the calls that led there, from
    one jit function to another, the innermost first.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str = "<unknown>",
        line: int = 0,
        column: int = 0,
        source_line: str = "",
        hint: str = "",
    ) -> None:
        self.message = message
        self.file, self.line, self.column = file, line, column
        self.source_line, self.hint = source_line, hint
        self.calls: tuple[tuple[str, int, int, str], ...] = ()
        super().__init__(message)

    def __str__(self) -> str:
        here = (self.file, self.line, self.column, self.source_line)
        text = _shown(*here, self.message)
        if self.hint:
            text += f"\n    hint: {self.hint}"
        return "\n".join((text, *(_shown(*call, "called from here") for call in self.calls)))


def _shown(file: str, line: int, column: int, source_line: str, message: str) -> str:
    """A place as compilers show it: the line of source with a caret below."""
    text = f"{file}:{line}:{column + 1}: {message}"
    return text + (f"\n    {source_line}\n    {' ' * column}^" if source_line else "")


class TileIRError(CompilationError):
    """A text is not tile-IR."""


class OutOfBoundsError(CompilationError, IndexError):
    """A kernel on the interpreter reads or writes outside of a tensor."""


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """``; did you mean 'a' or 'b'?``, or nothing."""
    import difflib

    close = difflib.get_close_matches(name, list(names), n=2) if isinstance(name, str) else []
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
