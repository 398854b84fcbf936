"""``@amxq.heuristics``, and what it has in common with ``@amxq.autotune``: a kernel around a kernel
that adds constants to the arguments of a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from amxq.errors import ArgumentError
from amxq.frontend.source import KernelSource
from amxq.runtime.compiler import Launchable
from amxq.runtime.jit import Grid, JITFunction


class Kernel(Protocol):
    """What these decorators take and make."""

    kernel_source: KernelSource

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, grid: Grid) -> Callable[..., Launchable]: ...
    def warmup(self, *args: Any, **kwargs: Any) -> Any: ...


class Chooser:
    """A kernel around a kernel; launched, warmed up and described like it."""

    def __init__(self, kernel: Kernel) -> None:
        if not isinstance(kernel, (JITFunction, Chooser)):
            raise ArgumentError(
                f"{kernel!r} is not a kernel: write @amxq.jit below @amxq.autotune and "
                "@amxq.heuristics"
            )
        functools.update_wrapper(self, kernel, updated=())
        self.kernel = kernel
        self.kernel_source: KernelSource = kernel.kernel_source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel(*args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Any) -> dict[str, Any]:
        """Arguments by name, to which the constants in ``chosen`` are going to be added."""
        source = self.kernel_source
        if len(args) > len(source.parameters):
            raise TypeError(
                f"{source.name} takes {len(source.parameters)} arguments, got {len(args)}"
            )
        named = dict(zip(source.parameters, args))
        for name in kwargs.keys() & named.keys() or (named.keys() | kwargs.keys()) & set(chosen):
            raise TypeError(f"{source.name} got two values for {name!r}")
        return {**named, **kwargs}

    def _known(self, named: dict[str, Any]) -> dict[str, Any]:
        """The arguments and the defaults of others, for functions that the user has written."""
        return {**self.kernel_source.defaults, **named}

    def _check_names(self, names: Sequence[str], where: str) -> None:
        for name in names:
            if name not in self.kernel_source.parameters:
                raise ArgumentError(
                    f"{where} of {self.kernel_source.name} names {name!r}: its parameters are "
                    f"{', '.join(self.kernel_source.parameters)}"
                )


class Heuristics(Chooser):
    """A kernel under :func:`heuristics`."""

    def __init__(self, kernel: Kernel, values: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        super().__init__(kernel)
        self.values = dict(values)
        self._check_names(list(values), "the heuristics")

    def __getitem__(self, grid: Grid) -> Callable[..., Launchable]:
        def launch(*args: Any, **kwargs: Any) -> Launchable:
            return self.kernel[grid](**self._complete(args, kwargs))

        return launch

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        """As the kernel's; the heuristics see dtypes where dtypes are given."""
        options = warmup_options(kwargs)
        return self.kernel.warmup(**self._complete(args, kwargs), **options)

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        named = self._named(args, kwargs, self.values)
        for name, value in self.values.items():
            named[name] = value(self._known(named))
        return named


def heuristics(
    values: dict[str, Callable[[dict[str, Any]], Any]],
) -> Callable[[Kernel], Heuristics]:
    """Computes constants of a kernel from its other arguments.

    Args:
        values: parameter → function of the dict of the arguments (those of outer decorators and
            defaults included, and the values before it in this dict).

    Raises:
        ArgumentError: a name is none of the kernel's parameters.
    """
    return lambda kernel: Heuristics(kernel, values)


def warmup_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes the arguments of ``warmup`` itself out of those of the kernel."""
    return {name: kwargs.pop(name) for name in ("grid", "target") if name in kwargs}
