"""Activations as the kernels take them: contiguous bf16 rows.

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


def bf16_parts(x: torch.Tensor, perm: torch.Tensor | None, columns: int) -> torch.Tensor:
    """bf16 [parts · M, columns]: part s of row m at row s·M + m; columns beyond K are zero.

    Args:
        x: [M, K] bf16, fp16 or fp32, any strides.
        perm: int32 [K]: the order of the input features, or None.
        columns: K rounded up to whole blocks of the packed weight.
    """
    if perm is not None:
        x = permuted(x, perm)
    M, K = x.shape
    parts = split_count(x.dtype)
    out = torch.empty((parts, M, columns), dtype=torch.bfloat16)
    if columns > K:
        out[:, :, K:] = 0
    if parts == 1:
        out[0, :, :K] = x
        return out.view(M, columns)
    rest = x.to(torch.float32, copy=True)
    infinite = rest.isinf()
    for part in range(parts):
        # cutting the low bits off never overflows, and the remainder is exact
        high = (rest.contiguous().view(torch.int32) & -65536).view(torch.float32)
        out[part, :, :K] = high
        rest = (rest - high).masked_fill_(infinite, 0)
    return out.view(parts * M, columns)


def permuted(x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """x [M, K] with its columns in the order of perm. Raises LayoutError if perm is none."""
    try:
        return x.index_select(1, perm)
    except (IndexError, RuntimeError) as problem:
        raise LayoutError(f"perm is not a permutation of x's features: {problem}") from None
