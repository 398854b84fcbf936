"""What this machine's CPU is and can do, asked of Linux and of the CPU itself.

Nothing here runs at import. Facts that cannot change while the process lives are asked once;
affinity and control-group limits are asked every time. A fact that the system does not tell is
None (or an empty set), never a guess.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_SYSTEM_CPU = Path("/sys/devices/system/cpu")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP_ROOT = Path("/sys/fs/cgroup")

# void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t out[4]), System V calling convention.
_CPUID_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53"  # push rbx (cpuid writes it, the caller owns it)
    "4989d0"  # mov r8, rdx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5bc3"  # pop rbx; ret
)
# uint64_t xgetbv0(void): XCR0, the register states that the system has switched on.
_XGETBV_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "31c9"  # xor ecx, ecx
    "0f01d0"  # xgetbv
    "48c1e220"  # shl rdx, 32
    "4809d0"  # or rax, rdx
    "c3"  # ret
)
_OSXSAVE = 1 << 27  # CPUID.1:ECX; without it xgetbv is an illegal instruction
_TILE_LEAF = 0x1D


@dataclass(frozen=True)
class TileFacts:
    """What CPUID and XCR0 say about tile registers.

    Attributes:
        max_palette: CPUID.1D.0:EAX, 0 when there is no usable palette; None when not known.
        xcr0: the enabled register states as a bit mask, None when not known.
        problem: why a value is None, else an empty string.
    """

    max_palette: int | None
    xcr0: int | None
    problem: str = ""


@dataclass(frozen=True)
class Cache:
    """One data or unified cache of CPU 0: its level, bytes, and how many CPUs share it."""

    level: int
    bytes: int
    shared_by: int


def is_x86_64_linux() -> bool:
    """Whether the machine code and system calls of this package make sense here."""
    return sys.platform == "linux" and os.uname().machine == "x86_64" and sys.maxsize > 2**32


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty when it cannot be read."""
    return parse_cpuinfo(_read(CPUINFO, until_blank_line=True))


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The fields of the first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def model_name() -> str:
    """The CPU's name, for people."""
    return _cpuinfo().get("model name", "") or "unknown CPU"


def identity() -> str:
    """The CPU's model, for comparison: virtual machines give many models the same name."""
    fields = ("vendor_id", "cpu family", "model", "stepping", "model name")
    return ", ".join(_cpuinfo().get(field, "unknown") for field in fields)


def vendor() -> str:
    """GenuineIntel, AuthenticAMD, or an empty string when not known."""
    return _cpuinfo().get("vendor_id", "")


@functools.cache
def flags() -> frozenset[str]:
    """Feature names as /proc/cpuinfo writes them (``avx512vbmi``, ``amx_tile``); may be empty."""
    return frozenset(_cpuinfo().get("flags", "").split())


@functools.cache
def tile_facts() -> TileFacts:
    """Ask the CPU for its largest tile palette and for XCR0.

    Some virtual machines list AMX among their features and report palette 0: every tile
    instruction then faults, so the feature flags alone are not enough.
    """
    if not is_x86_64_linux():
        return TileFacts(None, None, "this is not a 64-bit x86 Linux, CPUID was not asked")
    try:
        with _machine_code() as (cpuid, xgetbv):
            max_leaf = cpuid(0)[0]
            palette = cpuid(_TILE_LEAF)[0] if max_leaf >= _TILE_LEAF else 0
            xcr0 = xgetbv() if cpuid(1)[2] & _OSXSAVE else 0
    except OSError as error:
        problem = f"the system refuses executable memory ({error.strerror}), CPUID was not asked"
        return TileFacts(None, None, problem)
    return TileFacts(palette, xcr0)


