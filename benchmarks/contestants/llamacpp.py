"""llama.cpp's kernels, as it uses them itself: Q4_0 and Q4_K, in the form that suits this CPU.

ggml's libraries come with the package llama-cpp-python. It quantises activations to int8 in
blocks of 32 (Q4_0) or 256 (Q4_K). Q4_0 holds the problem's weights exactly; for Q4_K
llama.cpp quantises them once more, and that is part of the error.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contestants import without
from benchmarks.problems import Array, Linear

VARIANTS = {"q4_0": {"kind": 2}, "q4_k": {"kind": 12}}  # ggml's numbers of types
_F32, _I32 = 0, 26
_Q4_0 = VARIANTS["q4_0"]["kind"]


def unavailable() -> str:
    return without("llama_cpp")


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


_P, _I64, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t
_BASE: dict[str, tuple[Any, tuple[Any, ...]]] = {  # name without ggml_: result, arguments
    "init": (_P, (_InitParams,)),
    "free": (None, (_P,)),
    "new_tensor": (_P, (_P, _INT, _INT, ctypes.POINTER(_I64))),
    "nbytes": (_SIZE, (_P,)),
    "get_data": (_P, (_P,)),
    "set_output": (None, (_P,)),
    "row_size": (_SIZE, (_INT, _I64)),
    "quantize_chunk": (_SIZE, (_INT, _P, _P, _I64, _I64, _I64, _P)),
    "mul_mat": (_P, (_P, _P, _P)),
    "mul_mat_id": (_P, (_P, _P, _P, _P)),
    "swiglu_split": (_P, (_P, _P, _P)),
    "mul": (_P, (_P, _P, _P)),
    "add": (_P, (_P, _P, _P)),
    "view_2d": (_P, (_P, _P, _I64, _I64, _SIZE, _SIZE)),
    "new_graph": (_P, (_P,)),
    "build_forward_expand": (None, (_P, _P)),
    "gallocr_new": (_P, (_P,)),
    "gallocr_alloc_graph": (ctypes.c_bool, (_P, _P)),
    "backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "backend_buffer_set_usage": (None, (_P, _INT)),
    "backend_buffer_free": (None, (_P,)),
    "backend_cpu_buffer_type": (_P, ()),
    "backend_cpu_buffer_from_ptr": (_P, (_P, _SIZE)),
    "backend_tensor_alloc": (_INT, (_P, _P, _P)),
    "backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)),
    "backend_get_device": (_P, (_P,)),
    "backend_dev_backend_reg": (_P, (_P,)),
    "backend_dev_supports_op": (ctypes.c_bool, (_P, _P)),
    "backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
    "backend_graph_compute": (_INT, (_P, _P)),
}
_CPU: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "backend_cpu_init": (_P, ()),
    "backend_cpu_set_n_threads": (None, (_P, _INT)),
}


class Ggml:
    """ggml's functions, one backend, and the buffer types it may keep weights in, best first."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("llama_cpp")  # importing it would need its dependencies
        assert found is not None and found.origin is not None
        folder = Path(found.origin).parent / "lib"
        for library, functions in (("base", _BASE), ("cpu", _CPU)):
            loaded = ctypes.CDLL(str(folder / f"libggml-{library}.so"), ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in functions.items():
                function = getattr(loaded, f"ggml_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        self.device = self.backend_get_device(self.backend)
        address = self.backend_reg_get_proc_address(
            self.backend_dev_backend_reg(self.device), b"ggml_backend_dev_get_extra_bufts"
        )
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self.device)
        self.buffer_types = []
        while extra[len(self.buffer_types)]:
            self.buffer_types.append(extra[len(self.buffer_types)])
        self.buffer_types.append(self.backend_cpu_buffer_type())

    def context(self) -> Any:
        """Room for descriptions of tensors and a graph."""
        return self.init(_InitParams(4 << 20, None, True))

    def tensor(self, context: Any, kind: int, *sizes: int) -> Any:
        """A tensor without memory; its last dimension comes first, as ggml wants it."""
        return self.new_tensor(context, kind, len(sizes), (_I64 * len(sizes))(*sizes))

    def given(self, context: Any, values: torch.Tensor, *sizes: int) -> Any:
        """A tensor that lies where a tensor of torch does, fp32 or int32."""
        kind = _F32 if values.dtype == torch.float32 else _I32
        tensor = self.tensor(context, kind, *sizes)
        buffer = self.backend_cpu_buffer_from_ptr(values.data_ptr(), values.nbytes)
        self.backend_tensor_alloc(buffer, tensor, values.data_ptr())
        return tensor

    def weight(self, kind: int, blocks: Array, sizes: tuple[int, ...], probe: Any) -> Any:
        """A weight in the first kind of buffer that can be multiplied by ``probe(context, w)``."""
        for buffer_type in self.buffer_types:
            context = self.context()
            tensor = self.tensor(context, kind, *sizes)
            buffer = self.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            if self.backend_dev_supports_op(self.device, probe(context, tensor)):
                assert self.nbytes(tensor) == blocks.nbytes
                self.backend_buffer_set_usage(buffer, 1)  # weights
                self.backend_tensor_set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
                return tensor
            self.backend_buffer_free(buffer)
            self.free(context)
        raise RuntimeError("no buffer of ggml takes this weight")

    def result(self, graph: Any, y: Any, m: int, n: int) -> torch.Tensor:
        """Give a graph memory; the tensor that holds y [m, n] after each computation."""
        self.set_output(y)
        self.build_forward_expand(graph, y)
        if not self.gallocr_alloc_graph(self.gallocr_new(self.backend_cpu_buffer_type()), graph):
            raise MemoryError("ggml has no memory for this graph")
        pointer = ctypes.cast(self.get_data(y), ctypes.POINTER(ctypes.c_float))
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (m, n)))


