"""Kernels called from C: the header compiles, the object links, the numbers are right."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import amxq
import amxq.language as tl
from amxq.errors import ArgumentError
from amxq.runtime.targets import available_targets

CC = shutil.which("cc")
needs_cc = pytest.mark.skipif(CC is None, reason="needs a C compiler called cc")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMXQ_CACHE_DIR", str(tmp_path / "objects"))


@amxq.jit
def scale(x, register, n, factor, negate, bias, y, BLOCK: tl.constexpr):
    """y = x · factor + register, negated or not; one parameter is a word of C."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * factor + tl.load(register + at, mask=at < n).to(
        tl.float32
    )
    value = tl.where(negate, -value, value)
    tl.store(y + at, value + tl.program_id(1) * 1000.0, mask=at < n)


MAIN = r"""
#include <stdio.h>
#include "first.h"
#include "second.h"

enum { N = 1000 };
static float x[N], y[N + 1], z[N + 1];
static uint16_t halves[N];

int main(void)
{
    for (int i = 0; i < N; i++)
        x[i] = i, halves[i] = 0x3F80; /* 1 in bf16 */
    first(4, 1, 1, x, halves, N, 3.0f, 1, y);
    second(16, 1, 1, x, halves, N, 3.0f, 0, z);
    for (int i = 0; i < N; i++)
        if (y[i] != -(3.0f * i + 1) || z[i] != 3.0f * i + 1)
            return 1;
#ifdef _OPENMP
    omp_set_num_threads(3);
    first_omp(4, 2, 1, x, halves, N, 2.0f, 0, y);
    first_omp(0, 1, 1, 0, 0, 0, 0.0f, 0, 0);
    for (int i = 0; i < N; i++)
        if (y[i] != 2.0f * i + 1 && y[i] != 2.0f * i + 1001)
            return 2;
#endif
    first(0, 1, 1, 0, 0, 0, 0.0f, 0, 0);
    puts(y[N] == 0 && z[N] == 0 ? "right" : "wrong");
    return 0;
}
"""


def build_and_run(folder: Path, main: str, *options: str) -> str:
    (folder / "main.c").write_text(main)
    assert CC is not None
    objects = [str(path) for path in folder.glob("*.o")]
    command = [CC, "-O1", "-Wall", "-Wextra", "-Werror", *options, "main.c", *objects, "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run([folder / "main"], check=True, capture_output=True, text=True).stdout


def exported(folder: Path, target: str, name: str | None, block: int) -> None:
    types = (torch.float32, torch.bfloat16, tl.int32, tl.float32, tl.int1, None, torch.float32)
    made = scale.warmup(*types, BLOCK=block, target=target).export(folder, name)
    assert [path.name for path in made] == [f"{name or 'scale'}.o", f"{name or 'scale'}.h"]


@needs_cc
@pytest.mark.parametrize("options", [(), ("-fopenmp",)], ids=["serial", "openmp"])
def test_two_kernels_in_a_program_of_c(tmp_path: Path, options: tuple[str, ...]) -> None:
    target = available_targets()[-1]
    exported(tmp_path, target, "first", 256)
    exported(tmp_path, target, "second", 64)
    assert build_and_run(tmp_path, MAIN, *options) == "right\n"


LINEAR = r"""
#include <stdio.h>
#include "linear.h"

static uint8_t qweight[2 * 16 * 2 * 64];
static uint16_t x[32 * 128], scales[64];
static float y[32 * 64];

int main(void)
{
    if (amxq_request_amx() != 0)
        return 1;
    for (int i = 0; i < 32 * 128; i++)
        x[i] = 0x3F80;
    for (unsigned i = 0; i < sizeof qweight; i++)
        qweight[i] = 0xBB; /* 11 - 8 */
    for (int i = 0; i < 64; i++)
        scales[i] = 0x3F00; /* 0.5 */
    linear(1, 2, 1, x, qweight, scales, y, 32, 32, 128, 64, 128, 128, 1);
    for (int i = 0; i < 32 * 64; i++)
        if (y[i] != 128 * 3 * 0.5f)
            return 2;
    puts("right");
    return 0;
}
"""


@needs_cc
@pytest.mark.amx
def test_an_int4_linear_on_tiles(tmp_path: Path) -> None:
    from amxq_kernels.int4_linear import int4_linear

    constants: dict[str, Any] = {"SPLITS": 1, "BLOCK_M": 32, "BLOCK_K": 128}
    made = int4_linear.warmup(
        torch.bfloat16, torch.uint8, torch.bfloat16, *[None] * 6, torch.float32,
        *[tl.int32] * 7, **constants, target="amx",
    )  # fmt: skip
    made.export(tmp_path, "linear")
    assert build_and_run(tmp_path, LINEAR) == "right\n"


STRIDED = r"""
#include <stdio.h>
#include "strided.h"

int main(int argc, char **argv)
{
    float x[64] = {1, 2}, y[64] = {0};
    (void)argv;
    strided(1, 1, 1, x, 1, argc > 1 ? 20 : 32, y);
    printf("%g %g\n", y[0], y[31]);
    return 0;
}
"""


@amxq.jit
def strided(x, stride, n, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * stride, mask=at < n) + n, mask=at < n)


