"""Mistakes in kernels: which error, at which place, with which advice.

Each kernel below has one line that ends with ``# error: message | hint``, two regular
expressions: the error must point at that line and say so.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import CompilationError, DTypeError, LayoutError, ShapeError

F32, I32, BF16, U8 = torch.float32, torch.int32, torch.bfloat16, torch.uint8
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {}


def wrong(*args: Any) -> Any:
    """Registers a kernel that must not compile for these arguments."""

    def register(kernel: Any) -> Any:
        CASES[kernel.kernel_source.name] = kernel, args
        return kernel

    return register


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
    tl.store(x, tl.zeros((BLOCK, 4), tl.float32))  # error: shape .*not made of constants | constexpr


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
def branch_on_a_number(x, n):
    if n:  # error: condition is i32, expected an int1 scalar |
        tl.store(x, 1.0)


@wrong(F32)
@amxq.jit
def branch_on_a_tile(x):
    if tl.arange(0, 8) > 3:  # error: condition is tile<8xi1>, expected an int1 scalar |
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
    tl.store(x, tl.load(x).to(3))  # error: 3 is not a type | tl.float32


@wrong(F32)
@amxq.jit
def reduction_of_the_first_axis(x):
    tile = tl.zeros((4, 8), tl.float32)
    tl.store(x + tl.arange(0, 8), tl.sum(tile, 0))  # error: axis 0 of shape \[4, 8\]: only the last |


@wrong(F32)
@amxq.jit
def reduction_of_a_number(x):
    tl.store(x, tl.sum(3, 0))  # error: expected a tile of numbers, got the constant 3|got i32 |


@wrong(F32)
@amxq.jit
def fourth_dimension(x):
    tl.store(x, tl.zeros((2, 2, 2, 2), tl.float32))  # error: shape |


@wrong(F32)
@amxq.jit
def empty_range(x):
    tl.store(x + tl.arange(4, 4), 0.0)  # error: arange\(4, 4\) | start < end


@wrong(F32)
@amxq.jit
def slice_of_a_tile(x):
    tl.store(x, tl.arange(0, 8)[0])  # error: tiles are indexed with : and None only | None


@wrong(F32)
@amxq.jit
def axis_of_the_grid(x):
    tl.store(x + tl.program_id(3), 0.0)  # error: axis 3 of the grid | 0, 1 or 2


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


@wrong(F32, tl.int32)
@amxq.jit
def pointers_carried_by_a_loop(x, n):
    at = x + tl.arange(0, 16)
    for _ in range(n):  # error: at is a tile of pointers | carry the offsets
        tl.store(at, 0.0)
        at += 16


# --- dot --------------------------------------------------------------------------------


@wrong(F32)
@amxq.jit
def inner_dimensions(x):
    a, b = tl.zeros((4, 8), tl.float32), tl.zeros((4, 8), tl.float32)
    tl.store(x, tl.dot(a, b))  # error: dot of \[4, 8\] and \[4, 8\]: the inner dimensions differ |


@wrong(F32)
@amxq.jit
def dot_of_vectors(x):
    tl.store(x, tl.dot(tl.zeros((8,), tl.float32), tl.zeros((8, 8), tl.float32)))  # error: a of dot is tile<8xf32>, expected a tile of rank 2 |


@wrong(F32)
@amxq.jit
def dot_of_numbers(x):
    tl.store(x, tl.dot(2.0, 3.0))  # error: a of dot is f32, expected a tile of rank 2 |


@wrong(F32)
@amxq.jit
def dot_of_mixed_types(x):
    a, b = tl.zeros((4, 8), tl.bfloat16), tl.zeros((8, 4), tl.float32)
    tl.store(x, tl.dot(a, b))  # error: dot of bf16 and f32 is not defined | bf16 with int4


@wrong(F32)
@amxq.jit
def accumulator(x):
    a, b = tl.zeros((4, 8), tl.float32), tl.zeros((8, 4), tl.float32)
    tl.store(x, tl.dot(a, b, 0.0))  # error: acc of dot is f32, expected tile<4x4xf32> |


@wrong(U8, BF16, F32)
@amxq.jit
def int4_block(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [12, 32])  # error: block shape \[12, 32\] | BLOCK_K % 8
    tl.store(x, w.scales([0, 0]))


@wrong(I32, BF16, F32)
@amxq.jit
def int4_pointer(q, s, x):
    w = tl.int4_tensor(q, s, None, [64, 64], 32, [32, 32])  # error: qweight is ptr<i32>, expected ptr<u8> |
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
    tl.make_tensor_descriptor(3, [8], [1], [4])  # error: base is the constant 3, expected a tensor |


# --- syntax -----------------------------------------------------------------------------


@wrong(F32, tl.int32)
@amxq.jit
def return_in_a_loop(x, n):
    for i in range(n):  # error: return inside a loop |
        if i is None:
            pass
        return


@wrong(F32, tl.int32)
@amxq.jit
def return_in_a_branch(x, n):
    if n > 2:  # error: return inside a branch | mask
        return
    tl.store(x, 1.0)


@wrong(F32)
@amxq.jit
def result_of_a_kernel(x):
    return tl.load(x)  # error: a kernel returns nothing | tl.store


@wrong(F32)
@amxq.jit
def try_statement(x):
    try:  # error: Try statements are not part |
        tl.store(x, 1.0)
    except ValueError:
        pass


@wrong(F32, tl.int32)
@amxq.jit
def while_statement(x, n):
    while n > 0:  # error: While statements are not part |
        n -= 1


@wrong(F32)
@amxq.jit
def assert_statement(x):
    assert x  # error: assert is not part | static_assert


@wrong(F32)
@amxq.jit
def lambda_expression(x):
    f = lambda y: y  # noqa: E731 # error: Lambda expressions are not part |
    tl.store(x, f(1.0))


@wrong(F32)
@amxq.jit
def comprehension(x):
    tl.store(x, [i for i in (1, 2)][0])  # error: ListComp expressions are not part |


@wrong(F32)
@amxq.jit
def chained_comparison(x):
    tl.store(x, 0.0 < tl.load(x) < 1.0)  # error: chained comparisons | &


@wrong(F32)
@amxq.jit
def power(x):
    tl.store(x, tl.load(x) ** 2)  # error: operator Pow |


@wrong(F32)
@amxq.jit
def loop_over_a_list(x):
    for i in [1, 2]:  # error: a for loop iterates over range |
        tl.store(x + i, 0.0)


@wrong(F32, tl.int32)
@amxq.jit
def unrolled_loop_of_the_run_time(x, n):
    for i in tl.static_range(n):  # error: bounds of tl.static_range are constants |
        tl.store(x + i, 0.0)


@wrong(F32, tl.float32)
@amxq.jit
def loop_over_floats(x, n):
    for _ in range(n):  # error: bounds of a loop are integer scalars |
        tl.store(x, 0.0)


@wrong(F32)
@amxq.jit
def step_backwards(x):
    for i in range(9, 0, -1):  # error: the step is -1, it must be positive |
        tl.store(x + i, 0.0)


@wrong(F32)
@amxq.jit
def argument_of_range(x):
    for i in tl.range(0, 4, stages=2):  # error: unexpected or repeated argument stages |
        tl.store(x + i, 0.0)


@wrong(F32)
@amxq.jit
def python_function(x):
    tl.store(x, helper(2.0))  # error: helper is not a function of the kernel language | @amxq.jit


def helper(value: float) -> float:
    return value


@wrong(F32)
@amxq.jit
def torch_function(x):
    tl.store(x, torch.exp(tl.load(x)))  # error: is not a function of the kernel language |


@wrong(F32)
@amxq.jit
def missing_argument(x):
    tl.store(x)  # error: value |


@wrong(F32)
@amxq.jit
def argument_of_a_jit_function(x):
    identity(x, wrong=3)  # error: identity got an unexpected .*'wrong' |


@amxq.jit
def identity(x):
    return x


@wrong(F32)
@amxq.jit
def stores_to_a_subscript(x):
    x[0] = 1.0  # error: only names can be assigned to | tl.store


@wrong(F32)
@amxq.jit
def failed_assertion(x):
    tl.static_assert(1 > 2, "never")  # error: static_assert failed: never |


@wrong(F32)
@amxq.jit
def constants_that_do_not_add_up(x):
    tl.store(x, 1 + "2")  # error: unsupported operand |


@wrong(F32)
@amxq.jit
def division_of_constants(x):
    tl.store(x, 1 // 0)  # error: by zero |


@wrong(F32)
@amxq.jit
def comparison_with_none(x):
    tl.store(x, 1.0 if None < 3 else 2.0)  # error: '<' not supported |


@wrong(F32)
@amxq.jit
def unpacking(x):
    a, b = 1, 2, 3  # error: cannot unpack .* into 2 names |
    tl.store(x, a + b)


def expected(kernel: Any) -> tuple[int, str, str]:
    """Line, message and hint that the kernel's comment announces."""
    lines, first = inspect.getsourcelines(kernel.kernel_source.function)
    for number, line in enumerate(lines, first):
        if "# error:" in line:
            text = line.split("# error:")[1].strip()
            message, _, hint = text.rpartition("|")
            return number, message.strip(), hint.strip()
    raise AssertionError("no expectation")


