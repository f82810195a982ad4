"""The weights of attention themselves, all of them or summed up."""

from typing import Literal

import torch
from torch import Tensor

_attention_weights = torch.ops.qkv.attention_weights.default


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    reduce: Literal["heads", "queries"] | None = None,
) -> Tensor:
    """How much every query attends to every key: what `attention` averages the values with.

    `attention_weights(query, key, **options) @ value` is `attention(query, key, value, **options)`.
    A row of weights is 0 or more and sums to 1; to less with sinks, and to 0 where a query has
    nothing to attend to. With dropout they are the weights after it.

    Args:
        reduce: None for all weights, `[..., H, L, S]`. "heads" for their mean over the heads,
            `[..., L, S]`: the picture of a layer. "queries" for their sum over the queries,
            `[..., H, S]`: how much each key is attended to, which is what decides on the keys that
            a cache can do without. The reduced ones never hold all weights.
        Everything else: as in `attention`.

    Returns:
        The weights in query's dtype, contiguous (their sums are float32 for bfloat16 and float16,
        too, and rounded once); differentiable, once, with respect to query, key, a floating
        attn_mask, alibi_slopes and sinks.

    Raises:
        As `attention` does; ValueError for another reduce.
    """
    return _attention_weights(
        query, key, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        reduce=reduce,
    )  # fmt: skip
