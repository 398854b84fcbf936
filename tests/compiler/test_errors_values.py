"""Mistakes with names, types and shapes: which error, at which place, with which advice."""

from __future__ import annotations

import pytest
from mistakes import BF16, F32, I32, Cases, check, registering

import amxq
import amxq.language as tl

CASES: Cases = {}
wrong = registering(CASES)


# --- names ------------------------------------------------------------------------------


@wrong(F32)
@amxq.jit
def undefined_name(x):
    tl.store(x, undefined + 1)  # noqa: F821 # error: name 'undefined' is not defined |


@wrong(F32)
@amxq.jit
def undefined_function(x):
    tl.store(x, tl.softmax(x))  # error: has no attribute 'softmax' |


@wrong(F32, tl.int32)
@amxq.jit
def set_in_one_branch(x, n):
    if n > 0:
        value = 1.0
    tl.store(x, value)  # error: value is set in one branch |


@wrong(F32, tl.int32)
@amxq.jit
def set_in_a_loop_only(x, n):
    for i in range(n):
        value = i
    tl.store(x, value)  # error: value is set inside of a loop only | before the loop


@wrong(F32, tl.int32)
@amxq.jit
def index_after_the_loop(x, n):
    for i in range(n):
        tl.store(x + i, 0.0)
    tl.store(x, i)  # error: i is set inside of a loop only |


@wrong(F32, tl.int32)
@amxq.jit
def constant_that_a_loop_changes(x, n):
    previous = None
    for i in range(n):
        if previous is not None:  # error: previous is the constant None before this loop |
            tl.store(x, previous)
        previous = tl.load(x + i)


@wrong(F32)
@amxq.jit
def global_that_kernels_cannot_use(x):
    tl.store(x, CASES)  # error: CASES is .*which a kernel cannot use |


# --- types and shapes -------------------------------------------------------------------


@wrong(F32)
@amxq.jit
def shapes_that_do_not_broadcast(x):
    y = tl.arange(0, 16) + tl.arange(0, 8)  # error: \[16\] and \[8\] do not broadcast | 1
    tl.store(x, y)


@wrong(F32, tl.int32)
@amxq.jit
def block_size_of_the_run_time(x, BLOCK):
    at = tl.arange(0, BLOCK)  # error: arange | constants
    tl.store(x + at, 0.0)


@wrong(F32, tl.int32)
@amxq.jit
def shape_of_the_run_time(x, BLOCK):
    tile = tl.zeros((BLOCK, 4), tl.float32)  # error: not made of constants | constexpr
    tl.store(x, tile)


@wrong(F32, tl.int32)
@amxq.jit
def descriptor_of_the_run_time(x, BLOCK):
    tl.make_tensor_descriptor(x, [8], [1], [BLOCK])  # error: not made of constants | constexpr


@wrong(F32)
@amxq.jit
def load_of_a_number(x):
    tl.store(x, tl.load(tl.arange(0, 4)))  # error: expected a pointer .*got tile<4xi32> | pointers


@wrong(F32)
@amxq.jit
def float_offset(x):
    tl.store(x + 1.5, 0.0)  # error: cannot move a pointer by f32 | integers


@wrong(F32, BF16)
@amxq.jit
def sum_of_pointers(x, y):
    tl.store(x + y, 0.0)  # error: cannot move a pointer by ptr<f32> |


@wrong(F32)
@amxq.jit
def product_of_a_pointer(x):
    tl.store(x * 2, 0.0)  # error: expected numbers, got ptr<f32> |


@wrong(F32)
@amxq.jit
def mask_of_numbers(x):
    at = tl.arange(0, 8)
    tl.store(x + at, 0.0, mask=at)  # error: mask is tile<8xi32>, expected int1 | compare


@wrong(F32)
@amxq.jit
def mask_of_another_shape(x):
    at = tl.arange(0, 8)
    tl.store(x + at, 0.0, mask=tl.arange(0, 4) < 2)  # error: \[4\] to \[8\] |


@wrong(F32)
@amxq.jit
def store_of_a_larger_tile(x):
    tl.store(x, tl.arange(0, 8))  # error: cannot store tile<8x |


@wrong(F32)
@amxq.jit
def condition_of_numbers(x):
    tl.store(x, tl.where(1.5, 1.0, 0.0))  # error: condition of where .*expected int1 |


@wrong(F32, tl.int32)
@amxq.jit
def branch_on_a_pointer(x, n):
    if x:  # error: condition is ptr<f32>, expected a scalar |
        tl.store(x, 1.0)


@wrong(F32)
@amxq.jit
def branch_on_a_tile(x):
    if tl.arange(0, 8) > 3:  # error: condition is tile<8xi1>, expected a scalar | tl.max
        tl.store(x, 1.0)


@wrong(F32)
@amxq.jit
def number_that_does_not_fit(x):
    at = tl.arange(0, 8).to(tl.int8)
    tl.store(x + (at + 300), 1.0)  # error: 300 does not fit i8 | wider


@wrong(F32)
@amxq.jit
def bits_of_floats(x):
    tl.store(x, tl.load(x) & 1)  # error: bit operations need integers, got f32 |


@wrong(F32)
@amxq.jit
def inverted_float(x):
    tl.store(x, ~tl.load(x))  # error: ~ needs integers, got f32 |


