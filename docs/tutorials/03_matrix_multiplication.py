"""Matrix multiplication: blocks, pointer arithmetic, masks, and an order of programs.

C [M, N] = A [M, K] · B [K, N]. Every program computes one block of C: it walks along K, loads a
block of A and one of B at pointers that move by a block each time, and adds their product to an
accumulator in fp32. Compared with Triton's tutorial of this name only the imports and the names
of devices differ.

Programs that run after one another should share what they read: they go through C in groups of
GROUP_SIZE_M rows of blocks, so that the blocks of B that a group reads stay in cache.

    python 03_matrix_multiplication.py            checks, and times both in this process
"""

import torch

import amxq as triton
import amxq.language as tl


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    # Which block of C: groups of GROUP_SIZE_M rows of blocks, column after column.
    pid = tl.program_id(axis=0)
    blocks_m = tl.cdiv(M, BLOCK_SIZE_M)
    blocks_n = tl.cdiv(N, BLOCK_SIZE_N)
    blocks_in_group = GROUP_SIZE_M * blocks_n
    first_m = pid // blocks_in_group * GROUP_SIZE_M
    group_size = min(blocks_m - first_m, GROUP_SIZE_M)
    pid_m = first_m + pid % blocks_in_group % group_size
    pid_n = pid % blocks_in_group // group_size

    # Rows and columns beyond the matrix wrap round: they are read, and never stored.
    rows = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    columns = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    depth = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + columns[None, :] * stride_bn

    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        left = K - k * BLOCK_SIZE_K
        a = tl.load(a_ptrs, mask=depth[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < left, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk

    rows = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    columns = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * rows[:, None] + stride_cn * columns[None, :]
    tl.store(c_ptrs, accumulator, mask=(rows[:, None] < M) & (columns[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N], both of one dtype (bf16, fp16, fp32) and any strides."""
    (M, K), N = a.shape, b.shape[1]
    assert b.shape[0] == K and a.dtype == b.dtype
    c = torch.empty((M, N), dtype=a.dtype)
    # Large blocks: a block of B is copied into the order that the multiplication wants once for
    # all rows of a block of A, and what both need together fits the second-level cache.
    size = 256 if min(M, N) > 256 else 64
    depth = 512 // a.element_size() if size > 64 else 128
    grid = (triton.cdiv(M, size) * triton.cdiv(N, size),)
    matmul_kernel[grid](
        a,
        b,
        c,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        *c.stride(),
        BLOCK_SIZE_M=size,
        BLOCK_SIZE_N=size,
        BLOCK_SIZE_K=depth,
        GROUP_SIZE_M=8,
    )
    return c


def check(M: int, N: int, K: int, dtype: torch.dtype) -> None:
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    exact = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    bound = terms * K * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps + 1e-6
    assert ((matmul(a, b) - exact).abs() <= bound).all(), (M, N, K, dtype)


if __name__ == "__main__":
    from amxq.testing import do_bench

    torch.manual_seed(0)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        check(300, 200, 100, kind)
        check(512, 512, 512, kind)
        x, y = torch.randn(512, 512).to(kind), torch.randn(512, 512).to(kind)
        ours, theirs = do_bench(lambda: matmul(x, y)), do_bench(lambda: torch.matmul(x, y))  # noqa: B023
        print(f"512 x 512 x 512 {kind}: {ours:.2f} ms, torch {theirs:.2f} ms")
