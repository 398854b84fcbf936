"""amxq.testing: times, tables and files; with and without matplotlib and pandas."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import amxq
from amxq.errors import ArgumentError
from amxq.testing import Benchmark, do_bench, perf_report


def test_milliseconds_of_a_call() -> None:
    found = do_bench(lambda: time.sleep(0.004), warmup=1, rep=20)
    assert 4 <= found < 12


def test_short_calls_are_timed_in_batches() -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    times = do_bench(count, warmup=1, rep=5, return_mode="all")
    assert calls > 20 * len(times)
    assert 0 < min(times) < 0.01


def test_a_few_late_samples_do_not_move_the_result() -> None:
    calls = 0

    def late_at_times() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.05 if calls % 5 == 0 else 0.001)

    assert do_bench(late_at_times, warmup=0, rep=200) < 8


def test_summaries() -> None:
    def sleep() -> None:
        time.sleep(0.0005)

    low, middle, high = do_bench(sleep, warmup=0, rep=10, quantiles=[0, 0.5, 1])
    assert low <= middle <= high
    assert isinstance(do_bench(sleep, warmup=0, rep=1, quantiles=[0.5]), float)
    for mode in ("min", "mean", "max"):
        assert isinstance(do_bench(sleep, warmup=0, rep=1, return_mode=mode), float)
    assert len(do_bench(sleep, warmup=0, rep=0, return_mode="all")) == 3


def test_gradients_are_dropped_before_every_call() -> None:
    import torch

    x = torch.ones(3, requires_grad=True)
    do_bench(lambda: x.sum().backward(), warmup=0, rep=1, grad_to_none=[x])
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1]


def test_the_collector_is_off_meanwhile_and_comes_back() -> None:
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        do_bench(fail)
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("wrong", [{"return_mode": "average"}, {"quantiles": [0.5, 20]}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="average|20"):
        do_bench(lambda: None, **wrong)


def example(**changes: Any) -> Benchmark:
    description: dict[str, Any] = {
        "x_names": ["m", "n"],
        "x_vals": [2, (3, 5)],
        "line_arg": "provider",
        "line_vals": ["a", "b"],
        "line_names": ["first", "second"],
        "styles": [("blue", "-"), ("green", "--")],
        "ylabel": "GB/s",
        "plot_name": "example",
        "args": {"plus": 0.5},
    }
    return Benchmark(**{**description, **changes})


def figure(m: int, n: int, provider: str, plus: float, extra: float = 0) -> Any:
    value = m * n + plus + extra
    return value if provider == "a" else (2 * value, value, 3 * value)


TABLE = """\
example:
m  n  first (GB/s)  second (GB/s)
2  2           4.5              9
3  5          15.5             31
"""


def test_table_and_csv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = perf_report(example())(figure)
    assert report.run(print_data=True, save_path=tmp_path / "out") is None
    assert capsys.readouterr().out == TABLE
    assert (tmp_path / "out" / "example.csv").read_text().splitlines() == [
        "m,n,first (GB/s),second (GB/s)",
        "2,2,4.5,9.0",
        "3,5,15.5,31.0",
    ]


def test_plot(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    perf_report([example(x_log=True, y_log=True)])(figure).run(save_path=tmp_path, extra=1)
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_plot_but_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = perf_report(example())(figure)
    report.run(save_path=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["example.csv"]
    assert "matplotlib" in caplog.text
    with pytest.raises(ImportError):
        report.run(show_plots=True)


def test_data_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pandas", None)
        with pytest.raises(ImportError):
            perf_report(example())(figure).run(return_df=True)
    pytest.importorskip("pandas")
    frame = perf_report(example())(figure).run(return_df=True)
    assert frame["first (GB/s)"].tolist() == [4.5, 15.5]
    assert len(perf_report([example()] * 2)(figure).run(return_df=True)) == 2


@pytest.mark.parametrize("wrong", [{"line_names": ["one"]}, {"x_vals": [(1, 2, 3)]}])
def test_wrong_descriptions(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="example"):
        example(**wrong)


def test_it_is_found_from_the_package() -> None:
    assert amxq.testing.do_bench is do_bench
