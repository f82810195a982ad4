"""The weights of attention themselves, all of them or summed up."""

from typing import Literal

import torch
from torch import Tensor

from qkv.options import ScoreOptions, Unpack, refuse_unknown, show_options

_attention_weights = torch.ops.qkv.attention_weights.default


@show_options(_attention_weights)
def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    reduce: Literal["heads", "queries"] | None = None,
    **options: Unpack[ScoreOptions],
) -> Tensor:
    """How much every query attends to every key: what `attention` averages the values with.

    `attention_weights(query, key, **options) @ value` is `attention(query, key, value, **options)`.
    A row of weights is 0 or more and sums to 1; to less with sinks, and to 0 where a query has
    nothing to attend to. With dropout they are the weights after it.

    Args:
        query, key, attn_mask, dropout_p, is_causal: as in `attention`.
        **options: see `qkv.options.ScoreOptions`.
        reduce: None for all weights, `[..., H, L, S]`. "heads" for their mean over the heads,
            `[..., L, S]`: the picture of a layer. "queries" for their sum over the queries,
            `[..., H, S]`: how much each key is attended to, which is what decides on the keys that
            a cache can do without. The reduced ones never hold all weights.

    Returns:
        The weights in query's dtype, contiguous (their sums are float32 for bfloat16 and float16,
        too, and rounded once); differentiable, once, with respect to query, key, a floating
        attn_mask, bias, alibi_slopes and sinks.

    Raises:
        As `attention` does; ValueError for another reduce.

    Example:
        >>> query, key = torch.randn(2, 1, 8, 100, 64)
        >>> qkv.attention_weights(query, key, is_causal=True).sum(-1).allclose(torch.ones(100))
        True
        >>> qkv.attention_weights(query, key, reduce="heads").shape
        torch.Size([1, 100, 100])

    Source: weights as a picture of what a model looks at, Bahdanau et al., "Neural machine
    translation by jointly learning to align and translate", 2014; their sum over the queries, Zhang
    et al., "H2O: Heavy-hitter oracle for efficient generative inference", 2023.
    """
    # An argument costs the dispatcher 0.2 us, a keyword 0.5: only those that say something.
    args = (query, key)
    if attn_mask is not None or dropout_p != 0.0 or is_causal is not False:
        args += (attn_mask, dropout_p, is_causal)
    own = {} if reduce is None else {"reduce": reduce}
    try:
        return _attention_weights(*args, **own, **options)
    except RuntimeError:
        refuse_unknown(attention_weights, options)
        raise
