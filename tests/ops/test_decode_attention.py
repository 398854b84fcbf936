"""The kernel of one token's attention against fp64."""

from __future__ import annotations

import pytest
import torch

from amxq.ops.attend import attend_one
from amxq.ops.rotary import rotate

ROOM = 300


@pytest.mark.parametrize(("heads", "kv_heads", "head"), [(6, 2, 16), (3, 3, 80), (7, 1, 64)])
def test_one_token(on: str, heads: int, kv_heads: int, head: int) -> None:
    generator = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    kernel, scale = attend_one(on, head), head**-0.5
    for length in (0, 1, 15, 16, 17, ROOM - 1):
        qkv, angles = random(1, 1, heads + 2 * kv_heads, head), random(2, 1, 1, head)
        keys, values = random(1, kv_heads, ROOM, head), random(1, kv_heads, ROOM, head)
        keys[:, :, length:] = values[:, :, length:] = float("nan")  # left over from a longer text
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
        q, k = rotate(q, k, *angles)
        want_keys = torch.cat([keys[:, :, :length], k], 2)
        want_values = torch.cat([values[:, :, :length], v.transpose(1, 2)], 2)
        y = torch.empty(1, heads, 1, head).bfloat16()
        tensors = (qkv, *angles, keys, values, y)
        numbers = (length, ROOM * head, kv_heads, scale)
        kernel.launch((heads, 1, 1), (*(t.data_ptr() for t in tensors), *numbers))
        assert torch.equal(keys[:, :, : length + 1], want_keys)
        assert torch.equal(values[:, :, : length + 1], want_values)
        assert keys[:, :, length + 1 :].isnan().all()
        wide = (t.double() for t in (q, want_keys, want_values))
        attention = torch.nn.functional.scaled_dot_product_attention
        want = attention(*wide, scale=scale, enable_gqa=True)
        size = want_values.abs().amax().double()
        assert ((y - want).abs() <= 1.01 * 2.0**-8 * want.abs() + 2.0**-18 * size).all()
