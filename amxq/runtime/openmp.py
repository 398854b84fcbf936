"""The OpenMP runtime that torch has loaded: kernels run on its threads.

Sharing torch's pool makes ``torch.set_num_threads``, affinity and nesting behave as users
expect, and never has more threads running than cores. A second OpenMP runtime beside torch's
would break all of that, so this module finds the loaded one and never loads another.

What a launch has to know about ``GOMP_parallel(function, data, num_threads, flags)``:
inside an OpenMP region (another kernel, a torch operator) it calls ``function`` once, on the
calling thread, whatever ``num_threads`` says. So generated code never trusts the number that it
asked for: threads take over the shares of those that are not there (:mod:`amxq.codegen.team`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from amxq import knobs
from amxq.errors import TargetError
from amxq.runtime.targets import raw_environment

_MAPS = Path("/proc/self/maps")
_PAUSE_SOFT = 1
_THREADS_VARIABLE = knobs.NUM_THREADS.name.encode()


@dataclass(frozen=True)
class OpenMP:
    """Addresses of the functions that generated code calls, and the file they are in.

    Attributes:
        library: path of the shared library.
        gomp_parallel: void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned).
        get_thread_num, in_parallel: the omp_* functions, int (*)(void).
    """

    library: str
    gomp_parallel: int
    get_thread_num: int
    in_parallel: int


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def runtime() -> OpenMP:
    """The OpenMP runtime of the torch in this process.

    Raises:
        TargetError: this torch was built without OpenMP, or its runtime has no GOMP_parallel.
    """
    library = _torch_library()
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_in_parallel")
    addresses = [_address(library, name) for name in names]
    if not all(addresses):
        missing = ", ".join(n for n, a in zip(names, addresses, strict=True) if not a)
        raise TargetError(
            f"torch's library {library._name} leads to no {missing}: amxq needs a torch for Linux "
            "that is built with OpenMP, as the packages on the Python index are"
        )
    parallel, thread_num, in_parallel_ = addresses
    return OpenMP(_file_of(parallel), parallel, thread_num, in_parallel_)


def gomp_parallel_address() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch uses.

    Raises:
        TargetError: torch in this process has no such runtime.
    """
    return runtime().gomp_parallel


def max_threads() -> int:
    """Threads of a launch from this thread: AMXQ_NUM_THREADS, else ``torch.get_num_threads()``.

    Takes about 0.1 µs. torch's number belongs to the calling thread, as torch defines it.

    Raises:
        SettingError: AMXQ_NUM_THREADS is not a whole number from 1 to 1024.
    """
    text = raw_environment(_THREADS_VARIABLE)
    if text:
        return _parsed_threads(text)
    return _torch_threads()


def in_parallel() -> bool:
    """Whether this thread runs inside an OpenMP region, so that a launch would be serial."""
    return bool(_in_parallel_function()())


def _torch_threads() -> int:
    # Replaced by torch's own function on the first call: importing torch takes seconds, and
    # an import statement inside a function half as long as the call itself.
    global _torch_threads
    import torch

    _torch_threads = torch.get_num_threads
    return torch.get_num_threads()


@functools.lru_cache(maxsize=16)
def _parsed_threads(text: bytes) -> int:
    # The raw text is only the cache's key: the knob reads the variable, and owns its rules.
    return knobs.NUM_THREADS.get() or _torch_threads()


@functools.cache
def _in_parallel_function() -> Callable[[], int]:
    function: Callable[[], int] = ctypes.PYFUNCTYPE(ctypes.c_int)(runtime().in_parallel)
    return function


def _torch_library() -> ctypes.PyDLL:
    """A handle of torch's loaded CPU library: symbols are searched in what it depends on."""
    import torch

    wanted = ("libtorch_cpu.so", "libtorch.so")
    mapped = {Path(path).name: path for path in mapped_files()}
    folder = Path(torch.__file__).parent / "lib"
    tried = [mapped.get(name, str(folder / name)) for name in wanted]
    for path in tried:
        try:
            return ctypes.PyDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
    raise TargetError(
        f"torch's CPU library is not loaded in this process (tried {', '.join(tried)}): "
        "amxq needs a torch package for Linux"
    )


def mapped_files() -> list[str]:
    """Paths of the files mapped into this process, once each; empty without /proc."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in lines)
    return list(dict.fromkeys(f[5] for f in fields if len(f) == 6 and f[5].startswith("/")))


def openmp_libraries() -> list[str]:
    """OpenMP runtimes loaded in this process; more than one means that threads compete."""
    prefixes = ("libgomp", "libiomp", "libomp")
    return [path for path in mapped_files() if Path(path).name.startswith(prefixes)]


def _address(library: ctypes.PyDLL, name: str) -> int:
    function = getattr(library, name, None)
    if function is None:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _file_of(address: int) -> str:
    """The shared library that holds an address, or an empty string."""
    libc = ctypes.CDLL(None)
    info = _DlInfo()
    if not libc.dladdr(ctypes.c_void_p(address), ctypes.byref(info)) or not info.file:
        return ""
    return str(os.fsdecode(info.file))


def _before_fork() -> None:
    """Put this thread's pool to rest, so that the child can start its own.

    GNU's runtime keeps no track of fork: a child whose parent has used the pool waits for
    threads that do not exist there, for ever (seen with torch 2.13 alone). A paused pool is
    simply started again, by parent and child, at a cost of a few milliseconds. Inside an
    OpenMP region pausing does nothing; Intel's and LLVM's runtimes look after fork themselves.
    """
    if not hasattr(sys.modules.get("torch"), "get_num_threads"):
        return  # not imported, or not completely: there is no pool
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_SOFT)


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    try:
        address = _address(_torch_library(), "omp_pause_resource_all")
    except TargetError:
        return None
    if not address:
        return None
    # Not the form that keeps the GIL: the pool's threads may be about to ask for it.
    function: Callable[[int], int] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
    return function


os.register_at_fork(before=_before_fork)
