"""Caches for latent attention, to which a step adds one row and of which it copies none."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, StaticCache

from qkv.integrations.transformers import _private

_GROWTH = 1.5  # by which a full buffer grows, so that n steps copy 3 n rows at most


class LatentCache(DynamicCache):
    """transformers' `DynamicCache`, whose steps do not copy what they keep: a latent and its rotary
    part lie beside each other in a row of one buffer, which grows when it is full.

    Where gradients are recorded, which may need the rows as they were, and in `torch.compile`, rows
    are concatenated as in `DynamicCache`. Layers that are not latent attention work as well; those
    with a sliding window, and of linear attention, are transformers' own.

    Args:
        config: of the model, which says what kinds of layers there are.

    Example:
        >>> from qkv.integrations.transformers import LatentCache
        >>> cache = LatentCache(model.config)
        >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=100)
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        kinds = {_private.DynamicLayer: _Rows, _private.DynamicIndexedLayer: _IndexedRows}
        self.layers = [kinds[type(x)]() if type(x) in kinds else x for x in self.layers]


class StaticLatentCache(StaticCache):
    """transformers' `StaticCache`, where a latent and its rotary part lie beside each other in a
    row as in `LatentCache`, so that a step does not put the two together. Its room is there from
    the first call on, and never moves.

    Args:
        config: of the model.
        max_cache_len: for how many tokens there is room.
    """

    def __init__(self, config: PreTrainedConfig, max_cache_len: int) -> None:
        super().__init__(config, max_cache_len)
        static, indexed = _private.StaticLayer, _private.StaticIndexedLayer
        kinds = {static: _StaticRows, indexed: _StaticIndexedRows}
        self.layers = [
            kinds[type(x)](max_cache_len) if type(x) in kinds else x for x in self.layers
        ]


class _Rows(_private.DynamicLayer):
    """A layer whose keys `[B, H, S, C]` and values `[B, H, S, R]` are views of a buffer
    `[B, H, capacity, C + R]`, its first rows. What removes rows at the end leaves them that; what
    else is put in their place, by `reorder_cache` or as a part of them, the next step copies to a
    new buffer."""

    keys: Any  # a Tensor, or None before the first step
    values: Any
    buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds rows, and returns all of them."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        size, before = key_states.shape[-1], self.get_seq_length()
        after = before + key_states.shape[-2]
        buffer = self.buffer
        if buffer is None or after > buffer.shape[-2] or not self._begin(buffer, before):
            shape = max(after, int(_GROWTH * before)), size + value_states.shape[-1]
            buffer = key_states.new_empty(*key_states.shape[:-2], *shape)
            if before:
                buffer[:, :, :before, :size] = self.keys
                buffer[:, :, :before, size:] = self.values
        buffer[:, :, before:after, :size] = key_states
        buffer[:, :, before:after, size:] = value_states
        self.buffer, rows = buffer, buffer[:, :, :after]
        self.keys, self.values = rows[..., :size], rows[..., size:]
        return self.keys, self.values

    def __copy__(self) -> "_Rows":
        self.buffer = None  # or either would write over the rows that the other has added
        copied: _Rows = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def _begin(self, buffer: Tensor, count: int) -> bool:
        """Whether keys and values still are its first rows, and torch allows it to change."""
        sizes = self.keys.shape[-1], self.values.shape[-1]
        if sum(sizes) != buffer.shape[-1]:  # as after a reset
            return False
        rows = buffer[:, :, :count].split(sizes, -1)
        are_first = [_place(x) for x in rows] == [_place(self.keys), _place(self.values)]
        return are_first and buffer.is_inference() <= torch.is_inference_mode_enabled()


def _place(x: Tensor) -> tuple[Any, ...]:
    """Which elements of memory a tensor is."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride()


class _IndexedRows(_Rows, _private.DynamicIndexedLayer):
    """The same beside the keys of an indexer."""


class _StaticRows(_private.StaticLayer):
    """A layer whose keys and values are views of one buffer `[B, H, max_cache_len, C + R]`."""

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        rows = torch.cat([self.keys, self.values], -1)
        parts = rows.split([self.k_head_dim, self.v_head_dim], -1)
        # Autograd, where it records, refuses to write to what is one of several views.
        self.keys, self.values = (part.detach() for part in parts)


class _StaticIndexedRows(_StaticRows, _private.StaticIndexedLayer):
    """The same beside the keys of an indexer."""
