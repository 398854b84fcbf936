"""amxq.runtime.cpu and amxq.runtime.amx: what the machine says, and machines that lie."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading

import pytest

from amxq.errors import TargetError
from amxq.runtime import amx, cpu

XEON = frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx2"})
TILES_ON = (0b11 << 17) | 0b111

linux_x86 = pytest.mark.skipif(not cpu.is_x86_64_linux(), reason="needs x86-64 Linux")


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a CPU; requests for permission answer ``error`` and are counted."""
    asked = []

    def pretend(flags=XEON, palette=1, xcr0=TILES_ON, problem="", error=0, permitted=False):
        def arch_prctl(code, argument):
            if code == amx._ARCH_REQ_XCOMP_PERM:
                asked.append(argument)
                return error
            return 0 if not permitted else _write_mask(argument)

        monkeypatch.setattr(cpu, "flags", lambda: frozenset(flags))
        monkeypatch.setattr(cpu, "tile_facts", lambda: cpu.TileFacts(palette, xcr0, problem))
        monkeypatch.setattr(amx, "_arch_prctl", arch_prctl)
        monkeypatch.setattr(amx, "_granted", False)
        return asked

    return pretend


def _write_mask(address):
    ctypes.c_uint64.from_address(address).value = 1 << 18
    return 0


def test_cpuinfo_of_the_first_processor():
    text = "processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu avx2\nempty :\n\nprocessor\t: 1\n"
    fields = cpu.parse_cpuinfo(text)
    assert fields["processor"] == "0"
    assert fields["model name"] == "A: B"
    assert fields["flags"].split() == ["fpu", "avx2"]
    assert cpu.parse_cpuinfo("") == {}


@linux_x86
def test_flags_are_those_of_the_system():
    with open("/proc/cpuinfo") as file:
        line = next(line for line in file if line.startswith("flags"))
    assert cpu.flags() == set(line.split(":")[1].split())


@linux_x86
def test_machine_code_asks_cpuid():
    with cpu._machine_code() as (cpuid, xgetbv):
        _, b, c, d = cpuid(0)
        vendor = b"".join(word.to_bytes(4, "little") for word in (b, d, c)).decode()
        assert vendor == cpu.vendor()
        if "avx2" in cpu.flags():
            assert cpuid(7)[1] >> 5 & 1
            assert xgetbv() & 0b111 == 0b111  # x87, SSE and AVX registers
        if "avx512f" in cpu.flags():
            assert xgetbv() & 0xE0 == 0xE0


@linux_x86
def test_tile_facts_agree_with_the_flags():
    facts = cpu.tile_facts()
    if facts.problem:
        assert facts.max_palette is None
        assert facts.xcr0 is None
        return
    assert facts.xcr0 & 0b11 == 0b11
    if "amx_tile" not in cpu.flags():
        assert amx.status().missing_flags


def test_refused_executable_memory_is_said(monkeypatch):
    def refuse(*_args, **_named):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cpu, "is_x86_64_linux", lambda: True)
    monkeypatch.setattr(cpu.mmap, "mmap", refuse)
    facts = cpu.tile_facts.__wrapped__()
    assert facts.max_palette is None
    assert "refuses executable memory (Permission denied)" in facts.problem


def test_other_systems_run_no_machine_code(monkeypatch):
    monkeypatch.setattr(cpu, "is_x86_64_linux", lambda: False)
    monkeypatch.setattr(cpu, "_machine_code", None)
    assert cpu.tile_facts.__wrapped__().max_palette is None


