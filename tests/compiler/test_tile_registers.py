"""Tile registers: any number of rows fits eight of them, and dots of one kernel share them."""

from __future__ import annotations

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.passes.tile_registers import REGISTERS, numbers, row_tiles, shapes, united
from amxq.runtime.targets import available_targets, target


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [*range(1, 35), 47, 48, 100])
def test_every_dot_fits_alone(rows: int, width: int) -> None:
    wanted = shapes(rows, width)
    config = united((), wanted)
    assert config is not None and len(config) <= REGISTERS
    assert all(0 < r <= 16 and 0 < width <= 64 for r, width in config)
    found = numbers(config, wanted)
    assert len(set(found)) == len(wanted) and [config[n] for n in found] == list(wanted)
    assert sum(row_tiles(rows)) == min(rows, 32)


def test_dots_share_registers_of_the_same_shape() -> None:
    small, large = shapes(4, 64), shapes(64, 64)
    assert united(large, large) == large
    assert united(large, small) is None  # three of four rows beside eight of sixteen
    both = united(small, shapes(16, 64))
    assert both is not None and len(both) == 3 + 5
    assert united(both, shapes(16, 32)) is None


@amxq.jit
def two_dots(x, qweight, scales, out, M: tl.constexpr, FIRST: tl.constexpr):
    """Rows 0 to FIRST - 1 by one dot, the others by another."""
    w = tl.int4_tensor(qweight, scales, None, [64, 32], 64, [64, 32])
    q = w.load([0, 0])
    a = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [FIRST, 64])
    b = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [M - FIRST, 64])
    y = tl.make_tensor_descriptor(out, [M, 32], [32, 1], [FIRST, 32])
    z = tl.make_tensor_descriptor(out, [M, 32], [32, 1], [M - FIRST, 32])
    y.store([0, 0], tl.dot(a.load([0, 0], boundary_check=()), q))
    z.store([FIRST, 0], tl.dot(b.load([FIRST, 0], boundary_check=()), q))


@pytest.mark.parametrize(
    ("m", "first", "lowerings"),
    [(20, 16, ["amx", "amx"]), (64, 32, ["amx", "amx"]), (68, 64, ["amx", "vdpbf16ps"])],
)
def test_dots_of_two_shapes(m: int, first: int, lowerings: list[str]) -> None:
    kinds = {"x": torch.bfloat16, "qweight": torch.uint8, "scales": torch.float32}
    compiled = two_dots.warmup(**kinds, out=torch.float32, M=m, FIRST=first, target="amx")
    chosen = compiled.asm["tir"].split("// after choose_dot")[1].split("// after")[0]
    assert [part.split()[0] for part in chosen.split("lowering=")[1:]] == lowerings
    if "amx" not in available_targets():
        pytest.skip("compiled; running it needs AMX")
    q = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    w = amxq.pack(q, torch.ones(32, 1), format="plain")
    x = torch.randint(-8, 8, (m, 64)).bfloat16()
    out = torch.zeros(m, 32)
    with target("amx"):
        two_dots[(1,)](x, w.qweight, w.scales, out, M=m, FIRST=first)
    assert torch.equal(out, x.float() @ (q.float().T - 8))


@amxq.jit
def twice(x, qweight, scales, out, M: tl.constexpr):
    w = tl.int4_tensor(qweight, scales, None, [64, 32], 64, [64, 32])
    a = tl.make_tensor_descriptor(x, [M, 64], [64, 1], [M, 64])
    part = tl.dot(a.load([0, 0], boundary_check=()), w.load([0, 0]))
    y = tl.make_tensor_descriptor(out, [M, 2, 32], [64, 32, 1], [M, 2, 32])
    y.store([0, 0, 0], tl.broadcast_to(tl.expand_dims(part, 1), (M, 2, 32)))


@pytest.mark.amx
@pytest.mark.parametrize("m", [16, 64])
def test_a_result_that_is_broadcast(m: int) -> None:
    """Its chunks of rows are not those of what it is repeated to."""
    q = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    w = amxq.pack(q, torch.ones(32, 1), format="plain")
    x, out = torch.randint(-8, 8, (m, 64)).bfloat16(), torch.zeros(m, 2, 32)
    with target("amx"):
        twice[(1,)](x, w.qweight, w.scales, out, M=m)
    want = x.float() @ (q.float().T - 8)
    assert torch.equal(out, want[:, None].expand(m, 2, 32))
