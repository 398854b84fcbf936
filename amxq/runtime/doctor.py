"""What amxq finds on this machine and what it does with it, for people and for bug reports.

Every section is collected by itself: one that fails says so in its place and the others
stand. No kernel is compiled or run, so nothing here depends on what the CPU can do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

from amxq import knobs
from amxq.errors import AmxqError, did_you_mean
from amxq.runtime import amx, cache, cpu, openmp, targets

Section = dict[str, Any]

# Not amxq's, but they decide how many threads torch has and where they run.
_OPENMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_PACKAGES = ("amxq", "torch", "llvmlite", "transformers", "numpy")


def report() -> Section:
    """Everything that the doctor looks at, as plain values that JSON can hold.

    Sections: ``versions``, ``cpu``, ``amx``, ``targets``, ``target``, ``threads``, ``memory``,
    ``cache``, ``environment``, each a dict (with the single key ``error`` if it could not be
    collected), and two lists of sentences: ``advice``, and ``problems``, which calls of amxq
    would raise. Raises nothing. Linux is asked for the permission to use AMX if the CPU has it.
    """
    sections: dict[str, Callable[[], Section]] = {
        "versions": _versions,
        "cpu": _cpu,
        "amx": _amx,
        "targets": _targets,
        "target": _target,
        "threads": _threads,
        "memory": _memory,
        "cache": _cache,
        "environment": _environment,
    }
    found: Section = {name: _collected(collect) for name, collect in sections.items()}
    found["advice"] = _advice(found)
    found["problems"] = _problems(found)
    return found


def render(report: Section) -> str:
    """The report as text of a screen or two, without a line break at the end."""
    lines: list[str] = []
    for title, section, write in (
        ("CPU", "cpu", _cpu_lines),
        ("AMX", "amx", _amx_lines),
        ("Targets", "targets", _targets_lines),
        ("Target in use", "target", _target_lines),
        ("Threads", "threads", _threads_lines),
        ("Memory", "memory", _memory_lines),
        ("Kernel cache", "cache", _cache_lines),
        ("Versions", "versions", _plain_lines),
        ("Environment", "environment", _plain_lines),
    ):
        body: Section = report.get(section, {})
        lines.append(title)
        if "error" in body and len(body) == 1:
            lines.append(f"  could not be found out: {body['error']}")
        else:
            lines.extend(f"  {line}" for line in write(body))
    for title in ("Advice", "Problems"):
        if sentences := report.get(title.lower()):
            lines.append(title)
            lines.extend(f"  - {sentence}" for sentence in sentences)
    return "\n".join(lines)


def _collected(collect: Callable[[], Section]) -> Section:
    try:
        return collect()
    except Exception as error:  # a doctor that dies of the illness is of no use
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> Section:
    found: Section = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        found[package] = _version_of(package)
    found["llvm"] = _llvm_version()
    found["kernel"] = os.uname().release
    return found


def _version_of(package: str) -> str:
    # The installed metadata, not the module: importing transformers takes seconds.
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _llvm_version() -> str:
    try:
        binding = importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        return f"llvmlite cannot be loaded: {error}"
    return ".".join(str(number) for number in binding.llvm_version_info)


def _cpu() -> Section:
    return {
        "model": cpu.model_name(),
        "vendor": cpu.vendor(),
        "logical_cores": cpu.logical_cores(),
        "caches": [
            {"level": c.level, "bytes": c.bytes, "shared_by": c.shared_by} for c in cpu.caches()
        ],
        "flags": sorted(flag for flag in cpu.flags() if flag.startswith(("avx", "amx", "fma"))),
    }


def _amx() -> Section:
    facts = cpu.tile_facts()
    found = amx.status(request=True)
    listed = "not listed: " + ", ".join(found.missing_flags) if found.missing_flags else "listed"
    palette = "not known" if found.max_palette is None else f"largest is {found.max_palette}"
    xcr0 = "not known" if facts.xcr0 is None else f"{facts.xcr0:#x}"
    granted = {None: "not asked", True: "granted", False: "refused"}[found.permission]
    palette_ok = None if found.max_palette is None else found.max_palette >= 1
    steps = [
        {"step": "CPU features", "ok": not found.missing_flags, "detail": listed},
        {"step": "tile palette (CPUID 1D)", "ok": palette_ok, "detail": palette},
        {"step": "tile registers on (XCR0)", "ok": found.xcr0_tiles, "detail": xcr0},
        {"step": "Linux's permission", "ok": found.permission, "detail": granted},
    ]
    return {
        "usable": found.usable,
        "emulated": targets.emulates_amx(),
        "fp16": targets.has_amx_fp16(),
        "reason": found.reason,
        "steps": steps,
    }


def _targets() -> Section:
    found: Section = {}
    for name, target in targets.TABLE.items():
        try:
            why = targets.why_not(target)
        except AmxqError as error:
            why = str(error)
        found[name] = {
            "runs": not why,
            "missing_features": targets.missing_flags(target),
            "reason": why,
        }
    return found


def _target() -> Section:
    try:
        requested = targets.requested_target()
        in_use: str | None = targets.get_target()
    except AmxqError as error:
        text = targets.raw_environment(knobs.TARGET.name.encode())
        asked = os.fsdecode(text) if text else None
        return {"in_use": None, "requested": asked, "why": str(error)}
    if requested is None:
        why = "none was asked for: the best that this CPU runs"
    elif requested == targets.AUTO:
        why = "auto was asked for: the best that this CPU runs"
    else:
        why = "asked for by name"
    if in_use == "amx" and targets.emulates_amx():
        why += "; emulated, which is slow and for testing"
    return {"in_use": in_use, "requested": requested, "why": why}


def _threads() -> Section:
    found: Section = {
        "affinity": len(cpu.affinity()),
        "physical_cores": cpu.physical_cores(),
        "cgroup_cpu_limit": cpu.cgroup_cpu_limit(),
    }
    try:
        found["launch"] = openmp.max_threads()
        found["openmp"] = openmp.runtime().library
    except (AmxqError, ImportError, OSError, ValueError) as error:
        found["problem"] = str(error)
    found["openmp_libraries"] = openmp.openmp_libraries()
    return found


def _memory() -> Section:
    return {**cpu.memory(), "transparent_huge_pages": cpu.huge_page_mode()}


def cache_text() -> str:
    """Where the object cache is and what it holds, one fact a line."""
    return "\n".join(_cache_lines(_cache()))


def _cache() -> Section:
    info = cache.open_cache().info()
    return {
        "directory": info.directory,
        "usable": info.usable,
        "reason": info.reason,
        "entries": info.entries,
        "bytes": info.bytes,
        "max_bytes": info.max_bytes,
    }


def _environment() -> Section:
    """Variables that are set, as text; one that its knob cannot read says so."""
    found: Section = {}
    for knob in knobs.ALL:
        text = targets.raw_environment(knob.name.encode())
        if not text:
            continue
        found[knob.name] = os.fsdecode(text)
        if why := _unreadable(knob):
            found[knob.name] = f"cannot be read: {why}"
    for name in _unknown_variables():
        found[name] = "not read by amxq"
    for name in _OPENMP_VARIABLES:
        text = targets.raw_environment(name.encode())
        if text:
            found[name] = os.fsdecode(text)
    return found


def _unreadable(knob: knobs.Knob[Any]) -> str:
    """Why the variable's text is no value; empty if it is one, or the variable is not set."""
    try:
        knob.get()
    except ValueError as error:
        return str(error)
    return ""


