"""What layers with grouped heads have in common: sizes, norms, sinks, a gate, W_O, and the call."""

from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._refuse import refuse
from qkv._watched import is_watched
from qkv.nn._check import check_broadcast, check_dtypes
from qkv.nn._linear import Linear
from qkv.nn._masks import as_added, as_bias
from qkv.nn.kvcache import KVCache
from qkv.spans import Spans


class RMSNorm(torch.nn.RMSNorm):
    """Of heads; its weight is multiplied as `offset + weight`, which begins as 1."""

    def __init__(self, width: int, eps: float, offset: float, **like: Any) -> None:
        self.offset = offset
        super().__init__(width, eps, **like)

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 1 - self.offset)


class GroupedHeads(torch.nn.Module):
    """A subclass makes query, key and value; the arguments are those of `SelfAttention`."""

    is_causal: bool = False
    window_size: tuple[int, int] | None = None
    # The projections that are one product here, by the letters of their names in transformers, and
    # how many heads each of them has.
    _joined: str
    _heads: list[int]

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, *,
        head_dim: int | None = None, qk_norm: bool = False, norm_eps: float = 1e-6,
        norm_offset: float = 0.0, softcap: float = 0.0, scale: float | None = None,
        sinks: bool = False, gate: bool = False, dropout: float = 0.0, bias: bool = False,
        out_bias: bool | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        self._check_sizes(**sizes, head_dim=1 if head_dim is None else head_dim)
        if num_heads % num_kv_heads:
            wanted = f"a divisor of num_heads, {num_heads}, is expected"
            self._refuse("num_kv_heads", num_kv_heads, wanted, ValueError)
        if head_dim is None and embed_dim % num_heads:
            wanted = f"a multiple of num_heads, {num_heads}, is expected where head_dim is None"
            self._refuse("embed_dim", embed_dim, wanted, ValueError)
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            self._refuse("dropout", dropout, "0 to 1 is expected", ValueError)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.dropout, self.norm_offset = head_dim, dropout, norm_offset
        self.softcap, self.scale, self.gate = softcap, scale, bool(gate)
        like: Any = {"device": device, "dtype": dtype}
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = Linear(num_heads * head_dim, embed_dim, bias=out_bias, **like)
        norm = head_dim, norm_eps, norm_offset
        self.q_norm, self.k_norm = (RMSNorm(*norm, **like) if qk_norm else None for _ in "qk")
        self.sinks = torch.nn.Parameter(torch.zeros(num_heads, **like)) if sinks else None

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for part in self.children():
            if isinstance(part, (torch.nn.Linear, RMSNorm)):
                part.reset_parameters()
        if self.sinks is not None:
            torch.nn.init.zeros_(self.sinks)

    def _projection(self, width: int, heads: int, bias: bool) -> Linear:
        like: Any = {"device": self.o_proj.weight.device, "dtype": self.o_proj.weight.dtype}
        return Linear(width, heads * self.head_dim, bias=bias, **like)

    def _split(self, projection: Linear, x: Tensor, heads: Any) -> list[Tensor]:
        """`[B, h, L, D]` of each number h of heads, or of as many as there are of one number; views
        of one product."""
        every = projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return [*every.split(heads, 1)]

    def extra_repr(self) -> str:
        plain = {"window_size": None, "softcap": 0.0, "scale": None, "gate": False, "dropout": 0.0}
        plain |= {"is_causal": type(self).is_causal, "norm_offset": 0.0}
        heads = f"{self.embed_dim}, {self.num_heads}, {self.num_kv_heads}, head_dim={self.head_dim}"
        given = [f"{n}={getattr(self, n)}" for n, d in plain.items() if getattr(self, n) != d]
        return ", ".join([heads, *given])

    def _refuse(
        self, name: str, found: Any, expected: str, error: type[Exception] = RuntimeError
    ) -> NoReturn:
        refuse(name, found, expected, error, type(self).__name__)

    def _check_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if not isinstance(size, (Integral, torch.SymInt)) or size < 1:
                self._refuse(name, size, "1 or more, an integer, is expected", ValueError)

    def _check(self, x: Tensor, cache: KVCache | None) -> None:
        if x.is_nested or x.dim() != 3 or x.size(-1) != self.embed_dim:
            found = "nested" if x.is_nested else x
            self._refuse("x", found, f"[B, L, {self.embed_dim}] is expected")
        if cache is not None and cache.lengths.shape != (x.size(0),):
            wanted = f"[{x.size(0)}], a number for each row of x, is expected"
            self._refuse("cache.lengths", cache.lengths, wanted)
        if cache is not None and self.training and self.dropout:
            wanted = "0 is expected with a cache, or a layer in eval mode"
            self._refuse("dropout", self.dropout, wanted)

    def _check_mask(
        self, mask: Tensor, query: Tensor, key: Tensor | None, cache: KVCache | None
    ) -> None:
        check_dtypes(query.dtype, type(self).__name__, "may attend", mask=mask)
        added = 0 if key is None else key.size(-2)
        keys = added if cache is None else [1, *mask.shape][-1]
        check_broadcast("mask", mask, [*query.shape[:-1], keys], type(self).__name__)
        if cache is not None and keys != 1 and not is_watched(cache.lengths):
            longest = max(cache.lengths.tolist(), default=0) + added
            if keys < longest:
                wanted = f"a number for each of the longest row's {longest} keys is expected"
                self._refuse("mask", mask, wanted)

    def _norm_options(self, **norms: torch.nn.RMSNorm | None) -> dict[str, Any]:
        """eps and weights of `qkv.rotate`, by `query` and `key`; of no norms, nothing."""
        options: dict[str, Any] = {}
        for name, norm in norms.items():
            if norm is not None:
                dtype = torch.promote_types(norm.weight.dtype, torch.float32)
                offset = self.norm_offset  # added in float32: what is above 1 would lose its digits
                weight = norm.weight.to(dtype) + offset if offset else norm.weight
                options |= {f"{name}_weight": weight, "eps": norm.eps}
        return options

    def _attend(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, gate: Tensor | None,
        mask: Tensor | None, spans: Spans | Tensor | None, cache: KVCache | None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """The layer's output. With a cache key and value, unless None, are appended to it.

        gate: before the sigmoid. options: what the cache alone is told."""
        if mask is not None:
            self._check_mask(mask, query, key, cache)
        common: dict[str, Any] = {
            "softcap": self.softcap, "window_size": self.window_size,
            "sinks": self.sinks, "spans": spans,
        }  # fmt: skip
        if cache is not None:
            if mask is not None:
                options["bias"] = as_bias(as_added(~mask if mask.dtype == torch.bool else mask))
            options |= {"softmax_scale": self.scale, "causal": self.is_causal}
            output = cache.attend(query, key, value, **common, **options)
        else:
            assert key is not None and value is not None
            dropout = self.dropout if self.training else 0.0
            output = attention(
                query, key, value, mask, dropout, self.is_causal,
                scale=self.scale, enable_gqa=True, **common,
            )  # fmt: skip
        if gate is not None:
            output = output * gate.sigmoid()
        return self.o_proj(output.transpose(1, 2).flatten(-2))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Joins what models of transformers have apart."""
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}_proj.{kind}" for name in self._joined]
            if not all(name in state_dict for name in names):
                continue
            parts = [state_dict.pop(name) for name in names]
            if len(self._heads) == 4:  # Qwen3-Next's q_proj: a head's query, its gate, and so on
                heads = parts[0].split(self.head_dim)
                none = parts[0][:0]  # of one head alone there is no gate
                query, gate = (torch.cat((none, *heads[i::2])) for i in range(2))
                parts = [query, *parts[1:], gate]
            found = [part.size(0) // self.head_dim for part in parts]
            if found != self._heads:
                wanted = f"{self._heads} heads are expected"
                error_msgs.append(f"{', '.join(names)} have {found} heads, but {wanted}")
            state_dict[f"{prefix}{self._joined}_proj.{kind}"] = torch.cat(parts)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
