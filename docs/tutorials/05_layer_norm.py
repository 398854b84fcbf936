"""Layer norm, forward and backward: several passes over a row, and sums over rows.

y = (x - mean) / sqrt(var + eps) · weight + bias along the rows of x [M, N]. The backward pass gives
the gradient of x row by row. Those of weight and bias are sums over rows: programs add their
rows' parts to GROUP_SIZE_M buffers, each behind a lock, and a second kernel adds up the buffers.
Compared with Triton's tutorial of this name only the imports and the names of devices differ.

    python 05_layer_norm.py            checks, and times both in this process
"""

from typing import Any

import torch

import amxq as triton
import amxq.language as tl


@triton.jit
def layer_norm_forward(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    # mean and variance
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        _mean += tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    rstd = 1 / tl.sqrt(tl.sum(_var, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    # normalise, scale, shift
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(Y + cols, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def layer_norm_backward_dx(
    DX, DY, DW, DB, X, W, Mean, Rstd, Lock, stride, N,
    GROUP_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE_N)
    mask = cols < N
    X += row * stride
    DY += row * stride
    DX += row * stride
    # the buffer of this row's group, and its lock
    lock_id = row % GROUP_SIZE_M
    Lock += lock_id
    Count = Lock + GROUP_SIZE_M
    DW = DW + lock_id * N + cols
    DB = DB + lock_id * N + cols
    x = tl.load(X + cols, mask=mask, other=0).to(tl.float32)
    dy = tl.load(DY + cols, mask=mask, other=0).to(tl.float32)
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    mean = tl.load(Mean + row)
    rstd = tl.load(Rstd + row)
    # dx
    xhat = tl.where(mask, (x - mean) * rstd, 0.0)
    wdy = tl.where(mask, w * dy, 0.0)
    c1 = tl.sum(xhat * wdy, axis=0) / N
    c2 = tl.sum(wdy, axis=0) / N
    dx = (wdy - (xhat * c1 + c2)) * rstd
    tl.store(DX + cols, dx, mask=mask)
    # dw and db, added to the buffer
    partial_dw = (dy * xhat).to(w.dtype)
    partial_db = dy.to(w.dtype)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    count = tl.load(Count)
    if count == 0:  # the first one finds nothing to add to
        tl.atomic_xchg(Count, 1)
    else:
        partial_dw += tl.load(DW, mask=mask)
        partial_db += tl.load(DB, mask=mask)
    tl.store(DW, partial_dw, mask=mask)
    tl.store(DB, partial_db, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(Lock, 0)


@triton.jit
def layer_norm_backward_dwdb(
    DW, DB, FINAL_DW, FINAL_DB, M, N, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    dw = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for i in range(0, M, BLOCK_SIZE_M):
        rows = i + tl.arange(0, BLOCK_SIZE_M)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        offs = rows[:, None] * N + cols[None, :]
        dw += tl.load(DW + offs, mask=mask, other=0.0)
        db += tl.load(DB + offs, mask=mask, other=0.0)
    tl.store(FINAL_DW + cols, tl.sum(dw, axis=0), mask=cols < N)
    tl.store(FINAL_DB + cols, tl.sum(db, axis=0), mask=cols < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, eps):  # type: ignore[no-untyped-def]
        y = torch.empty_like(x)
        rows = x.reshape(-1, x.shape[-1])
        M, N = rows.shape
        mean, rstd = torch.empty(M), torch.empty(M)
        block = min(1024, triton.next_power_of_2(N))
        layer_norm_forward[(M,)](
            rows, y, weight, bias, mean, rstd, rows.stride(0), N, eps, BLOCK_SIZE=block
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[no-untyped-def]
        x, weight, mean, rstd = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        M, N = rows.shape
        groups = 16
        locks = torch.zeros(2 * groups, dtype=torch.int32)
        _dw, _db = torch.zeros(groups, N), torch.zeros(groups, N)
        dw, db = torch.empty_like(weight), torch.empty_like(weight)
        dx = torch.empty_like(dy)
        layer_norm_backward_dx[(M,)](
            dx, dy, _dw, _db, rows, weight, mean, rstd, locks, rows.stride(0), N,
            GROUP_SIZE_M=groups, BLOCK_SIZE_N=triton.next_power_of_2(N),
        )  # fmt: skip
        layer_norm_backward_dwdb[(triton.cdiv(N, 128),)](
            _dw, _db, dw, db, min(groups, M), N, BLOCK_SIZE_M=16, BLOCK_SIZE_N=128
        )
        return dx, dw, db, None


layer_norm = LayerNorm.apply


def check(M: int, N: int, eps: float = 1e-5) -> None:
    x = (-2.3 + 0.5 * torch.randn(M, N)).requires_grad_()
    weight, bias = (torch.rand(N).requires_grad_() for _ in range(2))
    dy = 0.1 * torch.randn(M, N)
    got = layer_norm(x, weight, bias, eps)
    got.backward(dy)
    grads = [t.grad.clone() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    want = torch.nn.functional.layer_norm(wide[0], (N,), wide[1], wide[2], eps)
    want.backward(dy.double())
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    for grad, reference in zip(grads, wide):
        torch.testing.assert_close(grad, reference.grad.float(), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    from amxq import testing

    torch.manual_seed(0)
    check(1151, 1000)

    @testing.perf_report(
        testing.Benchmark(
            x_names=["N"],
            x_vals=[512, 1024, 2048, 4096],
            line_arg="provider",
            line_vals=["amxq", "torch"],
            line_names=["amxq", "torch"],
            ylabel="GB/s",
            plot_name="layer-norm-forward",
            args={"M": 2048},
        )
    )
    def benchmark(M: int, N: int, provider: str) -> float:
        x, weight, bias = torch.randn(M, N), torch.rand(N), torch.rand(N)
        if provider == "amxq":
            ms = testing.do_bench(lambda: layer_norm(x, weight, bias, 1e-5))
        else:
            ms = testing.do_bench(
                lambda: torch.nn.functional.layer_norm(x, (N,), weight, bias, 1e-5)
            )
        return 2 * x.numel() * x.element_size() / ms * 1e-6

    benchmark.run(print_data=True)
