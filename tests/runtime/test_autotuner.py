"""@amxq.autotune and @amxq.heuristics: what is chosen, kept, refused and printed."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import ArgumentError, TuningError
from amxq.runtime import autotuner
from amxq.runtime.targets import available_targets


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(tmp_path / "objects"))
    for name in ("AMXQ_AUTOTUNE", "AMXQ_PRINT_AUTOTUNING"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@amxq.jit
def repeat(x, n, TIMES: tl.constexpr, BLOCK: tl.constexpr = 16):
    """Adds 1 to x, TIMES times: TIMES says how slow it is."""
    at = tl.arange(0, BLOCK)
    for _ in tl.range(0, TIMES):
        tl.store(x + at, tl.load(x + at) + 1.0, mask=at < n)


@amxq.jit
def add_up(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1.0, mask=at < n)


def times(*counts: int, **options: Any) -> list[amxq.Config]:
    return [amxq.Config({"TIMES": count}, **options) for count in counts]


def tuned(kernel: Any = repeat, configs: Any = None, key: Any = ("n",), **options: Any) -> Any:
    options = {"warmup": 0.2, "rep": 1, **options}
    return amxq.autotune(configs or times(300000, 10, 400000), key, **options)(kernel)


def test_the_fastest_is_chosen_once_for_each_key() -> None:
    kernel, x = tuned(), torch.zeros(16)
    compiled = kernel[(1,)](x, 16)
    assert kernel.best_config.kwargs == {"TIMES": 10}
    assert compiled.constants["TIMES"] == 10
    x.zero_()
    kernel[(1,)](x, 16)
    assert (x == 10).all()  # tuned before: one run
    kernel[(1,)](x, 8)
    assert x[0] > 20 and x[8] == 10  # another key


def test_dtypes_and_threads_decide_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tuned(key=[])
    runs = []
    original = autotuner.do_bench
    monkeypatch.setattr(autotuner, "do_bench", lambda *a, **k: runs.append(1) or original(*a, **k))
    counts = []
    for x, threads in ((torch.zeros(16), 1), (torch.zeros(16), 2), (torch.zeros(16).double(), 1)):
        for _ in range(2):
            before = len(runs)
            kernel[(1,)](x, 16, num_threads=threads)
            counts.append(len(runs) > before)
    assert counts == [True, False] * 3


def test_clearly_slower_ones_are_given_up_early() -> None:
    called = {10: 0, 11: 0, 300000: 0}

    def hook(arguments: dict[str, Any]) -> None:
        called[arguments["TIMES"]] += 1

    kernel = tuned(configs=times(300000, 10, 11, pre_hook=hook), rep=40)
    kernel[(1,)](torch.zeros(16), 16)
    assert called[300000] < min(20, called[10], called[11])


def test_arguments_are_restored_for_every_call() -> None:
    x = torch.arange(16.0, requires_grad=True)
    before = x.detach().clone()
    kernel = tuned(restore_value=["x"], configs=times(3, 3000))
    kernel[(1,)](x, 16)
    assert torch.equal(x, before + kernel.best_config.kwargs["TIMES"])
    y = torch.full((16,), 5.0)
    seen = []
    configs = times(4, 3000, pre_hook=lambda arguments: seen.append(arguments["x"].sum().item()))
    kernel = tuned(reset_to_zero=["x"], configs=configs)
    kernel[(1,)](y, 16)
    assert (y == 5 + kernel.best_config.kwargs["TIMES"]).all() and set(seen) == {0, 80}


def test_what_the_compiler_refuses_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configs = [amxq.Config({"BLOCK": block}) for block in (-1, 16, 1 << 40)]
    kernel = tuned(add_up, configs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMXQ_PRINT_AUTOTUNING", "1")
        kernel[lambda meta: (amxq.cdiv(meta["n"], meta["BLOCK"]),)](torch.zeros(40), 40)
    assert kernel.best_config is configs[1]
    printed = capsys.readouterr().err
    assert "autotuning add_up for n=40 took" in printed
    assert "BLOCK: 16  <- best" in printed and "refused       BLOCK: -1: " in printed
    assert [made.constants["BLOCK"] for made in kernel.warmup(torch.float32, 40)] == [16]


def test_if_all_are_refused_the_error_says_why_for_each() -> None:
    kernel = tuned(add_up, [amxq.Config({"BLOCK": -1}), amxq.Config({"BLOCK": 1 << 40})])
    with pytest.raises(TuningError, match=r"(?s)add_up.*BLOCK: -1.*py:\d+.*BLOCK: 1099511627776"):
        kernel[(1,)](torch.zeros(4), 4)


@pytest.mark.parametrize("variable", [("AMXQ_AUTOTUNE", "0"), ("AMXQ_INTERPRET", "1")])
def test_without_timing_the_first_that_compiles_is_taken(
    monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    monkeypatch.setattr(autotuner, "do_bench", None)
    x = torch.zeros(16)
    kernel = tuned(configs=[amxq.Config({"TIMES": 1, "BLOCK": -1}), *times(700, 10)])
    kernel[(1,)](x, 16)
    assert (x == 700).all() and kernel.best_config.kwargs == {"TIMES": 700}


def test_pruning() -> None:
    def early(configs: list[amxq.Config], arguments: dict[str, Any]) -> list[amxq.Config]:
        assert arguments["n"] == 16 and arguments["BLOCK"] == 16
        return [config for config in configs if config.kwargs["TIMES"] < 350000]

    def model(n: int, TIMES: int, **rest: Any) -> float:
        return -TIMES

    kernel = tuned(prune_configs_by={"early_config_prune": early})
    assert len(kernel.warmup(torch.float32, 16)) == 2
    kernel = tuned(prune_configs_by={"perf_model": model, "top_k": 1})
    assert [made.constants["TIMES"] for made in kernel.warmup(torch.float32, 16)] == [400000]
    kernel = tuned(prune_configs_by={"perf_model": model, "top_k": 0.67})
    assert [made.constants["TIMES"] for made in kernel.warmup(torch.float32, 16)] == [
        400000,
        300000,
    ]
    with pytest.raises(TuningError, match="early_config_prune leaves no"):
        tuned(prune_configs_by={"early_config_prune": lambda *_: []})[(1,)](torch.zeros(16), 16)


@pytest.mark.parametrize("count", [0, -1, 0.0, 1.5, "1"])
def test_pruning_to_nothing(count: Any) -> None:
    with pytest.raises(ArgumentError, match=f"top_k is {count!r}, expected how many"):
        tuned(prune_configs_by={"perf_model": lambda **_: 0.0, "top_k": count})


def test_a_configuration_that_lacks_a_parameter() -> None:
    configs = [amxq.Config({"BLOCK": 16, "TIMES": 1}), amxq.Config({"BLOCK": 32})]
    with pytest.raises(ArgumentError, match=r"\{BLOCK: 32\} of repeat has no TIMES, which others"):
        tuned(configs=configs)


def test_heuristics_inside_and_outside() -> None:
    by_size = amxq.heuristics({"BLOCK": lambda args: amxq.next_power_of_2(args["n"])})
    x = torch.zeros(8)
    assert by_size(repeat)[(1,)](x, 5, TIMES=2).constants["BLOCK"] == 8
    assert x.tolist() == [2.0] * 5 + [0.0] * 3
    assert by_size(repeat).warmup(torch.float32, 5, TIMES=2, target="avx2").constants["BLOCK"] == 8
    inside = tuned(by_size(repeat))
    assert inside[(1,)](x, 3).constants["BLOCK"] == 4 and inside.best_config.kwargs["TIMES"] == 10
    outside = by_size(tuned())
    assert outside[(1,)](x, 3).constants["BLOCK"] == 4


def test_threads_of_a_configuration() -> None:
    kernel = tuned(add_up, [amxq.Config({"BLOCK": 4}, num_threads=1, num_warps=4, num_stages=2)])
    x = torch.zeros(16)
    kernel[(4,)](x, 16)
    assert x.min() == x.max() > 0
    with pytest.raises(TypeError, match="two values for 'num_threads'"):
        kernel[(4,)](x, 16, num_threads=2)


def test_every_target_chooses_for_itself() -> None:
    kernel = tuned()
    for name in available_targets():
        with amxq.target(name):
            assert kernel[(1,)](torch.zeros(16), 16).target.name == name


def test_many_threads_tune_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tunings = tuned(), []
    original = kernel._tune
    monkeypatch.setattr(kernel, "_tune", lambda *a: tunings.append(1) or original(*a))
    threads = [threading.Thread(target=lambda: kernel[(1,)](torch.zeros(16), 16)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tunings) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tuned(configs=["TIMES"]), "expected amxq.Config"),
        (lambda: tuned(configs=[amxq.Config({"TIME": 1})]), "a configuration of repeat names 'TI"),
        (lambda: tuned(key=["m"]), "key of repeat names 'm': its parameters are x, n, TIMES"),
        (lambda: tuned(reset_to_zero=["y"]), "names 'y'"),
        (lambda: tuned(prune_configs_by={"top": 1}), "prune_configs_by has top"),
        (lambda: tuned(tuned()), "autotuned already"),
        (lambda: tuned(len), "not a kernel: write @amxq.jit below"),
        (lambda: amxq.heuristics({"m": len})(repeat), "the heuristics of repeat names 'm'"),
    ],
)
def test_wrong_descriptions(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_wrong_calls() -> None:
    x = torch.zeros(16)
    with pytest.raises(TypeError, match="cuda_graph"):
        tuned(use_cuda_graph=True)
    with pytest.raises(TypeError, match=r"launch it as repeat\[grid\]"):
        tuned()(x, 16)
    for call, message in (
        (lambda: tuned()[(1,)](x, 16, TIMES=1), "two values for 'TIMES'"),
        (lambda: tuned()[(1,)](x, n=16, x=x), "two values for 'x'"),
        (lambda: tuned()[(1,)](x), "misses the argument 'n'"),
        (lambda: tuned()[(1,)](x, 1, 2, 3, 4), "takes 4 arguments, got 5"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


MODULE = """
import amxq, amxq.language as tl

