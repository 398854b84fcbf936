"""ONNX Runtime's MatMulNBits, the operator of its INT4 language models: accuracy levels 0 and 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Array, Linear

VARIANTS = {"fp32": {"accuracy_level": 0}, "int8": {"accuracy_level": 4}}


def unavailable() -> str:
    return without("onnxruntime", "onnx")


class Session:
    """One layer; input and output are bound once, so that a call copies nothing."""

    def __init__(self, problem: Linear, accuracy_level: int) -> None:
        import onnxruntime

        model, self.bytes = _model(problem, accuracy_level)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        self.columns = problem.n
        self.bound: dict[int, tuple[Any, Array]] = {}

    def __call__(self, x: Array) -> Array:
        if id(x) not in self.bound:
            y = np.empty((len(x), self.columns), np.float32)
            binding = self.session.io_binding()
            binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
            binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
            self.bound[id(x)] = binding, y
        binding, y = self.bound[id(x)]
        self.session.run_with_iobinding(binding)
        return y


def _model(problem: Linear, accuracy_level: int) -> tuple[bytes, int]:
    from onnx import TensorProto, helper, numpy_helper

    n, k, group = problem.n, problem.k, problem.group
    constants = {
        "w": _pairs(problem.q).reshape(n, k // group, group // 2),
        "scales": problem.scales.reshape(-1),
    }
    if not problem.symmetric:  # absent: 8 everywhere
        zeros = problem.zeros
        constants["zeros"] = _pairs(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))).reshape(-1)
    node = helper.make_node(
        "MatMulNBits",
        ["x", *constants],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=group,
        accuracy_level=accuracy_level,
    )
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", n])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), sum(array.nbytes for array in constants.values())


def _pairs(values: Array) -> Array:
    """Two 4-bit values a byte along the last axis, the first one low."""
    return (values[..., 0::2] | (values[..., 1::2] << 4)).astype(np.uint8)


def pack(problem: Linear, accuracy_level: int) -> Session:
    return Session(problem, accuracy_level)


def size(packed: Session) -> int:
    return packed.bytes


def given(x: torch.Tensor) -> Array:
    return x.float().numpy()


def call(x: Any, packed: Session) -> torch.Tensor:
    return torch.from_numpy(packed(x))