@pytest.mark.parametrize("name", CASES)
def test_mistake(name: str) -> None:
    kernel, args = CASES[name]
    line, message, hint = expected(kernel)
    with pytest.raises(CompilationError) as caught:
        kernel.warmup(*args, target="avx512_bf16")
    error = caught.value
    assert re.search(message, error.message), error
    assert re.search(hint, error.hint), error
    assert (error.file, error.line) == (__file__, line), error
    source = error.source_line
    assert source.strip() and source[error.column] != " "
    text = str(error).splitlines()
    assert text[0] == f"{__file__}:{line}:{error.column + 1}: {error.message}"
    assert text[1].endswith(source) and text[2].index("^") == 4 + error.column


def test_a_mistake_in_a_called_function_names_both_places() -> None:
    with pytest.raises(CompilationError, match="ptr<f32>") as caught:
        calls_wrongly.warmup(F32, target="avx2")
    assert "return value * 2" in caught.value.source_line
    number = inspect.getsourcelines(calls_wrongly.kernel_source.function)[1] + 2
    assert f"called from {__file__}:{number}" in caught.value.hint


@amxq.jit
def doubles(value):
    return value * 2


@amxq.jit
def calls_wrongly(x):
    tl.store(x, doubles(x))


def test_endless_recursion() -> None:
    with pytest.raises(CompilationError, match="more than 32 deep"):
        recursive.warmup(F32, target="avx2")


