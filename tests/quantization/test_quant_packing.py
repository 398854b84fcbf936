"""pack and dequantize against the independent reader, over formats and shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import quant_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amxq.errors import AmxqError, DTypeError, LayoutError, ShapeError
from amxq.quantization import PackedWeight, dequantize, format_of_raw, is_raw, pack
from amxq.runtime import memory

FORMATS = ["gptq", "gptq_v2", "awq", "plain"]


def make(
    seed: int, N: int, K: int, group: int, *, sym: bool, act_order: bool = False
) -> reference.Weight:
    rng = np.random.default_rng(seed)
    size = K if group == -1 else group
    G = -(-K // size)
    scales = rng.standard_normal((N, G)).astype(np.float16)
    zeros = None if sym else rng.integers(0, 16, (N, G), dtype=np.uint8)
    groups = np.arange(K) // size
    if act_order:
        groups = groups[rng.permutation(K)]
    return reference.Weight(rng.integers(0, 16, (N, K), dtype=np.uint8), zeros, scales, groups)


def packed(weight: reference.Weight, format: str, **options: Any) -> PackedWeight:
    qweight, scales, zeros = weight.tensors(format)
    return pack(
        torch.from_numpy(qweight.copy()),
        torch.from_numpy(scales.copy()),
        None if zeros is None else torch.from_numpy(zeros.copy()),
        format=format,  # type: ignore[arg-type]
        **options,
    )


def numpy(w: PackedWeight) -> tuple[Any, ...]:
    return tuple(None if t is None else t.numpy() for t in w)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    format = draw(st.sampled_from(FORMATS))
    N = draw(st.integers(1, 70))
    step = 8 if format in ("gptq", "gptq_v2") else 1
    K = step * draw(st.integers(1, 88 // step))
    group = draw(st.one_of(st.just(-1), st.integers(1, 6).map(lambda g: 8 * g)))
    return {
        "format": format,
        "N": N,
        "K": K,
        "group": group,
        "sym": draw(st.booleans()),
        "act_order": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_pack_and_dequantize_are_exact(case: dict[str, Any]) -> None:
    format, group = case.pop("format"), case["group"]
    weight = make(**case)
    options: dict[str, Any] = {"group_size": group}
    if case["act_order"]:
        options["g_idx"] = torch.from_numpy(weight.groups)
    w = packed(weight, format, **options).check()
    N, K = case["N"], case["K"]
    assert (w.out_features, w.in_features, w.num_experts) == (N, K, None)
    assert w.group_size * w.num_groups == 8 * -(-K // 8)
    assert all(t is None or t.is_contiguous() for t in w)
    expected = weight.exact()
    assert np.array_equal(reference.read_packed(*numpy(w)), expected)
    assert np.array_equal(dequantize(w).numpy(), expected)
    assert reference.padding(w.qweight.numpy(), N, K) <= {8}


@pytest.mark.parametrize("format", FORMATS)
def test_stacked_experts_are_each_their_own_packing(format: str) -> None:
    weights = [make(e, 40, 64, 16, sym=False) for e in range(3)]
    stacked = [np.stack(t) for t in zip(*(w.tensors(format) for w in weights), strict=True)]
    q, s, z = (torch.from_numpy(t) for t in stacked)
    w = pack(q, s, z, format=format).check()  # type: ignore[arg-type]
    assert w.num_experts == 3 and (w.out_features, w.in_features) == (40, 64)
    for e, weight in enumerate(weights):
        one = packed(weight, format)
        for whole, part in zip(w[:3], one[:3], strict=True):
            assert whole is not None and part is not None and torch.equal(whole[e], part)
    assert np.array_equal(dequantize(w).numpy(), np.stack([x.exact() for x in weights]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_dtype_and_bits(dtype: torch.dtype) -> None:
    scales = torch.randn(33, 2).to(dtype)
    w = pack(torch.randint(0, 16, (33, 32), dtype=torch.uint8), scales, format="plain")
    assert w.scales.dtype == dtype
    assert torch.equal(w.scales.flatten().sort().values, scales.flatten().sort().values)


@pytest.mark.parametrize(
    ("K", "group", "new"), [(160, 128, 32), (352, 128, 32), (160, 64, 32), (96, 32, 32)]
)
def test_a_short_last_group_is_regrouped(K: int, group: int, new: int) -> None:
    weight = make(0, 20, K, group, sym=False)
    w = packed(weight, "gptq", group_size=group)
    assert w.group_size == new == math.gcd(group, K)
    assert np.array_equal(dequantize(w).numpy(), weight.exact())


def test_symmetric_zeros_become_none_and_k_is_exact() -> None:
    weight = make(1, 8, 60, -1, sym=True)
    weight.z = np.full_like(weight.s, 8, dtype=np.uint8)
    w = packed(weight, "plain")
    assert w.zeros is None and w.perm is not None
    assert torch.equal(w.perm, torch.arange(60, dtype=torch.int32))
    assert w.in_features == 60 and w.group_size == 64


def test_v1_zeros_borrow_from_their_neighbours() -> None:
    weight = make(2, 8, 8, -1, sym=False)
    weight.z = np.array([[0], [0], [9], [0], [1], [15], [0], [0]], dtype=np.uint8)
    assert np.array_equal(dequantize(packed(weight, "gptq")).numpy(), weight.exact())


def test_trivial_g_idx_means_no_act_order_and_gives_the_group_size() -> None:
    weight = make(3, 16, 160, 128, sym=False)
    w = packed(weight, "gptq", g_idx=torch.from_numpy(weight.groups.astype(np.int32)))
    assert w.perm is None and w.group_size == 32
    assert np.array_equal(dequantize(w).numpy(), weight.exact())


def test_act_order_is_sorted_stably() -> None:
    weight = make(4, 16, 64, 16, sym=False, act_order=True)
    w = packed(weight, "gptq", g_idx=torch.from_numpy(weight.groups))
    assert w.perm is not None and w.perm.dtype == torch.int32
    assert np.array_equal(w.perm.numpy(), np.argsort(weight.groups, kind="stable"))


def test_experts_with_one_act_order_and_with_their_own() -> None:
    q = torch.randint(0, 16, (2, 8, 32), dtype=torch.uint8)
    s = torch.ones(2, 8, 2)
    g_idx = (torch.arange(32) // 16).flip(0)
    w = pack(q, s, format="plain", g_idx=g_idx.expand(2, 32))
    assert w.perm is not None and w.perm.shape == (32,)
    assert torch.equal(dequantize(w), q.float() - 8)
    own = torch.stack((g_idx, torch.arange(32) // 8 % 2))
    scales, zeros = torch.rand(2, 8, 2), torch.randint(0, 16, (2, 8, 2), dtype=torch.uint8)
    w = pack(q, scales, zeros, format="plain", g_idx=own)
    assert w.perm is not None and w.perm.shape == (2, 32) and w.in_features == 32
    columns = own[:, None].expand(2, 8, 32)
    exact = (q.float() - zeros.gather(2, columns)) * scales.gather(2, columns)
    assert torch.equal(dequantize(w), exact)
    with pytest.raises(LayoutError, match="twice"):
        w._replace(perm=torch.stack((w.perm[0], w.perm[0] // 2))).check()
    with pytest.raises(ShapeError, match="perm has shape"):
        w._replace(perm=w.perm[:1]).check()


def test_pages_are_touched_panel_by_panel_on_machines_with_several_memory_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the grid of a linear of one row, whose threads therefore find them near."""
    from amxq_kernels import packing as kernels

    panels = torch.full((3, 2500), -1, dtype=torch.int32)
    kernels.touch[3,](panels, 2500, PAGE=1024)
    written = (panels == 0).nonzero().tolist()
    assert written == [[panel, word] for panel in range(3) for word in (0, 1024, 2048)]
    assert int((panels == -1).sum()) == 3 * 2500 - len(written)

    q, scales = torch.randint(0, 16, (70, 64), dtype=torch.uint8), torch.rand(70, 2) + 0.5
    near = pack(q, scales, format="plain")
    seen: list[int] = []
    touch = type(kernels.touch).__getitem__
    monkeypatch.setattr(memory, "several_nodes", lambda: True)

    def recorded(kernel: Any, grid: Any) -> Any:
        if kernel is kernels.touch:
            seen.extend(grid)
        return touch(kernel, grid)

    monkeypatch.setattr(type(kernels.touch), "__getitem__", recorded)
    again = pack(q, scales, format="plain")
    assert seen == [3]
    assert torch.equal(near.qweight, again.qweight)


