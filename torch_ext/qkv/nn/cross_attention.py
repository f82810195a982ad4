"""Attention to another sequence: grouped heads, norms, a gate, and a context projected once."""

from typing import Any

import torch
from torch import Tensor

from qkv._rotate import rotate
from qkv.nn._heads import GroupedHeads
from qkv.nn.kvcache import KVCache
from qkv.spans import Spans


class CrossAttention(GroupedHeads):
    """Cross attention: queries from one sequence, keys and values from another, the context: what
    an encoder made of a text, a sound or a picture.

    Args:
        embed_dim, num_heads, num_kv_heads: as in `SelfAttention`.
        context_dim: C, the context's width; embed_dim if None.
        options: head_dim, qk_norm, norm_eps, norm_offset, softcap, scale, sinks, gate, dropout,
            bias, out_bias, device and dtype, as in `SelfAttention`.

    The parameters are `q_proj.weight`, `[H D, E]`, W_Q, and with gate another H D rows;
    `kv_proj.weight`, `[2 Hkv D, C]`, W_K and W_V; and `o_proj`, `q_norm`, `k_norm` and `sinks` of
    `SelfAttention`. `load_state_dict` also takes `k_proj` and `v_proj`.

    Raises:
        ValueError: a number that is out of range, or numbers that do not fit each other.

    Example:
        >>> layer = qkv.nn.CrossAttention(512, 8, 2, context_dim=256).eval()
        >>> x, context = torch.randn(2, 10, 512), torch.randn(2, 100, 256)
        >>> layer(x, context).shape
        torch.Size([2, 10, 512])
        >>> with torch.no_grad():
        ...     cache = layer.new_cache(context)
        ...     steps = [layer(step, cache) for step in x.split(1, 1)]
    """

    _joined = "kv"

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, *,
        context_dim: int | None = None, bias: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, num_kv_heads, bias=bias, **options)
        self.context_dim = embed_dim if context_dim is None else context_dim
        self._check_sizes(context_dim=self.context_dim)
        self._heads = [self.num_kv_heads] * 2
        self.q_proj = self._projection(embed_dim, num_heads * (2 if self.gate else 1), bias)
        self.kv_proj = self._projection(self.context_dim, sum(self._heads), bias)

    def forward(
        self, x: Tensor, context: Tensor | KVCache, mask: Tensor | None = None, *,
        spans: Spans | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends from each place of x to the context.

        Args:
            x: `[B, L, E]`.
            context: `[B, S, C]`; or, for inference, what `new_cache` made of it.
            mask: broadcastable to `[B, H, L, S]`. Bool: True = may attend; or floating, added to
                the scores.
            spans: as in `qkv.attention`.

        Returns:
            `[B, L, E]`. A query with nothing to attend to gets the bias of the last projection.

        Raises:
            RuntimeError: shapes and dtypes that do not fit; a cache in training with dropout.
        """
        if isinstance(context, Tensor):
            return self._attend(*self.project(x, context), mask, spans, None)
        query, gate = self._query(x, context)
        return self._attend(query, None, None, gate, mask, spans, context)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What `forward` attends with, as in `SelfAttention`: key and value `[B, Hkv, S, D]`."""
        query, gate = self._query(x, None)
        return query, *self._keys(context, x.size(0)), gate

    @torch.no_grad()
    def new_cache(self, context: Tensor, *, dtype: torch.dtype | None = None) -> KVCache:
        """Keys and values of a context `[B, S, C]`, for many calls: a token at a time, say. Where
        rows are padded on the right, put the true `lengths` into it.

        dtype: of the cache, torch.int8 as in `SelfAttention`; that of the projection if None."""
        return KVCache.filled(*self._keys(context), dtype)

    def _query(self, x: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor | None]:
        """Query and gate."""
        self._check(x, cache)
        query, *gate = self._split(self.q_proj, x, self.num_heads)
        return self._normed(query, self.q_norm), gate[0] if gate else None

    def _keys(self, context: Tensor, batch: int | str = "B") -> tuple[Tensor, Tensor]:
        """Key and value. batch: how many rows are expected, if that is known."""
        rows = context.shape[:1] if batch == "B" else (batch,)
        if context.dim() != 3 or context.shape != (*rows, context.size(1), self.context_dim):
            self._refuse("context", context, f"[{batch}, S, {self.context_dim}] is expected")
        key, value = self._split(self.kv_proj, context, self._heads)
        return self._normed(key, self.k_norm), value

    def _normed(self, x: Tensor, norm: torch.nn.RMSNorm | None) -> Tensor:
        """By `rotate`, which rounds once: with no other tensor, and no pairs to turn."""
        none = x.new_empty(x.size(-2), 0)
        options = self._norm_options(query=norm)
        return rotate(x, x[:, :0], none, none, **options)[0] if options else x