@wrong(F32)
@amxq.jit
def whole_division_of_floats(x):
    tl.store(x, tl.load(x) // 2.0)  # error: // needs integers | use /


@wrong(I32)
@amxq.jit
def root_of_an_integer(x):
    tl.store(x, tl.sqrt(tl.load(x)))  # error: sqrt needs floats, got i32 | to\(tl.float32\)


@wrong(F32)
@amxq.jit
def cast_to_nothing(x):
    tl.store(x, tl.load(x).to(3))  # error: the constant 3 is not a type | tl.float32


@wrong(F32)
@amxq.jit
def reduction_of_an_axis_too_many(x):
    tile = tl.zeros((4, 8), tl.float32)
    tl.store(x, tl.sum(tile, 2))  # error: axis 2 of a tile of shape \[4, 8\] |


@wrong(F32)
@amxq.jit
def reshape_to_another_count(x):
    tile = tl.zeros((4, 8), tl.float32)
    tl.store(x, tile.reshape(4, 4))  # error: cannot reshape \[4, 8\] to \[4, 4\] | 32 .* 16


@wrong(F32)
@amxq.jit
def permutation_that_repeats(x):
    tile = tl.zeros((4, 8), tl.float32)
    tl.store(x, tl.permute(tile, 0, 0))  # error: permute .*\[4, 8\] by \[0, 0\] | each axis once


@wrong(F32)
@amxq.jit
def bits_of_another_size(x):
    tl.store(x, tl.load(x).to(tl.int16, bitcast=True))  # error: bitcast of f32 to i16 | bits


@wrong(F32)
@amxq.jit
def exponential_of_an_integer(x):
    tl.store(x, tl.exp(tl.arange(0, 8)))  # error: exp needs floats | float32


@wrong(BF16)
@amxq.jit
def atomic_sum_of_bf16(x):
    tl.atomic_add(x, 1.0)  # error: atomic operations on bf16 | float32


@wrong(F32)
@amxq.jit
def atomic_or_of_floats(x):
    tl.atomic_or(x, 1.0)  # error: atomic or needs integers |


@wrong(F32)
@amxq.jit
def mask_of_a_block_pointer(x):
    block = tl.make_block_ptr(x, (8,), (1,), (0,), (8,), (0,))
    tl.load(block, mask=tl.arange(0, 8) < 4)  # error: takes no mask | boundary_check


@wrong(F32)
@amxq.jit
def block_pointer_of_uneven_rank(x):
    tl.make_block_ptr(x, (8, 8), (1,), (0, 0), (8, 8), (1, 0))  # error: 2, 1, 2 sizes | one of each


@wrong(F32, tl.int32)
@amxq.jit
def tuple_that_changes(x, n):
    pair = (n, n)
    while n > 0:  # error: pair changes its type in this loop |
        pair = (n, n, n)
        n -= 1
    tl.store(x, pair[0])


@wrong(F32)
@amxq.jit
def reduction_of_a_number(x):
    tl.store(x, tl.sum(3, 0))  # error: expected a tile of numbers, got the constant 3|got i32 |


@wrong(F32, I32)
@amxq.jit
def axis_of_the_run_time(x, n):
    tl.store(x, tl.sum(tl.arange(0, 8), tl.load(n)))  # error: the axis is i32, it must be a const |


@wrong(F32, tl.int32)
@amxq.jit
def offsets_of_another_rank(x, n):
    block = tl.make_tensor_descriptor(x, [8, 8], [8, 1], [4, 4])
    tl.store(x, block.load((n, n, 3)))  # error: expected 2 offsets, got \(i32, i32, 3\) |


@wrong(F32)
@amxq.jit
def negative_size(x):
    tl.store(x, tl.zeros((-4,), tl.float32))  # error: shape \[-4\] | each of 1 or more


@wrong(F32, tl.int32)
@amxq.jit
def division_by_a_constant_zero(x, n):
    tl.store(x + n // 0, 1.0)  # error: // by the constant 0 |


@wrong(F32, tl.int32)
@amxq.jit
def remainder_of_a_constant_zero(x, n):
    tl.store(x + n % 0, 1.0)  # error: % by the constant 0 |


@wrong(F32)
@amxq.jit
def fourth_dimension(x):
    tl.store(x, tl.zeros((2, 2, 2, 2), tl.float32))  # error: shape |


@wrong(F32)
@amxq.jit
def empty_range(x):
    tl.store(x + tl.arange(4, 4), 0.0)  # error: arange from the constant 4 | start < end


@wrong(F32)
@amxq.jit
def slice_of_a_tile(x):
    tl.store(x, tl.arange(0, 8)[0])  # error: tiles are indexed with : and None only | None


@wrong(F32)
@amxq.jit
def axis_of_the_grid(x):
    tl.store(x + tl.program_id(3), 0.0)  # error: axis of the grid is the constant 3 | 0, 1 or 2


@wrong(F32, tl.int32)
@amxq.jit
def type_that_changes_in_a_loop(x, n):
    total = 0
    for i in range(n):  # error: total changes its type in this loop, from i32 to f32 | \.to\(\)
        total += tl.load(x + i)
    tl.store(x, total)


@wrong(F32, tl.int32)
@amxq.jit
def shape_that_changes_in_a_loop(x, n):
    tile = tl.zeros((4,), tl.float32)
    for _ in range(n):  # error: tile changes its type in this loop |
        tile = tile[None, :] + tl.zeros((2, 4), tl.float32)
    tl.store(x, 0.0)


@wrong(F32, tl.int32)
@amxq.jit
def type_that_depends_on_a_branch(x, n):
    value = 1
    if n > 0:  # error: value changes its type in the branches |
        value = tl.load(x + tl.arange(0, 4))
    tl.store(x, value)


@pytest.mark.parametrize("name", CASES)
def test_mistake(name: str) -> None:
    check(*CASES[name], __file__)
