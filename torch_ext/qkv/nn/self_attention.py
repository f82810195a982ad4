"""Self-attention as models of today have it: grouped heads, rotation, norms, a gate, a cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._refuse import refuse
from qkv._rotate import rotate
from qkv.nn._linear import Linear
from qkv.nn._masks import as_added, as_bias
from qkv.nn.kvcache import KVCache
from qkv.nn.rotary import Rotary
from qkv.spans import Spans

_refuse = partial(refuse, function="SelfAttention")
_refuse_call = partial(_refuse, error=RuntimeError)


def _rows_from(table: Tensor, begins: Tensor, length: int) -> Tensor:
    """`[L, ...]`, a view of table where all rows of a batch begin at the same place, else
    `[B, L, ...]`."""
    if not torch.compiler.is_compiling():  # a graph has no branch by what is in a tensor
        places = {*begins.tolist()}
        if len(places) == 1:
            return table[places.pop() :][:length]
    return table[begins.unsqueeze(-1) + torch.arange(length, device=begins.device)]


class SelfAttention(torch.nn.Module):
    """Self-attention of a decoder: one product makes query, key and value, which are normed and
    rotated, each query sees itself and what is before it, and another product joins the heads.

    In training, in a prompt, and in decoding a token at a time the call is the same, but for the
    cache.

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
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, size in (sizes | {"head_dim": head_dim}).items():
            if size is not None and size < 1:
                _refuse(name, size, "1 or more is expected")
        if num_heads % num_kv_heads:
            wanted = f"a divisor of num_heads, {num_heads}, is expected"
            _refuse("num_kv_heads", num_kv_heads, wanted)
        if head_dim is None and embed_dim % num_heads:
            wanted = f"a multiple of num_heads, {num_heads}, is expected where head_dim is None"
            _refuse("embed_dim", embed_dim, wanted)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if not 0 <= dropout <= 1:
            _refuse("dropout", dropout, "0 to 1 is expected")
        if isinstance(rotary, (int, float)):
            rotary = Rotary(head_dim, rotary)
        if rotary is not None and rotary.dim > head_dim:
            _refuse("rotary.dim", rotary.dim, f"at most head_dim, {head_dim}, is expected")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.dropout, self.norm_offset = head_dim, dropout, norm_offset
        self.is_causal, self.window_size = is_causal, window_size
        self.softcap, self.scale, self.gate = softcap, scale, gate
        self.rotary = rotary
        # How many heads of the product are query's, key's, value's and the gate's.
        self._heads = [num_heads, num_kv_heads, num_kv_heads] + [num_heads] * gate
        like: Any = {"device": device, "dtype": dtype}
        self.qkv_proj = Linear(embed_dim, sum(self._heads) * head_dim, bias=bias, **like)
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = Linear(num_heads * head_dim, embed_dim, bias=out_bias, **like)
        norms = [torch.nn.RMSNorm(head_dim, norm_eps, **like) if qk_norm else None for _ in "qk"]
        self.q_norm, self.k_norm = norms
        for norm in filter(None, norms):
            torch.nn.init.constant_(norm.weight, 1 - norm_offset)
        self.sinks = torch.nn.Parameter(torch.zeros(num_heads, **like)) if sinks else None

    def extra_repr(self) -> str:
        plain = {"window_size": None, "softcap": 0.0, "scale": None, "gate": False, "dropout": 0.0}
        plain |= {"is_causal": True, "norm_offset": 0.0}
        heads = f"{self.embed_dim}, {self.num_heads}, {self.num_kv_heads}, head_dim={self.head_dim}"
        given = [f"{n}={getattr(self, n)}" for n, d in plain.items() if getattr(self, n) != d]
        return ", ".join([heads, *given])

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
        self._check(x, mask, cache, positions)
        query, key, value, gate = self.project(x, cache, positions=positions, rotary=rotary)
        options: dict[str, Any] = {
            "softcap": self.softcap, "window_size": self.window_size,
            "sinks": self.sinks, "spans": spans,
        }  # fmt: skip
        if cache is None:
            dropout = self.dropout if self.training else 0.0
            output = attention(
                query, key, value, mask, dropout, self.is_causal,
                scale=self.scale, enable_gqa=True, **options,
            )  # fmt: skip
        else:
            if mask is not None:
                options["bias"] = as_bias(as_added(~mask if mask.dtype == torch.bool else mask))
            options |= {"softmax_scale": self.scale, "causal": self.is_causal}
            output = cache.attend(query, key, value, **options)
        if gate is not None:
            output = output * gate.sigmoid()
        return self.o_proj(output.transpose(1, 2).flatten(-2))

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
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value, *gate = heads.split(self._heads, 1)
        if rotary is None:
            rotary = self._tables(query, cache, positions)
        query, key = self._norm_and_rotate(query, key, rotary)
        return query, key, value, gate[0] if gate else None

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
        for name, number in {"batch": batch, "length": length, "pages": pages}.items():
            if number is not None and number < 1:
                _refuse(name, number, "1 or more is expected", function="new_cache")
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

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Joins what models of transformers have apart."""
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
            if not all(name in state_dict for name in names):
                continue
            query, key, value = (state_dict.pop(name) for name in names)
            parts = [query, key, value]
            if self.gate:  # Qwen3-Next's q_proj: D rows of a head's query, D of its gate, and so on
                rows = query.unflatten(0, (-1, 2, self.head_dim))
                parts = [rows[:, 0].flatten(0, 1), key, value, rows[:, 1].flatten(0, 1)]
            found = [part.size(0) // self.head_dim for part in parts]
            if found != self._heads:
                wanted = f"{self._heads} heads are expected"
                error_msgs.append(f"{', '.join(names)} have {found} heads, but {wanted}")
            state_dict[f"{prefix}qkv_proj.{kind}"] = torch.cat(parts)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _norm_and_rotate(
        self, query: Tensor, key: Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if tables is None and self.q_norm is None:
            return query, key
        none = query.new_empty(query.size(-2), 0)
        cos, sin = tables or (none, none)
        options: dict[str, Any] = {"interleaved": getattr(self.rotary, "interleaved", False)}
        if self.q_norm is not None and self.k_norm is not None:
            options["eps"] = self.q_norm.eps
            dtype = torch.promote_types(self.q_norm.weight.dtype, torch.float32)
            for name, norm in {"query": self.q_norm, "key": self.k_norm}.items():
                offset = self.norm_offset  # added in float32: what is above 1 would lose its digits
                weight = norm.weight.to(dtype) + offset if offset else norm.weight
                options[f"{name}_weight"] = weight
        return rotate(query, key, cos, sin, **options)

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

    def _check(
        self, x: Tensor, mask: Tensor | None, cache: KVCache | None, positions: Tensor | None
    ) -> None:
        if x.dim() != 3 or x.size(-1) != self.embed_dim:
            _refuse_call("x", x, f"[B, L, {self.embed_dim}] is expected")
        batch, length, _ = x.shape
        if mask is not None:
            if mask.dtype != torch.bool and not mask.is_floating_point():
                wanted = "bool (True = may attend) or a floating one is expected"
                _refuse_call("mask", mask.dtype, wanted)
            keys = length if cache is None else mask.size(-1)
            whole = (batch, self.num_heads, length, keys)
            sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
            if mask.dim() > 4 or any(size not in (1, most) for size, most in sizes):
                _refuse_call("mask", mask, f"what broadcasts to {[*whole]} is expected")
        if positions is not None and positions.shape not in ((length,), (batch, length)):
            _refuse_call("positions", positions, f"[{length}] or [{batch}, {length}] is expected")
        if cache is not None:
            if cache.lengths.shape != (batch,):
                wanted = f"[{batch}], a number for each row of x, is expected"
                _refuse_call("cache.lengths", cache.lengths, wanted)
            if self.training and self.dropout:
                wanted = "0 is expected with a cache, or a layer in eval mode"
                _refuse_call("dropout", self.dropout, wanted)