def test_strided_inputs_are_taken() -> None:
    weight = make(5, 24, 32, 16, sym=False)
    q, s, z = (torch.from_numpy(t) for t in weight.tensors("gptq"))  # type: ignore[arg-type]
    expected = pack(q, s, z, format="gptq")
    strided = [t.t().contiguous().t() for t in (q, s, z)]
    for a, b in zip(pack(*strided, format="gptq"), expected, strict=True):
        assert a is b or torch.equal(a, b)  # type: ignore[arg-type]
    plain = torch.randint(0, 16, (25, 33), dtype=torch.uint8)
    inner = plain[1:, 1:]
    w = pack(inner, torch.ones(24, 2), format="plain")
    assert torch.equal(dequantize(w), inner.float() - 8)


def bad_inputs() -> list[tuple[str, type[AmxqError], dict[str, Any]]]:
    q = torch.zeros(4, 16, dtype=torch.int32)
    s = torch.ones(2, 16, dtype=torch.float16)
    z = torch.zeros(2, 2, dtype=torch.int32)
    nan = s.clone()
    nan[1, 3] = float("nan")
    inf = s.clone()
    inf[0, 5] = float("inf")
    plain = torch.zeros(16, 32, dtype=torch.uint8)
    base = {"qweight": q, "scales": s, "zeros": z, "format": "gptq"}
    plains = {"qweight": plain, "scales": s.t(), "zeros": None, "format": "plain"}
    skew = torch.zeros(32, dtype=torch.int32)
    skew[0] = 1
    return [
        ("neither", LayoutError, base | {"format": "neither"}),
        ("list", DTypeError, base | {"qweight": [1, 2]}),
        ("int64", DTypeError, base | {"qweight": q.long()}),
        ("uint8", DTypeError, base | {"zeros": z.to(torch.uint8)}),
        ("float64", DTypeError, base | {"scales": s.double()}),
        ("device meta", LayoutError, base | {"qweight": q.to("meta")}),
        (r"qweight has shape \[64\]", ShapeError, base | {"qweight": q.flatten()}),
        ("1 or more", ShapeError, base | {"qweight": q[:0]}),
        ("disagree on N", ShapeError, base | {"scales": s[:, :8], "zeros": z[:, :1]}),
        ("fit format 'gptq'", ShapeError, base | {"format": "awq"}),
        (r"zeros have shape \[2, 3\]", ShapeError, base | {"zeros": torch.zeros(2, 3).int()}),
        ("scales have shape", ShapeError, base | {"scales": s[None]}),
        ("makes 4 groups", ShapeError, base | {"group_size": 8}),
        ("group_size is 0", ShapeError, base | {"group_size": 0}),
        ("group_size is '16'", DTypeError, base | {"group_size": "16"}),
        ("group_size -1 makes 1", ShapeError, base | {"group_size": -1}),
        ("multiple of 8", ShapeError, plains | {"qweight": plain[:, :24]}),
        ("pass group_size", ShapeError, plains | {"qweight": plain[:, :31]}),
        (
            r"qweight\[3, 4\] is 16",
            LayoutError,
            plains
            | {
                "qweight": plain.index_put(
                    (torch.tensor(3), torch.tensor(4)), torch.tensor(16, dtype=torch.uint8)
                )
            },
        ),
        ("zeros.* is 200", LayoutError, plains | {"zeros": torch.full((16, 2), 200).byte()}),
        (r"scales\[1, 3\] is nan", LayoutError, base | {"scales": nan}),
        (r"scales\[0, 5\] is inf", LayoutError, base | {"scales": inf}),
        (r"g_idx has shape \[31\]", ShapeError, plains | {"g_idx": skew[:31]}),
        (r"g_idx has shape \[0, 32\]", ShapeError, base | {"g_idx": skew.expand(0, 32)}),
        (r"g_idx has shape \[2, 32\]", ShapeError, base | {"g_idx": skew.expand(2, 32)}),
        (r"g_idx\[7\] is 2", LayoutError, base | {"g_idx": skew.index_fill(0, torch.tensor(7), 2)}),
        (
            r"g_idx\[7\] is -1",
            LayoutError,
            base | {"g_idx": skew.index_fill(0, torch.tensor(7), -1)},
        ),
        ("31 input features into group 0", LayoutError, base | {"g_idx": skew, "group_size": 16}),
        ("dtype torch.float32", DTypeError, base | {"g_idx": skew.float()}),
    ]


