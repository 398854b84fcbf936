"""Memory for packed weights: separate tensors, whatever mapping they share."""

from __future__ import annotations

import io

import pytest
import torch

from amxq.runtime import memory


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
