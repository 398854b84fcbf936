"""Mistakes at the limits: sizes, constants that cannot be computed, what loops cannot carry."""

from __future__ import annotations

import pytest
import torch
from mistakes import BF16, F32, U8, Cases, check, registering

import amxq
import amxq.language as tl

CASES: Cases = {}
wrong = registering(CASES)


@wrong(F32)
@amxq.jit
def long_tile(x):
    tl.store(x + tl.arange(0, 1 << 33), 1.0)  # error: is too large: a tile has at most | smaller


@wrong(F32)
@amxq.jit
def scratch_memory(x):
    a = tl.make_tensor_descriptor(x, [640, 512], [512, 1], [640, 512])
    total = tl.zeros((640, 512), tl.float32)
    for _ in range(2):  # error: need more than 1048576 bytes of scratch memory | smaller
        total += a.load([0, 0])
    a.store([0, 0], total)


@wrong(F32)
@amxq.jit
def axis_that_is_a_bool(x):
    tl.store(x, tl.program_id(True))  # error: axis of the grid is .* True | 0, 1 or 2


@wrong(F32)
@amxq.jit
def constant_division_by_zero(x):
    tl.store(x, tl.cdiv(3, 0))  # error: ZeroDivisionError |


@wrong(F32)
@amxq.jit
def constant_without_end(x):
    tl.store(x, 1 << (1 << 62))  # error: OverflowError |


@wrong(F32)
@amxq.jit
def constant_beyond_floats(x):
    tl.store(x, tl.load(x) + (1 << 2000))  # error: OverflowError |


@wrong(U8, BF16, F32)
@amxq.jit
def carried_int4(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 32], 32, [32, 32])
    b = w.load([0, 0])
    for k in range(0, 64, 32):  # error: b is a packed int4 tile, which loops and branches | load it
        b = w.load([k, 0])
    tl.store(x + tl.arange(0, 1), tl.sum(tl.dot(tl.zeros((1, 32), tl.bfloat16), b), 1))


@wrong(U8, BF16, F32)
@amxq.jit
def int4_shape(q, s, x):
    w = tl.int4_tensor(q, s, None, [64], 32, [32, 32])  # error: shape of an int4 tensor .* two |
    tl.store(x, w.scales([0, 0]))


@wrong(U8, BF16, F32)
@amxq.jit
def int4_offsets(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 32], 32, [32, 32])
    tl.store(x, w.scales([0]))  # error: offsets of an int4 tensor .* expected two |


@wrong(F32)
@amxq.jit
def zeros_of_another_shape(x):
    tl.store(x + tl.arange(0, 4), tl.zeros((8,), tl.float32))  # error: broadcast shape \[8\] to |


@wrong(F32)
@amxq.jit
def tile_mask_of_a_scalar(x):
    tl.store(x, 1.0, tl.arange(0, 4) < 2)  # error: mask is tile<4xi1>, but the pointer is |


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_explained(name):
    check(*CASES[name], __file__)


def test_parameters_are_plain():
    def kernel(*x):
        pass

    with pytest.raises(amxq.errors.CompilationError, match="is not supported") as caught:
        amxq.jit(kernel)
    assert caught.value.file == __file__ and caught.value.line


@amxq.jit
def stores(x, value):
    tl.store(x, value)


@pytest.mark.parametrize("args", [(torch.float32, 1), (torch.zeros(1), tl.int32)])
def test_types_stand_for_arguments_in_warmup_only(args):
    stores.warmup(*args)
    with pytest.raises(amxq.errors.DTypeError, match="kernels take tensors, numbers and None"):
        stores[(1,)](*args)


NOT_A_NUMBER = float("nan")


@amxq.jit
def captures_nan(x):
    tl.store(x, NOT_A_NUMBER)


def test_a_captured_nan_has_not_changed():
    x = torch.zeros(1)
    for _ in range(2):
        captures_nan[(1,)](x)
    assert x.isnan().all()
