"""amxq.runtime.doctor: complete on this machine, and standing on broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from amxq.runtime import amx, cache, cpu, doctor, openmp, targets

SECTIONS = {
    "versions",
    "cpu",
    "amx",
    "targets",
    "target",
    "threads",
    "memory",
    "cache",
    "environment",
    "advice",
    "problems",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in ("AMXQ_TARGET", "AMXQ_EMULATE", "AMXQ_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_choice", None)
    monkeypatch.setattr(targets, "_resolved", {})


@pytest.fixture
def machine(monkeypatch):
    def pretend(flags, palette=0, xcr0=0, problem=""):
        monkeypatch.setattr(cpu, "flags", lambda: frozenset(flags))
        monkeypatch.setattr(cpu, "tile_facts", lambda: cpu.TileFacts(palette, xcr0, problem))
        monkeypatch.setattr(amx, "_granted", False)
        monkeypatch.setattr(amx, "_arch_prctl", lambda code, _: 28 if code == 0x1023 else 0)

    return pretend


def seen():
    """The report, after a way through JSON, and its text."""
    found = doctor.report()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == SECTIONS
    return found, doctor.render(found)


def test_this_machine():
    found, text = seen()
    assert [name for name in found if "error" in found[name]] == []
    assert found["problems"] == [] and "Problems" not in text
    assert found["cpu"]["model"] in text
    runs = [name for name, one in found["targets"].items() if one["runs"]]
    assert runs == targets.available_targets()
    if runs:
        assert found["target"] == {
            "in_use": runs[0],
            "requested": None,
            "why": "none was asked for: the best that this CPU runs",
        }
    assert found["threads"]["launch"] == openmp.max_threads()
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["torch"][0].isdigit()
    assert found["versions"]["llvm"].count(".") == 2
    assert found["environment"].keys() >= {"AMXQ_CACHE_DIR"}
    for title in ("CPU", "AMX", "Targets", "Target in use", "Threads", "Kernel cache"):
        assert f"\n{title}\n" in "\n" + text


def test_looking_makes_no_folder(tmp_path):
    seen()
    assert not (tmp_path / "cache").exists()


def test_what_is_in_the_cache(tmp_path):
    cache.open_cache().put(cache.make_key("a"), b"object")
    found, text = seen()
    assert found["cache"]["entries"] == 1
    assert "1 object, " in text


def test_a_cpu_without_avx512(machine):
    machine(targets.TABLE["avx2"].cpu_flags)
    found, text = seen()
    assert found["target"]["in_use"] == "avx2"
    assert "avx512f" in found["targets"]["avx512"]["missing_features"]
    assert not found["amx"]["usable"]
    assert "not usable: the CPU does not list" in text
    assert found["problems"] == []
    advice = "AutoRound checkpoints are meant for Intel AMX and refused here until you ask"
    assert advice in "\n".join(found["advice"])
    targets.set_target("auto")
    assert advice not in "\n".join(seen()[0]["advice"])


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"palette": 0}, "no tile palette"),
        ({"palette": 1, "xcr0": 0}, "XCR0"),
        (
            {"palette": None, "xcr0": None, "problem": "no executable memory"},
            "no executable memory",
        ),
        ({"palette": 1, "xcr0": 3 << 17}, "signal stack"),
    ],
)
def test_amx_that_cannot_be_used_is_explained(machine, facts, reason):
    machine(targets.TABLE["amx"].cpu_flags, **facts)
    found, text = seen()
    assert reason in found["amx"]["reason"]
    assert found["target"]["in_use"] == "avx512_bf16"
    assert any("the CPU has AMX, but" in sentence for sentence in found["advice"])
    assert reason in text


def test_a_cpu_that_runs_nothing(machine):
    machine({"sse2"})
    found, text = seen()
    assert found["target"]["in_use"] is None
    assert "none (this CPU" in text
    assert found["problems"] == [found["target"]["why"]]


@pytest.mark.parametrize(
    "variable, value, section",
    [
        ("AMXQ_TARGET", "sse9", "target"),
        ("AMXQ_EMULATE", "perhaps", "amx"),
        ("AMXQ_NUM_THREADS", "many", "threads"),
        ("AMXQ_CACHE_DIR", "/proc/nothing", "cache"),
    ],
)
def test_bad_environments_are_shown(monkeypatch, variable, value, section):
    monkeypatch.setenv(variable, value)
    found, text = seen()
    assert value in found["environment"][variable]
    assert variable in text
    assert value in json.dumps(found[section])
    if section != "cache":  # without one, kernels are compiled in every process
        assert len(found["problems"]) == 1 and text.endswith(
            f"Problems\n  - {found['problems'][0]}"
        )
        assert f"{variable}={value!r}" in found["problems"][0]


def test_unknown_variables_are_named(monkeypatch):
    monkeypatch.setenv("AMXQ_TARGETS", "amx")
    monkeypatch.setenv("AMXQ_COLOUR", "1")
    found, text = seen()
    assert "amxq reads no variable AMXQ_COLOUR" in found["advice"]
    assert "  - amxq reads no variable AMXQ_TARGETS; did you mean 'AMXQ_TARGET'" in text
    assert "  AMXQ_TARGETS not read by amxq" in text
    assert found["problems"] == []


def test_every_section_may_fail(monkeypatch):
    def broken():
        raise RuntimeError("broken on purpose")

    for name in SECTIONS - {"advice", "problems"}:
        with monkeypatch.context() as patch:
            patch.setattr(doctor, f"_{name}", broken)
            found, text = seen()
            assert found[name] == {"error": "RuntimeError: broken on purpose"}
            assert "could not be found out: RuntimeError: broken on purpose" in text


def test_advice_on_threads(monkeypatch):
    monkeypatch.setenv("AMXQ_NUM_THREADS", "64")
    monkeypatch.setattr(cpu, "cgroup_cpu_limit", lambda: 1.5)
    monkeypatch.setattr(openmp, "openmp_libraries", lambda: ["/a/libgomp.so.1", "/b/libomp.so"])
    monkeypatch.setattr(cpu, "huge_page_mode", lambda: "never")
    found, _ = seen()
    advice = "\n".join(found["advice"])
    assert "OMP_NUM_THREADS to 1" in advice
    assert "more than one OpenMP runtime" in advice
    assert "transparent huge pages are off" in advice


def test_a_fresh_process_without_anything():
    """An empty environment, no home, no torch: the report still comes."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['llvmlite'] = None\n"
        "from amxq.runtime import doctor\n"
        "print(doctor.render(doctor.report()))\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Target in use" in done.stdout
    assert "llvmlite cannot be loaded" in done.stdout
