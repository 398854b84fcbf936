"""amxq.runtime.targets: the table, who decides, and machines that run only some of it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import timeit
import types

import pytest

from amxq import knobs
from amxq.errors import TargetError
from amxq.runtime import amx, cpu, targets
from amxq.runtime.targets import TABLE, TARGETS

ALL_FLAGS = TABLE["amx"].cpu_flags
ZEN4 = TABLE["avx512_bf16"].cpu_flags
SKYLAKE = TABLE["avx512"].cpu_flags
HASWELL = TABLE["avx2"].cpu_flags
TILES_ON = 0b11 << 17


@pytest.fixture(autouse=True)
def nobody_has_asked(monkeypatch):
    """Start every test with nothing chosen, and forget what it chose."""
    monkeypatch.delenv("AMXQ_TARGET", raising=False)
    monkeypatch.delenv("AMXQ_EMULATE", raising=False)
    monkeypatch.setattr(targets, "_choice", None)
    monkeypatch.setattr(targets, "_resolved", {})
    monkeypatch.setattr(targets, "_warned_about_amx", False)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a CPU with these flags, palette and answer to the permission request."""

    def pretend(flags, palette=1, xcr0=TILES_ON, error=0):
        monkeypatch.setattr(cpu, "flags", lambda: frozenset(flags))
        monkeypatch.setattr(cpu, "tile_facts", lambda: cpu.TileFacts(palette, xcr0))
        monkeypatch.setattr(amx, "_arch_prctl", lambda code, _: error if code == 0x1023 else 0)
        monkeypatch.setattr(amx, "_granted", False)

    return pretend


@pytest.fixture
def emulator(monkeypatch):
    """An emulator that only counts its installations."""
    module = types.ModuleType("amxq.emulator")
    module.installs = 0

    def install():
        module.installs += 1

    module.install = install
    module.is_installed = lambda: module.installs > 0
    monkeypatch.setitem(sys.modules, "amxq.emulator", module)
    monkeypatch.setattr("amxq.emulator", module, raising=False)
    return module


