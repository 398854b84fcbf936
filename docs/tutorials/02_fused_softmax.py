"""Fused softmax: a row stays close by from its load to its store.

Written with torch's operations, softmax reads and writes the matrix several times. Here every
program takes rows one after another, and each row is read once and written once. Compared with
Triton's tutorial of this name only the imports and the names of devices differ, and the number of
programs: one for each thread.

    python 02_fused_softmax.py            checks, and times both in this process
"""

import torch

import amxq as triton
import amxq.language as tl


@triton.jit
def softmax_kernel(
    output_ptr,
    input_ptr,
    input_row_stride,
    output_row_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    num_stages: tl.constexpr,
):
    row_start = tl.program_id(0)
    row_step = tl.num_programs(0)
    for row_idx in tl.range(row_start, n_rows, row_step, num_stages=num_stages):
        # The block is the next power of two of the row's length; the mask says what is real.
        col_offsets = tl.arange(0, BLOCK_SIZE)
        input_ptrs = input_ptr + row_idx * input_row_stride + col_offsets
        mask = col_offsets < n_cols
        row = tl.load(input_ptrs, mask=mask, other=-float("inf"))
        # Subtracting the maximum keeps exp from overflowing.
        numerator = tl.exp(row - tl.max(row, axis=0))
        # One division a row: dividing every element takes a core as long as computing exp of it.
        factor = 1.0 / tl.sum(numerator, axis=0)
        output_ptrs = output_ptr + row_idx * output_row_stride + col_offsets
        tl.store(output_ptrs, numerator * factor, mask=mask)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax along the rows of a matrix."""
    n_rows, n_cols = x.shape
    y = torch.empty_like(x)
    programs = min(n_rows, torch.get_num_threads())
    block = triton.next_power_of_2(n_cols)
    softmax_kernel[(programs,)](
        y, x, x.stride(0), y.stride(0), n_rows, n_cols, BLOCK_SIZE=block, num_stages=2
    )
    return y


def check(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    torch.testing.assert_close(
        softmax(x), torch.softmax(x.double(), 1).float(), rtol=1e-5, atol=1e-8
    )


if __name__ == "__main__":
    from amxq import testing

    torch.manual_seed(0)
    check(1823, 781)

    @testing.perf_report(
        testing.Benchmark(
            x_names=["N"],
            x_vals=[256, 781, 1024, 2048, 4096, 8192],
            line_arg="provider",
            line_vals=["amxq", "torch"],
            line_names=["amxq", "torch"],
            ylabel="GB/s",
            plot_name="softmax",
            args={"M": 2048},
        )
    )
    def benchmark(M: int, N: int, provider: str) -> float:
        x = torch.randn(M, N)
        run = softmax if provider == "amxq" else (lambda x: torch.softmax(x, dim=-1))
        return 2 * x.numel() * x.element_size() / testing.do_bench(lambda: run(x)) * 1e-6

    benchmark.run(print_data=True)
