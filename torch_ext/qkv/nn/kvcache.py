"""The keys and values that one layer has seen, for decoding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv._cache import new_cache
from qkv._kvcache import attention_with_kvcache


@dataclass(eq=False)
class KVCache:
    """Memory for one layer's keys and values, and how much of it each row has taken.
    `new_cache` of a layer makes it; all of it may be read and replaced from call to call.

    Args:
        keys: `[B, Hkv, length, D]`, or with block_table `[blocks, Hkv, block_size, D]`; of the
            layer's dtype, or int8.
        values: likewise.
        lengths: `[B]`, int32 or int64: how many keys each row has. A call of the layer puts a
            tensor with its L more in its place. To take keys back, or where rows were padded on the
            right, set it: what lies beyond is never read.
        block_table: `[B, M]`, int32: which blocks each row has, as in `attention_with_kvcache`.
            Rows may share a pool, and come and go, if lengths are replaced with it.
        k_scale, v_scale: float32, of int8 keys and values, as in `attention_with_kvcache`.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def empty(
        cls, batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype,
        pages: int | None = None,
    ) -> "KVCache":  # fmt: skip
        """A cache of zeros with nothing in it. pages: how many keys a block has."""
        shape, table = (batch, heads, length), None
        if pages is not None:
            blocks = -(-length // pages)  # of a row
            shape = (batch * blocks, heads, pages)
            table = torch.arange(batch * blocks, dtype=torch.int32, device="cpu").view(batch, -1)
        keys, values = (new_cache((*shape, head_dim), dtype=dtype) for _ in range(2))
        lengths = torch.zeros(batch, dtype=torch.int32, device="cpu")
        scales = (keys.new_zeros(shape, dtype=torch.float32) for _ in range(2))
        return cls(keys, values, lengths, table, *(scales if dtype == torch.int8 else ()))

    @classmethod
    def filled(cls, key: Tensor, value: Tensor, dtype: torch.dtype | None) -> "KVCache":
        """A cache of these, `[B, Hkv, S, D]`, with no room for more; of key's dtype if None."""
        batch, heads, length, width = key.shape
        cache = cls.empty(batch, heads, length, width, key.dtype if dtype is None else dtype)
        cache.attend(key.new_empty(batch, heads, 0, width), key, value)
        return cache

    @property
    def length(self) -> int:
        """How many keys a row has room for."""
        blocks = 1 if self.block_table is None else self.block_table.size(1)
        return blocks * self.keys.size(-2)

    def attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, **options: Any
    ) -> Tensor:
        """Appends key and value, unless they are None, and attends to all that each row then
        has."""
        output = attention_with_kvcache(
            query, self.keys, self.values, key, value, cache_seqlens=self.lengths,
            block_table=self.block_table, k_scale=self.k_scale, v_scale=self.v_scale, **options,
        )  # fmt: skip
        # Not in place: caches of several layers may begin with the same tensor.
        if key is not None:
            self.lengths = self.lengths + key.size(-2)
        return output
