"""How fast one row of x can be multiplied with packed int4 weights that come from memory.

Three ways through the same bytes, 64 of them 16 columns × 8 values of k: tiles, VDPBF16PS, and
fp32 FMA. At M = 1 this is a race against memory; the hint that fetches ahead decides it.
"""

from __future__ import annotations

import struct
import time

from benchmarks import clock
from benchmarks.native import Buffer
from benchmarks.report import Row, quantile

_SIZE = 384 << 20
_TILES = "\n".join(f"tileloadd tmm{t}, [rsi + rbx + {1024 * t}]" for t in range(8))
_TABLE = "vmovdqu64 zmm31, [rsi]"


def _tiles(columns: int) -> tuple[list[str], int]:
    """One row against ``columns`` B tiles a step, dequantised two steps ahead, three steps."""
    body = []
    for step in range(3):
        make, use = step * columns * 1024, (step - 2) % 3 * columns * 1024
        body.append(f"tileloadd tmm{columns}, [rsi + rbx + {32768 + step * 1024}]")
        for j in range(columns):
            for q in range(4):
                body.append(f"vmovdqa64 zmm0, [rdi + {((step * columns + j) * 4 + q) * 64}]")
                for i in range(4):
                    body += [f"vpsrlw zmm{i}, zmm0, {4 * i}"] if i else []
                    body.append(f"vpermw zmm{4 + i}, zmm{i}, zmm31")
                    target = make + j * 1024 + 256 * q + 64 * i
                    body.append(f"vmovdqa64 [rsi + {target}], zmm{4 + i}")
            body.append(f"tileloadd tmm{7 - j % 2}, [rsi + rbx + {use + 1024 * j}]")
            body.append(f"tdpbf16ps tmm{j}, tmm{columns}, tmm{7 - j % 2}")
    return body, 3 * columns * 256


def _vectors(values: int, shift: str, lookup: str, multiply: str) -> tuple[list[str], int]:
    """``values`` shifts, table look-ups and multiplies for each 64 bytes, eight times."""
    body = []
    for q in range(8):
        body.append(f"vmovdqa64 zmm0, [rdi + {64 * q}]")
        for i in range(values):
            body += [f"{shift} zmm1, zmm0, {4 * i}"] if i else []
            body.append(f"{lookup} zmm2, zmm{1 if i else 0}, zmm31")
            number = values * q + i
            x = f"dword ptr [rsi + {4 * number}]{{1to16}}"
            body.append(f"{multiply} zmm{8 + number % 12}, zmm2, {x}")
    return body, 512


_WAYS = {
    "tiles, 32 columns": _tiles(2),
    "tiles, 64 columns": _tiles(4),
    "VPERMW, VDPBF16PS": _vectors(4, "vpsrlw", "vpermw", "vdpbf16ps"),
    "VPERMPS, FMA": _vectors(8, "vpsrld", "vpermps", "vfmadd231ps"),
}


def stream() -> list[Row]:
    """GB/s of packed weights, one thread: median and best of 5, by distance of PREFETCHT0."""
    import numpy as np

    random = np.random.default_rng(0)
    weights, near, config = Buffer(_SIZE + (1 << 20)), Buffer(1 << 20), Buffer(4096)
    weights.fill(random.integers(0, 256, 1 << 20, np.uint8).tobytes())
    numbers = random.standard_normal(1 << 19, np.float32).view(np.uint32) >> 16
    near.fill(numbers.astype(np.uint16).tobytes())
    # one row in A and C
    rows = [1] * 6 + [16, 16] + [0] * 8
    tiles = struct.pack("<BB14x16H16B", 1, 0, *([64] * 8 + [0] * 8), *rows)
    config.fill(tiles.ljust(4096, b"\0"))
    out = []
    for name, (body, step) in _WAYS.items():
        row: Row = {"what": name}
        for ahead in (0, 1024, 4096):
            hints = [f"prefetcht0 [rdi + {ahead + at}]" for at in range(0, step, 64) if ahead]
            code = clock.loop(
                "\n".join([*hints, *body, f"add rdi, {step}"]),
                before=f"ldtilecfg [r12]\nmov rbx, 64\n{_TILES}\n{_TABLE}",
                after="tilerelease",
            )
            rates = []
            for _ in range(5):
                begin = time.perf_counter_ns()
                code(_SIZE // step, near.address, weights.address, config.address)
                rates.append(_SIZE / (time.perf_counter_ns() - begin))
            row[f"{ahead} ahead"] = quantile(rates, 0.5)
            row[f"best, {ahead}"] = max(rates)
        out.append(row)
    return out
