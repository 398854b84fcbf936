"""Memory for packed weights: separate tensors, whatever mapping they share."""

from __future__ import annotations

import io
import platform
import re
from pathlib import Path

import pytest
import torch

from amxq.runtime import cpu, memory


@pytest.mark.parametrize("huge", ["1", "0"])
@pytest.mark.parametrize("shape", [(0, 3), (5,), (7, 3, 64), (17 << 20,)])
def test_shape_dtype_and_alignment(
    monkeypatch: pytest.MonkeyPatch, huge: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setenv("AMXQ_HUGE_PAGES", huge)
    for dtype in (torch.uint8, torch.int32, torch.bfloat16):
        tensor = memory.empty(shape, dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


def test_tensors_do_not_overlap_and_outlive_each_other() -> None:
    tensors = [memory.empty((300_001,), torch.int32).fill_(i) for i in range(20)]
    for i in range(0, 20, 2):
        tensors[i] = torch.empty(0)
    more = [memory.empty((100_000,), torch.int32).fill_(-1) for _ in range(20)]
    assert all(bool((tensors[i] == i).all()) for i in range(1, 20, 2)) and len(more) == 20


def test_saving_a_tensor_saves_it_alone() -> None:
    small = memory.empty((10,), torch.int32).zero_()
    file = io.BytesIO()
    torch.save(small, file)
    assert file.tell() < 10_000


def test_joined_pages_hold_what_is_written_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_HUGE_PAGES", "1")
    tensors = [memory.empty((3 << 20,), torch.int32).fill_(i) for i in range(8)]
    thread = memory.use_huge_pages()
    assert thread is not None and memory.use_huge_pages() is None
    sums = [int(tensor.add_(1).sum()) for tensor in tensors]
    del tensors[0]
    thread.join()
    assert sums == [(i + 1) * (3 << 20) for i in range(8)]
    assert all(bool((tensor == i + 2).all()) for i, tensor in enumerate(tensors))


def test_pages_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_HUGE_PAGES", "1")
    tensor = memory.empty((32 << 20,), torch.uint8).fill_(1)
    thread = memory.use_huge_pages()
    assert thread is not None
    thread.join()
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for text in maps[1:]:
        begin, end = (int(word, 16) for word in text.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            joined = re.search(r"AnonHugePages: +(\d+) kB", text)
    if cpu.huge_page_mode() in (None, "never") or _linux() < (6, 1):
        pytest.skip("this system does not join pages when asked")
    assert joined is not None and int(joined[1]) > 0


def _linux() -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", platform.release())[:2])