def _unknown_variables() -> list[str]:
    known = {knob.name for knob in knobs.ALL}
    return sorted(name for name in os.environ if name.startswith("AMXQ_") and name not in known)


def _problems(found: Section) -> list[str]:
    """What calls of amxq would raise on this machine, with these settings."""
    said = [why for knob in knobs.ALL if (why := _unreadable(knob))]
    target = found["target"]
    if target.get("in_use") is None and "why" in target:
        said.append(target["why"])
    return list(dict.fromkeys(said))


def _advice(found: Section) -> list[str]:
    """What a person should know or change, from the sections that could be collected."""
    names = [knob.name for knob in knobs.ALL]
    said = [
        f"amxq reads no variable {name}{did_you_mean(name, names)}" for name in _unknown_variables()
    ]
    target = found["target"]
    if target.get("in_use") not in (None, "amx") and target["requested"] is None:
        said.append(
            "AutoRound checkpoints are meant for Intel AMX and refused here until you ask for "
            "another target: --target auto, or AMXQ_TARGET=auto"
        )
    threads = found["threads"]
    launch = threads.get("launch", 0)
    limit = threads.get("cgroup_cpu_limit")
    cores = threads.get("physical_cores", launch)
    if limit is not None and launch > limit:
        said.append(
            f"{launch} threads share {limit:g} CPUs that the container may use: set "
            f"AMXQ_NUM_THREADS or OMP_NUM_THREADS to {max(1, int(limit))}"
        )
    elif launch > cores:
        said.append(
            f"{launch} threads run on {cores} physical cores; {cores} are usually as fast or faster"
        )
    if len(threads.get("openmp_libraries", ())) > 1:
        said.append("more than one OpenMP runtime is loaded: their threads compete for the cores")
    if found["memory"].get("transparent_huge_pages") == "never":
        said.append(
            "transparent huge pages are off; with madvise, packed weights are read with fewer "
            "address translations: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    cached = found["cache"]
    if cached.get("reason"):
        said.append(f"kernels are compiled anew in every process: {cached['reason']}")
    status = found["amx"]
    if status.get("reason") and not status["steps"][0]["detail"].startswith("not listed"):
        said.append(f"the CPU has AMX, but it cannot be used: {status['reason']}")
    return said


def _cpu_lines(body: Section) -> list[str]:
    caches = ", ".join(
        f"L{c['level']} {_size(c['bytes'])}"
        + (f" shared by {c['shared_by']} CPUs" if c["shared_by"] > 1 else "")
        for c in body["caches"]
    )
    return [
        f"{body['model']}, {body['logical_cores']} CPUs",
        f"caches: {caches or 'not told'}",
        f"features: {' '.join(body['flags']) or 'none of AVX'}",
    ]


def _amx_lines(body: Section) -> list[str]:
    marks = {True: "yes", False: "no", None: "?"}
    lines = [f"{s['step']:<26}{marks[s['ok']]:<5}{s['detail']}" for s in body["steps"]]
    if body["emulated"]:
        lines.append("emulated (AMXQ_EMULATE=1): slow, for testing")
    lines.append("usable" if body["usable"] else f"not usable: {body['reason']}")
    if body["usable"] or body["emulated"]:
        how = "by AMX-FP16" if body["fp16"] else "as two bf16 numbers each, without AMX-FP16"
        lines.append(f"fp16 activations are multiplied {how}")
    return lines


def _targets_lines(body: Section) -> list[str]:
    return [
        f"{name:<14}{'runs' if one['runs'] else 'does not run: ' + one['reason']}"
        for name, one in body.items()
    ]


def _target_lines(body: Section) -> list[str]:
    return [f"{body['in_use'] or 'none'} ({body['why']})"]


def _threads_lines(body: Section) -> list[str]:
    limit = body["cgroup_cpu_limit"]
    granted = "no limit" if limit is None else f"{limit:g} CPUs"
    lines = [
        f"may run on {body['affinity']} CPUs, {body['physical_cores']} physical cores; "
        f"container limit: {granted}"
    ]
    if "problem" in body:
        return [*lines, f"problem: {body['problem']}"]
    threads = "1 thread" if body["launch"] == 1 else f"{body['launch']} threads"
    return [*lines, f"kernels run on {threads} of {body['openmp']}"]


def _memory_lines(body: Section) -> list[str]:
    if "total" in body:
        amount = f"{_size(body['total'])}, {_size(body.get('available', 0))} available"
    else:
        amount = "size not told"
    return [amount, f"transparent huge pages: {body['transparent_huge_pages'] or 'not told'}"]


def _cache_lines(body: Section) -> list[str]:
    objects = "1 object" if body["entries"] == 1 else f"{body['entries']} objects"
    held = f"{objects}, {_size(body['bytes'])} of {_size(body['max_bytes'])}"
    lines = [str(body["directory"] or "no folder"), held]
    return lines if body["usable"] else [*lines, f"not usable: {body['reason']}"]


def _plain_lines(body: Section) -> list[str]:
    return [f"{name} {value}" for name, value in body.items()] or ["nothing is set"]


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
