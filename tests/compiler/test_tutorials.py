"""The tutorials' kernels, on every target, against fp64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


def tutorial(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(100, 70, 130), (64, 128, 256)])
def test_matrix_multiplication(
    on_each: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tutorial("03_matrix_multiplication").check(*shape, dtype)


@pytest.mark.parametrize("shape", [(3, 17, 5), (70, 300, 260)])
def test_packed_matrix_multiplication(on_each: str, shape: tuple[int, int, int]) -> None:
    tutorial("03_packed_matrix_multiplication").check(*shape)


@pytest.mark.parametrize("size", [1, 1000, 20000])
def test_vector_addition(on: str, size: int) -> None:
    tutorial("01_vector_add").check(size)


@pytest.mark.parametrize("shape", [(7, 781), (3, 32)])
def test_softmax(on: str, shape: tuple[int, int]) -> None:
    tutorial("02_fused_softmax").check(*shape)


@pytest.mark.parametrize("shape", [(37, 200), (5, 1300)])
def test_layer_norm_forward_and_backward(on: str, shape: tuple[int, int]) -> None:
    torch.set_num_threads(2)
    tutorial("05_layer_norm").check(*shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(on_each: str, dtype: torch.dtype, causal: bool) -> None:
    tutorial("06_attention").check(1, 2, 100, 64, dtype, causal)
