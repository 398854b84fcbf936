"""Mistakes with dots and descriptors."""

from __future__ import annotations

import pytest
from mistakes import BF16, F32, I32, U8, Cases, check, registering

import amxq
import amxq.language as tl

CASES: Cases = {}
wrong = registering(CASES)


# --- dot --------------------------------------------------------------------------------


@wrong(F32)
@amxq.jit
def inner_dimensions(x):
    a, b = tl.zeros((4, 8), tl.float32), tl.zeros((4, 8), tl.float32)
    tl.store(x, tl.dot(a, b))  # error: dot of \[4, 8\] and \[4, 8\]: the inner dimensions differ |


@wrong(F32)
@amxq.jit
def integers_of_floats(x):
    a = tl.zeros((8, 8), tl.float32)
    tl.store(x, tl.dot(a, a, out_dtype=tl.int32))  # error: out_dtype .* i32 | f32 or bf16 or f16


@wrong(F32)
@amxq.jit
def wider_than_the_sum(x):
    a = tl.zeros((8, 8), tl.bfloat16)
    tl.store(x, tl.dot(a, a, out_dtype=tl.float64))  # error: out_dtype .* f64 | bf16 adds up in f32


@wrong(F32)
@amxq.jit
def no_type_of_a_dot(x):
    a = tl.zeros((8, 8), tl.float64)
    tl.store(x, tl.dot(a, a, out_dtype=64))  # error: out_dtype .* 64 | expected f64 or bf16


@wrong(U8, BF16, F32)
@amxq.jit
def floats_of_integers(q, s, x):
    b = tl.int4_tensor(q, s, None, [64, 64], 32, [32, 32]).load([0, 0])
    a = tl.zeros((4, 32), tl.int8)
    tl.store(x, tl.dot(a, b, out_dtype=tl.float32))  # error: out_dtype .* f32 | i8 adds up in i32


@wrong(F32)
@amxq.jit
def transposed_vector(x):
    a = tl.arange(0, 8)
    tl.store(x, tl.trans(a))  # error: cannot transpose tile<8xi32> | tile\[:, None\]


@wrong(F32)
@amxq.jit
def transposed_number(x):
    tl.store(x, tl.load(x).T)  # error: cannot transpose f32 | rank 2 or 3


@wrong(F32)
@amxq.jit
def dot_of_vectors(x):
    a, b = tl.zeros((8,), tl.float32), tl.zeros((8, 8), tl.float32)
    tl.store(x, tl.dot(a, b))  # error: a of dot is tile<8xf32>, expected a tile of rank 2 |


@wrong(F32)
@amxq.jit
def dot_of_numbers(x):
    tl.store(x, tl.dot(2.0, 3.0))  # error: a of dot is f32, expected a tile of rank 2 |


@wrong(F32)
@amxq.jit
def dot_of_mixed_types(x):
    a, b = tl.zeros((4, 8), tl.bfloat16), tl.zeros((8, 4), tl.float32)
    tl.store(x, tl.dot(a, b))  # error: dot of bf16 and f32 is not defined | bf16 or int8 with int4


@wrong(F32)
@amxq.jit
def int8_times_int8(x):
    a, b = tl.zeros((4, 8), tl.int8), tl.zeros((8, 32), tl.int8)
    tl.store(x, tl.dot(a, b))  # error: dot of i8 and i8 is not defined | int8 with int4


@wrong(F32)
@amxq.jit
def order_of_twelve(x):
    tl.store(x, tl.int4_order(tl.zeros((4, 12), tl.int8)))  # error: tile<4x12xi8>: .* eights |


@wrong(F32)
@amxq.jit
def accumulator(x):
    a, b = tl.zeros((4, 8), tl.float32), tl.zeros((8, 4), tl.float32)
    tl.store(x, tl.dot(a, b, 0.0))  # error: acc of dot is f32, expected tile<4x4xf32> |


@wrong(U8, BF16, F32)
@amxq.jit
def int4_block(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [12, 32])  # error: \[12, 32\] | BLOCK_K % 8
    tl.store(x, w.scales([0, 0]))


@wrong(I32, BF16, F32)
@amxq.jit
def int4_pointer(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [32, 32])  # error: i32>, expected ptr<u8> |
    tl.store(x, w.scales([0, 0]))


@wrong(U8, BF16, F32)
@amxq.jit
def int4_zeros(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [32, 32])
    tl.store(x + tl.arange(0, 32), w.zeros([0, 0]))  # error: no zero points | has_zeros


@wrong(U8, BF16, F32)
@amxq.jit
def arithmetic_on_int4(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [32, 32])
    tl.store(x, w.load([0, 0]) + 1)  # error: packed int4 tile | dot


# --- descriptors ------------------------------------------------------------------------


@wrong(F32)
@amxq.jit
def last_stride(x):
    tl.make_tensor_descriptor(x, [8, 8], [1, 8], [4, 4])  # error: last stride |


@wrong(F32)
@amxq.jit
def rank_of_a_descriptor(x):
    tl.make_tensor_descriptor(x, [8], [8, 1], [4, 4])  # error: 1 sizes, 2 strides, 2 block sizes |


@wrong(F32)
@amxq.jit
def offsets_of_a_descriptor(x):
    d = tl.make_tensor_descriptor(x, [8, 8], [8, 1], [4, 4])
    d.load([0])  # error: expected 2 offsets |


@wrong(F32)
@amxq.jit
def check_of_a_descriptor(x):
    d = tl.make_tensor_descriptor(x, [8, 8], [8, 1], [4, 4])
    d.load([0, 0], boundary_check=(2,))  # error: boundary_check=\(2,\) |


@wrong(F32)
@amxq.jit
def base_of_a_descriptor(x):
    tl.make_tensor_descriptor(3, [8], [1], [4])  # error: base is the constant 3, expected a |


@pytest.mark.parametrize("name", CASES)
def test_mistake(name: str) -> None:
    check(*CASES[name], __file__)