class _Cpuid:
    def __init__(self, address: int) -> None:
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
        self._function = prototype(address)

    def __call__(self, leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
        """EAX, EBX, ECX, EDX of one leaf."""
        out = (ctypes.c_uint32 * 4)()
        self._function(leaf, subleaf, ctypes.addressof(out))
        return (out[0], out[1], out[2], out[3])


@contextmanager
def _machine_code() -> Iterator[tuple[_Cpuid, ctypes._CFunctionType]]:
    """The two functions above in one page that is first writable, then executable.

    Never both at once: hardened systems allow the change and refuse the combination.

    Raises:
        OSError: the system refuses even that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        page[: len(_CPUID_CODE)] = _CPUID_CODE
        page[64 : 64 + len(_XGETBV_CODE)] = _XGETBV_CODE
        # The buffer view must be gone before close(), hence the helper that drops it.
        address = _address_of(page)
        access = ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC)
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), access) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        yield _Cpuid(address), ctypes.CFUNCTYPE(ctypes.c_uint64)(address + 64)
    finally:
        page.close()


def _address_of(page: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


@functools.cache
def caches() -> tuple[Cache, ...]:
    """Data and unified caches of CPU 0, smallest level first; empty when not told."""
    found = []
    for folder in sorted((_SYSTEM_CPU / "cpu0" / "cache").glob("index*")):
        if _read(folder / "type").strip() not in ("Data", "Unified"):
            continue
        size = _bytes_of(_read(folder / "size").strip())
        level = _read(folder / "level").strip()
        if size and level.isdecimal():
            sharers = parse_cpu_list(_read(folder / "shared_cpu_list"))
            found.append(Cache(int(level), size, max(1, len(sharers))))
    return tuple(sorted(found, key=lambda cache: cache.level)) or _caches_from_libc()


def _caches_from_libc() -> tuple[Cache, ...]:
    """What the C library knows, for containers without sysfs."""
    found = []
    for level, name in ((1, "SC_LEVEL1_DCACHE_SIZE"), (2, "SC_LEVEL2_CACHE_SIZE")):
        try:
            size = os.sysconf(name)
        except (ValueError, OSError):
            continue
        if size > 0:
            found.append(Cache(level, size, 1))
    return tuple(found)


def affinity() -> frozenset[int]:
    """The CPUs that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def logical_cores() -> int:
    """CPUs of the machine, hyperthreads included, whether or not this process may use them."""
    return os.cpu_count() or 1


@functools.cache
def _siblings_of(cpu: int) -> str:
    """Which CPUs are hyperthreads of one core: text that is equal for CPUs of one core."""
    return _read(_SYSTEM_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip()


def physical_cores(cpus: frozenset[int] | None = None) -> int:
    """Physical cores among ``cpus`` (default: those this thread may run on), 1 or more.

    A CPU whose topology the system does not tell counts as a core.
    """
    chosen = affinity() if cpus is None else cpus
    return max(1, len({_siblings_of(cpu) or f"cpu{cpu}" for cpu in chosen}))


def cgroup_cpu_limit() -> float | None:
    """CPUs' worth of time that control groups grant this process, or None without a limit."""
    limits = [limit for limit in _cgroup_limits() if limit is not None]
    return min(limits) if limits else None


def _cgroup_limits() -> Iterator[float | None]:
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        names = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
        if number == "0" and not controllers:
            # The file system is seen from inside a container under its own root, so the
            # path in /proc/self/cgroup may not exist there: parents are tried up to the root.
            for folder in _upwards(_CGROUP_ROOT, group):
                yield parse_cpu_max(_read(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for name in names:
                for folder in _upwards(_CGROUP_ROOT / name, group):
                    quota = _read(folder / "cpu.cfs_quota_us").strip()
                    yield parse_cpu_max(f"{quota} {_read(folder / 'cpu.cfs_period_us')}")


def _upwards(root: Path, group: str) -> Iterator[Path]:
    folder = root / group.strip().lstrip("/")
    yield folder
    while folder != root and root in folder.parents:
        folder = folder.parent
        yield folder


def parse_cpu_max(text: str) -> float | None:
    """``"150000 100000"`` (microseconds of CPU time in each period) is 1.5; no limit is None."""
    words = text.split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1]) or None
    return None


def huge_page_mode() -> str | None:
    """``always``, ``madvise`` or ``never``; None when the kernel has no such setting."""
    match = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    return match.group(1) if match else None


def memory() -> dict[str, int]:
    """Bytes of all and of available memory (``total``, ``available``), and free huge pages."""
    wanted = {"MemTotal": "total", "MemAvailable": "available", "HugePages_Free": "huge_free"}
    found = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name in wanted and words and words[0].isdecimal():
            found[wanted[name]] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list such as ``0-3,8``, as sysfs writes them; bad parts are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _bytes_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        return 0
    return int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)]


def _read(path: Path, until_blank_line: bool = False) -> str:
    """The file's text, or its first block; an empty string when it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            if not until_blank_line:
                return file.read()
            # With hundreds of CPUs the whole of /proc/cpuinfo takes milliseconds.
            lines: list[str] = []
            for line in file:
                if not line.strip():
                    break
                lines.append(line)
            return "".join(lines)
    except OSError:
        return ""
