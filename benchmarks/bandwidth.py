"""How fast cores read memory: caches and DRAM, page sizes, prefetch hints, one and two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks import clock
from benchmarks.native import Buffer
from benchmarks.report import Row, quantile

_LOADS = [f"vmovdqa64 zmm{i}, [rsi + rax + {64 * i}]" for i in range(8)]
_BYTES_A_REPETITION = 256 << 20  # 2 to 20 ms
_PREFETCH_AHEAD = 2048


def bandwidth() -> list[Row]:
    """GB/s of 64-byte loads in one stream, all threads together: median and best of 7."""
    cases: list[tuple[str, int, bool, str]] = [
        (f"{size >> 10} KB a thread", size, True, "") for size in (32 << 10, 1 << 20, 16 << 20)
    ]
    for huge in (True, False):
        for hint in ("", "prefetcht0", "prefetchnta"):
            what = f"256 MB a thread, {2 if huge else 4} {'M' if huge else 'K'}B pages"
            cases.append((f"{what}, {hint}" if hint else what, 256 << 20, huge, hint))
    out = []
    for what, size, huge, hint in cases:
        hints = [f"{hint} [rsi + rax + {_PREFETCH_AHEAD + 64 * i}]" for i in range(8) if hint]
        # a power of two: the mask sends the stream back to the start
        body = [*hints, *_LOADS, "add rax, 512", f"and rax, {size - 1}"]
        code = clock.loop("\n".join(body), before="xor eax, eax")
        buffer = Buffer(2 * size, huge=huge)
        row: Row = {"what": what}
        for threads in (1, 2):
            rates = _read_rates(code, buffer, size, threads)
            row[f"{threads} thread{'s' * (threads > 1)}"] = quantile(rates, 0.5)
            row[f"best, {threads}"] = max(rates)
        out.append(row | {"2 MB pages, MB": huge_megabytes(buffer)})
    return out


def read_rate(threads: int) -> float:
    """Bytes a second that so many threads read together from memory, 2 MB pages, best of 7."""
    hints = [f"prefetcht0 [rsi + rax + {_PREFETCH_AHEAD + 64 * i}]" for i in range(8)]
    size = 256 << 20
    body = [*hints, *_LOADS, "add rax, 512", f"and rax, {size - 1}"]
    code = clock.loop("\n".join(body), before="xor eax, eax")
    return 1e9 * max(_read_rates(code, Buffer(threads * size, huge=True), size, threads))


def huge_megabytes(buffer: Buffer) -> int:
    """How much of a buffer the system has put on huge pages, in MB."""
    inside = False
    total = 0
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(x, 16) for x in first.split("-"))
                inside = low < buffer.address + buffer.size and high > buffer.address
            elif inside and first == "AnonHugePages:":
                total += int(line.split()[1])
    return total >> 10


def _read_rates(code: Callable[..., int], buffer: Buffer, size: int, threads: int) -> list[float]:
    """GB/s, one value a repetition; each thread reads its own part of the buffer."""
    start = threading.Barrier(threads)
    times: list[list[float]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        address = buffer.address + number * size
        code(size // 512, address, 0, 0)
        for _ in range(7):
            start.wait()
            begin = time.perf_counter_ns()
            code(_BYTES_A_REPETITION // 512, address, 0, 0)
            times[number].append(time.perf_counter_ns() - begin)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [sum(_BYTES_A_REPETITION / t for t in row) for row in zip(*times, strict=True)]
