"""Activations as the kernels take them: contiguous rows, of bf16 for precision "bf16".

An fp16 number is the sum of two bf16 numbers, an fp32 number of three (8 + 8 + 8 bits of
significand), so a product with an integer weight stays exact: the parts are multiplied one
after the other into the same fp32 sums.
"""

from __future__ import annotations

import torch

from amxq.errors import LayoutError

_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def split_count(dtype: torch.dtype) -> int:
    """How many bf16 numbers make up one number of this dtype."""
    return _PARTS[dtype]


def ordered_rows(x: torch.Tensor, perm: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Contiguous [M, columns] of x's dtype; columns beyond K are zero.

    Args:
        x: [..., K] bf16, fp16 or fp32, any strides.
        perm: int32 [K]: the order of the input features, or None.
        columns: K rounded up to whole blocks of the packed weight.
    """
    K = x.shape[-1]
    x = x.reshape(-1, K)
    if perm is not None:
        x = permuted(x, perm)
    return torch.nn.functional.pad(x, (0, columns - K)) if columns > K else x.contiguous()


def permuted(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """x [M, K] with its columns in the order of perm. Raises LayoutError if perm is none."""
    try:
        return x.index_select(1, perm)
    except (IndexError, RuntimeError) as problem:
        raise LayoutError(f"perm is not a permutation of x's features: {problem}") from None
