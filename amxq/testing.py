"""Timing functions and plotting families of them, with the calls of Triton's ``testing``.

@amxq.testing.perf_report(
    amxq.testing.Benchmark(
        x_names=["size"], x_vals=[2**i for i in range(12, 24)],
        line_arg="provider", line_vals=["amxq", "torch"], line_names=["amxq", "torch"],
        ylabel="GB/s", plot_name="vector-add", args={},
    )
)
def benchmark(size, provider): ...

benchmark.run(print_data=True, save_path="plots")
"""

from __future__ import annotations

import csv
import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amxq.errors import ArgumentError

_log = logging.getLogger(__name__)

_SAMPLE_NS = 50_000
_LEAST_SAMPLES = 3
_MODES: dict[str, Callable[[list[float]], Any]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "all": list,
}


def do_bench(
    fn: Callable[[], Any],
    warmup: float = 25,
    rep: float = 100,
    grad_to_none: Iterable[Any] | None = None,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "median",
) -> Any:
    """How long a call of ``fn`` takes, in milliseconds.

    A sample is the wall time of enough calls to last 50 µs, divided by their number, so that
    the clock's own 0.1 µs do not count. Samples are taken for ``rep`` milliseconds, with the
    garbage collector off. Calls follow each other, so data that fits a cache is found there: use
    operands larger than the last-level cache to measure memory.

    On a machine that others use too, samples come out late but never early: the default is the
    median, which a few of them cannot move (Triton's is the mean), and two functions are
    compared only by quotients of figures taken right after one another.

    Args:
        fn: what is timed; called without arguments.
        warmup, rep: milliseconds of calls before and while samples are taken; at least three
            samples are, however long one lasts.
        grad_to_none: tensors whose ``grad`` is dropped before every call, outside of the time.
        quantiles: numbers from 0 to 1; the result is then a list with one time for each, or
            the time alone if there is one.
        return_mode: without quantiles: ``"median"``, ``"mean"``, ``"min"``, ``"max"``, or
            ``"all"`` for the list of samples.

    Raises:
        ArgumentError: return_mode or a quantile is none of these.
    """
    if return_mode not in _MODES:
        raise ArgumentError(f"return_mode is {return_mode!r}, expected one of {', '.join(_MODES)}")
    for quantile in quantiles or ():
        if not 0 <= quantile <= 1:
            raise ArgumentError(f"quantiles has {quantile!r}, expected numbers from 0 to 1")
    times = _samples(fn, warmup * 1e6, rep * 1e6, list(grad_to_none or ()))
    if quantiles is None:
        return _MODES[return_mode](times)
    found = [_quantile(sorted(times), q) for q in quantiles]
    return found[0] if len(found) == 1 else found