@pytest.mark.parametrize(("text", "error", "arguments"), bad_inputs())
def test_bad_input_is_a_typed_error(
    text: str, error: type[AmxqError], arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text):
        pack(**arguments)


def test_check_refuses_what_the_layout_is_not() -> None:
    w = packed(make(6, 40, 60, 8, sym=False), "plain", group_size=8).check()
    assert w.zeros is not None and w.perm is not None
    twice = w.perm.clone()
    twice[0] = 1
    for change, error in [
        ({"qweight": w.qweight.int()}, DTypeError),
        ({"qweight": w.qweight[:1]}, ShapeError),
        ({"qweight": w.qweight[0]}, ShapeError),
        ({"scales": w.scales.double()}, DTypeError),
        ({"scales": w.scales[:, :3].contiguous()}, ShapeError),
        ({"scales": w.scales.t().contiguous().t()}, LayoutError),
        ({"zeros": w.zeros[1:]}, ShapeError),
        ({"perm": w.perm.long()}, DTypeError),
        ({"perm": w.perm[:50]}, ShapeError),
        ({"perm": w.perm + 1}, LayoutError),
        ({"perm": twice}, LayoutError),
        ({"perm": None, "scales": "no tensor"}, DTypeError),
    ]:
        with pytest.raises(error):
            w._replace(**change).check()  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="PackedWeight"):
        dequantize(tuple(w))  # type: ignore[arg-type]


