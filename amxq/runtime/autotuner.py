"""``@amxq.autotune``: constants of a kernel that are chosen at launch, by timing.

    @amxq.autotune(
        configs=[amxq.Config({"BLOCK": 256}), amxq.Config({"BLOCK": 1024}, num_threads=1)],
        key=["n"],
    )
    @amxq.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

The first launch with new values of ``key`` times the configurations against each other and
keeps the fastest, in memory and in the object cache on disk. They are timed in rounds, the first
of a few calls, so that a slow spell of the machine meets all of them; after each round those drop
out whose fastest sample is slower than the best one's median by more than 20 %. Those that the
compiler refuses never take part.

AMXQ_AUTOTUNE=0 turns timing off: the first configuration that compiles is taken, always. The same
holds where times mean nothing, in the interpreter and in the emulator.
"""

from __future__ import annotations

import ast
import functools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from amxq import knobs
from amxq.errors import ArgumentError, CompilationError, TuningError
from amxq.runtime import cpu, openmp
from amxq.runtime.cache import make_key, open_cache
from amxq.runtime.compiler import CompiledKernel, Launchable
from amxq.runtime.heuristics import Chooser, Kernel, warmup_options
from amxq.runtime.jit import Grid
from amxq.runtime.targets import emulates_amx, get_target, raw_environment
from amxq.testing import do_bench

_ROUNDS = (0, 0.25, 0.25, 0.5)  # shares of the time
_MARGIN = 1.2
_PRUNERS = frozenset(("early_config_prune", "perf_model", "top_k"))
_AUTOTUNE, _INTERPRET = knobs.AUTOTUNE.name.encode(), knobs.INTERPRET.name.encode()
_tuning = threading.RLock()  # two tunings at once would time each other


class Config:
    """One choice of a kernel's constants.

    Args:
        kwargs: parameter → value.
        num_threads: as for a launch; None leaves it to the launch.
        num_warps, num_stages: of GPUs. They are kept, so that configurations written for Triton
            can be used as they are, and change nothing: a CPU has neither.
        pre_hook: called with the dict of all arguments before every launch.
    """

    def __init__(
        self,
        kwargs: dict[str, Any],
        num_threads: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        pre_hook: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.kwargs, self.num_threads = dict(kwargs), num_threads
        self.num_warps, self.num_stages, self.pre_hook = num_warps, num_stages, pre_hook

    def all_kwargs(self) -> dict[str, Any]:
        """What a launch gets: the constants, and num_threads if there is one."""
        threads = {} if self.num_threads is None else {"num_threads": self.num_threads}
        return {**self.kwargs, **threads}

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.all_kwargs().items())


