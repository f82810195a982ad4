"""Attention as a function, and its derivative in a direction."""

from typing import Literal, overload

import torch
from torch import Tensor

from qkv._jagged import jagged_attention, refuse_mixed
from qkv.options import AttentionOptions, Unpack, keywords_of
from qkv.spans import Spans

_attention = torch.ops.qkv.attention.default
_attention_with_lse = torch.ops.qkv.attention_with_lse.default
_indexed_attention = torch.ops.qkv.indexed_attention.default
_attention_jvp = torch.ops.qkv.attention_jvp.default
_keywords, _jvp_keywords = (keywords_of(x, after="value") for x in (_attention, _attention_jvp))
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def has_kernels(tensor: Tensor) -> bool:
    """Whether attention to tensors like this one, by its device and dtype, is qkv's own."""
    return tensor.device.type == "cpu" and tensor.dtype in _DTYPES


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: bool, **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    spans: Spans | Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A soft lookup: every query gets the average of the values, weighted by how well their keys
    match it. `softmax(scale * query @ key.mT + attn_mask) @ value`, without the L x S matrix.

    The first arguments are those of `torch.nn.functional.scaled_dot_product_attention`. All of
    them combine, and everything that is a float tensor gets its gradient.

    The score of query i and key j is made in this order: `scale * query_i . key_j`; softcap; ALiBi;
    bias and the floating attn_mask are added; what is_causal, window_size, spans or attn_mask hides
    is left out.

    Args:
        query: `[..., H, L, D]`, float32, float64, bfloat16 or float16; at least 2-D. The leading
            dimensions of query, key and value broadcast, and any strides will do. Or a jagged
            nested tensor `[B, H, j, D]`, see below.
        key: `[..., H, S, D]`, of query's dtype.
        value: `[..., H, S, Dv]`, of query's dtype.
        attn_mask: broadcastable to `[..., H, L, S]`; bool (True = may attend), or float32 or
            query's dtype, added to the scores (-inf hides; the least finite number does not).
        dropout_p: the probability of dropping a weight, 0 to 1; those that are kept are divided
            by 1 - dropout_p. It is up to the caller to pass 0 when not training. A call draws one
            number from torch's default CPU generator: docs/options.md, "Dropout".
        is_causal: query i sees keys j <= i: aligned top-left, which matters when L != S.
        scale: multiplies the scores; `1 / sqrt(D)` if None.
        enable_gqa: key and value may have fewer heads than query, as long as they divide H.
        window_size: `(left, right)`: query i sees keys from `i + S - L - left` to
            `i + S - L + right`: aligned bottom-right, as in FlashAttention; -1 leaves a side open,
            None both. Time grows with L times the window, not with L * S.
        softcap: if not 0, scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: floating, broadcastable to `[..., H]`: `slope * |i + S - L - j|` is taken off
            the scores.
        bias: float32 or query's dtype, broadcastable to `[..., H, L, S]`: added to the scores
            beside any attn_mask; -inf hides.
        spans: which keys each query sees, as a few intervals instead of a number for every pair:
            `qkv.Spans`, or its int32 tensor, broadcastable to `[..., H, L, 2 n]`. Time grows with
            what they show.
        sinks: floating, broadcastable to `[..., H]`: the score of one more key that every query of
            the head sees and whose value is 0. It counts in the lse, too.
        indices: the keys that something else, an indexer, has chosen for each query: int32 or int64
            `[..., L, k]`, or `[..., Hkv, L, k]` for each key head. All others are hidden. -1 names
            no key; one that is named twice counts once. Time grows with k instead of S where S is
            at least twice as large: docs/decoding.md.
        return_lse: also return the logarithm of each softmax's denominator, before dropout.

    Returns:
        `[..., H, L, Dv]`, in query's dtype and laid out in memory like it; with return_lse also
        `[..., H, L]`, float64 for float64, else float32. A row with nothing to attend to is 0, its
        lse -inf (the sink, if there is one). Both are differentiable with respect to query, key,
        value, bias, a floating attn_mask, alibi_slopes and sinks: backward, in forward mode
        (`attention_jvp` is that as a function) and twice, in memory linear in the sequence; more
        often with the memory of a few `[..., H, L, S]` tensors.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, by the argument's name.
        ValueError: a number that is out of range: scale, dropout_p, window_size, softcap, spans.
        TypeError: spans that are none.
        NotImplementedError: what is still to come.

    bfloat16 and float16: scores, softmax and all sums are float32, what is returned is rounded
    once. Gradients have the dtypes of their arguments. Under `torch.autocast("cpu")` query, key,
    value and a floating attn_mask become the autocast dtype, as in scaled_dot_product_attention.

    Jagged nested tensors (`torch.nested`, `layout=torch.jagged`): query, key and value are all
    `[B, H, j, D]`, usually `.transpose(1, 2)` of `[B, j, H, D]`. Item b of key and value may have
    another length than item b of query. alibi_slopes, sinks, bias and spans are as in
    `varlen_attn`, of items in place of documents; attn_mask is None. The results are jagged like
    query.

    Tensors on another device than the CPU go to torch's own attention.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 100, 64, requires_grad=True)
        >>> output, lse = qkv.attention(query, key, value, window_size=(16, 0), return_lse=True)
        >>> output.shape, lse.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([2, 8, 100]))
        >>> output.sum().backward()

    Sources: Vaswani et al., "Attention is all you need", 2017; without the L x S matrix, Rabe and
    Staats, "Self-attention does not need O(n^2) memory", 2021, and Dao et al., "FlashAttention",
    2022; ALiBi, Press et al., "Train short, test long", 2021; sinks, OpenAI, gpt-oss, 2025, after
    Xiao et al., "Efficient streaming language models with attention sinks", 2023; softcap, Gemma
    Team, "Gemma 2", 2024.
    """
    given = _keywords(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes,
        bias, spans, sinks,
    )  # fmt: skip
    if indices is not None:
        output, lse = _indexed_attention(query, key, value, indices, **given)
        return (output, lse) if return_lse else output
    # Jagged tensors are of a class of their own. What else is wrong with query the operator says.
    # "is True": torch.fx's proxies have every attribute, and no truth.
    if type(query) is not Tensor and getattr(query, "is_nested", False) is True:
        output, lse = jagged_attention("attention", query, key, value, **given)
        return (output, lse) if return_lse else output
    op = _attention_with_lse if return_lse else _attention
    try:
        return op(query, key, value, **given)
    except RuntimeError:
        refuse_mixed("attention", query, key, value)
        raise


def attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    query_tangent: Tensor | None = None, key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None, attn_mask_tangent: Tensor | None = None,
    bias_tangent: Tensor | None = None, alibi_slopes_tangent: Tensor | None = None,
    sinks_tangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`attention`, and how its results change when its inputs change along given directions: a
    Jacobian times a vector, in one pass over the keys and in memory linear in the sequence.

    A tangent has the shape and the dtype of its tensor; None stands for zeros, and costs nothing.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal: as in `attention`.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks: likewise.
        query_tangent, key_tangent, value_tangent: the directions of these.
        attn_mask_tangent, bias_tangent, alibi_slopes_tangent, sinks_tangent: likewise, where they
            are floating.

    Returns:
        (output, lse, output_tangent, lse_tangent): `[..., H, L, Dv]` and `[..., H, L]`, as
        `attention(..., return_lse=True)` returns them, and the change of each, of its shape, dtype
        and strides. A row with nothing to attend to has tangents of 0 (its lse that of the sink, if
        there is one). With dropout all four are those of the same kept weights. All are
        differentiable in turn, and their gradients take linear memory, too.

    Raises:
        RuntimeError: as `attention` does; a tangent of another shape or dtype than its tensor's, or
            of an argument that is None or not floating.
        ValueError: as `attention` does.
        NotImplementedError: what is still to come; tensors that are not on the CPU.

    Under `torch.autocast("cpu")` the tangents of what is cast are cast, too. Of jagged nested
    tensors the tangents are jagged with the same offsets; torch's own forward mode has none for
    them.

    Example:
        >>> query, key, value, direction = torch.randn(4, 2, 8, 100, 64)
        >>> output, lse, change, lse_change = qkv.attention_jvp(
        ...     query, key, value, is_causal=True, query_tangent=direction)
        >>> f = lambda q: qkv.attention(q, key, value, is_causal=True)
        >>> change.equal(torch.func.jvp(f, (query,), (direction,))[1])
        True

    Source: forward mode of attention in one pass, Lu and Song, "Simplifying, stabilizing and
    scaling continuous-time consistency models", 2024.
    """
    given = _jvp_keywords(
        attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes,
        bias, spans, sinks, query_tangent, key_tangent, value_tangent, attn_mask_tangent,
        bias_tangent, alibi_slopes_tangent, sinks_tangent,
    )  # fmt: skip
    # Jagged tensors are of a class of their own. What else is wrong with query the operator says.
    if type(query) is not Tensor and getattr(query, "is_nested", False) is True:
        return jagged_attention("attention_jvp", query, key, value, **given)
    try:
        return _attention_jvp(query, key, value, **given)
    except RuntimeError:
        refuse_mixed("attention_jvp", query, key, value)
        raise
