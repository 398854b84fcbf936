"""Vector addition: programs, masks, and a launch.

Every program adds one block of BLOCK_SIZE elements; the mask keeps the last one inside of the
vectors. Compared with Triton's tutorial of this name only the imports and the names of devices
differ.

    python 01_vector_add.py            checks, and times both in this process
"""

import torch

import amxq as triton
import amxq.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y of two contiguous tensors of one shape."""
    output = torch.empty_like(x)
    n_elements = output.numel()
    # The grid may depend on the meta-parameters.
    grid = lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)  # noqa: E731
    add_kernel[grid](x, y, output, n_elements, BLOCK_SIZE=8192)
    return output


def check(size: int) -> None:
    x, y = torch.rand(size), torch.rand(size)
    assert torch.equal(add(x, y), x + y), size


if __name__ == "__main__":
    from amxq import testing

    for n in (1, 1000, 98432, 1 << 20):
        check(n)

    @testing.perf_report(
        testing.Benchmark(
            x_names=["size"],
            x_vals=[2**i for i in range(12, 25, 2)],
            x_log=True,
            line_arg="provider",
            line_vals=["amxq", "torch"],
            line_names=["amxq", "torch"],
            ylabel="GB/s",
            plot_name="vector-add",
            args={},
        )
    )
    def benchmark(size: int, provider: str) -> float:
        x, y = torch.rand(size), torch.rand(size)
        ms = testing.do_bench((lambda: add(x, y)) if provider == "amxq" else (lambda: x + y))
        return 3 * x.numel() * x.element_size() / ms * 1e-6

    benchmark.run(print_data=True)