class Autotuner(Chooser):
    """A kernel under :func:`autotune`.

    Attributes:
        configs: all configurations.
        best_config: the one of the last launch, None before the first.
    """

    def __init__(
        self,
        kernel: Kernel,
        configs: Sequence[Config],
        key: Sequence[str],
        prune_configs_by: dict[str, Any],
        reset_to_zero: Sequence[str],
        restore_value: Sequence[str],
        warmup: float,
        rep: float,
    ) -> None:
        super().__init__(kernel)
        if isinstance(kernel, Autotuner) or isinstance(getattr(kernel, "kernel", None), Autotuner):
            raise ArgumentError(f"{self.kernel_source.name} is autotuned already: do it once")
        self.configs = list(configs)
        if not self.configs or not all(isinstance(config, Config) for config in self.configs):
            raise ArgumentError(f"configs is {configs!r}, expected amxq.Config, one or more")
        for config in self.configs:
            self._check_names(list(config.kwargs), "a configuration")
        self._check_names(key, "key")
        self._check_names([*reset_to_zero, *restore_value], "reset_to_zero or restore_value")
        if unknown := prune_configs_by.keys() - _PRUNERS:
            raise ArgumentError(
                f"prune_configs_by has {', '.join(sorted(unknown))}, expected some of "
                f"{', '.join(sorted(_PRUNERS))}"
            )
        count = prune_configs_by.get("top_k", 1.0)
        share = isinstance(count, float) and 0 < count <= 1
        if not share and not (isinstance(count, int) and count >= 1):
            raise ArgumentError(
                f"top_k is {count!r}, expected how many configurations to time, 1 or more, or a "
                "share of them, above 0.0 and up to 1.0"
            )
        self.key, self._prune_by = list(key), dict(prune_configs_by)
        self._zeroed, self._restored = list(reset_to_zero), list(restore_value)
        self._warmup, self._rep = warmup, rep
        self._constants = {name for config in self.configs for name in config.all_kwargs()}
        for config in self.configs:
            lacking = self._constants - {"num_threads", *config.kwargs} - {*self._known({})}
            if lacking:
                raise ArgumentError(
                    f"the configuration {{{config}}} of {self.kernel_source.name} has no "
                    f"{', '.join(sorted(lacking))}, which others have: give it in each"
                )
        self._chosen: dict[tuple[Any, ...], Config] = {}
        self.best_config: Config | None = None

    def __getitem__(self, grid: Grid) -> Callable[..., Launchable]:
        def launch(*args: Any, **kwargs: Any) -> Launchable:
            named = self._named(args, kwargs, self._constants)
            key = self._key(named)
            config = self._chosen.get(key)
            if config is None:
                with _tuning:
                    config = self._chosen.get(key) or self._choose(key, grid, named)
                    self._chosen[key] = config
            self.best_config = config
            return self._run(config, grid, named)

        return launch

    def warmup(self, *args: Any, **kwargs: Any) -> list[CompiledKernel]:
        """Compiles all configurations that the compiler takes; runs nothing.

        Raises:
            TuningError: it takes none.
        """
        options = warmup_options(kwargs)
        made, _ = self._compile(self._named(args, kwargs, self._constants), options)
        return list(made.values())

    # --- which one ------------------------------------------------------------------------

    def _key(self, named: dict[str, Any]) -> tuple[Any, ...]:
        """All that the choice depends on; from its third element on in words that mean the same
        in another process."""
        known = self._known(named)
        for name in self.key:
            if name not in known:
                raise TypeError(f"{self.kernel_source.name} misses the argument {name!r}")
        values = [known[name] for name in self.key]
        return (
            raw_environment(_AUTOTUNE),
            raw_environment(_INTERPRET),
            get_target(),
            named.get("num_threads") or openmp.max_threads(),
            *[(type(value), value) for value in values if not hasattr(value, "dtype")],
            *[getattr(named.get(p), "dtype", None) for p in self.kernel_source.parameters],
        )

    @staticmethod
    def _times_matter() -> bool:
        emulated = get_target() == "amx" and emulates_amx()
        return knobs.AUTOTUNE.get() and not knobs.INTERPRET.get() and not emulated

    def _choose(self, key: tuple[Any, ...], grid: Grid, named: dict[str, Any]) -> Config:
        if not self._times_matter():
            return next(iter(self._compile(named, {}, first=True)[0]))
        cache, entry = open_cache(), self._entry(key)
        config = self._kept(cache.get(entry), named)
        if config is None:
            config, made = self._tune(grid, named)
            if config in self.configs:  # not one that early_config_prune has made
                kept = {"config": self.configs.index(config), "object": made.key}
                cache.put(entry, json.dumps(kept).encode())
        return config

    def _entry(self, key: tuple[Any, ...]) -> str:
        """The name on disk of the choice for ``key``, on this model of CPU."""
        source = self.kernel_source
        configs = repr([config.all_kwargs() for config in self.configs])
        return make_key(
            "autotune", cpu.identity(), ast.unparse(source.tree), configs, repr(key[2:])
        )

    def _kept(self, data: bytes | None, named: dict[str, Any]) -> Config | None:
        """The configuration that an earlier process chose, if its kernel is still the same."""
        try:
            kept = json.loads(data or b"")
            config = self.configs[kept["config"]]
            same = self._compile_one(config, named, {}).key == kept["object"]
        except (ValueError, LookupError, TypeError, CompilationError):
            return None
        return config if same else None

    def _prune(self, named: dict[str, Any]) -> list[Config]:
        configs, known = self.configs, self._known(named)
        early, model = (self._prune_by.get(name) for name in ("early_config_prune", "perf_model"))
        if early is not None:
            configs = list(early(configs, known))
            if not configs:
                raise TuningError(
                    f"early_config_prune leaves no configuration of {self.kernel_source.name}: "
                    "return one or more"
                )
        if model is not None:
            count = self._prune_by.get("top_k", 1.0)
            if isinstance(count, float):
                count = max(1, int(len(self.configs) * count))
            configs = sorted(configs, key=lambda c: model(**{**known, **c.all_kwargs()}))[:count]
        return configs

    def _compile_one(
        self, config: Config, named: dict[str, Any], options: dict[str, Any]
    ) -> CompiledKernel:
        arguments = {name: value for name, value in named.items() if name != "num_threads"}
        made = self.kernel.warmup(**arguments, **config.kwargs, **options)
        assert isinstance(made, CompiledKernel)
        return made

    def _compile(
        self, named: dict[str, Any], options: dict[str, Any], first: bool = False
    ) -> tuple[dict[Config, CompiledKernel], dict[Config, CompilationError]]:
        """The configurations that compile (or only the first), and those that do not."""
        made: dict[Config, CompiledKernel] = {}
        refused: dict[Config, CompilationError] = {}
        for config in self._prune(named):
            try:
                made[config] = self._compile_one(config, named, options)
            except CompilationError as error:
                refused[config] = error
            if made and first:
                break
        if not made:
            reasons = "\n  ".join(f"{config}\n    {error}" for config, error in refused.items())
            raise TuningError(
                f"no configuration of {self.kernel_source.name} can be compiled:\n  {reasons}"
            )
        return made, refused

    # --- timing ---------------------------------------------------------------------------

    def _tune(self, grid: Grid, named: dict[str, Any]) -> tuple[Config, CompiledKernel]:
        import torch

        start = time.perf_counter()
        made, refused = self._compile(named, {})
        saved = {n: named[n].detach().clone() for n in (*self._zeroed, *self._restored)}

        @torch.no_grad()
        def restore(names: list[str]) -> None:
            for name in names:
                named[name].copy_(saved[name])

        def call(config: Config) -> None:
            for name in self._zeroed:
                named[name].detach().zero_()
            restore(self._restored)
            self._run(config, grid, named)

        times: dict[Config, list[float]] = {config: [] for config in made}
        running = list(made)
        for share in _ROUNDS:
            for config in running:
                run = functools.partial(call, config)
                times[config] += do_bench(
                    run, share * self._warmup, share * self._rep, return_mode="all"
                )
            best = min(running, key=lambda c: statistics.median(times[c]))
            limit = _MARGIN * statistics.median(times[best])
            running = [c for c in running if min(times[c]) <= limit]
            if len(running) == 1:
                break
        restore(self._zeroed + self._restored)
        if knobs.PRINT_AUTOTUNING.get():
            values = ", ".join(f"{name}={self._known(named)[name]}" for name in self.key)
            took = f"{time.perf_counter() - start:.2f} s"
            lines = [f"autotuning {self.kernel_source.name} for {values} took {took}"]
            for config in made:
                mark = "  <- best" if config is best else ""
                lines.append(f"  {statistics.median(times[config]):9.4f} ms  {config}{mark}")
            lines += [f"  refused       {config}: {why.message}" for config, why in refused.items()]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return best, made[best]

    def _run(self, config: Config, grid: Grid, named: dict[str, Any]) -> Launchable:
        if config.pre_hook is not None:
            config.pre_hook({**self._known(named), **config.all_kwargs()})
        return self.kernel[grid](**named, **config.all_kwargs())