@functools.cache
def ggml() -> Ggml:
    return Ggml()


def blocks(kind: int, q: Array, scales: Array, zeros: Array) -> Array:
    """A weight [N, K] in ggml's blocks, bytes."""
    n, k = q.shape
    group = k // scales.shape[1]
    if kind == _Q4_0:
        if group % 32 or (zeros != 8).any():
            raise ValueError("Q4_0 takes symmetric weights in groups of a multiple of 32 only")
        halves = q.reshape(n, k // 32, 2, 16)
        repeated = np.repeat(scales, group // 32, 1).astype(np.float16)
        parts = repeated[..., None].view(np.uint8), halves[..., 0, :] | (halves[..., 1, :] << 4)
        return np.ascontiguousarray(np.concatenate(parts, 2)).reshape(-1)
    grouped = q.reshape(n, -1, group).astype(np.float32) - zeros[..., None]
    weight = np.ascontiguousarray((grouped * scales[..., None]).reshape(n, k))
    out = np.empty(n * ggml().row_size(kind, k), np.uint8)
    ggml().quantize_chunk(kind, weight.ctypes.data, out.ctypes.data, 0, n, k, None)
    return out


@functools.lru_cache(1)  # all copies of a layer are made of the same blocks
def _layer(problem: Linear, kind: int) -> Array:
    if problem.k % (32 if kind == _Q4_0 else 256):
        raise ValueError(f"K = {problem.k} is not a multiple of this format's blocks")
    return blocks(kind, problem.q, problem.scales, problem.zeros)


class Layer:
    """One weight, and a graph for each x that it has been called with."""

    def __init__(self, problem: Linear, kind: int) -> None:
        def probe(context: Any, weight: Any) -> Any:
            x = ggml().tensor(context, _F32, problem.k, 512)
            return ggml().mul_mat(context, weight, x)

        self.n, self.k = problem.n, problem.k
        packed = _layer(problem, kind)
        self.bytes = packed.nbytes
        self.weight = ggml().weight(kind, packed, (problem.k, problem.n), probe)
        self.graphs: dict[int, tuple[Any, ...]] = {}  # x is kept, for its memory

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        library = ggml()
        if id(x) not in self.graphs:
            context = library.context()
            graph = library.new_graph(context)
            given = library.given(context, x, self.k, len(x))
            y = library.mul_mat(context, self.weight, given)
            self.graphs[id(x)] = graph, library.result(graph, y, len(x), self.n), x
        graph, result, _ = self.graphs[id(x)]
        library.backend_graph_compute(library.backend, graph)
        return result


def pack(problem: Linear, kind: int) -> Layer:
    return Layer(problem, kind)


def size(packed: Layer) -> int:
    return packed.bytes


def given(x: torch.Tensor) -> torch.Tensor:
    return x.float()


def call(x: torch.Tensor, packed: Layer) -> torch.Tensor:
    return packed(x)
