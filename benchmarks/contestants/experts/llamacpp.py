"""llama.cpp's experts: three mul_mat_id, as its graphs of mixtures have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.contestants.llamacpp import VARIANTS, blocks, ggml, given, size, unavailable
from benchmarks.problems import Experts

__all__ = ["VARIANTS", "call", "given", "pack", "size", "unavailable"]


class Layer:
    """The weights of gate, up and down, and a graph for each x that it has been called with."""

    def __init__(self, problem: Experts, kind: int) -> None:
        parts: list[list[Any]] = [[], [], []]
        for expert in range(problem.experts):
            w13, w2 = (problem.matrix(expert, which) for which in range(2))
            gate, up = ([part[half] for part in w13] for half in _halves(problem.inner))
            for made, matrix in zip(parts, (gate, up, w2), strict=True):
                made.append(blocks(kind, *matrix))
        hidden, inner = problem.hidden, problem.inner
        self.hidden, self.bytes, self.weights = hidden, 0, []
        for k, n, made in zip((hidden, hidden, inner), (inner, inner, hidden), parts, strict=True):

            def probe(context: Any, weight: Any, k: int = k) -> Any:
                x = ggml().tensor(context, 0, k, problem.topk, 512)
                ids = ggml().tensor(context, 26, problem.topk, 512)
                return ggml().mul_mat_id(context, weight, x, ids)

            stacked = np.concatenate(made)
            self.bytes += stacked.nbytes
            self.weights.append(ggml().weight(kind, stacked, (k, n, problem.experts), probe))
        self.graphs: dict[int, tuple[Any, ...]] = {}

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        library = ggml()
        if id(x) not in self.graphs:
            factors, routing = weights.float().clone(), ids.int().clone()  # ggml wants them aligned
            context = library.context()
            graph = library.new_graph(context)
            (m, topk), hidden = ids.shape, self.hidden
            gate, up, down = self.weights
            tokens = library.given(context, x, hidden, 1, m)
            routed = library.given(context, routing, topk, m)
            scales = library.given(context, factors, 1, topk, m)
            rows = [library.mul_mat_id(context, w, tokens, routed) for w in (gate, up)]
            active = library.swiglu_split(context, *rows)
            y = library.mul_mat_id(context, down, active, routed)
            y = library.mul(context, y, scales)
            step = 4 * hidden
            views = [
                library.view_2d(context, y, hidden, m, topk * step, i * step) for i in range(topk)
            ]
            for view in views:
                library.build_forward_expand(graph, view)
            total = views[0]
            for view in views[1:]:
                total = library.add(context, total, view)
            self.graphs[id(x)] = graph, library.result(graph, total, m, hidden), x, routing, factors
        graph, result, *_ = self.graphs[id(x)]
        library.backend_graph_compute(library.backend, graph)
        return result


def _halves(inner: int) -> tuple[slice, slice]:
    return slice(0, inner), slice(inner, 2 * inner)


def pack(problem: Experts, kind: int) -> Layer:
    return Layer(problem, kind)


def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Layer) -> torch.Tensor:
    return packed(x, weights, ids)
