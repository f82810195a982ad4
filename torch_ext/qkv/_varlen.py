"""Attention over many sequences packed into one, as torch.nn.attention.varlen has it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from qkv.options import SoftmaxOptions, Unpack, keywords_of, score_keywords
from qkv.spans import Spans

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest

_varlen_attention = torch.ops.qkv.varlen_attention.default
_keywords = keywords_of(_varlen_attention)


class _Options(SoftmaxOptions, total=False):
    scale: float | None
    window_size: tuple[int, int]
    enable_gqa: bool
    seqused_k: Tensor | None
    block_table: Tensor | None
    num_splits: int | None
    dropout_p: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    score_mod: Callable[..., Any] | None


@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int, max_k: int, *,
    return_aux: None = None, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int, max_k: int, *,
    return_aux: "AuxRequest", **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: "AuxRequest | None" = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    spans: Spans | Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn` for the CPU, with more options and all gradients.

    N documents lie one after the other, without padding; each attends to itself alone.

    Args:
        query: `[T, H, D]`, float32, float64, bfloat16 or float16: the queries of all documents.
        key: `[Tk, Hkv, D]`, of query's dtype. Any strides will do.
        value: `[Tk, Hkv, Dv]`, of query's dtype.
        cu_seq_q: `[N + 1]`, int32 or int64, never falling: document n has the queries from
            `cu_seq_q[n]` up to `cu_seq_q[n + 1]`.
        cu_seq_k: `[N + 1]`, likewise for key and value; cu_seq_q if None.
        max_q, max_k: the longest document's lengths. Not needed here.
        return_aux: `AuxRequest(lse=True)` also returns the lse.
        scale, enable_gqa, dropout_p, softcap: as in `qkv.attention`.
        window_size: `(left, right)`, aligned to the end of each document's queries and keys; -1
            leaves a side open, `(-1, 0)` is causal attention.
        seqused_k: `[N]`, int32 or int64: only document n's first `seqused_k[n]` keys take part.
        block_table: `[N, M]`, int32 or int64: key and value lie in blocks,
            `[blocks, block_size, Hkv, D]` and `[blocks, block_size, Hkv, Dv]`; document n has the
            first `seqused_k[n]` keys of the blocks `block_table[n]`. Needs seqused_k, and the
            numbers in cu_seq_k are not used. For inference: no gradients, no dropout.
        num_splits: accepted and not needed: the result of a document never depends on the others.
        alibi_slopes: as in `qkv.attention`, `[H]` or `[N, H]`; i, j, L and S are a document's own.
        bias: float32 or query's dtype, broadcastable to `[N, H, L, S]`: added to the scores by
            positions within a document; L and S are at least the longest document's. -inf hides.
        spans: `qkv.Spans` or int32, broadcastable to `[N, H, L, 2 n]`, likewise by positions within
            a document, at whose last key they are cut off.
        sinks: as in `qkv.attention`, `[H]` or `[N, H]`.
        k_scale, v_scale: of an int8 key and value, as in `qkv.attention_with_kvcache`, for each row
            of each head `[blocks, block_size, Hkv]`. With block_table alone, and query float32,
            bfloat16 or float16.
        score_mod: as in `flex_attention`. The batch item's number is the document's, and queries
            and keys are counted within it; with block_table the last query's number is that of the
            last key.

    Returns:
        `[T, H, Dv]` in query's dtype; with `return_aux.lse` also the logarithm of each softmax's
        denominator, `[H, T]`, float64 for float64, else float32. Both are differentiable with
        respect to query, key, value, bias, alibi_slopes and sinks: backward, in forward mode and
        twice. Queries outside every document get output 0 and lse -inf.

    Raises:
        RuntimeError, ValueError: as `qkv.attention` does.

    Example:
        >>> query, key, value = torch.randn(3, 30, 8, 64)  # documents of 10, 5 and 15 rows
        >>> ends = torch.tensor([0, 10, 15, 30])
        >>> output = qkv.varlen_attn(query, key, value, ends, ends, 15, 15, window_size=(-1, 0))
        >>> output.shape
        torch.Size([30, 8, 64])

    Source: packed sequences, as Dao et al., "FlashAttention", 2022, and its
    flash_attn_varlen_func have them.
    """
    given = _keywords(
        dropout_p, scale, None if window_size == (-1, -1) else window_size, enable_gqa, seqused_k,
        block_table, softcap, alibi_slopes, bias, spans, sinks, k_scale, v_scale,
    )  # fmt: skip
    if score_mod is not None:
        given |= score_keywords(score_mod, query)
    output, lse = _varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **given)
    return (output, lse) if return_aux is not None and return_aux.lse else output
