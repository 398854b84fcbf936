"""An independent fp64 reference of ``amxq.fused_moe``: one token and expert at a time, in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from linear_reference import Weight, draw

import amxq

#: Relative norm error that a result may have: bf16 has two roundings, h's and the result's.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}


@dataclass
class Experts:
    """E matrices [N, K], drawn apart, and as ``amxq.pack`` stacks them."""

    matrices: list[Weight]
    packed: amxq.PackedWeight = field(init=False)

    def __post_init__(self) -> None:
        q, s, z = zip(*(w.tensors("plain") for w in self.matrices), strict=True)
        zeros = None if z[0] is None else torch.stack(z)
        self.packed = amxq.pack(torch.stack(q), torch.stack(s), zeros, format="plain")

    def exact(self, expert: int) -> np.ndarray:
        """The fp64 matrix of one expert."""
        w = self.matrices[expert]
        return w.difference * w.scale


def experts(
    rng: np.random.Generator, E: int, N: int, K: int, group: int = 32, symmetric: bool = True
) -> Experts:
    """Full-range weights, with scales that keep a unit input's result near one."""
    matrices = [draw(rng, N, K, group, symmetric=symmetric) for _ in range(E)]
    for w in matrices:
        w.s = (w.s.float() * (8 / math.sqrt(K))).half()
        w.scale = w.s.double().numpy()[:, w.groups]
    return Experts(matrices)


@dataclass
class Case:
    """A call's tensors, drawn; ``options`` are keyword arguments of ``amxq.fused_moe``."""

    w13: Experts
    w2: Experts
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, **changes: Any) -> torch.Tensor:
        arguments = {
            "x": self.x,
            "w13": self.w13.packed,
            "w2": self.w2.packed,
            "topk_weights": self.weights,
            "topk_ids": self.ids,
        }
        return amxq.fused_moe(**(arguments | self.options | changes))

    def exact(self) -> np.ndarray:
        """The result in fp64."""
        o = self.options
        out = np.zeros(self.x.shape)
        for m, j in np.ndindex(*self.ids.shape):
            e = int(self.ids[m, j])
            if e >= 0 and "expert_map" in o:
                e = int(o["expert_map"][e])
            if e >= 0:
                out[m] += self._one(m, e, float(self.weights[m, j].double()))
        return out * o.get("routed_scaling_factor", 1.0)

    def _one(self, m: int, e: int, weight: float) -> np.ndarray:
        o = self.options
        on_input = o.get("apply_router_weight_on_input", False)
        x = self.x[m].double().numpy() * (weight if on_input else 1.0)
        y = self.w13.exact(e) @ x
        if "w13_bias" in o:
            y = y + o["w13_bias"][e].double().numpy()
        half = y.size // 2
        gate, up = (y[::2], y[1::2]) if o.get("interleaved") else (y[:half], y[half:])
        result = self.w2.exact(e) @ activated(gate, up, o)
        if "w2_bias" in o:
            result = result + o["w2_bias"][e].double().numpy()
        return result if on_input else weight * result

    def check(self, got: torch.Tensor) -> None:
        """``got`` is the result up to rounding."""
        assert got.dtype == self.x.dtype and got.shape == self.x.shape
        want = self.exact()
        error = np.linalg.norm(got.double().numpy() - want)
        assert error <= TOLERANCE[got.dtype] * np.linalg.norm(want), error / np.linalg.norm(want)


def activated(gate: np.ndarray, up: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    kind = options.get("activation", "silu")
    limit = options.get("limit", 7.0 if kind == "swiglu" else np.inf)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind == "swiglu":
        return gate / (1 + np.exp(-options.get("alpha", 1.702) * gate)) * (up + 1)
    if kind == "gelu":
        return gate * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(gate) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def case(
    rng: np.random.Generator,
    w13: Experts,
    w2: Experts,
    M: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Case:
    """Random activations, weights and distinct experts for each token."""
    H, E = w13.packed.in_features, len(w13.matrices)
    ids = np.array([rng.permutation(E)[:topk] for _ in range(M)], dtype=np.int64).reshape(M, topk)
    x = torch.from_numpy(rng.standard_normal((M, H))).to(dtype)
    weights = torch.from_numpy(rng.uniform(-0.5, 1, (M, topk))).float()
    return Case(w13, w2, x, weights, torch.from_numpy(ids), options)
