"""The instruction sets that kernels are compiled for, and which one is in use.

Who decides, strongest first: ``with target(name)``, :func:`set_target`, the environment
variable AMXQ_TARGET, and else ``auto``, the best that this CPU runs by itself. Compiling for a
target is possible everywhere; running needs :func:`require_runnable`.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from amxq import knobs
from amxq.errors import TargetError
from amxq.runtime import amx, cpu

_log = logging.getLogger(__name__)

TARGETS = ("amx", "avx512_bf16", "avx512", "avx2")
"""Names of all targets, best first."""

AUTO = "auto"


def _flags(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The x86-64 psABI levels: LLVM may use any of these features for a function compiled for
# x86-64-v3 or -v4, so a CPU must list them all even where a kernel names only a few.
_V3_FLAGS = _flags(
    "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 xsave abm movbe bmi1 bmi2 avx avx2 f16c fma"
)
_V4_FLAGS = _V3_FLAGS | _flags("avx512f avx512bw avx512cd avx512dq avx512vl")
_BF16_FLAGS = _V4_FLAGS | _flags("avx512vbmi avx512_vnni avx512_bf16")

# x86-64-v4 on its own makes LLVM's vectoriser stop at 256 bits (checked with LLVM 22).
_WIDE = "-prefer-256-bit"
_BF16_FEATURES = f"+avx512vbmi,+avx512vnni,+avx512bf16,{_WIDE}"


@dataclass(frozen=True)
class Target:
    """One instruction set.

    Attributes:
        name: one of TARGETS.
        cpu_flags: what a CPU must list in /proc/cpuinfo to run it.
        llvm_cpu, llvm_features: for LLVM's target machine. They name levels, not models, so that
            an object runs on every CPU with ``cpu_flags``.
        vector_bits: width of the vectors that kernels use.
    """

    name: str
    cpu_flags: frozenset[str]
    llvm_cpu: str
    llvm_features: str
    vector_bits: int


TABLE: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "amx",
            _BF16_FLAGS | amx.FLAGS,
            "x86-64-v4",
            f"+amx-tile,+amx-bf16,+amx-int8,{_BF16_FEATURES}",
            512,
        ),
        # CPUs with AVX512-BF16 and VBMI but no AMX are AMD's, since Zen 4.
        Target("avx512_bf16", _BF16_FLAGS, "x86-64-v4", _BF16_FEATURES, 512),
        Target("avx512", _V4_FLAGS, "x86-64-v4", _WIDE, 512),
        Target("avx2", _V3_FLAGS, "x86-64-v3", "", 256),
    )
}

_AMX_FP16_FLAGS = amx.FLAGS | {"amx_fp16"}
AMX_FP16 = replace(
    TABLE["amx"],
    name="amx+fp16",
    cpu_flags=TABLE["amx"].cpu_flags | _AMX_FP16_FLAGS,
    llvm_features=f"+amx-fp16,{TABLE['amx'].llvm_features}",
)
"""What a single kernel may be compiled for on ``amx``: CPUs that multiply fp16 tiles as well, since
Granite Rapids. Not a target that one chooses: ``amx`` is in use there, and operators take such
kernels where :func:`has_amx_fp16`."""

# The choice in this process or context, and the raw text of AMXQ_TARGET and AMXQ_EMULATE.
_Key = tuple["str | _Unset | None", "bytes | None", "bytes | None"]


class _Unset:
    """No ``with target(...)`` is active; differs from None, which means "nobody asked"."""


_UNSET = _Unset()
_override: contextvars.ContextVar[str | _Unset | None] = contextvars.ContextVar(
    "amxq_target", default=_UNSET
)
_choice: str | None = None
_resolved: dict[_Key, str] = {}
_emulator_lock = threading.Lock()
_warned_about_amx = False
_TARGET_VARIABLE = knobs.TARGET.name.encode()
_EMULATE_VARIABLE = knobs.EMULATE.name.encode()


def _after_fork_in_child() -> None:
    global _emulator_lock
    _emulator_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def raw_environment(name: bytes) -> bytes | None:
    """The raw text of an environment variable, in 50 ns, to notice that a knob has changed.

    ``os.environ.get`` takes 850 ns for a variable that is not set (measured, CPython 3.11),
    which a call's hot path cannot spend; values are still read through amxq.knobs.
    """
    data: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return data.get(name)


def set_target(name: str | None) -> None:
    """Choose the target of every later call in this process.

    Args:
        name: one of TARGETS, ``"auto"`` (the best that this CPU runs), or None to take the
            choice back, so that AMXQ_TARGET counts again.

    Raises:
        TargetError: the name is unknown or this CPU cannot run that target.
    """
    global _choice
    _check_choice(name)
    _choice = name
    # Asking anew for "auto" is also the way to try a refused permission for AMX again.
    _resolved.clear()


def get_target() -> str:
    """The target that calls use now, one of TARGETS.

    Raises:
        TargetError: AMXQ_TARGET is not a target or this CPU cannot run it, or there is no
            target that it can run.
    """
    name = _override.get()
    if name is _UNSET:
        name = _choice
    key = (name, raw_environment(_TARGET_VARIABLE), raw_environment(_EMULATE_VARIABLE))
    found = _resolved.get(key)
    return found if found is not None else _resolve(key)


def requested_target() -> str | None:
    """What was asked for: ``"auto"``, one of TARGETS, or None when nobody asked.

    Raises:
        TargetError: AMXQ_TARGET is not a target.
    """
    name = _override.get()
    if isinstance(name, _Unset):
        name = _choice
    return name if name is not None else _from_environment()


@contextmanager
def target(name: str | None) -> Iterator[None]:
    """Choose the target of the calls inside a ``with`` block, in this thread (or task) only.

    Args:
        name: as for :func:`set_target`; None means that nobody has asked.

    Raises:
        TargetError: the name is unknown or this CPU cannot run that target.
    """
    _check_choice(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def available_targets() -> list[str]:
    """The targets that this machine runs, best first.

    ``"amx"`` is among them if AMX is usable in this process (its permission is asked for), or
    with AMXQ_EMULATE=1 if it can be emulated. Empty on a CPU without AVX2.
    """
    return [name for name in TARGETS if not why_not(TABLE[name])]


def check_name(name: str) -> Target:
    """The target of that name.

    Raises:
        TargetError: there is none.
    """
    found = TABLE.get(name) if isinstance(name, str) else None
    if found is None:
        raise TargetError(
            f"unknown target {name!r}: expected one of {', '.join(TARGETS)}, or auto for the "
            "best that this CPU runs"
        )
    return found


def kernel_target(name: str) -> Target:
    """What a kernel is compiled for: a target, or :data:`AMX_FP16` by its name.

    Raises:
        TargetError: there is none of that name.
    """
    return AMX_FP16 if name == AMX_FP16.name else check_name(name)


def has_amx_fp16() -> bool:
    """Whether fp16 tiles can be multiplied where target ``amx`` runs here. An emulated ``amx`` has
    what the CPU lists, so a test that wants it emulated adds the flag."""
    return "amx_fp16" in cpu.flags()


def require_runnable(name: str) -> Target:
    """The target of that name, or :data:`AMX_FP16`, made ready to run on this machine.

    For ``"amx"`` this asks Linux for the permission to use tile registers, or installs the
    emulator when AMXQ_EMULATE=1 and the CPU has no AMX.

    Raises:
        TargetError: there is no such target, or this machine cannot run it.
    """
    chosen = kernel_target(name)
    why = why_not(chosen)
    if why:
        runs = available_targets()
        instead = f"this machine runs {', '.join(runs)}" if runs else "this machine runs no target"
        raise TargetError(
            f"target {name!r} cannot run here: {why}; {instead} (AMXQ_TARGET=auto takes the best)"
        )
    if amx.FLAGS <= chosen.cpu_flags and emulates_amx():
        _install_emulator()
    return chosen


def emulates_amx() -> bool:
    """Whether ``"amx"`` runs by emulation: AMXQ_EMULATE=1 on a CPU without usable AMX.

    Raises:
        TargetError: the text of AMXQ_EMULATE cannot be read.
    """
    try:
        wanted = knobs.EMULATE.get()
    except ValueError as error:
        raise TargetError(str(error)) from None
    return wanted and not amx.status().hardware


def missing_flags(chosen: Target, flags: frozenset[str] | None = None) -> list[str]:
    """Features of the target that the CPU (or the given flags) lacks, sorted."""
    return sorted(chosen.cpu_flags - (cpu.flags() if flags is None else flags))


def why_not(chosen: Target) -> str:
    """Why this machine cannot run the target; empty when it can."""
    if not cpu.flags():
        return "the CPU's features cannot be read from /proc/cpuinfo"
    missing = missing_flags(chosen)
    if not amx.FLAGS <= chosen.cpu_flags:
        return f"the CPU lacks {', '.join(missing)}" if missing else ""
    beside_amx = [flag for flag in missing if flag not in _AMX_FP16_FLAGS]
    if beside_amx:
        return f"the CPU lacks {', '.join(beside_amx)}, which the emulator does not replace"
    if emulates_amx():
        return ""
    found = amx.status(request=True)
    if found.hardware:
        return found.reason or (f"the CPU lacks {', '.join(missing)}" if missing else "")
    return f"{found.reason}; AMXQ_EMULATE=1 emulates AMX here, slowly, for testing"


def _check_choice(name: str | None) -> None:
    if name is not None and name != AUTO:
        require_runnable(check_name(name).name)


def _from_environment() -> str | None:
    name = knobs.TARGET.get()
    if name is not None and name != AUTO and name not in TABLE:
        raise TargetError(
            f"{knobs.TARGET.name}={name!r} is not a target: expected one of "
            f"{', '.join(TARGETS)}, or auto"
        )
    return name


def _resolve(key: _Key) -> str:
    name = requested_target()
    name = _best() if name is None or name == AUTO else require_runnable(name).name
    _resolved[key] = name
    return name


def _best() -> str:
    """The best target that the CPU runs by itself: emulation is only ever asked for by name."""
    global _warned_about_amx
    for name in TARGETS:
        if name == "amx" and emulates_amx():
            continue
        why = why_not(TABLE[name])
        if not why:
            return name
        if name == "amx" and amx.status().hardware and not _warned_about_amx:
            _warned_about_amx = True
            _log.warning("this CPU has AMX, but it is not used: %s", why)
    raise TargetError(
        f"this CPU ({cpu.model_name()}) runs none of the targets {', '.join(TARGETS)}: the least, "
        f"avx2, cannot run because {why_not(TABLE['avx2'])}"
    )


def _install_emulator() -> None:
    from amxq import emulator

    with _emulator_lock:
        if not emulator.is_installed():
            emulator.install()
