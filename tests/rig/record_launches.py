"""Records launches of amx kernels under the emulator, to be repeated on another machine:

    python tests/rig/record_launches.py OUT

writes for each launch its object, the memory that its arguments point to before and after, and
index.json: kernel, grid, arguments (a number, or [region, offset]). Real weights, from
../shared/fixtures.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

importlib.import_module("tests.without_amx")  # before torch is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import amxq  # noqa: E402
from amxq import emulator  # noqa: E402
from amxq.ir.types import PointerType  # noqa: E402
from amxq.ops import checks, expert_checks, schedule  # noqa: E402
from amxq.runtime import cpu  # noqa: E402
from amxq.runtime.compiler import CompiledKernel, _code  # noqa: E402

FIXTURES = ROOT.parent / "shared" / "fixtures"


class Recorder:
    """While :meth:`active`, every launch is carried out and written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cpu = "spr"  # the CPU of the rig that the launches are for
        self.index: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def active(self, what: str) -> Iterator[None]:
        launch = CompiledKernel.launch

        def recorded(kernel: CompiledKernel, grid: Any, args: Any, num_threads: Any = None) -> None:
            self._write(what, kernel, grid, args, lambda: launch(kernel, grid, args, num_threads))

        CompiledKernel.launch = recorded  # type: ignore[method-assign]
        try:
            yield
        finally:
            CompiledKernel.launch = launch  # type: ignore[method-assign]

    def _write(self, what: str, kernel: CompiledKernel, grid: Any, args: Any, run: Any) -> None:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.layout is torch.strided and t.is_cpu
        }
        regions: list[Any] = []
        arguments: list[Any] = []
        for value, type_ in zip(args, kernel.params.values(), strict=True):
            if not isinstance(type_, PointerType):
                arguments.append(value)
                continue
            (start,) = (s for s, x in storages.items() if s <= value < s + x.nbytes())
            storage = storages[start]
            if start not in [s for s, _ in regions]:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                regions.append((start, flat))
            number = [s for s, _ in regions].index(start)
            arguments.append([number, value - start])
        before = {f"before{i}": flat.copy() for i, (_, flat) in enumerate(regions)}
        run()
        after = {f"after{i}": flat for i, (_, flat) in enumerate(regions)}
        stem = f"{len(self.index):03}"
        (self.folder / f"{stem}.o").write_bytes(kernel.image)
        np.savez_compressed(self.folder / f"{stem}.npz", **before, **after)
        codes = ["Q" if isinstance(t, PointerType) else _code(t) for t in kernel.params.values()]
        self.index.append(
            {
                "stem": stem,
                "cpu": self.cpu,
                "what": what,
                "kernel": kernel.source.name,
                "grid": list(grid),
                "arguments": arguments,
                "codes": "".join(codes),
                "regions": len(regions),
            }
        )

    def close(self) -> None:
        (self.folder / "index.json").write_text(json.dumps(self.index, indent=1))


def layer(folder: str, name: str, format: str, group: int) -> amxq.PackedWeight:
    """One layer of a real model, packed."""
    tensors = load_file(FIXTURES / "real_layers" / folder / "layers.safetensors")
    parts = [tensors[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros")]
    return amxq.pack(*parts, format=format, group_size=group)


AWQ = ("smollm2-awq-g64-asym-i20", "model.layers.20.self_attn.v_proj", "awq", 64)
GPTQ = ("smollm2-ar-g128-sym-rtn", "model.layers.3.self_attn.o_proj", "gptq", 128)
CASES = [  # layer, rows, dtype; smallest first
    (AWQ, 1, torch.bfloat16),
    (AWQ, 7, torch.float16),
    (AWQ, 40, torch.bfloat16),
    (GPTQ, 1, torch.bfloat16),
    (GPTQ, 16, torch.float32),
    (GPTQ, 24, torch.bfloat16),
    (GPTQ, 130, torch.bfloat16),
]


def experts(folder: str, prefix: str, number: int) -> tuple[amxq.PackedWeight, amxq.PackedWeight]:
    """w13 and w2 of a mixture: packed rows are in panels of 32, so gate and up just follow."""

    def joined(parts: list[amxq.PackedWeight], join: Any) -> amxq.PackedWeight:
        return amxq.PackedWeight(*(None if x[0] is None else join(x) for x in zip(*parts)))

    def load(expert: int, part: str) -> amxq.PackedWeight:
        return amxq.load_layer(FIXTURES / "checkpoints" / folder, f"{prefix}.{expert}.{part}_proj")

    w13 = [joined([load(e, "gate"), load(e, "up")], torch.cat) for e in range(number)]
    w2 = [load(e, "down") for e in range(number)]
    return joined(w13, torch.stack), joined(w2, torch.stack)


MIXTURE = ("tiny-mixtral-ar-g128-asym", "model.layers.0.block_sparse_moe.experts", 4)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = Recorder(folder)
    for source, rows, dtype in CASES:
        weight = layer(*source)
        x = torch.randn(rows, weight.in_features).to(dtype)
        for precision in checks.PRECISIONS:
            with recorder.active(f"linear {precision}, {source[0]}, {rows} rows of {dtype}"):
                amxq.linear(x, *weight, precision=precision)
    w13, w2 = experts(*MIXTURE)
    for rows in (1, 30):
        x = torch.randn(rows, w13.in_features).bfloat16()
        weights, ids = torch.rand(rows, 2), torch.randint(0, MIXTURE[2], (rows, 2))
        for precision in expert_checks.PRECISIONS:
            with recorder.active(f"experts {precision}, {MIXTURE[0]}, {rows} rows"):
                amxq.fused_moe(x, w13, w2, weights, ids, precision=precision)
    recorder.cpu = "gnr"
    with_fp16 = cpu.flags() | {"amx_fp16"}
    cpu.flags = lambda: with_fp16  # type: ignore[assignment]
    schedule.plan.cache_clear()
    for source, rows in ((AWQ, 7), (GPTQ, 40)):
        weight = layer(*source)
        x = torch.randn(rows, weight.in_features).half()
        with recorder.active(f"linear, {source[0]}, {rows} rows of fp16 with AMX-FP16"):
            amxq.linear(x, *weight)
    recorder.close()
    assert all(emulator.counts()[name] for name in ("TDPBF16PS", "TDPBSSD", "TDPFP16PS"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