@needs_cc
def test_what_was_compiled_in_is_said_and_asserted(tmp_path: Path) -> None:
    target, x = available_targets()[-1], torch.float32
    strided.warmup(x, 1, 32, x, BLOCK=64, target=target).export(tmp_path)
    header = (tmp_path / "strided.h").read_text()
    assert "Taken for granted: stride == 1 and n % 16 == 0, which assert() checks." in header
    assert build_and_run(tmp_path, STRIDED) == "33 32\n"
    wrong = subprocess.run([tmp_path / "main", "20"], capture_output=True, text=True)
    assert wrong.returncode and "n % 16 == 0" in wrong.stderr
    strided.warmup(x, tl.int32, tl.int32, x, BLOCK=64, target=target).export(tmp_path)
    header = (tmp_path / "strided.h").read_text()
    assert "Taken for granted: nothing." in header and "assert" not in header
    assert build_and_run(tmp_path, STRIDED) == "33 32\n"
    run = subprocess.run([tmp_path / "main", "20"], check=True, capture_output=True, text=True)
    assert run.stdout == "21 0\n"


def test_the_header_says_what_it_is(tmp_path: Path) -> None:
    exported(tmp_path / "new" / "folder", "avx2", None, 256)
    header = (tmp_path / "new" / "folder" / "scale.h").read_text()
    assert "scale: kernel scale(x: ptr<f32>, register: ptr<bf16>, n: i32, factor: f32" in header
    assert f"compiled by amxq {amxq.__version__} for target avx2" in header
    assert "fma" in header and "Compiled in: bias = None, BLOCK = 256." in header
    signature = re.search(r"void scale\((.*?)\)", header)
    assert signature is not None and signature[1] == (
        "int64_t grid_x, int64_t grid_y, int64_t grid_z, float *x, uint16_t *argument1, int32_t n, "
        "float factor, uint8_t negate, float *y"
    )
    assert "amxq_request_amx" not in header
    exported(tmp_path, "amx", None, 256)
    assert "amxq_request_amx" in (tmp_path / "scale.h").read_text()


@pytest.mark.parametrize("name", ["", "1st", "a-b", "double", "naïve"])
def test_names_that_c_does_not_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"name is '{name}'"):
        exported(tmp_path, "avx2", name, 256)
    assert not list(tmp_path.glob("*.h"))


def test_signatures_compiled_ahead_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import amxq.codegen.compile as compiler

    @amxq.jit
    def fill(x, value, BLOCK: tl.constexpr):
        tl.store(x + tl.arange(0, BLOCK), value)

    signatures = [
        (dtype, tl.float32, block) for dtype in (torch.float32, torch.bfloat16) for block in (8, 16)
    ]
    made = [fill.warmup(*s, target=t) for s in signatures for t in available_targets()]
    assert len({kernel.key for kernel in made}) == 4 * len(available_targets())
    monkeypatch.setattr(compiler, "optimise", None)
    again = amxq.jit(fill.kernel_source.function)
    for dtype, _, block in signatures:
        x = torch.zeros(16, dtype=dtype)
        again[(1,)](x, 2.5, block)
        assert (x[:block] == 2.5).all()
