"""xFormers' memory_efficient_attention on CPU tensors, by its name and with its arguments.

    from qkv.compat.xformers import LowerTriangularMask, memory_efficient_attention

Masks are xFormers' own, where it is installed, or those of this module, which are enough where it
is not. All derivatives of `qkv.attention` come with it, a tensor's that is attn_bias among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._refuse import refuse
from qkv._varlen import _varlen_attention
from qkv.spans import Spans

__all__ = [
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "memory_efficient_attention",
]


class LowerTriangularMask:
    """Query i sees the keys j <= i: top-left aligned."""


class LowerTriangularFromBottomRightMask:
    """Query i of L sees the keys j <= i + S - L of S."""


@dataclass(eq=False)
class _Lengths:
    """One after the other: where each sequence begins, `[N + 1]`, int32, and the longest length."""

    seqstart: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "_Lengths":
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(ends, max(lengths, default=0))


@dataclass(eq=False)
class BlockDiagonalMask:
    """Packed sequences, `[1, T, H, K]`, each of which attends to itself, or to its own keys."""

    q_seqinfo: _Lengths
    k_seqinfo: _Lengths

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None
    ) -> "BlockDiagonalMask":
        queries = _Lengths.of(q_seqlen)
        return cls(queries, queries if kv_seqlen is None else _Lengths.of(kv_seqlen))

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """Within each sequence, whose queries and keys are as many."""
        if not torch.equal(self.q_seqinfo.seqstart, self.k_seqinfo.seqstart):
            raise ValueError("make_causal: the queries and keys of a sequence are not as many")
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """The last query of each sequence sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """The same, where every sequence is causal from its first query and key on."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The same, where every sequence is causal from its last query and key on."""


# What needs no tensor of all pairs, by the name of the mask's class.
_DENSE: dict[str, dict[str, Any]] = {
    "LowerTriangularMask": {"is_causal": True},
    "LowerTriangularFromBottomRightMask": {"window_size": (-1, 0)},
}
_PACKED: dict[str, dict[str, Any]] = {
    "BlockDiagonalMask": {},
    "BlockDiagonalCausalMask": {"window_size": (-1, 0)},  # of as many queries as keys
    "BlockDiagonalCausalFromBottomRightMask": {"window_size": (-1, 0)},
}


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`[B, M, H, K]`, keys `[B, N, H, K]` and values `[B, N, H, Kv]` to `[B, M, H, Kv]`.

    Args:
        query, key, value: also `[B, M, K]`, of one head, or `[B, M, G, H, K]`, of G groups of
            heads, whose key and value may be expanded over H.
        attn_bias: a tensor, broadcastable to `[B, H, M, N]` (`[B, M, N]`, `[B, G, H, M, N]`), bool
            or added to the scores, or a mask of this module's or of xFormers'. Any other object is
            asked for its tensor, `materialize((M, N), dtype)`.
        p: the probability of dropping a weight.
        scale: multiplies the scores; `1 / sqrt(K)` if None.
        op: accepted and not needed: the name of a kernel of xFormers'.
        output_dtype: of the result, query's if None.

    Raises:
        RuntimeError, ValueError: as `qkv.attention` does.
        TypeError: attn_bias is no mask.
    """
    kind = type(attn_bias).__name__
    if kind in _PACKED:
        output = _packed(query, key, value, attn_bias, p, scale, kind)
    else:
        options = _DENSE.get(kind) or {"attn_mask": _tensor(attn_bias, query, key)}
        rows = (x.movedim(1, -2) for x in (query, key, value))
        output = attention(*rows, dropout_p=p, scale=scale, **options).movedim(-2, 1)
    return output if output_dtype is None else output.to(output_dtype)


def _packed(query, key, value, mask, p, scale, kind) -> Tensor:
    """Heads in groups, `[1, T, G, H, K]`, are heads like others."""
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    packed = {"query": (query, queries), "key": (key, keys), "value": (value, keys)}
    for name, (x, info) in packed.items():
        if x.shape[:2] != (1, total := int(info.seqstart[-1])):
            refuse(name, x, f"[1, {total}, …], as many rows as attn_bias has, is expected")
    rows = [x[0].unsqueeze(1) if x.dim() == 3 else x[0].flatten(1, -2) for x in (query, key, value)]
    options = _PACKED[kind]
    if kind == "BlockDiagonalCausalMask" and not queries.seqstart.equal(keys.seqstart):
        options = {"spans": Spans.window(queries.max_seqlen, -1, 0).tensor}  # top-left aligned
    output, _ = _varlen_attention(
        *rows, queries.seqstart, keys.seqstart, queries.max_seqlen, keys.max_seqlen,
        scale=scale, dropout_p=p, **options,
    )  # fmt: skip
    return output.reshape(*query.shape[:-1], value.size(-1))


def _tensor(attn_bias: Any, query: Tensor, key: Tensor) -> Tensor | None:
    if attn_bias is None or isinstance(attn_bias, Tensor):
        return attn_bias
    if not hasattr(attn_bias, "materialize"):
        wanted = "a tensor or one of xFormers' masks is expected"
        refuse("attn_bias", type(attn_bias).__name__, wanted, TypeError)
    return attn_bias.materialize((query.size(1), key.size(1)), dtype=query.dtype)