@pytest.mark.parametrize("N", [8, 16, 64])
@pytest.mark.parametrize("K", [8, 64, 128])
def test_raw_formats_are_told_by_shapes(N: int, K: int) -> None:
    weight = make(7, N, K, -1, sym=False)
    for format in ("gptq", "awq"):
        q, s, z = (torch.from_numpy(t) for t in weight.tensors(format))  # type: ignore[arg-type]
        assert is_raw(q, s, z) and format_of_raw(q, s, z) == format
    weight.z = np.full_like(weight.z, 8)  # type: ignore[arg-type]
    q, s, z = (torch.from_numpy(t) for t in weight.tensors("gptq_v2"))  # type: ignore[arg-type]
    assert format_of_raw(q, s, z) == "gptq_v2"
    assert format_of_raw(q, s) == "gptq"
    w = packed(weight, "gptq")
    assert not is_raw(w.qweight, w.scales)


def test_raw_tensors_of_no_format_are_refused() -> None:
    q = torch.zeros(4, 16, dtype=torch.int32)
    with pytest.raises(ShapeError, match="neither GPTQ"):
        format_of_raw(q, torch.ones(1, 24))
    with pytest.raises(ShapeError, match="neither GPTQ"):
        format_of_raw(q[0], torch.ones(1, 24))
    with pytest.raises(DTypeError, match="int32"):
        format_of_raw(q.byte(), torch.ones(1, 16))
    with pytest.raises(DTypeError, match="scales"):
        format_of_raw(q, torch.ones(1, 16).int())
