"""Kernels on the interpreter: Python inside of them, bounds, errors, and agreement with compiled
code where the two could differ. tests/compiler runs the language's tests on it as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import amxq
import amxq.language as tl
from amxq import knobs
from amxq.errors import CompilationError, OutOfBoundsError
from amxq.interpreter import arithmetic
from amxq.interpreter.evaluator import Evaluator
from amxq.ir import ops
from tests.compiler.conftest import *  # noqa: F403


@pytest.fixture
def interpreter() -> Iterator[None]:
    with knobs.INTERPRET.scope("1"):
        yield


# --- Python inside of a kernel ------------------------------------------------------------


@amxq.jit
def double(x):
    return x * 2


seen: list[np.ndarray] = []


@amxq.jit
def talks(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = double(tl.load(x + at, mask=inside))
    print("program", tl.program_id(0), "has", value, f"of {n:03d}", repr(x))
    seen.append(np.asarray(value) + 1)
    names = {"half": 0.5, "n": [int(n)]}
    tl.store(x + at, value * names["half"], mask=inside)


def test_python_runs_inside_of_a_kernel(
    interpreter: None, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.arange(6.0)
    seen.clear()
    talks[lambda meta: (amxq.cdiv(meta["n"], meta["BLOCK"]),)](x, 6, BLOCK=4)
    assert capsys.readouterr().out == (
        "program 0 has [0. 2. 4. 6.] of 006 x + 0 : ptr<f32>\n"
        "program 1 has [ 8. 10.  0.  0.] of 006 x + 0 : ptr<f32>\n"
    )
    assert [s.tolist() for s in seen] == [[1, 3, 5, 7], [9, 11, 1, 1]]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


@amxq.jit
def stops(x, N: tl.constexpr):
    total = tl.zeros((N,), tl.int32)
    for i in range(2):
        total += tl.arange(0, N) * i
        breakpoint()
    tl.store(x + tl.arange(0, N), total)


def test_a_breakpoint_stops_at_its_line(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def look() -> None:
        frame = sys._getframe(1)
        values = {name: repr(frame.f_locals[name]) for name in ("i", "total", "N")}
        found.append((frame.f_code.co_filename, frame.f_lineno, *values.values()))

    monkeypatch.setattr(sys, "breakpointhook", look)
    stops[(1,)](torch.zeros(3, dtype=torch.int32), N=3)
    line = stops.kernel_source.first_line + 5
    assert found == [
        (__file__, line, "0 : i32", "[0 0 0] : tile<3xi32>", "3"),
        (__file__, line, "1 : i32", "[0 1 2] : tile<3xi32>", "3"),
    ]


# --- bounds -------------------------------------------------------------------------------


@amxq.jit
def far(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at + n)  # error here
    tl.store(y + at, value)  # or here


def place(marker: str, kernel: amxq.runtime.jit.JITFunction) -> int:
    lines = open(__file__).read().splitlines()
    return next(i for i, line in enumerate(lines, 1) if marker in line and "marker" not in line)


@pytest.mark.parametrize(
    ("sizes", "n", "marker", "message"),
    [
        ((8, 8), 1, "# error here", r"load of x\[8\] is outside of x, which has 8 elements"),
        ((8, 8), -2, "# error here", r"load of x\[-2\] is outside of x"),
        ((9, 7), 1, "# or here", r"store of y\[7\] is outside of y, which has 7 elements"),
    ],
)
def test_accesses_outside_of_a_tensor(
    interpreter: None, sizes: tuple[int, int], n: int, marker: str, message: str
) -> None:
    x, y = (torch.zeros(s) for s in sizes)
    with pytest.raises(OutOfBoundsError, match=message) as caught:
        far[(1,)](x, y, n, BLOCK=8)
    error = caught.value
    assert (error.file, error.line) == (__file__, place(marker, far))
    assert error.source_line.endswith(marker)
    assert f"{__file__}:{error.line}:" in str(error) and isinstance(error, IndexError)


def test_a_view_ends_with_its_last_element(interpreter: None) -> None:
    base = torch.zeros(4, 8)
    with pytest.raises(OutOfBoundsError, match=r"x\[19\].* has 19 elements \(shape \[3, 3\]\)"):
        far[(1,)](base[1:, 2:5], torch.zeros(8), 12, BLOCK=8)
    with pytest.raises(OutOfBoundsError, match="has 0 elements"):
        far[(1,)](base[:0], torch.zeros(8), 0, BLOCK=8)


def test_an_address_is_good_for_the_rest_of_its_storage(interpreter: None) -> None:
    """So are those that amxq.linear and amxq.fused_moe hand over."""
    table = amxq.runtime.jit.pointers()
    types = {"x": table[torch.float32], "y": table[torch.float32], "n": tl.int32}
    launchable = far.compile(types, {"BLOCK": 8})
    base, y = torch.zeros(12), torch.zeros(8)
    launchable.launch((1, 1, 1), (base[4:].data_ptr(), y.data_ptr(), 0))
    with pytest.raises(OutOfBoundsError, match=r"load of x\[8\] .* has 8 elements") as caught:
        launchable.launch((1, 1, 1), (base[4:].data_ptr(), y.data_ptr(), 1))
    assert caught.value.line == place("# error here", far)


@amxq.jit
def leaves_early(x, n):
    for i in range(n):
        if i > 2:
            break
        tl.store(x + i, 1.0)


@amxq.jit
def assigns(x):
    x[0] = 1.0


@amxq.jit
def raises_to_a_power(x):
    tl.store(x, tl.load(x) ** 2)


@amxq.jit
def stands_still(x):
    for i in tl.static_range(0, 4, 0):
        tl.store(x + i, 1.0)


@amxq.jit
def divides_by_zero(x, n):
    tl.store(x + n // 0, 1.0)


@pytest.mark.parametrize(
    ("kernel", "args"),
    [(leaves_early, (3,)), (assigns, ()), (raises_to_a_power, ()), (stands_still, ()),
     (divides_by_zero, (3,))],
    ids=lambda x: x.kernel_source.name if hasattr(x, "kernel_source") else "",
)  # fmt: skip
def test_the_same_mistake_as_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, args: tuple[int, ...]
) -> None:
    errors = []
    for setting in ("0", "1"):
        monkeypatch.setenv("AMXQ_INTERPRET", setting)
        with pytest.raises(CompilationError) as caught:
            kernel[(1,)](torch.zeros(8), *args)
        errors.append(caught.value)
    compiled, interpreted = errors
    assert (compiled.message, compiled.hint) == (interpreted.message, interpreted.hint)
    assert (compiled.file, compiled.line) == (interpreted.file, interpreted.line)


# --- names and attributes that do not exist, and what a combine_fn must not do --------------


@amxq.jit
def unknown_name(x, FN: tl.constexpr):
    tl.store(x, tl.load(x) + nowhere)  # noqa: F405


@amxq.jit
def unknown_function(x, FN: tl.constexpr):
    tl.store(x, nowhere(tl.load(x)))  # noqa: F405


@amxq.jit
def unknown_operation(x, FN: tl.constexpr):
    tl.store(x, tl.unknown(tl.load(x)))


@amxq.jit
def misspelt_operation(x, FN: tl.constexpr):
    tl.store(x, tl.laod(x))


@amxq.jit
def misspelt_method(x, FN: tl.constexpr):
    tl.store(x, tl.load(x).reshpae((1,)))


@amxq.jit
def index_of_a_pointer(x, FN: tl.constexpr):
    tl.store(x, x[0])


@amxq.jit
def unknown_attribute(x, FN: tl.constexpr):
    tl.store(x, tl.load(x).unknown)


@amxq.jit
def unknown_attribute_of_a_type(x, FN: tl.constexpr):
    tl.store(x, x.dtype.unknown)


@amxq.jit
def too_many_arguments(x, FN: tl.constexpr):
    tl.store(x, tl.exp(tl.load(x), 2))


@amxq.jit
def no_such_argument(x, FN: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, 8)), 0, unknown=2))


@amxq.jit
def arithmetic_of_constants(x, FN: tl.constexpr):
    tl.store(x, tl.load(x) + 1 // 0)


@amxq.jit
def calls_it(x, FN: tl.constexpr):
    tl.store(x, FN(1.0, tl.load(x)))


@amxq.jit
def reduces_by_it(x, FN: tl.constexpr):
    tl.store(x, tl.reduce(tl.load(x + tl.arange(0, 8)), 0, FN))


@amxq.jit
def scans_by_it(x, FN: tl.constexpr):
    n, m = tl.arange(0, 2)[:, None], tl.arange(0, 4)[None, :]
    tile = tl.load(x + n * 4 + m)
    tl.store(x + n * 4 + m, tl.associative_scan(tile, 1, combine_fn=FN))


@amxq.jit
def adds_a_name(a, b):
    return a + b * nowhere  # noqa: F405


@amxq.jit
def adds_an_attribute(a, b):
    return tl.unknown(a, b)


@amxq.jit
def knows_its_program(a, b):
    return a + b + tl.program_id(0)


@amxq.jit
def knows_the_grid(a, b):
    return a + b * tl.num_programs(0)


@amxq.jit
def loops(a, b):
    for _ in range(2):
        a = a + b
    return a


@amxq.jit
def loops_while(a, b):
    while a < b:
        a = a + 1
    return a


@amxq.jit
def branches(a, b):
    if a > b:
        return a
    return b


@amxq.jit
def makes_a_tile(a, b):
    return a + b + tl.sum(tl.arange(0, 4), 0)


@amxq.jit
def fills_a_tile(a, b):
    return a + b + tl.sum(tl.full((4,), 1.0, tl.float32), 0)


@amxq.jit
def prints(a, b):
    tl.device_print("never", a)
    return a + b


@amxq.jit
def inner_loops(a, b):
    return loops(a, b)


HINTS = {
    misspelt_operation: "did you mean 'load'?",
    misspelt_method: "did you mean 'reshape' or 'shape'?",
    index_of_a_pointer: "read memory with tl.load(pointer + offset)",
}
WRONG = [
    *((k, None) for k in (unknown_name, unknown_function, unknown_operation, unknown_attribute)),
    *((k, None) for k in (misspelt_operation, misspelt_method, index_of_a_pointer)),
    *((k, None) for k in (unknown_attribute_of_a_type, too_many_arguments, no_such_argument)),
    (arithmetic_of_constants, None),
    (calls_it, adds_a_name),
    *(
        (kernel, function)
        for kernel in (reduces_by_it, scans_by_it)
        for function in (
            *(adds_a_name, adds_an_attribute, knows_its_program, knows_the_grid, loops),
            *(loops_while, branches, makes_a_tile, fills_a_tile, prints, inner_loops),
        )
    ),
]


@pytest.mark.parametrize(
    ("kernel", "function"),
    WRONG,
    ids=lambda x: "" if x is None else x.kernel_source.name,
)
def test_the_same_words_as_of_the_compiler(
    capfd: pytest.CaptureFixture[str], kernel: Any, function: Any
) -> None:
    """Message, hint, line, caret, and the calls that led there."""
    texts = []
    for setting in (None, "1"):
        with knobs.INTERPRET.scope(setting), pytest.raises(CompilationError) as caught:
            kernel[(1,)](torch.zeros(8), FN=function)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and "^" in texts[0]
    if kernel in HINTS:
        assert texts[0].endswith(f"\n    hint: {HINTS[kernel]}")
    if function is not None and kernel is not calls_it and "add" not in function.__name__:
        assert f"{function.__name__} does more than computing" in texts[0]
        assert "use tl.where instead of if" in texts[0]
    assert not capfd.readouterr().out


@amxq.jit
def sometimes_bound(x):
    if tl.load(x) > 1.0:
        v = 1.0
    tl.store(x, v)


@amxq.jit
def allowed(a, b):
    larger = a if a > b else b
    for _ in tl.static_range(2):
        larger = tl.maximum(larger, b) + 0.0
    return tl.where(larger > 100.0, 100.0, larger)


def fails() -> None:
    raise AttributeError("of Python code that a kernel calls")


@amxq.jit
def calls_python(x):
    fails()


@amxq.jit
def takes_pythons(x, FN: tl.constexpr):
    tl.store(x, FN(tl.load(x + tl.arange(0, 8))))


@pytest.mark.parametrize("function", [abs, len, torch.exp])
def test_functions_of_python_that_tiles_have_not(interpreter: None, function: Any) -> None:
    with pytest.raises(CompilationError, match="value of the run time") as caught:
        takes_pythons[(1,)](torch.zeros(8), FN=function)
    assert caught.value.hint == "use a function of tl" and "Proxy" not in str(caught.value)


def test_what_python_finds_and_what_is_none_of_its_business(interpreter: None) -> None:
    with pytest.raises(CompilationError, match="'v'") as caught:
        sometimes_bound[(1,)](torch.zeros(8))
    assert caught.value.source_line.strip() == "tl.store(x, v)" and "before" in caught.value.hint
    with pytest.raises(AttributeError, match="that a kernel calls"):
        calls_python[(1,)](torch.zeros(8))
    x = torch.arange(8.0)
    reduces_by_it[(1,)](x, FN=allowed)
    assert x[0] == 7.0


@amxq.jit
def blocks(x, y, m, n, M: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr):
    a = tl.make_tensor_descriptor(x, [m, n], [n, 1], [M, N])
    tile = a.load([0, 0], boundary_check=CHECK)
    tl.make_tensor_descriptor(y, [m, n], [n, 1], [M, N]).store([0, 0], tile)


def test_descriptors_check_what_they_are_asked_to(interpreter: None) -> None:
    x, y = torch.arange(15.0).reshape(3, 5), torch.zeros(3, 5)
    blocks[(1,)](x, y, 3, 5, M=4, N=8, CHECK=None)
    assert (x == y).all()
    with pytest.raises(OutOfBoundsError, match=r"load of x\[17\]"):
        blocks[(1,)](x, y, 3, 5, M=3, N=8, CHECK=(0,))


# --- typing rules -------------------------------------------------------------------------


@amxq.jit
def changes_type(x, n):
    s = 0
    for _ in range(n):
        s = s + 0.5
    tl.store(x, s)


@amxq.jit
def wrong_shapes(x, n):
    tl.store(x, tl.sum(tl.arange(0, 4) + tl.arange(0, 5), 0))


@amxq.jit
def tile_condition(x, n):
    if tl.arange(0, 4) > n:
        tl.store(x, 1.0)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (changes_type, "s changes its type in this loop, from i32 to f32"),
        (wrong_shapes, "do not broadcast"),
        (tile_condition, "the condition is tile<4xi1>"),
    ],
)
def test_the_typing_rules_hold(
    interpreter: None, kernel: amxq.runtime.jit.JITFunction, message: str
) -> None:
    with pytest.raises(CompilationError, match=message) as caught:
        kernel[(1,)](torch.zeros(1), 2)
    assert caught.value.file == __file__ and caught.value.source_line
    assert message in str(caught.value)
    with knobs.INTERPRET.scope(None), pytest.raises(CompilationError, match=message):
        kernel[(1,)](torch.zeros(1), 2)


@amxq.jit
def carries_constants(out, byte, n):
    s = 250
    step = 1
    for _ in range(n):
        s += step
    if n > 1:
        step = 2
    small = tl.load(byte)
    tl.store(out, small + s)  # int32, as s is one: a constant 252 would not fit int8
    tl.store(out + 1, small * 100 + step)
    tl.store(out + 2, (n > 1 and n < 3) + (not n > 1))
    tl.store(out + 3, min(n, 7) if n > 1 else max(n, 9))


def test_constants_that_a_loop_changes_have_the_types_of_compiled_code(on: str) -> None:
    out = torch.zeros(4, dtype=torch.int64)
    carries_constants[(1,)](out, torch.tensor([3], dtype=torch.int8), 2)
    assert out.tolist() == [255, 46, 1, 2]


def test_functions_of_the_language_need_a_kernel(interpreter: None) -> None:
    with pytest.raises(RuntimeError, match="inside an @amxq.jit kernel only"):
        tl.arange(0, 4)
    with pytest.raises(TypeError, match="launch it as"):
        double(3)


def test_warmup_compiles(interpreter: None) -> None:
    compiled = far.warmup(torch.float32, torch.float32, tl.int32, BLOCK=8, target="avx2")
    assert "vec<8xf32>" in compiled.asm["tir"]


def test_an_int4_linear(interpreter: None) -> None:
    from amxq.ops import schedule

    g = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (40, 64), generator=g, dtype=torch.uint8)
    scales = torch.rand(40, 2, generator=g) + 0.5
    zeros = torch.randint(0, 16, (40, 2), generator=g, dtype=torch.uint8)
    w = amxq.pack(q, scales, zeros, format="plain")
    x = torch.randn(3, 64, generator=g).bfloat16()
    schedule.plan.cache_clear()
    schedule.int4_linear.cache_clear()
    schedule.prepare_bf16.cache_clear()
    try:
        got = amxq.linear(x, *w)
    finally:
        schedule.plan.cache_clear()
        schedule.int4_linear.cache_clear()
        schedule.prepare_bf16.cache_clear()
    want = x.double() @ amxq.dequantize(w).double().T
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


def test_every_operation_of_the_language_has_a_meaning() -> None:
    control = {"?", "for", "if", "while", "yield", "combine"}
    names = {c.name for c in vars(ops).values() if isinstance(c, type) and issubclass(c, ops.Op)}
    missing = {n for n in names - control if not hasattr(Evaluator, f"on_{n}")}
    assert not missing
    assert set(ops.UNARY) <= {*arithmetic.UNARY, *arithmetic.MATH}
    assert set(ops.BINARY) == set(arithmetic.BINARY)
    assert set(ops.COMPARE) == set(arithmetic.COMPARE)