def autotune(
    configs: Sequence[Config],
    key: Sequence[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    warmup: float = 20,
    rep: float = 80,
) -> Callable[[Kernel], Autotuner]:
    """Chooses among configurations of a kernel by timing them; see the module's text.

    Args:
        configs: the choices.
        key: parameters whose values decide anew; dtypes, the target, the number of threads and
            the CPU's model always do.
        prune_configs_by: ``"early_config_prune"``: function (configs, arguments) → configs;
            ``"perf_model"``: function of the arguments by name → estimated time, of which the
            best ``"top_k"`` (a number, or a share up to 1.0) are timed.
        reset_to_zero, restore_value: tensors that the kernel changes. Every call while tuning
            finds them zeroed, or as they were, and after it they are as they were. (Triton
            leaves the former zeroed.)
        warmup, rep: milliseconds that a configuration runs for, untimed and timed.

    Raises:
        ArgumentError: a name is none of the kernel's parameters, or there is no configuration.
        TuningError: (by launches) no configuration compiles; it says why for each.
    """

    def decorate(kernel: Kernel) -> Autotuner:
        return Autotuner(
            kernel,
            configs,
            key,
            prune_configs_by or {},
            reset_to_zero or (),
            restore_value or (),
            warmup,
            rep,
        )

    return decorate