@pytest.mark.parametrize(
    "text, expected",
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("-1 100000", None),
        ("", None),
        (" 100000", None),
        ("50000 0", None),
        ("25000 100000\n", 0.25),
    ],
)
def test_cgroup_limits(text, expected):
    assert cpu.parse_cpu_max(text) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_limit_is_the_smallest_on_the_way_up(tmp_path, monkeypatch, version):
    root = tmp_path if version == 2 else tmp_path / "cpu,cpuacct"
    (root / "outer" / "inner").mkdir(parents=True)
    for folder, quota in ((root / "outer", 200000), (root / "outer" / "inner", 300000)):
        if version == 2:
            (folder / "cpu.max").write_text(f"{quota} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
    listing = "0::/outer/inner\n" if version == 2 else "4:cpu,cpuacct:/outer/inner\n"
    original = cpu._read
    monkeypatch.setattr(cpu, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(
        cpu,
        "_read",
        lambda path, *rest: listing if str(path) == "/proc/self/cgroup" else original(path, *rest),
    )
    assert cpu.cgroup_cpu_limit() == 2.0


def test_cpu_lists():
    assert cpu.parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cpu.parse_cpu_list("") == frozenset()
    assert cpu.parse_cpu_list("x,2,3-") == {2}


def test_cores_and_caches_are_plausible():
    assert 1 <= cpu.physical_cores() <= len(cpu.affinity()) <= cpu.logical_cores()
    for cache in cpu.caches():
        assert cache.bytes >= 1024
        assert cache.shared_by >= 1
    assert cpu.huge_page_mode() in ("always", "madvise", "never", None)
    assert cpu.memory().get("total", 1) > 0


def test_hyperthreads_count_once(monkeypatch):
    monkeypatch.setattr(cpu, "_siblings_of", lambda number: f"{number % 2},{number % 2 + 2}")
    assert cpu.physical_cores(frozenset({0, 1, 2, 3})) == 2
    monkeypatch.setattr(cpu, "_siblings_of", lambda number: "")
    assert cpu.physical_cores(frozenset({0, 1, 2})) == 3


def test_unreadable_files_are_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_HUGE_PAGES", tmp_path / "absent")
    assert cpu.huge_page_mode() is None
    assert cpu._read(tmp_path / "absent") == ""


def test_importing_asks_nothing_and_loads_nothing_heavy():
    code = (
        "import sys, amxq.runtime.cpu, amxq.runtime.amx, amxq.runtime.cache\n"
        "assert amxq.runtime.amx._granted is False\n"
        "assert amxq.runtime.cpu.flags.cache_info().currsize == 0\n"
        "assert 'llvmlite' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_amx_is_usable_when_every_step_is_right(machine):
    asked = machine()
    before = amx.status()
    assert before.hardware
    assert before.permission is None
    assert before.usable
    assert asked == []
    amx.ensure_permission()
    amx.ensure_permission()
    assert asked == [18]
    assert amx.status().permission is True


def test_permission_that_another_library_asked_for_is_seen(machine):
    asked = machine(permitted=True)
    assert amx.status().permission is True
    assert asked == []


@pytest.mark.parametrize(
    "pretend, reason",
    [
        ({"flags": {"avx2", "amx_tile"}}, "does not list amx_bf16, amx_int8"),
        ({"palette": 0}, "no tile palette"),
        ({"xcr0": 0b111}, "XCR0 is 0x7"),
        ({"xcr0": 0b111 | 1 << 17}, "has not switched tile registers on"),
        ({"palette": None, "xcr0": None, "problem": "no executable memory"}, "no executable mem"),
    ],
)
def test_each_step_that_fails_is_named(machine, pretend, reason):
    asked = machine(**pretend)
    status = amx.status(request=True)
    assert not status.usable
    assert not status.hardware
    assert reason in status.reason
    assert asked == []
    with pytest.raises(TargetError, match="AMX cannot be used in this process"):
        amx.ensure_permission()


@pytest.mark.parametrize(
    "error, reason",
    [
        (errno.ENOSPC, "alternative signal stack is too small"),
        (errno.EINVAL, "Linux 5.16 or newer"),
        (errno.ENOSYS, "Linux 5.16 or newer"),
        (errno.EPERM, "seccomp"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_refusals_are_explained_and_asked_again(machine, error, reason):
    asked = machine(error=error)
    for _ in range(2):
        with pytest.raises(TargetError, match=reason):
            amx.ensure_permission()
    assert asked == [18, 18]
    status = amx.status(request=True)
    assert status.permission is False
    assert not status.usable


def test_permission_is_asked_for_once_by_many_threads(machine):
    asked = machine()
    barrier = threading.Barrier(8)

    def ask():
        barrier.wait()
        amx.ensure_permission()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [18]


def test_a_forked_child_can_ask_although_the_lock_was_held():
    with amx._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if amx._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@linux_x86
@pytest.mark.skipif(not amx.status().hardware, reason="needs a CPU with AMX")
def test_the_real_permission_is_inherited_by_fork():
    code = (
        "import os\n"
        "from amxq.runtime import amx\n"
        "assert not amx._already_permitted()\n"
        "amx.ensure_permission()\n"
        "assert amx._already_permitted()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if amx._already_permitted() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@linux_x86
@pytest.mark.skipif(not amx.status().hardware, reason="needs a CPU with AMX")
def test_a_small_signal_stack_is_explained():
    code = (
        "import ctypes\n"
        "from amxq.errors import TargetError\n"
        "from amxq.runtime import amx\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), "
        "('size', ctypes.c_size_t)]\n"
        "memory = ctypes.create_string_buffer(4096)\n"
        "stack = Stack(ctypes.addressof(memory), 0, 4096)\n"
        "libc = ctypes.CDLL(None)\n"
        "if libc.sigaltstack(ctypes.byref(stack), None) != 0: raise SystemExit(77)\n"
        "try: amx.ensure_permission()\n"
        "except TargetError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this system refuses small signal stacks at once")
    assert done.returncode == 0, done.stderr
    assert "alternative signal stack is too small" in done.stdout
    assert "bytes" in done.stdout
