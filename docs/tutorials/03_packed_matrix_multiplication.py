"""Matrix multiplication with a right operand that is packed beforehand, as weights are.

The instructions that multiply bf16 take two numbers of K at a time, for 16 columns: pairs that do
not lie next to each other in B [K, N]. The kernel of 03_matrix_multiplication.py puts each block of
B in that order again and again. Here B is brought once into panels of 16 columns, [N/16, K/2, 16,
2], and the kernel takes apart a block of it, [N/16, 16·K] of a few panels:

    accumulator = tl.dot(a, unpacked(pairs, K, N), accumulator)

Where the CPU multiplies pairs (targets amx and avx512_bf16) nothing is moved for that: the compiler
sees that the pairs are what it wants, and reads them where they lie. Elsewhere it moves them.

    python 03_packed_matrix_multiplication.py     checks, and times both in this process
"""

import torch

import amxq as triton
import amxq.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 32, 256, 256
PANEL = 16


@triton.jit
def pack_kernel(b, packed, N, K, depth, stride, BLOCK: tl.constexpr):
    """b [K, N] as pairs, uint32 [panels, depth / 2, 16]; beyond K and N there are zeros.

    Grid: (panels, depth / 2 / BLOCK).
    """
    panel, pair = tl.program_id(0), tl.program_id(1) * BLOCK
    shape, strides = [tl.cdiv(K, 2), N], [2 * stride, 1]
    even = tl.make_tensor_descriptor(b, shape, strides, [BLOCK, 16])
    odd = tl.make_tensor_descriptor(b + stride, [K // 2, N], strides, [BLOCK, 16])
    low, high = even.load([pair, panel * 16]), odd.load([pair, panel * 16])
    pairs = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    shape = [tl.num_programs(0) * (depth // 2), 16]
    lines = tl.make_tensor_descriptor(packed, shape, [16, 1], [BLOCK, 16])
    lines.store([panel * (depth // 2) + pair, 0], pairs, boundary_check=())


@triton.jit
def unpacked(pairs, K: tl.constexpr, N: tl.constexpr):
    """The columns [K, N] of a block [N/16, 16·K] of pairs."""
    lines = tl.reshape(pairs, (N // 16 * K // 2, 16, 2)).permute(0, 2, 1)
    return tl.reshape(tl.reshape(lines, (N // 16, K, 16)).permute(1, 0, 2), (K, N))


@triton.jit
def packed_matmul_kernel(
    a,
    packed,
    c,
    M,
    N,
    depth,
    stride_a,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of c [M, N], of a [rows, depth] in whole blocks. Grid: blocks of rows, of columns."""
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows = tl.num_programs(0) * BLOCK_M
    panels = tl.num_programs(1) * (BLOCK_N // 16)
    a_blocks = tl.make_tensor_descriptor(a, [rows, depth], [stride_a, 1], [BLOCK_M, BLOCK_K])
    b_blocks = tl.make_tensor_descriptor(
        packed, [panels, 16 * depth], [16 * depth, 1], [BLOCK_N // 16, 16 * BLOCK_K]
    )
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        # Whole blocks: nothing has to be checked, and blocks are read where they lie.
        rows_of_a = a_blocks.load([m, k], boundary_check=())
        pairs = b_blocks.load([n // 16, 16 * k], boundary_check=())
        accumulator = tl.dot(rows_of_a, unpacked(pairs, BLOCK_K, BLOCK_N), accumulator)
    tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N]).store([m, n], accumulator)


def up(number: int, block: int) -> int:
    return triton.cdiv(number, block) * block


def pack(b: torch.Tensor) -> torch.Tensor:
    """bf16 b [K, N], rows contiguous, as bf16 [panels, 16 · depth]: once for many products."""
    K, N = b.shape
    panels, depth = up(N, BLOCK_N) // PANEL, up(K, BLOCK_K)
    packed = torch.empty((panels, PANEL * depth), dtype=torch.bfloat16)
    halves, pairs = b.view(torch.uint16), packed.view(torch.uint32)
    grid = (panels, depth // BLOCK_K)
    pack_kernel[grid](halves, pairs, N, K, depth, b.stride(0), BLOCK=BLOCK_K // 2)
    return packed


def matmul(a: torch.Tensor, packed: torch.Tensor, N: int) -> torch.Tensor:
    """bf16 a [M, K] times b [K, N], which ``packed`` was made of."""
    M, K = a.shape
    panels, depth = packed.shape[0], packed.shape[1] // PANEL
    rows = a
    if M % BLOCK_M or K != depth or a.stride(1) != 1:  # not in whole blocks
        rows = torch.zeros((up(M, BLOCK_M), depth), dtype=torch.bfloat16)
        rows[:M, :K] = a
    c = torch.empty((M, N), dtype=torch.bfloat16)
    grid = (rows.shape[0] // BLOCK_M, panels * PANEL // BLOCK_N)
    packed_matmul_kernel[grid](
        rows,
        packed,
        c,
        M,
        N,
        depth,
        rows.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        # Longer sums go to memory and back less often.
        BLOCK_K=BLOCK_K if depth % (2 * BLOCK_K) else 2 * BLOCK_K,
    )
    return c


def check(M: int, N: int, K: int) -> None:
    a, b = torch.randn(M, K).bfloat16(), torch.randn(K, N).bfloat16()
    exact = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    bound = terms * K * 2.0**-24 + exact.abs() * torch.finfo(torch.bfloat16).eps + 1e-6
    assert ((matmul(a, pack(b), N) - exact).abs() <= bound).all(), (M, N, K)


if __name__ == "__main__":
    from amxq.testing import do_bench

    torch.manual_seed(0)
    check(300, 200, 100)
    check(512, 512, 512)
    x, y = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    z = pack(y)
    ours, theirs = do_bench(lambda: matmul(x, z, 1024)), do_bench(lambda: torch.matmul(x, y))
    print(
        f"1024 x 1024 x 1024: {ours:.2f} ms, packing {do_bench(lambda: pack(y)):.2f} ms, ", end=""
    )
    print(f"torch {theirs:.2f} ms")
