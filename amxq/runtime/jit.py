"""``@amxq.jit``: a Python function in the kernel language, compiled when it is first called."""

from __future__ import annotations

import functools
import numbers
import threading
from collections.abc import Callable, Sequence
from typing import Any

from amxq import knobs
from amxq.errors import CompilationError, DTypeError, LayoutError, ShapeError
from amxq.frontend.source import KernelSource
from amxq.ir.types import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    DType,
    PointerType,
    Type,
)
from amxq.language.core import interpreting
from amxq.runtime.compiler import CompiledKernel, Launchable
from amxq.runtime.targets import get_target, kernel_target

_GPU_HINTS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of a Triton launch that say nothing to a CPU; taken so that such launches run."""

Grid = tuple[int, ...] | Callable[[dict[str, Any]], Sequence[int]]


@functools.cache
def pointers() -> dict[Any, PointerType]:
    """torch dtype → the pointer type a tensor of it is passed as."""
    import torch

    return {
        torch.bfloat16: PointerType(BF16),
        torch.float16: PointerType(F16),
        torch.float32: PointerType(F32),
        torch.float64: PointerType(F64),
        torch.int8: PointerType(I8),
        torch.uint8: PointerType(U8),
        torch.int16: PointerType(I16),
        torch.int32: PointerType(I32),
        torch.int64: PointerType(I64),
        torch.uint16: PointerType(U16),
        torch.uint32: PointerType(U32),
        torch.uint64: PointerType(U64),
        torch.bool: PointerType(I1),
    }


class JITFunction:
    """A kernel: call it as ``kernel[grid](arguments…, META=…)``.

    Tensors arrive in the kernel as pointers to their first element, Python integers as int32
    (int64 where they do not fit), floats as float32, None as the constant None; parameters
    annotated ``tl.constexpr`` are compiled in. Integers that are 1 or a multiple of 16 get code of
    their own. ``grid`` is a tuple of 1 to 3 sizes, or a function
    of the dict of all arguments. ``num_threads=`` limits one launch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.kernel_source = KernelSource(function)
        self._compiled: dict[Any, CompiledKernel] = {}
        self._launched: dict[Any, CompiledKernel] = {}  # the same, by what a launch can tell fast
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        interpreter = interpreting.get()
        if interpreter is not None:
            return interpreter(self, args, kwargs)
        name = self.kernel_source.name
        raise TypeError(f"{name} is a kernel: launch it as {name}[grid](…)")

    def __getitem__(self, grid: Grid) -> Callable[..., Launchable]:
        def launch(*args: Any, num_threads: int | None = None, **kwargs: Any) -> Launchable:
            bound = self._bind(args, kwargs)
            key, values = self._signature(bound)
            compiled: Launchable
            known = self._launched.get(key) if key else None
            if known is not None:
                _check_captured(known)
                compiled = known
            else:
                types, constants, values = self._split(bound, _argument)
                compiled = self.compile(types, constants, facts=_facts(types, bound))
                if not isinstance(compiled, CompiledKernel):  # checks what may be accessed
                    values = [bound[name] for name in types]
                elif key:
                    self._launched[key] = compiled
            sizes = grid(bound) if callable(grid) else grid
            compiled.launch(_three(sizes), values, _threads(num_threads))
            return compiled

        return launch

    def warmup(
        self, *args: Any, grid: Grid = (1,), target: str | None = None, **kwargs: Any
    ) -> CompiledKernel:
        """Compiles, for any target on any machine, and runs nothing.

        Args:
            args, kwargs: as for a launch; a torch dtype stands for a tensor of it, a type of
                the language (``tl.int32``) for a scalar.
            grid: ignored, as nothing is launched.
            target: a target's name; default: the one in use.

        Raises:
            CompilationError: the kernel's source is wrong for these arguments.
            TargetError: there is no such target.
        """
        bound = self._bind(args, kwargs)
        types, constants, _ = self._split(bound, _type_only)
        return self._compile(types, constants, target, _facts(types, bound))

    def compile(
        self,
        types: dict[str, Type],
        constants: dict[str, Any],
        target: str | None = None,
        facts: dict[str, int] | None = None,
    ) -> Launchable:
        """The kernel for these argument types, constants and facts about integers (see
        :func:`amxq.frontend.code_generator.generate`), ready to launch; compiled once per
        process. Where AMXQ_INTERPRET=1 it runs on the interpreter."""
        if knobs.INTERPRET.get():
            from amxq.interpreter.kernel import InterpretedKernel

            return InterpretedKernel(self.kernel_source, types, constants)
        return self._compile(types, constants, target, facts or {})

    def _compile(
        self,
        types: dict[str, Type],
        constants: dict[str, Any],
        target: str | None,
        facts: dict[str, int],
    ) -> CompiledKernel:
        chosen = kernel_target(get_target() if target in (None, "auto") else target)
        key = (chosen.name, tuple(types.items()), _hashable(constants), tuple(facts.items()))
        compiled = self._compiled.get(key)
        if compiled is None:
            with self._lock:
                compiled = self._compiled.get(key)
                if compiled is None:
                    try:
                        compiled = CompiledKernel(
                            self.kernel_source, types, constants, chosen, facts
                        )
                    except CompilationError as error:  # show the kernel, not the compiler's inside
                        raise error.with_traceback(None) from None
                    self._compiled[key] = compiled
        _check_captured(compiled)
        return compiled

    # --- arguments ------------------------------------------------------------------------

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        source = self.kernel_source
        if len(args) > len(source.parameters):
            raise TypeError(
                f"{source.name} takes {len(source.parameters)} arguments, got {len(args)}"
            )
        bound = dict(zip(source.parameters, args))
        for name, value in kwargs.items():
            if name not in source.parameters:
                if name in _GPU_HINTS:
                    continue
                raise TypeError(f"{source.name} has no parameter {name!r}")
            if name in bound:
                raise TypeError(f"{source.name} got two values for {name!r}")
            bound[name] = value
        for name in source.parameters:
            if name not in bound:
                if name not in source.defaults:
                    raise TypeError(f"{source.name} misses the argument {name!r}")
                bound[name] = source.defaults[name]
        return {name: bound[name] for name in source.parameters}

    def _signature(self, bound: dict[str, Any]) -> tuple[Any, list[Any]]:
        """A key that fixes everything :meth:`_split` and :func:`_facts` say of arguments which
        have been compiled for, and the values to pass; (None, []) for unusual arguments."""
        if knobs.INTERPRET.get():
            return None, []
        from torch import Tensor

        key: list[Any] = [get_target()]
        values: list[Any] = []
        constexprs = self.kernel_source.constexprs
        for name, value in bound.items():
            kind = type(value)
            if name in constexprs or value is None:
                # 1, 1.0 and True, or 0.0 and -0.0, are equal, but not the same constant
                plain = kind is int or kind is str or kind is bool
                key.append((kind, value) if plain else (kind, str(value), value))
                continue
            if kind is Tensor:
                if not value.is_cpu or value.is_nested:
                    return None, []
                key.append(value.dtype)
                value = value.data_ptr()
            elif kind is int:
                small = -(1 << 31) <= value < 1 << 31
                key.append((small, 2 if value == 1 else value % 16 == 0))
                if not small and not -(1 << 63) <= value < 1 << 63:
                    return None, []
            elif kind is float:
                key.append(float)
            else:
                return None, []
            values.append(value)
        try:
            hash(found := tuple(key))
        except TypeError:
            return None, []
        return found, values

    def _split(
        self, bound: dict[str, Any], typed: Callable[[str, Any], tuple[Type, Any]]
    ) -> tuple[dict[str, Type], dict[str, Any], list[Any]]:
        """Types and values of what is passed at run time, as ``typed`` says, and the constants."""
        types: dict[str, Type] = {}
        constants: dict[str, Any] = {}
        values: list[Any] = []
        for name, value in bound.items():
            if name in self.kernel_source.constexprs or value is None:
                if hasattr(value, "data_ptr"):
                    raise DTypeError(
                        f"argument {name!r} is a {type(value).__name__}, but the parameter is "
                        "annotated tl.constexpr: give a number, string, tuple, type or function, "
                        "or leave the annotation out"
                    )
                constants[name] = value
                continue
            types[name], passed = typed(name, value)
            values.append(passed)
        return types, constants, values


