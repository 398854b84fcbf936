"""Memory as kernels reach it: each tensor argument knows its range, and accesses outside of it are
errors that name the tensor and the index."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from amxq.interpreter.arithmetic import Array, from_memory, memory_type, to_memory
from amxq.ir.types import DType


def _owner(address: int) -> Any:
    """The storage of a tensor that lives at ``address``, None if there is none. The calls of
    amxq.ops hand over addresses; looking for what they belong to takes as long as a few
    operations on the interpreter."""
    import torch

    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.is_cpu:
            if found.layout is torch.strided and not found.is_nested:
                storage = found.untyped_storage()
                if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                    return storage
    return None


class Outside(Exception):
    """An access outside of a tensor, without its place in the kernel."""


@dataclass(frozen=True)
class Memory:
    """What a pointer argument points at.

    Attributes:
        name: the parameter.
        address: of the first byte that may be accessed; pointers count bytes from it.
        size: bytes that may be accessed, None where they are not known.
        shape: of the tensor, for messages.
        owner: keeps the memory alive.
    """

    name: str
    address: int
    size: int | None
    shape: tuple[int, ...] = ()
    owner: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, tensor: Any) -> Memory:
        """The memory of a tensor, from its first element to its last; of an address, to the end of
        the storage that it lies in."""
        if isinstance(tensor, int):
            owner = _owner(tensor)
            size = None if owner is None else owner.data_ptr() + owner.nbytes() - tensor
            return cls(name, tensor, size, (), owner)
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        return cls(name, tensor.data_ptr(), size, tuple(tensor.shape), tensor)

    def load(self, places: Array, dtype: DType, mask: Array | None = None) -> Array:
        """Numbers at byte offsets ``places``; masked-off ones are 0 and not looked at."""
        wanted = places if mask is None else places[mask]
        window, index = self._window(wanted, dtype, "load")
        elements = window[index].view(memory_type(dtype))[..., 0]
        loaded = from_memory(elements, dtype)
        if mask is None:
            return loaded
        result = np.zeros(places.shape, loaded.dtype)
        result[mask] = loaded
        return result

    def store(self, places: Array, values: Array, dtype: DType, mask: Array | None = None) -> None:
        if mask is not None:
            places, values = places[mask], values[mask]
        window, index = self._window(places, dtype, "store")
        elements = np.ascontiguousarray(to_memory(values, dtype))
        window[index] = elements.reshape(*places.shape, 1).view(np.uint8)

    def _window(self, places: Array, dtype: DType, verb: str) -> tuple[Array, Array]:
        """The bytes between the first and the last of ``places``, and which of them are meant."""
        if not places.size:
            return np.empty(0, np.uint8), np.empty((*places.shape, dtype.bytes), np.int64)
        first, last = int(places.min()), int(places.max())
        if self.size is not None and (first < 0 or last + dtype.bytes > self.size):
            wrong = first if first < 0 else last
            raise Outside(
                f"{verb} of {self.name}[{wrong // dtype.bytes}] is outside of {self.name}, which "
                f"has {self.size // dtype.bytes} elements{self._form()}"
            )
        length = last - first + dtype.bytes
        window = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self.address + first))
        return window, (places - first)[..., None] + np.arange(dtype.bytes)

    def _form(self) -> str:
        return f" (shape {list(self.shape)})" if len(self.shape) > 1 else ""
