"""Mistakes of syntax and of calls between kernels."""

from __future__ import annotations

import inspect
import math
import traceback
from typing import Any

import pytest
import torch
from mistakes import F32, Cases, check, registering

import amxq
import amxq.language as tl
from amxq.errors import CompilationError

CASES: Cases = {}
wrong = registering(CASES)


# --- syntax -----------------------------------------------------------------------------


@wrong(F32, tl.int32)
@amxq.jit
def return_in_a_loop(x, n):
    for i in range(n):
        if i > 2:
            return  # error: return inside a loop | mask
        tl.store(x + i, 1.0)


@wrong(F32)
@amxq.jit
def result_of_a_kernel(x):
    return tl.load(x)  # error: a kernel returns nothing | tl.store


@wrong(F32)
@amxq.jit
def try_statement(x):
    try:  # error: try is not a statement |
        tl.store(x, 1.0)
    except ValueError:
        pass


@wrong(F32, tl.int32)
@amxq.jit
def loop_without_an_end(x, n):
    while True:  # error: condition of while is the constant True | static_range
        n -= 1


@wrong(F32, tl.int32)
@amxq.jit
def break_statement(x, n):
    while n > 0:
        break  # error: break inside a loop is not part of the kernel language | while


@amxq.jit
def sometimes(n):
    if n > 2:
        return n


@amxq.jit
def result_in_one_case(x, n):
    tl.store(x, sometimes(n))


@wrong(F32, tl.int32)
@amxq.jit
def return_in_a_static_loop(x, n):
    for i in tl.static_range(4):
        if n == i:
            return  # error: return inside a loop | mask
        tl.store(x + i, 1.0)


@wrong(F32)
@amxq.jit
def assert_statement(x):
    assert x  # error: assert is not part | static_assert


@wrong(F32)
@amxq.jit
def lambda_expression(x):
    f = lambda y: y  # noqa: E731 # error: lambda functions are not part | @amxq.jit
    tl.store(x, f(1.0))


@wrong(F32)
@amxq.jit
def comprehension(x):
    tl.store(x, [i + 1 for i in (1, 2)][0])  # error: comprehensions are not part | tl.static_range


@wrong(F32)
@amxq.jit
def formatted(x):
    tl.static_print(f"{x}")  # error: f-strings are not part | take the values one by one


@wrong(F32)
@amxq.jit
def function_in_a_kernel(x):
    def inner(y):  # error: def is not a statement | outside of the kernel, with @amxq.jit
        return y

    tl.store(x, inner(1.0))


@wrong(F32)
@amxq.jit
def power(x):
    tl.store(x, tl.load(x) ** 2)  # error: operator \*\* is not defined | multiply


@wrong(F32)
@amxq.jit
def loop_over_a_list(x):
    for i in [1, 2]:  # error: a for loop iterates over range |
        tl.store(x + i, 0.0)


@wrong(F32, tl.int32)
@amxq.jit
def unrolled_loop_of_the_run_time(x, n):
    for i in tl.static_range(n):  # error: bounds of tl.static_range are .*i32.* constants |
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
    tl.store(x, torch.exp(tl.load(x)))  # error: exp is not a function of the | ^use tl.exp$


@wrong(F32)
@amxq.jit
def function_of_python(x):
    tl.store(x, math.exp(tl.load(x)))  # error: exp is not a function of the | ^use tl.exp$


@wrong(F32)
@amxq.jit
def function_without_a_counterpart(x):
    tl.store(x, math.gcd(tl.load(x)))  # error: gcd is not a function of | docs/language.md


@wrong(F32)
@amxq.jit
def printing(x):
    print("x", tl.load(x))  # error: print is not a function | ^use tl.device_print$


@wrong(F32)
@amxq.jit
def conversion(x):
    tl.store(x, float(tl.load(x)))  # error: float\(\) of a value of the run time | value.to


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


@wrong(F32, tl.int32)
@amxq.jit
def continue_statement(x, n):
    for i in range(n):
        if i > 2:
            continue  # error: continue inside a loop | mask
        tl.store(x + i, 1.0)


@wrong(F32)
@amxq.jit
def unrolled_loop_that_stands_still(x):
    for i in tl.static_range(0, 4, 0):  # error: the step of tl.static_range is 0 |
        tl.store(x + i, 0.0)


@wrong(F32)
@amxq.jit
def matrices(x):
    tl.store(x, tl.arange(0, 4) @ tl.arange(0, 4))  # error: operator @ is not defined | tl.dot


@wrong(F32)
@amxq.jit
def constant_that_fills_the_memory(x):
    tl.store(x, 1 << (1 << 40))  # error: OverflowError: the constant has more than 1024 bits |


@wrong(F32)
@amxq.jit
def power_that_fills_the_memory(x):
    tl.store(x, 10**10**10)  # error: OverflowError: the constant has more than 1024 bits |


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


@pytest.mark.parametrize("name", CASES)
def test_mistake(name: str) -> None:
    check(*CASES[name], __file__)


def test_a_function_that_returns_in_one_case_only() -> None:
    with pytest.raises(CompilationError, match="returned in one of the cases only"):
        result_in_one_case.warmup(F32, tl.int32, target="avx2")


def test_a_mistake_in_a_called_function_names_both_places() -> None:
    with pytest.raises(CompilationError, match="ptr<f32>") as caught:
        calls_wrongly.warmup(F32, target="avx2")
    assert "return value * 2" in caught.value.source_line
    number = inspect.getsourcelines(calls_wrongly.kernel_source.function)[1] + 2
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not any("/frontend/" in f.filename or "/ir/" in f.filename for f in frames)
    line = caught.value.calls[0][3]
    column = line.index("doubles(")
    assert caught.value.calls == ((__file__, number, column, line),)
    assert str(caught.value).endswith(
        f"{__file__}:{number}:{column + 1}: called from here\n    {line}\n    {' ' * column}^"
    )


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
