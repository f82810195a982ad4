"""Self-attention as models of today have it: grouped heads, rotation, norms, a gate, a cache."""

from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv._rotate import rotate
from qkv._watched import is_watched
from qkv.nn._heads import GroupedHeads
from qkv.nn.kvcache import KVCache
from qkv.nn.rotary import Rotary
from qkv.spans import Spans


def _rows_from(table: Tensor, begins: Tensor, length: int) -> Tensor:
    """`[L, ...]`, a view of table where all rows of a batch begin at the same place, else
    `[B, L, ...]`."""
    if not is_watched(begins):
        places, last = {*begins.tolist()}, len(table) - length
        for place in places:
            if not (isinstance(place, int) and 0 <= place <= last):
                wanted = f"integers from 0 to {last} are expected"
                refuse("cache.lengths", f"{place} in a row", wanted, RuntimeError, "SelfAttention")
        if len(places) == 1:
            return table[places.pop() :][:length]
    places = begins.unsqueeze(-1) + torch.arange(length, device=begins.device)
    return table.to(begins.device)[places]


class SelfAttention(GroupedHeads):
    """Self-attention of a decoder: one product makes query, key and value, which are normed and
    rotated, each query sees itself and what is before it, and another product joins the heads.

    Args:
        embed_dim: E, the width of what comes in and goes out.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H; H if None.
        head_dim: D, the width of a head; E / H if None.
        rotary: a `Rotary`, which several layers may share, or the base of one over all of D: 10000
            in most models, 500000 in Llama 3. None: no rotation.
        qk_norm: whether each head of query and key goes through an RMS norm before the rotation.
        norm_eps: that of these norms.
        norm_offset: added to the norms' weights: 1 in Gemma and Qwen3-Next, whose weights are what
            is above 1.
        is_causal: whether a query sees no later keys. False: an encoder's.
        window_size, softcap, scale: as in `qkv.attention`. A model whose `sliding_window` is W has
            a window of `(W - 1, 0)`.
        sinks: whether each head has a learned sink, as gpt-oss has them.
        gate: whether the heads' output is multiplied by the sigmoid of a projection of x, as in
            Qwen3-Next.
        dropout: the probability of dropping a weight of attention in training, 0 to 1.
        bias: whether the projections of query, key, value and gate have one.
        out_bias: whether the output's has one; as bias if None.
        device, dtype: of the parameters.

    The parameters are `qkv_proj.weight`, `[(H + 2 Hkv) D, E]`, W_Q, W_K and W_V in this order, and
    behind them with gate another H D rows; `o_proj.weight`, `[E, H D]`; `qkv_proj.bias` and
    `o_proj.bias`; `q_norm.weight` and `k_norm.weight`, `[D]`; `sinks`, `[H]`. `load_state_dict`
    also takes `q_proj`, `k_proj` and `v_proj`, as models of transformers have them; their
    attention as a whole becomes one of these by `from_transformers`.

    Raises:
        ValueError: a number that is out of range, or numbers that do not fit each other.

    Example:
        >>> layer = qkv.nn.SelfAttention(512, 8, 2, rotary=10_000.0, qk_norm=True).eval()
        >>> x = torch.randn(2, 100, 512)
        >>> layer(x).shape
        torch.Size([2, 100, 512])
        >>> cache = layer.new_cache(2, 128)
        >>> with torch.no_grad():
        ...     parts = [layer(part, cache=cache) for part in x.split([60, 39, 1], 1)]
        >>> cache.lengths
        tensor([100, 100], dtype=torch.int32)
    """

    is_causal = True
    _joined = "qkv"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        rotary: Rotary | float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        is_causal: bool = True,
        window_size: tuple[int, int] | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
        sinks: bool = False,
        gate: bool = False,
        dropout: float = 0.0,
        bias: bool = False,
        out_bias: bool | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim=head_dim, qk_norm=qk_norm,
            norm_eps=norm_eps, norm_offset=norm_offset, softcap=softcap, scale=scale, sinks=sinks,
            gate=gate, dropout=dropout, bias=bias, out_bias=out_bias, device=device, dtype=dtype,
        )  # fmt: skip
        if isinstance(rotary, (int, float)):
            rotary = Rotary(self.head_dim, rotary)
        if not isinstance(rotary, (Rotary, type(None))):
            self._refuse("rotary", rotary, "a Rotary, its base or None is expected", ValueError)
        if rotary is not None and rotary.dim > self.head_dim:
            wanted = f"at most head_dim, {self.head_dim}, is expected"
            self._refuse("rotary.dim", rotary.dim, wanted, ValueError)
        self.rotary, self.is_causal, self.window_size = rotary, is_causal, window_size
        self._heads = [num_heads, self.num_kv_heads, self.num_kv_heads] + [num_heads] * self.gate
        self.qkv_proj = self._projection(embed_dim, sum(self._heads), bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        spans: Spans | Tensor | None = None,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attends from each place of x to those before it, in x and in the cache.

        Args:
            x: `[B, L, E]`.
            mask: broadcastable to `[B, H, L, S]`, beside is_causal and window_size; S is L, or with
                a cache at least the longest row with x appended. Bool: True = may attend; or
                floating, added to the scores.
            cache: what `new_cache` made. Keys and values of x are appended to it, for inference:
                under `torch.no_grad()`, without dropout.
            spans: as in `qkv.attention`: documents that are packed in x, say.
            positions: `[L]` or `[B, L]`, integers, for the rotation. None: from 0 on, or from
                `cache.lengths` on.
            rotary: (cos, sin) to rotate by, `[L, R / 2]` or `[B, L, R / 2]` each, in place of the
                layer's own: computed once for all layers, or by another rule. In pairs as the
                layer's `Rotary` has them, else in halves.

        Returns:
            `[B, L, E]`. A query with nothing to attend to gets the bias of the last projection.

        Raises:
            RuntimeError: shapes and dtypes that do not fit; a cache that has not so much room,
                or in training with dropout.
        """
        own = self.rotary if positions is None and rotary is None else None
        if cache is None or own is None or self.q_norm is not None or not self.is_causal:
            heads = self.project(x, cache, positions=positions, rotary=rotary)
            return self._attend(*heads, mask, spans, cache)
        # The cache's operator turns query and key itself, to the same bits in less time.
        heads = self._projected(x, cache)
        dtype = torch.promote_types(heads[0].dtype, torch.float32)
        table = own.table(cache.length + x.size(1), dtype)
        cos, sin = table.to(heads[0].device).unbind(-2)
        turned = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": own.interleaved}
        return self._attend(*heads, mask, spans, cache, **turned)

    def project(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What `forward` attends with: query `[B, H, L, D]`, normed and rotated; key, likewise, and
        value, `[B, Hkv, L, D]`; and the gate before the sigmoid, as query, or None. Nothing is
        appended to the cache."""
        query, key, value, gate = self._projected(x, cache)
        # Not "in", by which torch.compile finds no number equal to a symbol.
        if positions is not None and all(positions.shape != x.shape[i:2] for i in range(2)):
            wanted = f"[{x.size(1)}] or [{x.size(0)}, {x.size(1)}] is expected"
            self._refuse("positions", positions, wanted)
        tables = rotary or self._tables(query, cache, positions)
        if tables is not None or self.q_norm is not None:
            none = query.new_empty(query.size(-2), 0)
            options = self._norm_options(query=self.q_norm, key=self.k_norm)
            options["interleaved"] = getattr(self.rotary, "interleaved", False)
            query, key = rotate(query, key, *(tables or (none, none)), **options)
        return query, key, value, gate

    def new_cache(
        self, batch: int, length: int, *, dtype: torch.dtype | None = None, pages: int | None = None
    ) -> KVCache:
        """An empty cache for this layer's keys and values.

        Args:
            batch: B, how many rows.
            length: how many keys each has room for.
            dtype: of the cache; the parameters' if None. torch.int8: a quarter of float32's memory,
                with a scale for each row of each head. Under autocast that of autocast.
            pages: how many keys are in a block of a paged cache. None: each row in one piece.

        Raises:
            ValueError: a number below 1.
        """
        self._check_sizes(batch=batch, length=length, pages=1 if pages is None else pages)
        dtype = self.o_proj.weight.dtype if dtype is None else dtype
        return KVCache.empty(batch, self.num_kv_heads, length, self.head_dim, dtype, pages)

    @classmethod
    def from_transformers(cls, module: torch.nn.Module) -> "SelfAttention":
        """A layer that computes what `module` does, the attention of a layer of transformers'
        Llama, Mistral, Mixtral, Qwen2, Qwen3 (also MoE), Qwen3-Next, Gemma 2, Gemma 3 or gpt-oss:
        `model.model.layers[0].self_attn`. The weights are copied.

        Raises:
            ValueError: a module of another class, or a rotation that depends on the length.
        """
        from qkv.nn._from_transformers import arguments_of

        layer = cls(**arguments_of(module)).train(module.training)
        layer.load_state_dict(module.state_dict())
        return layer

    def _projected(
        self, x: Tensor, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `project`, before norms and rotation."""
        self._check(x, cache)
        query, key, value, *gate = self._split(self.qkv_proj, x, self._heads)
        return query, key, value, gate[0] if gate else None

    def _tables(
        self, query: Tensor, cache: KVCache | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """cos and sin by the layer's own rule."""
        if self.rotary is None:
            return None
        length, dtype = query.size(-2), torch.promote_types(query.dtype, torch.float32)
        if positions is not None:
            return self.rotary(positions, dtype)
        if cache is None:
            rows = self.rotary.table(length, dtype)[:length]
        else:
            table = self.rotary.table(cache.length + length, dtype)
            rows = _rows_from(table, cache.lengths, length)
        cos, sin = rows.to(query.device).unbind(-2)
        return cos, sin
