"""Attention, forward: softmax computed along the way (FlashAttention, Dao et al., 2022).

out = softmax(q · kᵀ · scale) · v for each head of q, k, v [Z, H, T, D]. Every program takes BLOCK_M
queries and walks along the keys in blocks, keeping the running maximum and sum of each row, so
the T x T matrix of scores is never in memory. Compared with Triton's tutorial of this name only
the imports and the names of devices differ.

    python 06_attention.py            checks, and times both in this process
"""

import torch

import amxq as triton
import amxq.language as tl


@triton.jit
def attention_kernel(
    Q, K, V, Out, sm_scale, stride_h, stride_t, stride_d, T,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    base = tl.program_id(1).to(tl.int64) * stride_h
    q_block = tl.make_block_ptr(
        Q + base, (T, D), (stride_t, stride_d), (start_m * BLOCK_M, 0), (BLOCK_M, D), (1, 0)
    )
    k_block = tl.make_block_ptr(
        K + base, (D, T), (stride_d, stride_t), (0, 0), (D, BLOCK_N), (0, 1)
    )
    v_block = tl.make_block_ptr(
        V + base, (T, D), (stride_t, stride_d), (0, 0), (BLOCK_N, D), (1, 0)
    )
    out_block = tl.make_block_ptr(
        Out + base, (T, D), (stride_t, stride_d), (start_m * BLOCK_M, 0), (BLOCK_M, D), (1, 0)
    )
    rows = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    highest = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    qk_scale = sm_scale * 1.44269504  # exp2 instead of exp
    q = tl.load(q_block, boundary_check=(0,))
    end = T
    if CAUSAL:
        end = min((start_m + 1) * BLOCK_M, T)
    for start_n in range(0, end, BLOCK_N):
        k = tl.load(k_block, boundary_check=(1,))
        qk = tl.dot(q, k)
        if not EVEN:
            qk = tl.where(start_n + columns[None, :] < T, qk, -float("inf"))
        if CAUSAL:
            qk = tl.where(rows[:, None] >= start_n + columns[None, :], qk, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(qk, 1) * qk_scale)
        p = tl.math.exp2(qk * qk_scale - new_highest[:, None])
        alpha = tl.math.exp2(highest - new_highest)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_block, boundary_check=(0,))
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        highest = new_highest
        k_block = tl.advance(k_block, (0, BLOCK_N))
        v_block = tl.advance(v_block, (BLOCK_N, 0))
    tl.store(out_block, (acc / total[:, None]).to(Out.dtype), boundary_check=(0,))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> torch.Tensor:
    """q, k, v [Z, H, T, D], contiguous, of one dtype."""
    Z, H, T, D = q.shape
    out = torch.empty_like(q)
    # The keys are put in order for the multiplication once for all queries of a program.
    block_m, block_n = (256, 128) if T > 256 else (64, 64)
    attention_kernel[(triton.cdiv(T, block_m), Z * H)](
        q, k, v, out, D**-0.5, q.stride(1), q.stride(2), q.stride(3), T,
        D=D, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, EVEN=T % block_n == 0,
    )  # fmt: skip
    return out


def check(Z: int, H: int, T: int, D: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (torch.randn(Z, H, T, D).to(dtype) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal
    )
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attention(q, k, v, causal).double(), want, rtol=bound, atol=bound)


if __name__ == "__main__":
    from amxq import testing

    torch.manual_seed(0)
    for is_causal in (False, True):
        check(1, 2, 200, 64, torch.float32, is_causal)
        check(2, 4, 256, 64, torch.bfloat16, is_causal)

    @testing.perf_report(
        testing.Benchmark(
            x_names=["T"],
            x_vals=[256, 512, 1024, 2048],
            line_arg="provider",
            line_vals=["amxq", "torch"],
            line_names=["amxq", "torch"],
            ylabel="ms",
            plot_name="attention-bf16",
            args={"H": 8, "D": 64},
        )
    )
    def benchmark(T: int, H: int, D: int, provider: str) -> float:
        q, k, v = (torch.randn(1, H, T, D, dtype=torch.bfloat16) for _ in range(3))
        run = attention
        if provider == "torch":
            run = torch.nn.functional.scaled_dot_product_attention
        return float(testing.do_bench(lambda: run(q, k, v)))

    benchmark.run(print_data=True)