def _facts(types: dict[str, Type], bound: dict[str, Any]) -> dict[str, int]:
    """Which integer arguments are 1 or a multiple of 16: strides and sizes for which better code
    is compiled, as Triton does it."""
    facts: dict[str, int] = {}
    for name, type_ in types.items():
        value = bound[name]
        if (type_ is I32 or type_ is I64) and isinstance(value, numbers.Integral):
            if value == 1 or value % 16 == 0:
                facts[name] = 1 if value == 1 else 16
    return facts


def _check_captured(compiled: CompiledKernel) -> None:
    for (source, name), value in compiled.captured.items():
        found, now = source.lookup(name)
        if not found or type(now) is not type(value) or repr(now) != repr(value):
            raise CompilationError(
                f"the global {name!r} was {value!r} when the kernel was compiled, now {now!r}",
                file=source.file,
                line=source.first_line,
                source_line=source.line(source.first_line),
                hint="pass it as a tl.constexpr argument",
            )


def jit(function: Callable[..., Any]) -> JITFunction:
    """Makes a kernel of a function written in the language of :mod:`amxq.language`."""
    return JITFunction(function)


def _argument(name: str, value: Any) -> tuple[Type, Any]:
    """The type an argument has in the kernel, and what is passed for it."""
    if isinstance(value, bool):
        return I1, int(value)
    if isinstance(value, numbers.Integral):
        value = int(value)
        if not -(1 << 63) <= value < 1 << 63:
            raise DTypeError(f"argument {name!r} is {value}, which does not fit 64 bits")
        return (I32 if -(1 << 31) <= value < 1 << 31 else I64), value
    if isinstance(value, float):
        return F32, value
    table = pointers()
    if not hasattr(value, "data_ptr"):
        raise DTypeError(
            f"argument {name!r} is a {type(value).__name__}: kernels take tensors, "
            "numbers and None; annotate the parameter tl.constexpr to compile other values in"
        )
    if value.device.type != "cpu":
        raise LayoutError(
            f"argument {name!r} is on {value.device}, expected a CPU tensor: use .cpu()"
        )
    if value.is_quantized or value.is_nested or str(value.layout) != "torch.strided":
        raise LayoutError(f"argument {name!r} is not a plain dense tensor: {value.layout}")
    if value.dtype not in table:
        raise DTypeError(f"argument {name!r} has dtype {value.dtype}, which kernels do not take")
    return table[value.dtype], value.data_ptr()