@amxq.jit
def recursive(x):
    recursive(x)


FACTOR = 2.0


@amxq.jit
def uses_a_global(x, N: tl.constexpr):
    calls_a_global(x, N)


@amxq.jit
def calls_a_global(x, N):
    tl.store(x + tl.arange(0, N), FACTOR)


def test_a_changed_global(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(32)
    uses_a_global[(1,)](x, N=16)
    assert x[0] == 2
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    uses_a_global[(1,)](x, N=32)  # a new signature sees the new value
    assert x[0] == 3
    with pytest.raises(CompilationError, match="'FACTOR' was 2.0 .*now 3.0") as caught:
        uses_a_global[(1,)](x, N=16)
    assert "constexpr" in caught.value.hint and caught.value.file == __file__


def test_enclosing_variables_are_constants_too() -> None:
    depth = 3

    @amxq.jit
    def closure(x):
        tl.store(x, depth)

    x = torch.zeros(1)
    closure[(1,)](x)
    assert x.item() == 3
    depth = 4
    with pytest.raises(CompilationError, match="'depth' was 3"):
        closure[(1,)](x)


# --- arguments of a launch ----------------------------------------------------------------


@amxq.jit
def plain(x, n, BLOCK: tl.constexpr = 16):
    tl.store(x + tl.arange(0, BLOCK), n)


X = torch.zeros(16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plain(X, 1), TypeError, r"launch it as plain\[grid\]"),
        (lambda: plain[(1,)](X), TypeError, "misses the argument 'n'"),
        (lambda: plain[(1,)](X, 1, 16, 3), TypeError, "takes 3 arguments, got 4"),
        (lambda: plain[(1,)](X, 1, m=2), TypeError, "no parameter 'm'"),
        (lambda: plain[(1,)](X, 1, x=X), TypeError, "two values for 'x'"),
        (lambda: plain[(1,)](X, "1"), DTypeError, "argument 'n' is a str"),
        (lambda: plain[(1,)](X, 1 << 70), DTypeError, "does not fit 64 bits"),
        (lambda: plain[(1,)](X.numpy(), 1), DTypeError, "argument 'x' is a ndarray"),
        (lambda: plain[(1,)](X.to("meta"), 1), LayoutError, r"on meta.*\.cpu\(\)"),
        (lambda: plain[(1,)](X.to(torch.complex64), 1), DTypeError, "complex64"),
        (lambda: plain[(1,)](X, 1, BLOCK=[16]), DTypeError, "must be hashable"),
        (lambda: plain[5](X, 1), ShapeError, "the grid is 5"),
        (lambda: plain[()](X, 1), ShapeError, r"the grid is \(\)"),
        (lambda: plain[(1, 1, 1, 1)](X, 1), ShapeError, "1 to 3 whole numbers"),
        (lambda: plain[(-1,)](X, 1), ShapeError, r"the grid is \(-1,\)"),
        (lambda: plain[(1.5,)](X, 1), ShapeError, r"the grid is \(1.5,\)"),
        (lambda: plain[(1 << 31,)](X, 1), ShapeError, "the grid is"),
        (lambda: plain[(1,)](X, 1, num_threads=0), ShapeError, "num_threads is 0"),
        (lambda: tl.arange(0, 4), RuntimeError, "inside an @amxq.jit kernel only"),
    ],
)
def test_wrong_launches(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert not X.any()


def test_parameters_that_kernels_cannot_have() -> None:
    def variadic(*x):
        pass

    with pytest.raises(CompilationError, match=r"variadic: parameter \*x is not supported"):
        amxq.jit(variadic)


def test_source_that_cannot_be_read() -> None:
    scope: dict[str, Any] = {"amxq": amxq}
    exec("@amxq.jit\ndef typed(x):\n    pass\n", scope)
    with pytest.raises(CompilationError, match="source of typed"):
        scope["typed"].warmup(F32, target="avx2")