def _samples(fn: Callable[[], Any], warmup: float, rep: float, tensors: list[Any]) -> list[float]:
    clock = time.perf_counter_ns

    def sample(calls: int) -> int:
        for tensor in tensors:
            tensor.grad = None
        start = clock()
        for _ in range(calls):
            fn()
        return clock() - start

    collects = gc.isenabled()
    gc.disable()
    try:
        sample(1)  # the first call may compile
        once = min(sample(1) for _ in range(3))
        calls = 1 if tensors else -(-_SAMPLE_NS // max(once, 1))
        end = clock() + warmup
        while clock() < end:
            sample(calls)
        times: list[float] = []
        end = clock() + rep
        while clock() < end or len(times) < _LEAST_SAMPLES:
            times.append(sample(calls) / calls / 1e6)
        return times
    finally:
        if collects:
            gc.enable()


def _quantile(ordered: list[float], q: float) -> float:
    """Linear between neighbours, as numpy.quantile."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Benchmark:
    """What :func:`perf_report` runs and draws: one figure, a line for each of ``line_vals``.

    Attributes:
        x_names: parameters that take each value of ``x_vals``; a value is a number for all of
            them or a tuple with one for each.
        line_arg: the parameter that takes ``line_vals``; ``line_names`` are for the reader.
        plot_name: title, and name of the files.
        args: further arguments of the function.
        styles: for each line, matplotlib's (colour, line style).
    """

    x_names: Sequence[str]
    x_vals: Sequence[Any]
    line_arg: str
    line_vals: Sequence[Any]
    line_names: Sequence[str]
    plot_name: str
    args: dict[str, Any] = field(default_factory=dict)
    xlabel: str = ""
    ylabel: str = ""
    x_log: bool = False
    y_log: bool = False
    styles: Sequence[tuple[str, str]] | None = None

    def __post_init__(self) -> None:
        if len(self.line_names) != len(self.line_vals):
            raise ArgumentError(
                f"benchmark {self.plot_name!r} has {len(self.line_names)} line_names for "
                f"{len(self.line_vals)} line_vals"
            )
        for x in self.x_vals:
            if isinstance(x, (tuple, list)) and len(x) != len(self.x_names):
                raise ArgumentError(
                    f"benchmark {self.plot_name!r}: {x!r} in x_vals has {len(x)} values for "
                    f"the {len(self.x_names)} x_names"
                )


@dataclass(frozen=True)
class Table:
    """Results of one :class:`Benchmark`: a row is the values of x, then a figure for each line.
    ``low`` and ``high`` hold the other two figures of functions that return three."""

    columns: list[str]
    rows: list[list[Any]]
    low: list[list[float]]
    high: list[list[float]]


def perf_report(
    benchmarks: Benchmark | Sequence[Benchmark],
) -> Callable[[Callable[..., Any]], Report]:
    """Makes a :class:`Report` of a function that returns a figure, or (figure, low, high), for
    ``x_names``, ``line_arg`` and ``args`` given by name."""
    many = [benchmarks] if isinstance(benchmarks, Benchmark) else list(benchmarks)
    return lambda fn: Report(fn, many, single=isinstance(benchmarks, Benchmark))


class Report:
    """A function under :func:`perf_report`; :meth:`run` runs it."""

    def __init__(self, fn: Callable[..., Any], benchmarks: list[Benchmark], single: bool) -> None:
        self.fn, self.benchmarks, self._single = fn, benchmarks, single

    def run(
        self,
        show_plots: bool = False,
        print_data: bool = False,
        save_path: str | Path = "",
        return_df: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs all benchmarks.

        Args:
            show_plots: open a window for each; needs matplotlib.
            print_data: print a table for each.
            save_path: folder for ``plot_name.csv`` and, where matplotlib is installed,
                ``plot_name.png``.
            return_df: return pandas data frames, one or a list as ``perf_report`` got them.
            kwargs: further arguments of the function.

        Raises:
            ImportError: return_df without pandas, or show_plots without matplotlib.
        """
        if return_df:
            import pandas
        tables = [_measure(self.fn, benchmark, kwargs) for benchmark in self.benchmarks]
        for benchmark, table in zip(self.benchmarks, tables):
            if print_data:
                print(f"{benchmark.plot_name}:\n{_text(table)}", flush=True)
            if save_path:
                _save(benchmark, table, Path(save_path))
            if show_plots:
                _draw(benchmark, table).show()
        if not return_df:
            return None
        frames = [pandas.DataFrame(table.rows, columns=table.columns) for table in tables]
        return frames[0] if self._single else frames


def _measure(fn: Callable[..., Any], benchmark: Benchmark, kwargs: dict[str, Any]) -> Table:
    unit = f" ({benchmark.ylabel})" if benchmark.ylabel else ""
    columns = [*benchmark.x_names, *(name + unit for name in benchmark.line_names)]
    table = Table(columns, [], [], [])
    for x in benchmark.x_vals:
        xs = list(x) if isinstance(x, (tuple, list)) else [x] * len(benchmark.x_names)
        figures = []
        for line in benchmark.line_vals:
            arguments = {**dict(zip(benchmark.x_names, xs)), benchmark.line_arg: line}
            made = fn(**arguments, **benchmark.args, **kwargs)
            figures.append(made if isinstance(made, (tuple, list)) else (made, made, made))
        middle, low, high = (list(column) for column in zip(*figures))
        table.rows.append(xs + middle)
        table.low.append(low)
        table.high.append(high)
    return table


def _text(table: Table) -> str:
    cells = [table.columns, *([_cell(value) for value in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in cells)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _save(benchmark: Benchmark, table: Table, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{benchmark.plot_name}.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table.columns, *table.rows])
    try:
        plot = _draw(benchmark, table)
    except ImportError:
        _log.warning("%s.png is not drawn: matplotlib is not installed", benchmark.plot_name)
        return
    plot.savefig(folder / f"{benchmark.plot_name}.png")
    plot.close()


def _draw(benchmark: Benchmark, table: Table) -> Any:
    """matplotlib.pyplot with the figure of one benchmark as its current one."""
    from matplotlib import pyplot

    pyplot.figure()
    axes = pyplot.subplot()
    xs = [row[0] for row in table.rows]
    for i, name in enumerate(benchmark.line_names):
        colour, style = benchmark.styles[i] if benchmark.styles else (None, "-")
        ys = [row[len(benchmark.x_names) + i] for row in table.rows]
        (line,) = axes.plot(xs, ys, label=name, color=colour, ls=style)
        low, high = ([row[i] for row in rows] for rows in (table.low, table.high))
        axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
    axes.legend()
    axes.set_xlabel(benchmark.xlabel or benchmark.x_names[0])
    axes.set_ylabel(benchmark.ylabel)
    axes.set_xscale("log" if benchmark.x_log else "linear")
    axes.set_yscale("log" if benchmark.y_log else "linear")
    axes.set_title(benchmark.plot_name)
    return pyplot
