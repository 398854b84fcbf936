"""A layer of transformers' cache that has room behind its last token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

_SPARE = 256
"""Tokens of room at least, beside a quarter of those that are there."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A ``DynamicLayer`` that writes new tokens behind the old ones instead of copying all.

    ``keys`` and ``values`` [B, heads, T, D] are views of larger tensors, which only grow: what has
    been read of the layer before stays as it was. Whatever else is put in their place, as beam
    search and cropping do, is copied before something is added to it.
    """

    _layer_type = None

    def __init__(self, layer: Any) -> None:
        """Takes the place of a ``DynamicLayer``, whose tensors it copies when a token is added."""
        self._length = 0
        self._stores: tuple[torch.Tensor, torch.Tensor] | None = None
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(layer).items() if k not in ("keys", "values")})
        self.keys, self.values = layer.keys, layer.values

    # What the class itself and its callers read and assign. The tensors that were assigned count
    # until room is made.
    @property
    def keys(self) -> torch.Tensor | None:
        """[B, heads, T, D], or None."""
        return self._keys if self._stores is None else self._stores[0][:, :, : self._length]

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._keys, self._values, self._stores = tensor, self.values, None

    @property
    def values(self) -> torch.Tensor | None:
        """[B, heads, T, D], or None."""
        return self._values if self._stores is None else self._stores[1][:, :, : self._length]

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._keys, self._values, self._stores = self.keys, tensor, None

    _keys: torch.Tensor | None = None
    _values: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which write their next tokens to memory of their own."""
        tensors = {"_keys": self.keys, "_values": self.values, "_stores": None}
        return self.__dict__ | tensors

    def get_seq_length(self) -> int:
        """Tokens that are there."""
        return self._length if self._stores is not None else int(super().get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens; returns all keys and all values."""
        new = (key_states, value_states)
        if not self._takes(*new):
            return super().update(*new, *args, **kwargs)  # type: ignore[no-any-return]
        count = key_states.shape[2]
        stores = self.room(count)
        for store, tensor in zip(stores, new, strict=True):
            store[:, :, self._length : self._length + count] = tensor
        self.advance(count)
        return self.keys, self.values  # type: ignore[return-value]

    def _takes(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether these tokens are of the kind that is there, and need no gradient."""
        if not self.can_grow(k.dtype) or k.shape != v.shape or k.dtype != v.dtype:
            return False
        there = self.keys
        assert there is not None
        same = (*k.shape[:2], *k.shape[3:]) == (*there.shape[:2], *there.shape[3:])
        return same and not (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad))

    def can_grow(self, dtype: torch.dtype) -> bool:
        """Whether keys and values are of this dtype, on the CPU, and of one shape."""
        if self._stores is not None:
            return self._stores[0].dtype == dtype
        k, v = self._keys, self._values
        return (
            type(k) is torch.Tensor
            and type(v) is torch.Tensor
            and k.dim() == 4
            and k.shape == v.shape
            and k.dtype == v.dtype == dtype
            and k.is_cpu
            and v.is_cpu
            and not (k.requires_grad or v.requires_grad)
        )

    def room(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous tensors [B, heads, room, D] of keys and values in which ``count`` more tokens
        have a place. Only where :meth:`can_grow`."""
        stores = self._stores
        needed = self.get_seq_length() + count
        if (
            stores is None
            or stores[0].shape[2] < needed
            or (stores[0].is_inference() and not torch.is_inference_mode_enabled())
        ):
            room = needed + max(_SPARE, needed // 4)
            old = self.keys, self.values
            made = []
            for tensor in old:
                assert tensor is not None
                store = tensor.new_zeros((*tensor.shape[:2], room, tensor.shape[3]))
                store[:, :, : tensor.shape[2]] = tensor
                made.append(store)
            self._length = needed - count
            self._keys = self._values = None
            self._stores = stores = (made[0], made[1])
        return stores

    def advance(self, count: int) -> None:
        """Tokens have been written behind the last one."""
        self._length += count


def grow(cache: DynamicCache) -> list[GrowingLayer] | None:
    """The layers of a cache, all of which can grow from now on; None if one of them is of another
    kind, or empty."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = GrowingLayer(layer)
        elif type(layer) is not GrowingLayer:
            return None
    return cache.layers  # type: ignore[no-any-return]
