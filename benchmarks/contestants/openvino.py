"""OpenVINO: a MatMul with a compressed u4 constant, activations in bf16 or quantised by groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Array, Linear

VARIANTS = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    "int8": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128},
}


def unavailable() -> str:
    return without("openvino")


class Request:
    """One layer, compiled."""

    def __init__(self, problem: Linear, options: dict[str, Any]) -> None:
        import openvino

        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        compiled = openvino.Core().compile_model(_model(problem), "CPU", settings | options)
        self.request = compiled.create_infer_request()
        zeros = 0 if problem.symmetric else problem.zeros.size // 2
        self.bytes = problem.q.size // 2 + 2 * problem.scales.size + zeros
        self.x: Array | None = None

    def __call__(self, x: Array) -> Array:
        import openvino

        if x is not self.x:
            self.x = x
            self.request.set_input_tensor(openvino.Tensor(x, shared_memory=True))
        self.request.infer()
        y: Array = self.request.get_output_tensor().data
        return y


def _model(problem: Linear) -> Any:
    import openvino
    from openvino import Shape, Tensor, Type
    from openvino import opset13 as ops

    n, k, group = problem.n, problem.k, problem.group
    shape = n, k // group, group
    q = Tensor(_pairs(problem.q), Shape(shape), Type.u4)
    if problem.symmetric:
        zeros = Tensor(np.array([8], np.uint8), Shape([1, 1, 1]), Type.u4)
    else:
        zeros = Tensor(_pairs(problem.zeros), Shape([n, k // group, 1]), Type.u4)
    integers, offsets = (
        ops.convert(ops.constant(t, shared_memory=False), Type.f16) for t in (q, zeros)
    )
    scales = ops.constant(problem.scales.reshape(n, -1, 1).astype(np.float16))
    grouped = ops.multiply(ops.subtract(integers, offsets), scales)
    weight = ops.reshape(grouped, ops.constant(np.array([n, k], np.int64)), False)
    x = ops.parameter([-1, k], Type.f32)
    y = ops.matmul(x, ops.convert(weight, Type.f32), False, True)
    return openvino.Model([ops.result(y)], [x], "linear")


def _pairs(values: Array) -> Array:
    """Two 4-bit values a byte, the first one low."""
    flat = values.reshape(-1)
    return (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)


def pack(problem: Linear, **options: Any) -> Request:
    return Request(problem, options)


def size(packed: Request) -> int:
    return packed.bytes


def given(x: torch.Tensor) -> Array:
    return x.float().numpy()


def call(x: Any, packed: Request) -> torch.Tensor:
    return torch.from_numpy(packed(x))
