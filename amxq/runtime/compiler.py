"""From a kernel's source and the types of its arguments to an object that can run.

    source → tile-IR → (cache?) → passes → LLVM → object → loaded functions

The key of a cached object is the tile-IR as the front end makes it, the target, and the
versions of amxq's compiler and of LLVM: a warm start needs the front end only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from amxq import knobs
from amxq.errors import SettingError
from amxq.frontend.code_generator import Captured, generate
from amxq.frontend.source import KernelSource
from amxq.ir.ops import Function
from amxq.ir.printer import print_function
from amxq.ir.types import DType, PointerType, Type
from amxq.ir.verifier import verify
from amxq.runtime import openmp
from amxq.runtime.cache import make_key, open_cache
from amxq.runtime.targets import Target, require_runnable

_log = logging.getLogger(__name__)

_COMPILER_FOLDERS = ("frontend", "ir", "language", "passes", "codegen")
STAGES = ("tir", "llir", "asm", "obj")


@functools.cache
def fingerprint() -> str:
    """Hash of the compiler's own source files: a changed compiler never meets old objects."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in _COMPILER_FOLDERS:
        for file in sorted((root / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class Stages(Mapping[str, Any]):
    """``compiled.asm``: what each stage made of the kernel.

    ``"tir"`` is the tile-IR after the front end and after every pass (text), ``"llir"`` the
    optimised LLVM IR, ``"asm"`` the assembly (text), ``"obj"`` the object (bytes).
    """

    def __init__(self, kernel: CompiledKernel) -> None:
        self._kernel = kernel

    def __getitem__(self, stage: str) -> Any:
        if stage == "obj":
            return self._kernel.image
        if stage not in STAGES:
            raise KeyError(f"{stage!r}: the stages are {', '.join(STAGES)}")
        return self._kernel.build()[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(STAGES)

    def __len__(self) -> int:
        return len(STAGES)


class Launchable(Protocol):
    """What a launch needs: a :class:`CompiledKernel`, or the interpreter in its place."""

    def launch(
        self, grid: tuple[int, int, int], args: Sequence[Any], num_threads: int | None = None
    ) -> None: ...

    def bind(
        self, grid: tuple[int, int, int], args: Sequence[Any], threads: int
    ) -> Callable[[], Any]: ...


class CompiledKernel:
    """A kernel for one target and one choice of argument types and constants.

    Attributes:
        asm: the stages, see :class:`Stages`.
        target: what it was compiled for.
        params: name → type of the arguments that are passed at run time, in order.
        captured: globals whose values are compiled in.
        key: hash of all that the object depends on, its name in the cache.
    """

    def __init__(
        self,
        source: KernelSource,
        types: dict[str, Type],
        constants: dict[str, Any],
        target: Target,
        facts: dict[str, int] | None = None,
    ) -> None:
        self.source, self.types, self.constants, self.target = source, types, constants, target
        self.facts = facts or {}
        self.params = types
        self.asm = Stages(self)
        self.captured: Captured = {}
        function = generate(source, types, constants, self.captured, self.facts)
        verify(function, "the front end")
        self._tir = print_function(function)
        self._function: Function | None = function
        self._built: dict[str, Any] | None = None
        self._lock = threading.RLock()
        self.image = self._image()
        codes = "".join("Q" if isinstance(t, PointerType) else _code(t) for t in types.values())
        self._pack = struct.Struct("<3q2Q" + codes).pack
        self._ready = False

    # --- compiling ------------------------------------------------------------------------

    def _image(self) -> bytes:
        from amxq.codegen.compile import compiler_version

        dump = knobs.KERNEL_DUMP.get()
        t = self.target
        key = self.key = make_key(
            self._tir, t.name, t.llvm_cpu, t.llvm_features, fingerprint(), compiler_version()
        )
        cache = open_cache()
        if not knobs.ALWAYS_COMPILE.get() and dump is None:
            image = cache.get(key)
            if image is not None:
                return image
        image = self.build_as(self.source.name)
        if dump is not None:
            self._dump(dump / f"{self.source.name}-{t.name}-{key[:8]}", self.build(), image)
        cache.put(key, image)
        return image

    def lowered(self, observe: Callable[[str, Function], None]) -> Function:
        """The kernel after all passes; ``observe`` sees it after each."""
        from amxq.passes.pipeline import lower

        function = self._function or generate(
            self.source, self.types, self.constants, facts=self.facts
        )
        self._function = None  # the passes change it in place
        lower(function, self.target.name, self.target.vector_bits, observe)
        return function

    def build(self) -> dict[str, Any]:
        """Runs passes and LLVM once more, keeping every stage but the object: what nobody looks
        at takes half of the time."""
        from amxq.codegen.compile import optimise
        from amxq.codegen.llvm import emit_llvm

        with self._lock:
            if self._built is None:
                texts = {"front end": self._tir}
                function = self.lowered(lambda name, f: texts.update({name: print_function(f)}))
                module, machine = optimise(emit_llvm(function), self.target)
                self._built = {
                    "passes": texts,
                    "tir": "\n".join(f"// after {name}\n{text}" for name, text in texts.items()),
                    "llir": str(module),
                    "asm": machine.emit_assembly(module),
                }
            return self._built

    def build_as(self, name: str) -> bytes:
        """The object with ``name`` in its symbols instead of the kernel's."""
        from amxq.codegen.compile import optimise
        from amxq.codegen.llvm import emit_llvm

        with self._lock:
            function = self.lowered(lambda name, f: None)
        module, machine = optimise(emit_llvm(replace(function, name=name)), self.target)
        return bytes(machine.emit_object(module))

    def annotated(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The assembly with source lines and LLVM's comments, and the configured tiles."""
        from amxq.codegen.compile import optimise
        from amxq.codegen.debug import LineTable
        from amxq.codegen.llvm import emit_llvm

        with self._lock:
            function = self.lowered(lambda name, f: None)
        module, machine = optimise(emit_llvm(function, LineTable()), self.target)
        machine.set_asm_verbosity(True)
        return machine.emit_assembly(module), function.tiles

    def export(self, folder: str | Path, name: str | None = None) -> tuple[Path, Path]:
        """Writes the kernel as ``NAME.o`` and ``NAME.h``, to be called without Python.

        The header explains itself: it has a function NAME (grid_x, grid_y, grid_z, arguments…)
        that runs on the calling thread, and where OpenMP is on NAME_omp, which runs on its
        threads.

        What was compiled for an integer that is 1 or a multiple of 16 takes such ones only: the
        header says which, and asserts it. Hand types, ``tl.int32``, to ``warmup`` in place of
        numbers for an object that takes any.

        Args:
            folder: made if it does not exist.
            name: prefix of all names in C; default: the kernel's. Kernels that are linked into
                one program need different ones.

        Returns:
            the paths of the object and of the header.

        Raises:
            ArgumentError: the name is no identifier of C.
        """
        from amxq.runtime.export import export

        return export(self, folder, name)

    @staticmethod
    def _dump(folder: Path, built: dict[str, Any], image: bytes) -> None:
        """``0_front_end.tir``, ``1_simplify.tir``, …, a file a pass, then what LLVM made of it."""
        files: dict[str, str | bytes] = {
            f"{i}_{name.replace(' ', '_')}.tir": text
            for i, (name, text) in enumerate(built["passes"].items())
        }
        files |= {f"kernel.{stage}": built[stage] for stage in ("llir", "asm")}
        files["kernel.obj"] = image
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                data = content if isinstance(content, bytes) else content.encode()
                (folder / name).write_bytes(data)
        except OSError as problem:
            raise SettingError(f"{knobs.KERNEL_DUMP.name}: cannot write there: {problem}") from None

    # --- running --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Loads the object into the process; before that nothing of it can run.

        Raises:
            TargetError: this CPU cannot run the kernel's target.
        """
        from amxq.runtime.loader import DamagedObject, load

        with self._lock:
            if self._ready:
                return
            require_runnable(self.target.name)
            try:
                loaded = load(self.source.name, self.image)
            except DamagedObject as problem:
                # Its checksum was right, so it was written so: by a version with a mistake.
                _log.warning("%s: it is compiled anew", problem)
                self.image = self.build_as(self.source.name)
                open_cache().put(self.key, self.image)
                loaded = load(self.source.name, self.image)
            omp = openmp.runtime()
            self._loaded = loaded
            self._omp = (omp.get_thread_num, omp.gomp_parallel)
            # CFUNCTYPE releases the GIL during the call
            self._run = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)(loaded.entry)
            self._ready = True

    def launch(
        self, grid: tuple[int, int, int], args: Sequence[Any], num_threads: int | None = None
    ) -> None:
        """Runs the grid; ``args`` are addresses and numbers in the order of ``params``.
        ``num_threads`` limits the threads of this launch.

        Nothing is checked here: callers have validated shapes and hold the memory.
        """
        if not self._ready:
            self.prepare()
        programs = grid[0] * grid[1] * grid[2]
        if not programs:
            return
        data = self._pack(*grid, *self._omp, *args)
        threads = openmp.max_threads()
        if threads > programs:
            threads = programs
        if num_threads is not None and threads > num_threads:
            threads = num_threads
        self._run(data, threads)

    def bind(
        self, grid: tuple[int, int, int], args: Sequence[Any], threads: int
    ) -> Callable[[], Any]:
        """A launch, ready to be called many times: on ``threads`` threads, whatever torch says by
        then. As for :meth:`launch`, the memory is the caller's to hold."""
        self.prepare()
        programs = grid[0] * grid[1] * grid[2]
        if not programs:
            return lambda: None
        data = self._pack(*grid, *self._omp, *args)
        return functools.partial(self._run, data, min(threads, programs))


def _code(type_: Type) -> str:
    assert isinstance(type_, DType)
    return "d" if type_.is_float else "q"
