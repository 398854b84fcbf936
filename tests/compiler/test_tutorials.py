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