def test_table_is_complete_and_nested():
    assert tuple(TABLE) == TARGETS
    for name, target in TABLE.items():
        assert target.name == name
    assert ALL_FLAGS > ZEN4 > SKYLAKE > HASWELL
    assert {"amx_tile", "amx_bf16", "amx_int8", "avx512vbmi", "avx512_vnni"} <= ALL_FLAGS
    assert {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= SKYLAKE
    assert {"avx2", "fma", "f16c"} <= HASWELL


@pytest.mark.parametrize(
    "flags, expected",
    [
        (ALL_FLAGS, ["amx", "avx512_bf16", "avx512", "avx2"]),
        (ZEN4, ["avx512_bf16", "avx512", "avx2"]),
        (ALL_FLAGS - {"avx512vbmi"}, ["avx512", "avx2"]),
        (SKYLAKE, ["avx512", "avx2"]),
        (HASWELL, ["avx2"]),
        (HASWELL - {"fma"}, []),
        (frozenset(), []),
    ],
)
def test_available_targets(machine, flags, expected):
    machine(flags)
    assert targets.available_targets() == expected
    if expected:
        assert targets.get_target() == expected[0]
    else:
        with pytest.raises(TargetError, match="runs none of the targets"):
            targets.get_target()


@pytest.mark.parametrize("pretend", [{"palette": 0}, {"xcr0": 0}, {"error": errno.ENOSPC}])
def test_amx_that_cannot_be_used_is_not_available(machine, pretend, caplog):
    machine(ALL_FLAGS, **pretend)
    assert targets.available_targets() == ["avx512_bf16", "avx512", "avx2"]
    with pytest.raises(TargetError, match="this machine runs avx512_bf16, avx512, avx2"):
        targets.require_runnable("amx")
    with caplog.at_level(logging.WARNING):
        assert targets.get_target() == "avx512_bf16"
        targets.set_target("auto")
        assert targets.get_target() == "avx512_bf16"
    refused = "error" in pretend
    assert [r for r in caplog.records if "signal stack" in r.message] == caplog.records
    assert len(caplog.records) == (1 if refused else 0)


def test_a_refused_permission_is_tried_again_by_set_target(machine):
    machine(ALL_FLAGS, error=errno.ENOSPC)
    assert targets.get_target() == "avx512_bf16"
    machine(ALL_FLAGS)
    assert targets.get_target() == "avx512_bf16"
    targets.set_target("auto")
    assert targets.get_target() == "amx"


@pytest.mark.parametrize("name", ["foo", "", "AMX", "avx512bf16", 3, b"amx"])
def test_unknown_names_list_the_valid_ones(name):
    for call in (targets.set_target, targets.require_runnable, targets.check_name):
        with pytest.raises(TargetError, match="expected one of amx, avx512_bf16, avx512, avx2"):
            call(name)
    with pytest.raises(TargetError, match="unknown target"), targets.target(name):
        pass
    assert targets.requested_target() is None


def test_the_environment_is_read_at_every_call(machine, monkeypatch):
    machine(ZEN4)
    assert targets.requested_target() is None
    assert targets.get_target() == "avx512_bf16"
    monkeypatch.setenv("AMXQ_TARGET", "avx2")
    assert targets.get_target() == targets.requested_target() == "avx2"
    monkeypatch.setenv("AMXQ_TARGET", "auto")
    assert targets.get_target() == "avx512_bf16"
    assert targets.requested_target() == "auto"
    monkeypatch.setenv("AMXQ_TARGET", "")
    assert targets.requested_target() is None
    monkeypatch.setenv("AMXQ_TARGET", "sse")
    for call in (targets.get_target, targets.requested_target):
        with pytest.raises(TargetError, match=r"AMXQ_TARGET='sse' is not a target"):
            call()
    monkeypatch.setenv("AMXQ_TARGET", "amx")
    with pytest.raises(TargetError, match="AMXQ_EMULATE=1 emulates AMX here"):
        targets.get_target()
    with knobs.TARGET.scope("avx512"):
        assert targets.get_target() == "avx512"


def test_who_decides(machine, monkeypatch):
    machine(ZEN4)
    monkeypatch.setenv("AMXQ_TARGET", "avx2")
    targets.set_target("avx512")
    assert targets.get_target() == "avx512"
    with targets.target("avx512_bf16"):
        assert targets.get_target() == targets.requested_target() == "avx512_bf16"
        with targets.target("auto"):
            assert targets.get_target() == "avx512_bf16"
            assert targets.requested_target() == "auto"
        with targets.target(None):
            assert targets.get_target() == targets.requested_target() == "avx2"
        targets.set_target(None)
        assert targets.get_target() == "avx512_bf16"
    assert targets.get_target() == "avx2"


def test_the_context_ends_with_an_exception(machine):
    machine(ZEN4)
    with pytest.raises(KeyError), targets.target("avx2"):
        raise KeyError
    assert targets.requested_target() is None


def test_what_cannot_run_is_refused_when_asked_for(machine):
    machine(SKYLAKE)
    targets.set_target("avx2")
    with pytest.raises(TargetError, match="lacks avx512_bf16, avx512_vnni, avx512vbmi"):
        targets.set_target("avx512_bf16")
    with pytest.raises(TargetError, match="cannot run here"), targets.target("amx"):
        pass
    assert targets.get_target() == "avx2"


def test_context_is_of_this_thread_and_set_target_of_all(machine):
    machine(ZEN4)
    seen = []

    def look():
        seen.append(targets.get_target())

    with targets.target("avx2"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        targets.set_target("avx512")
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == ["avx512_bf16", "avx512", "avx2"]


def test_threads_do_not_disturb_each_other(machine):
    machine(ZEN4)
    wrong = []

    def work(name):
        for _ in range(300):
            with targets.target(name):
                if targets.get_target() != name:
                    wrong.append(name)
            targets.set_target(None)

    threads = [threading.Thread(target=work, args=(n,)) for n in TARGETS[1:] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_emulation(machine, monkeypatch, emulator):
    machine(ZEN4)
    with pytest.raises(TargetError, match="AMXQ_EMULATE=1"):
        targets.set_target("amx")
    monkeypatch.setenv("AMXQ_EMULATE", "1")
    assert targets.available_targets() == list(TARGETS)
    # Only a name gets the emulator: auto is the best that the CPU runs by itself.
    assert targets.get_target() == "avx512_bf16"
    assert emulator.installs == 0
    monkeypatch.setenv("AMXQ_TARGET", "amx")
    assert targets.get_target() == "amx"
    assert targets.require_runnable("amx") is TABLE["amx"]
    assert emulator.installs == 1
    monkeypatch.setenv("AMXQ_EMULATE", "0")
    with pytest.raises(TargetError):
        targets.get_target()
    monkeypatch.setenv("AMXQ_EMULATE", "perhaps")
    with pytest.raises(TargetError, match="AMXQ_EMULATE='perhaps': expected 0 or 1"):
        targets.get_target()


def test_emulation_is_not_used_where_there_is_amx(machine, monkeypatch, emulator):
    machine(ALL_FLAGS)
    monkeypatch.setenv("AMXQ_EMULATE", "1")
    targets.set_target("amx")
    assert not targets.emulates_amx()
    assert emulator.installs == 0


def test_emulation_needs_the_vector_instructions(machine, monkeypatch, emulator):
    machine(SKYLAKE)
    monkeypatch.setenv("AMXQ_EMULATE", "1")
    with pytest.raises(TargetError, match=r"avx512_bf16.*which the emulator does not replace"):
        targets.set_target("amx")
    assert targets.available_targets() == ["avx512", "avx2"]


def test_emulation_where_a_virtual_machine_lies(machine, monkeypatch, emulator):
    machine(ALL_FLAGS, palette=0)
    monkeypatch.setenv("AMXQ_EMULATE", "1")
    targets.set_target("amx")
    assert emulator.installs == 1


@pytest.mark.skipif(not cpu.is_x86_64_linux(), reason="needs x86-64 Linux")
def test_this_machine():
    runs = targets.available_targets()
    assert runs == [name for name in TARGETS if name in runs]
    if "avx2" in cpu.flags() and "fma" in cpu.flags():
        assert runs
    for name in runs:
        assert targets.require_runnable(name).cpu_flags <= cpu.flags()
    if amx.status().hardware:
        assert runs[0] == "amx"


def test_get_target_takes_less_than_a_microsecond(machine):
    machine(ZEN4)
    calls = 5000
    best = min(timeit.repeat(targets.get_target, number=calls, repeat=20)) / calls
    assert best < 1e-6


def test_missing_flags():
    assert targets.missing_flags(TABLE["amx"], ZEN4) == ["amx_bf16", "amx_int8", "amx_tile"]
    assert targets.missing_flags(TABLE["avx2"], ALL_FLAGS) == []


def test_llvm_knows_the_names_and_uses_whole_vectors():
    """In a process of its own: LLVM prints what it does not know, and may abort."""
    pytest.importorskip("llvmlite")
    code = """
import llvmlite.binding as llvm
from amxq.runtime.targets import TABLE
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
LOOP = '''
define void @add(ptr noalias %a, ptr noalias %b, i64 %n) {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %p = getelementptr float, ptr %a, i64 %i
  %q = getelementptr float, ptr %b, i64 %i
  %x = load float, ptr %p
  %y = load float, ptr %q
  %z = fadd float %x, %y
  store float %z, ptr %p
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}
'''
TILE = '''
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
define void @tile() {
  call void @llvm.x86.tilezero(i8 0)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 1, i8 2)
  ret void
}
'''
DOT = '''
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @dot(<16 x float> %c, <32 x bfloat> %a, <32 x bfloat> %b) {
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float> %c, <32 x bfloat> %a, <32 x bfloat> %b)
  ret <16 x float> %r
}
'''
triple = "x86_64-unknown-linux-gnu"
for name, target in TABLE.items():
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=target.llvm_cpu, features=target.llvm_features, opt=3)
    text = LOOP + {"amx": TILE + DOT, "avx512_bf16": DOT}.get(name, "")
    module = llvm.parse_assembly(text)
    module.triple = triple
    options = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    assembly = machine.emit_assembly(module)
    loop = [line for line in assembly.splitlines() if "vaddps" in line]
    register = "%zmm" if target.vector_bits == 512 else "%ymm"
    assert any(register in line for line in loop), (name, loop)
    assert ("tdpbf16ps" in assembly) == (name == "amx")
    assert ("vdpbf16ps" in assembly) == (name in ("amx", "avx512_bf16"))
    assert machine.emit_object(module)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