@amxq.jit
def step(value):
    return value + STEP

@amxq.autotune([amxq.Config({"TIMES": t}) for t in (300000, 10)], ["n"], warmup=0, rep=1)
@amxq.jit
def kernel(x, n, TIMES: tl.constexpr):
    for _ in tl.range(0, TIMES):
        tl.store(x, step(tl.load(x)))
"""


def result_elsewhere(folder: Path, step: str = "1.0") -> float:
    """What the kernel makes of 0 when its module has been imported anew."""
    path = folder / f"module{len(list(folder.iterdir()))}.py"
    path.write_text(MODULE.replace("STEP", step))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.zeros(1)
    module.kernel[(1,)](x, 7)
    return x.item()


def test_another_process_takes_what_the_first_found(tmp_path: Path) -> None:
    """Until the kernel, or one that it calls, changes, or the entry is damaged."""
    assert result_elsewhere(tmp_path) > 10
    assert result_elsewhere(tmp_path) == 10
    assert result_elsewhere(tmp_path, "2.0") > 20
    assert result_elsewhere(tmp_path, "2.0") == 20
    for entry in (tmp_path / "objects").iterdir():
        if b'"config"' in entry.read_bytes():
            entry.write_bytes(entry.read_bytes().replace(b'"config": 1', b'"config": 0'))
    assert result_elsewhere(tmp_path, "2.0") > 20


def test_a_kept_choice_that_cannot_be_read_is_made_anew() -> None:
    kernel, x = tuned(), torch.zeros(16)
    named = {"x": x, "n": 16, "BLOCK": 16}
    good = kernel._compile_one(kernel.configs[1], named, {}).key.encode()
    assert kernel._kept(b'{"config": 1, "object": "%s"}' % good, named) is kernel.configs[1]
    for bad in (b"", b"\xff", b"[]", b"{}", b'{"config": 9, "object": ""}'):
        assert kernel._kept(bad, named) is None
    assert kernel._kept(b'{"config": 0, "object": "%s"}' % good, named) is None
