"""``amxq.fused_moe``: each argument wrong in each way gives a typed error that names the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amxq
from amxq.errors import AmxqError, ArgumentError, DTypeError, LayoutError, ShapeError

E, H, I = 3, 64, 32  # noqa: E741
GENERATOR = torch.Generator().manual_seed(0)


def packed(N: int, K: int, group: int = 32, zeros: bool = False) -> amxq.PackedWeight:
    q = torch.randint(0, 16, (E, N, K), dtype=torch.uint8, generator=GENERATOR)
    z = q[..., : K // group].clone() if zeros else None
    return amxq.pack(q, torch.rand(E, N, K // group).half(), z, format="plain")


W13, W2 = packed(2 * I, H), packed(H, I)
ASYMMETRIC = packed(2 * I, H, zeros=True)
X = torch.randn(2, H).bfloat16()
IDS, WEIGHTS = torch.tensor([[0, 2], [1, 0]]), torch.rand(2, 2)
LINEAR = amxq.PackedWeight(*(None if t is None else t[0] for t in W13))


def call(**changes: Any) -> torch.Tensor:
    given = {"x": X, "w13": W13, "w2": W2, "topk_weights": WEIGHTS, "topk_ids": IDS}
    return amxq.fused_moe(**(given | changes))


def w13(**changes: Any) -> dict[str, Any]:
    return {"w13": ASYMMETRIC._replace(**changes)}


WRONG = [
    ({"x": None}, DTypeError, "x is a NoneType"),
    ({"x": X.double()}, DTypeError, "x has dtype torch.float64"),
    ({"x": X[:, :-1]}, ShapeError, r"x has shape \[2, 63\]; expected \[M, 64\]"),
    ({"x": X[None]}, ShapeError, r"\[1, 2, 64\]"),
    ({"x": X.float().to_sparse()}, LayoutError, "to_dense"),
    ({"x": X.to("meta")}, LayoutError, "x is on meta and w13.qweight on cpu"),
    ({"x": torch.randn(2, H, requires_grad=True)}, LayoutError, "gradient"),
    ({"w13": None}, DTypeError, "w13 is a NoneType; expected an amxq.PackedWeight"),
    ({"w13": W13.qweight}, DTypeError, "w13 is a Tensor"),
    ({"w13": LINEAR}, ShapeError, r"w13.qweight .* expected packed, stacked experts"),
    ({"w13": W2}, ShapeError, "w13 is|w2 is"),
    ({"w2": W13}, ShapeError, r"w2 is \[3, 64, 64\]"),
    ({"w2": amxq.PackedWeight(*(None if t is None else t[:2] for t in W2))}, ShapeError, "w2 is"),
    (w13(qweight=None), DTypeError, "w13.qweight is a NoneType"),
    (w13(qweight=ASYMMETRIC.qweight.int()), DTypeError, "w13: qweight has dtype"),
    (w13(qweight=ASYMMETRIC.qweight.transpose(1, 2)), (ShapeError, LayoutError), "w13"),
    (w13(qweight=ASYMMETRIC.qweight[:, :1].contiguous()), ShapeError, "w13: scales say N"),
    (w13(scales=ASYMMETRIC.scales.double()), DTypeError, "w13: scales has dtype"),
    (w13(scales=ASYMMETRIC.scales[:, :, :1]), LayoutError, "w13: scales has strides"),
    (w13(scales=ASYMMETRIC.scales[:2].contiguous()), ShapeError, "w13: scales"),
    (w13(zeros=ASYMMETRIC.zeros.int()), DTypeError, "w13: zeros has dtype"),
    (w13(zeros=ASYMMETRIC.zeros[:, 1:].contiguous()), ShapeError, "w13: zeros"),
    (w13(zeros=8), DTypeError, "w13.zeros is a int"),
    (w13(perm=torch.arange(H)), DTypeError, "w13: perm has dtype"),
    (w13(perm=torch.arange(H).int() + 1), LayoutError, "perm"),
    (w13(perm=torch.arange(H - 3).int()), ShapeError, "K is 61|perm"),
    ({"w2": W2._replace(perm=torch.arange(I).int() - 1)}, LayoutError, "perm"),
    ({"topk_ids": IDS.float()}, DTypeError, "topk_ids has dtype torch.float32"),
    ({"topk_ids": IDS.short()}, DTypeError, "topk_ids has dtype torch.int16"),
    ({"topk_ids": IDS[0]}, ShapeError, r"topk_ids has shape \[2\]; expected \[2, topk\]"),
    ({"topk_ids": IDS[:1]}, ShapeError, r"\[1, 2\]"),
    ({"topk_ids": [[0, 1]]}, DTypeError, "topk_ids is a list"),
    (
        {"topk_ids": torch.tensor([[0, 2], [3, 0]])},
        ShapeError,
        r"topk_ids\[1, 0\] is 3; .* below 3",
    ),
    ({"topk_ids": IDS + (1 << 40)}, ShapeError, r"topk_ids\[.*\] is 1099"),
    ({"topk_weights": WEIGHTS.double()}, DTypeError, "topk_weights has dtype torch.float64"),
    ({"topk_weights": WEIGHTS[:, :1]}, ShapeError, r"topk_weights has shape \[2, 1\]"),
    ({"topk_weights": None}, DTypeError, "topk_weights is a NoneType"),
    ({"expert_map": torch.tensor([0.0])}, DTypeError, "expert_map has dtype"),
    ({"expert_map": torch.tensor([[0]])}, ShapeError, r"expert_map has shape \[1, 1\]"),
    ({"expert_map": torch.tensor([0, 1])}, ShapeError, r"is 2, but expert_map has shape \[2\]"),
    ({"expert_map": torch.tensor([0, 7, 1])}, ShapeError, r"expert_map\[1\] is 7; .* 0\.\.2"),
    ({"expert_map": torch.tensor([0, 2**40, 1])}, ShapeError, rf"expert_map\[1\] is {2**40}"),
    ({"expert_map": [0]}, DTypeError, "expert_map is a list"),
    ({"w13_bias": torch.zeros(E, I)}, ShapeError, r"w13_bias has shape \[3, 32\]; .* \[3, 64\]"),
    ({"w2_bias": torch.zeros(H)}, ShapeError, "w2_bias has shape"),
    ({"w2_bias": torch.zeros(E, H).int()}, DTypeError, "w2_bias has dtype torch.int32"),
    ({"w2_bias": 0.5}, DTypeError, "w2_bias is a float"),
    ({"activation": "relu"}, ArgumentError, "activation='relu': expected one of 'silu'"),
    ({"alpha": 2.0}, ArgumentError, "only 'swiglu' has an alpha"),
    ({"limit": 0.0}, ArgumentError, "limit=0.0"),
    ({"limit": float("nan")}, ArgumentError, "limit=nan"),
    ({"precision": "int4"}, ArgumentError, "'int4'"),
    ({"precision": None}, ArgumentError, "precision is None"),
    ({"activation": None}, ArgumentError, "activation is None"),
    ({"limit": "7"}, ArgumentError, "limit is '7'"),
    ({"routed_scaling_factor": "1"}, ArgumentError, "routed_scaling_factor is '1'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_mistakes(changes: dict[str, Any], error: type[AmxqError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, AmxqError)


def test_wrong_ids_in_many_rows() -> None:
    """The last wrong assignment is named, whatever lies before it."""
    ids = torch.zeros(500, 2, dtype=torch.int32)
    ids[321, 1] = 3
    with pytest.raises(ShapeError, match=r"topk_ids\[321, 1\] is 3"):
        call(x=torch.zeros(500, H), topk_ids=ids, topk_weights=torch.zeros(500, 2))