def _type_only(name: str, value: Any) -> tuple[Type, Any]:
    """As :func:`_argument` for warmup, where a dtype stands for an argument of that type."""
    if isinstance(value, DType):
        return value, None
    try:
        return pointers()[value], None
    except (KeyError, TypeError):
        return _argument(name, value)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    if not isinstance(sizes, (tuple, list)):
        raise ShapeError(f"the grid is {sizes!r}, expected a tuple of 1 to 3 sizes, as in (4,)")
    if not 1 <= len(sizes) <= 3:
        raise ShapeError(f"the grid {sizes!r} has {len(sizes)} sizes, expected 1 to 3")
    if not all(isinstance(s, int) and 0 <= s < 1 << 31 for s in sizes):
        raise ShapeError(f"the grid is {sizes!r}, expected whole numbers from 0 to 2^31 - 1")
    x, y, z = (*sizes, 1, 1)[:3]
    if x * y * z >= 1 << 63:
        raise ShapeError(f"the grid {sizes!r} has {x * y * z} programs, expected fewer than 2^63")
    return x, y, z


def _threads(count: int | None) -> int | None:
    if count is None or (isinstance(count, int) and count >= 1):
        return count
    raise ShapeError(f"num_threads is {count!r}, expected a whole number, 1 or more, or None")


def _hashable(constants: dict[str, Any]) -> tuple[Any, ...]:
    """1, 1.0 and True, or 0.0 and -0.0, are equal in Python but not the same constant."""
    for name, value in constants.items():
        try:
            hash(value)
        except TypeError:
            raise DTypeError(
                f"argument {name!r} is the {type(value).__name__} {value!r}: what is compiled in "
                "must be hashable; use a number, a string or a tuple"
            ) from None
    return tuple((k, type(v), str(v), v) for k, v in constants.items())
