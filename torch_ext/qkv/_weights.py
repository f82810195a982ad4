"""The weights of attention themselves, all of them or summed up."""

from typing import Literal

import torch
from torch import Tensor

from qkv.options import keywords_of
from qkv.spans import Spans

_attention_weights = torch.ops.qkv.attention_weights.default
_attention_with_weights = torch.ops.qkv.attention_with_weights.default
_keywords = keywords_of(_attention_weights, after="key")  # attention_with_weights has the same


def attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    reduce: Literal["heads", "queries"] | None = None,
) -> Tensor:  # fmt: skip
    """How much every query attends to every key: what `attention` averages the values with.

    `attention_weights(query, key, **options) @ value` is `attention(query, key, value, **options)`.
    A row of weights is 0 or more and sums to 1; to less with sinks, and to 0 where a query has
    nothing to attend to. With dropout they are the weights after it.

    Args:
        query, key, attn_mask, dropout_p, is_causal: as in `attention`.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks: likewise.
        reduce: None for all weights, `[..., H, L, S]`. "heads" for their mean over the heads,
            `[..., L, S]`: the picture of a layer. "queries" for their sum over the queries,
            `[..., H, S]`: how much each key is attended to, which is what decides on the keys that
            a cache can do without. The reduced ones never hold all weights.

    Returns:
        The weights in query's dtype, contiguous (their sums are float32 for bfloat16 and float16,
        too, and rounded once); differentiable with respect to query, key, a floating attn_mask,
        bias, alibi_slopes and sinks: in forward mode, and more than once, with the memory of a few
        `[..., H, L, S]` tensors, whatever reduce is.

    Raises:
        RuntimeError, NotImplementedError: as `attention` does.
        ValueError: as `attention` does, and for another reduce.

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
    given = _keywords(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes,
        bias, spans, sinks, reduce,
    )  # fmt: skip
    return _attention_weights(query, key, **given)


def attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    reduce: Literal["heads", "queries"] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of `attention` and the weights that it has averaged the values with, from one
    pass.

    With dropout the weights are those after it, and both have dropped the same ones.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal: as in `attention`.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks: likewise.
        reduce: as in `attention_weights`: None, "heads" or "queries".

    Returns:
        The output, `[..., H, L, Dv]`, as `attention` returns it, and the weights, `[..., H, L, S]`,
        or reduced, as `attention_weights` returns them. Both are differentiable, as there.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as `attention_weights` does.

    Example:
        >>> query, key, value = torch.randn(3, 1, 8, 100, 64)
        >>> output, weights = qkv.attention_with_weights(query, key, value, reduce="heads")
        >>> output.shape, weights.shape
        (torch.Size([1, 8, 100, 64]), torch.Size([1, 100, 100]))

    Source: that of `attention_weights`.
    """
    given = _keywords(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes,
        bias, spans, sinks, reduce,
    )  # fmt: skip
    return _attention_with_weights(query, key, value, **given)
