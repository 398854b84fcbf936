"""``amxq.linear``: each argument wrong in each way gives a typed error that names the value."""

from __future__ import annotations

import pytest
import torch

import amxq
from amxq.errors import AmxqError, ArgumentError, DTypeError, LayoutError, ShapeError

N, K, G = 40, 64, 2
Q = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
Z = torch.randint(0, 16, (N, G), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
W = amxq.pack(Q, torch.randn(N, G).half(), Z, format="plain")
PERM = torch.randperm(K).int()
X = torch.randn(3, K).bfloat16()
EXPERTS = amxq.PackedWeight(*(None if t is None else t[None] for t in W))
RAW = torch.zeros(K // 8, N, dtype=torch.int32), torch.ones(G, N), torch.zeros(G, N // 8).int()


def call(**changes):
    arguments = {"x": X, "qweight": W.qweight, "scales": W.scales, "zeros": W.zeros} | changes
    return amxq.linear(**arguments)


WRONG = [
    # x
    ({"x": None}, DTypeError, "x is a NoneType; expected a torch.Tensor"),
    ({"x": [1.0]}, DTypeError, "x is a list; expected a torch.Tensor"),
    ({"x": X.float().numpy()}, DTypeError, "x is a ndarray"),
    ({"x": X.double()}, DTypeError, "float64; expected bfloat16, float16 or float32"),
    ({"x": X.int()}, DTypeError, "x has dtype torch.int32"),
    ({"x": X.bool()}, DTypeError, "x has dtype torch.bool"),
    ({"x": X.to(torch.complex64)}, DTypeError, "complex64"),
    ({"x": X.float().to(torch.float8_e4m3fn)}, DTypeError, "float8_e4m3fn"),
    ({"x": X[0, 0]}, ShapeError, r"x has shape \[\]; expected \[..., 64\]"),
    ({"x": X[:, :63]}, ShapeError, r"x has shape \[3, 63\]; expected \[..., 64\]"),
    ({"x": X.T}, ShapeError, r"x has shape \[64, 3\]"),
    ({"x": X[:0, :5]}, ShapeError, r"x has shape \[0, 5\]"),
    ({"x": X.float().to_sparse()}, LayoutError, "sparse_coo; .*to_dense"),
    ({"x": X.float().to_mkldnn()}, LayoutError, "_mkldnn; .*to_dense"),
    ({"x": X.to("meta")}, LayoutError, "x is on meta and qweight on cpu"),
    ({"x": torch.quantize_per_tensor(X.float(), 0.1, 0, torch.qint8)}, LayoutError, "quantised"),
    ({"x": torch.nested.nested_tensor([X.float()])}, LayoutError, "x is nested"),
    # qweight
    ({"qweight": None}, DTypeError, "qweight is a NoneType"),
    ({"qweight": W.qweight.numpy()}, DTypeError, "qweight is a ndarray"),
    ({"qweight": W.qweight.to(torch.int8)}, DTypeError, "int8; expected torch.uint8; .*amxq.pack"),
    ({"qweight": W.qweight.float()}, DTypeError, "float32; expected torch.uint8"),
    ({"qweight": W.qweight[0]}, ShapeError, r"\[8, 2, 64\]; expected \[N/32, K/8, 2, 64\]"),
    ({"qweight": W.qweight[:1]}, ShapeError, "N = 40, which is 2 panels"),
    ({"qweight": W.qweight[:, :7].contiguous()}, ShapeError, "2 groups do not divide the 56"),
    ({"qweight": W.qweight.view(2, 8, 64, 2)}, ShapeError, r"\[2, 8, 64, 2\]"),
    ({"qweight": W.qweight[:, ::2]}, LayoutError, "strides .*contiguous"),
    ({"qweight": W.qweight.to("meta")}, LayoutError, "qweight is on meta"),
    ({"qweight": Q}, ShapeError, r"qweight has shape \[40, 64\].*amxq.pack"),
    ({"qweight": EXPERTS.qweight, "scales": EXPERTS.scales, "zeros": None}, ShapeError, "experts"),
    ({"qweight": W, "scales": None}, DTypeError, r"qweight is a PackedWeight; .*linear\(x, \*w\)"),
    # scales
    ({"scales": None}, DTypeError, "scales is a NoneType"),
    ({"scales": W.scales.double()}, DTypeError, "float64; expected torch.float16"),
    ({"scales": W.scales.int()}, DTypeError, "int32"),
    ({"scales": W.scales[:, 0].contiguous()}, ShapeError, r"scales have shape \[40\]"),
    ({"scales": W.scales[:32].contiguous(), "zeros": None}, ShapeError, "N = 32"),
    ({"scales": torch.ones(N, 3).half(), "zeros": None}, ShapeError, "3 groups do not divide"),
    ({"scales": torch.ones(N, 0).half(), "zeros": None}, ShapeError, "1 or more"),
    ({"scales": torch.ones(0, 2).half(), "zeros": None}, ShapeError, "1 or more"),
    ({"scales": torch.ones(G, N).half().T}, LayoutError, "contiguous"),
    ({"scales": W.scales.to("meta")}, LayoutError, "scales is on meta"),
    # zeros
    ({"zeros": W.zeros.int()}, DTypeError, "int32; expected torch.uint8"),
    ({"zeros": W.zeros[:, :1].contiguous()}, ShapeError, r"zeros have shape \[40, 1\]"),
    ({"zeros": torch.zeros(G, N, dtype=torch.uint8).T}, LayoutError, "contiguous"),
    ({"zeros": W.zeros.to("meta")}, LayoutError, "zeros is on meta"),
    ({"zeros": 8}, DTypeError, "zeros is a int"),
    # perm
    ({"perm": PERM.long()}, DTypeError, "perm has dtype torch.int64; expected torch.int32"),
    ({"perm": PERM[:56]}, ShapeError, r"perm has shape \[56\]; expected \[K\] with 56 < K <= 64"),
    ({"perm": PERM.view(8, 8)}, ShapeError, r"perm has shape \[8, 8\]"),
    ({"perm": PERM + 1}, LayoutError, "perm"),
    ({"perm": PERM - 1}, LayoutError, "perm"),
    ({"perm": PERM.to("meta")}, LayoutError, "perm is on meta"),
    ({"perm": "identity"}, DTypeError, "perm is a str"),
    # bias
    ({"bias": torch.zeros(N + 1)}, ShapeError, r"bias has shape \[41\]; expected \[40\]"),
    ({"bias": torch.zeros(1, N)}, ShapeError, r"bias has shape \[1, 40\]"),
    ({"bias": torch.tensor(1.0)}, ShapeError, r"bias has shape \[\]"),
    ({"bias": torch.zeros(N).int()}, DTypeError, "bias has dtype torch.int32"),
    ({"bias": torch.zeros(N).to("meta")}, LayoutError, "bias is on meta"),
    ({"bias": 1.0}, DTypeError, "bias is a float"),
    ({"bias": torch.zeros(N).to_sparse()}, LayoutError, "bias has layout"),
    # out
    ({"out": torch.empty(3, N)}, DTypeError, "out has dtype torch.float32; expected x's"),
    ({"out": X.new_empty(3, N + 1)}, ShapeError, r"out has shape \[3, 41\]; expected \[3, 40\]"),
    ({"out": X.new_empty(1, 3, N)}, ShapeError, r"out has shape \[1, 3, 40\]"),
    ({"out": X.new_empty(N, 3).T}, LayoutError, "contiguous"),
    ({"out": X.new_empty(3, N, device="meta")}, LayoutError, "out is .* on meta"),
    ({"out": 3}, DTypeError, "out is a int"),
    ({"out": X.new_empty(3, N).to_sparse()}, LayoutError, "out has layout"),
    ({"out": X.new_empty(1, N).expand(3, N)}, LayoutError, r"strides \(0, 1\); .*contiguous"),
    ({"out": X.new_empty(3 * N).as_strided((3, N), (1, 1))}, LayoutError, "contiguous"),
    ({"out": X.new_empty(3, N)._neg_view()}, LayoutError, "out is a lazy negation.*clone"),
    ({"out": torch._efficientzerotensor(3, N, dtype=X.dtype)}, LayoutError, "out is a lazy"),
    ({"out": torch.empty(3, N, dtype=torch.complex64).conj()}, DTypeError, "complex64"),
    (
        {"x": X.float(), "out": torch.empty(3, N, dtype=torch.complex64).conj().imag},
        LayoutError,
        "out is a lazy negation",
    ),
    ({"out": X.new_empty(3, N).requires_grad_()}, LayoutError, "out= has no gradient"),
    # precision
    ({"precision": None}, ArgumentError, "precision is None"),
    ({"precision": ["bf16"]}, ArgumentError, "precision is "),
    ({"precision": "int4"}, ArgumentError, "'int4'"),
    # raw triples
    ({"qweight": RAW[0], "scales": RAW[1], "zeros": W.zeros}, DTypeError, "zeros has dtype"),
    ({"qweight": RAW[0], "scales": RAW[1].T, "zeros": RAW[2]}, ShapeError, "qweight"),
    ({"qweight": RAW[0][:, :-1], "scales": RAW[1], "zeros": RAW[2]}, ShapeError, "qweight"),
    ({"qweight": RAW[0], "scales": RAW[1], "zeros": RAW[2][:1]}, ShapeError, "zeros"),
    ({"qweight": RAW[0], "scales": RAW[1].int(), "zeros": RAW[2]}, DTypeError, "scales"),
    ({"qweight": RAW[0], "scales": RAW[1], "zeros": None, "perm": PERM}, LayoutError, "g_idx"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, AmxqError)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_out_may_not_overlap_x() -> None:
    q = torch.randint(0, 16, (K, K), dtype=torch.uint8)
    w = amxq.pack(q, torch.ones(K, 1), format="plain")
    room = torch.randn(5, K)
    before = room.clone()
    for out in (room[:3], room[1:4], room[2:]):
        with pytest.raises(LayoutError, match="out overlaps x in memory"):
            amxq.linear(room[:3], *w, out=out)
    assert torch.equal(room, before)
    assert torch.equal(amxq.linear(room[:2], *w, out=room[2:4]), amxq.linear(before[:2], *w))


def test_out_may_not_overlap_the_weight() -> None:
    q = torch.randint(0, 16, (K, K), dtype=torch.uint8)
    w = amxq.pack(q, torch.ones(K, 1), format="plain")
    before = w.qweight.clone()
    out = w.qweight.view(-1).view(torch.float32)[: 2 * K].view(2, K)
    with pytest.raises(LayoutError, match="out overlaps qweight"):
        amxq.linear(torch.randn(2, K), *w, out=out)
    assert torch.equal(w.qweight, before)


def test_positional_mistakes() -> None:
    with pytest.raises(TypeError):
        amxq.linear(X)
    with pytest.raises(TypeError):
        amxq.linear(X, *W, None, torch.zeros(N))  # bias is named


def test_the_operator_itself_checks_too() -> None:
    op = torch.ops.amxq.linear
    with pytest.raises(ShapeError, match=r"x has shape \[3, 63\]"):
        op(X[:, :63], *W)
    with pytest.raises(LayoutError, match="qweight is on meta"):
        op(X, W.qweight.to("meta"), W.scales)
    with pytest.raises(DTypeError, match="float64"):
        op(X.double(), *W)
    op_out = torch.ops.amxq.linear_out
    with pytest.raises(ShapeError, match="out has shape"):
        op_out(X, *W, out=X.new_empty(2, N))
    for out in (X.new_empty(3, N)._neg_view(), torch._efficientzerotensor(3, N, dtype=X.dtype)):
        with pytest.raises(LayoutError, match="out is a lazy"):
            op_out(X, *W, out=out)
    out, bias = X.new_empty(3, N), torch.randn(N)
    for lazy in ((-X)._neg_view(), torch._efficientzerotensor(3, K, dtype=X.dtype)):
        op_out(lazy, *W, bias=(-bias)._neg_view(), precision="int8", out=out)
        assert torch.equal(out, op(lazy + 0, *W, bias=bias, precision="int8"))


@pytest.mark.parametrize("target", ["avx512_vnni", "", "AMX"])
def test_unknown_targets(target: str) -> None:
    from amxq.errors import TargetError

    with pytest.raises(TargetError, match="amx, avx512_bf16, avx512, avx2"):
        with amxq.target(target):
            call()
