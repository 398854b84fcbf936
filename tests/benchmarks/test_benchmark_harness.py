"""The measuring code itself: its problems, its statistics, and one small run through it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from amxq.runtime.targets import available_targets
from benchmarks import contestants, experts, figures, linear, peaks
from benchmarks.problems import Experts, Linear, round_to_bf16
from benchmarks.report import quantile, table


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    given = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x3F800000], np.uint32)
    np.testing.assert_array_equal(round_to_bf16(given.view(np.float32)).view(np.uint32), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_problem_is_the_same_everywhere_and_measures_errors(symmetric: bool) -> None:
    problem, same = Linear(64, 256, 32, symmetric), Linear(64, 256, 32, symmetric)
    np.testing.assert_array_equal(problem.q, same.q)
    assert problem.q.max() <= 15 and (problem.zeros == 8).all() == symmetric
    y = problem.input(3).astype(np.float64) @ problem.weight.astype(np.float64).T
    assert problem.error(y) == 0
    assert problem.error(y * 1.01) == pytest.approx(0.01)


def test_interrupted_calls_do_not_count_unless_nearly_all_are() -> None:
    clean = [(10_000 + i, 9_000, 0) for i in range(5)]
    calm = linear.summarise(clean + [(90_000, 9_000, 1)] * 5)
    assert not calm["disturbed"] and calm["us"] == pytest.approx(10, rel=0.01)
    busy = linear.summarise(clean[:1] + [(90_000, 9_000, 1)] * 9)
    assert busy["disturbed"] and busy["interrupted"] == 9 and busy["cpu_us"] == 9
    assert quantile([3.0], 0.9) == 3.0


def test_contestants_run_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["int4pack", "torch_bf16"]
    rows = linear.measure(Linear(64, 256, 64), [1, 3], names, 1, rounds=2, cold_mb=0.1)
    assert [(r["who"], r["m"]) for r in rows] == [(n, m) for m in (1, 3) for n in names]
    assert all(0 < r["error"] < 0.005 and r["us"] > 0 and r["copies"] > 1 for r in rows)
    text = figures.render(rows)
    assert "64 × 256, group 64, 1 thread" in text and "| torch_bf16 |" in text


def test_unknown_names_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="there are: amxq, amxq_int8, int4pack"):
        contestants.load("nobody")
    with pytest.raises(SystemExit):
        linear.main(["--peers", "nobody"])
    assert "there are: amxq, amxq_int8, int4pack" in capsys.readouterr().err


def test_tables_have_every_column_of_every_row() -> None:
    lines = table([{"a": 1.234}, {"a": 123.4, "b": "x"}]).splitlines()
    assert lines == ["| a | b |", "|---|---|", "| 1.23 |  |", "| 123 | x |"]


def test_experts_run_side_by_side() -> None:
    names = ["torch_loop", "torch_grouped"]
    problem = Experts(4, 2, 64, 32, 32)
    rows = linear.measure(problem, [1, 3], names, 1, rounds=1, cold_mb=0)
    assert [(r["who"], r["m"]) for r in rows] == [(n, m) for m in (1, 3) for n in names]
    assert all(0 < r["error"] < 0.02 and r["us"] > 0 for r in rows)
    more = {"shape": "4x2x64x32", "bytes_per_second": 1e9, "touched_bytes": 1e6, "flops": 1e6}
    text = experts.render([r | more for r in rows])
    assert "| torch_grouped |" in text and "| *read limit of INT4* | 1000 |" in text


def _row(who: str, m: int, us: float, error: float, threads: int = 1) -> dict[str, object]:
    case = {"n": 64, "k": 64, "group": 32, "symmetric": True, "threads": threads}
    return case | {"who": who, "m": m, "us": us, "error": error}


def test_runs_are_merged_and_the_nearest_peer_is_of_the_same_precision(tmp_path: Path) -> None:
    one = [_row("amxq", 1, 9.0, 0.001), _row("amxq_int8", 1, 4.0, 0.006)]
    one += [_row("exact", 1, 20.0, 0.002), _row("rough", 1, 2.0, 0.01)]
    two = [_row("amxq", 1, 10.0, 0.001), _row("slow", 1, 90.0, 0.001)]
    for name, rows, rate in (("a", one, 2.0), ("b", two, 1.0)):
        content = {"rows": rows, "limits": {"multiply": {"FMA": rate}}}
        (tmp_path / name).write_text(json.dumps(content))
    rows, limits = figures.merged([tmp_path / "a", tmp_path / "b"])
    assert [r["us"] for r in rows] == [10, 4, 20, 2, 90] and limits["multiply"] == {"FMA": 2}
    lines = figures.nearest(rows)
    assert [line["M = 1"] for line in lines] == ["2.00 exact", "0.50 rough"]


def test_plots_are_drawn_with_and_without_limits(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_row(who, m, 9.0 * m, 0.001) for who in ("amxq", "other") for m in (1, 8)]
    read = {"1": {"2 MB": 2e10, "4 KB": 1e10}}
    for limits in ({}, {"multiply": {"FMA": 1e11}, "read": read}):
        figures.plot(rows, limits, tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        assert "other" in text and ("20.0 GB/s" in text) == bool(limits)


def test_limits_are_those_of_a_real_machine() -> None:
    for multiply in peaks.MULTIPLIES:
        if multiply.target in available_targets():
            assert 1e8 < peaks.rate(multiply, samples=5) < 1e14
    assert 1e8 < peaks.read_rate(1, huge=True, megabytes=4) < 1e13
