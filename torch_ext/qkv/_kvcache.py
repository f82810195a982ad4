"""Decoding with a cache of keys and values, as FlashAttention's flash_attn_with_kvcache has it."""

from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal, overload

import torch
from torch import Tensor

from qkv.options import SoftmaxOptions, Unpack, keywords_of, score_keywords
from qkv.spans import Spans

_attention_with_kvcache = torch.ops.qkv.attention_with_kvcache.default
_keywords = keywords_of(_attention_with_kvcache)


def lengths_of(cache_seqlens: Any, query: Tensor) -> Tensor | None:
    """[B]: a number stands for that of each batch item."""
    numbers: Any = (int, torch.SymInt, Integral)  # NumPy's are Integral
    if not isinstance(cache_seqlens, numbers):
        return cache_seqlens
    return query.new_full((query.size(0),), cache_seqlens, dtype=torch.int64)  # a DTensor's is one


class CacheOptions(SoftmaxOptions, total=False):
    """The keywords of every function with a cache but for return_softmax_lse, on which the type of
    the result depends."""

    cache_seqlens: Tensor | int | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int] | None
    score_mod: Callable[..., Any] | None


class _Options(CacheOptions, total=False):
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    num_splits: int


@overload
def attention_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, *,
    return_softmax_lse: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, *,
    return_softmax_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = None,
    value: Tensor | None = None, *,
    return_softmax_lse: bool, **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_with_kvcache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    spans: Spans | Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    score_mod: Callable[..., Any] | None = None,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends key and value to the caches, in place, then attends to all that each row has.

    For inference: there are no gradients. The tensors have this library's layout, heads before
    rows; caches laid out as FlashAttention's, `[B, S, H, D]`, are passed as `.transpose(1, 2)`,
    which copies nothing. All are of one dtype: float32, float64, bfloat16 or float16; but caches
    may be int8, unless it is float64. Any strides will do. Index tensors are int32 or int64.

    Args:
        query: `[B, H, L, D]`. L is 1 in most steps of decoding, but may be anything.
        k_cache: `[B, Hkv, S_max, D]`, Hkv divides H. With cache_batch_idx any number of rows
            instead of B; with block_table `[blocks, Hkv, block_size, D]`.
        v_cache: as k_cache, with Dv instead of D.
        key: `[B, Hkv, L_new, D]`, what row b of the cache gets from place `cache_seqlens[b]` on.
            None: nothing, the cache stays as it is. L_new need not be L.
        value: `[B, Hkv, L_new, Dv]`.
        cache_seqlens: `[B]`, or one number for all: how many keys each row has before key is
            appended. None: the cache is full, and key must be None.
        cache_batch_idx: `[B]`: the row of the caches that each batch item uses; with key, all
            different. None: row b. Not with block_table.
        cache_leftpad: `[B]`: so many keys at the beginning of a row are not seen, up to
            cache_seqlens. Not with block_table.
        block_table: `[B, M]`: a paged cache. Row j of batch item b is row `j % block_size` of block
            `block_table[b, j // block_size]`.
        rotary_cos, rotary_sin: `[n, R / 2]`, float32 or query's dtype: query and key are rotated,
            as by `rotate`, and key is appended rotated. Row i is for place i of a row of the cache;
            docs/decoding.md has the places of queries. Both or neither, and only with key.
        rotary_interleaved: pair i is the numbers 2 i and 2 i + 1 (GPT-J), as is FlashAttention's
            default, not `rotate`'s; False: i and i + R / 2 (Llama).
        softmax_scale: multiplies the scores; `1 / sqrt(D)` if None.
        causal: with S keys after appending, query i sees keys j <= i + S - L: bottom-right
            aligned, as in FlashAttention, so that the last query sees all keys.
        window_size: as in `attention`, where `(-1, -1)` is None. With causal, right is 0.
        softcap, alibi_slopes, sinks: as in `attention`.
        bias: float32 or query's dtype, broadcastable to `[B, H, L, S]`: added to the scores; -inf
            hides. S is at least the longest row's, counted from the first key that is seen.
        spans: `qkv.Spans` or int32, broadcastable to `[B, H, L, 2 n]`, of keys counted as for bias;
            what lies behind a row's last key is cut off.
        k_scale: float32, what the numbers of an int8 k_cache are multiplied by: `[]` or `[1]` for
            all, `[Hkv]` for each head, or k_cache's shape without D for each row of each head,
            `[B, Hkv, S_max]`, which appending writes, in place. docs/decoding.md says how numbers
            are rounded. None: k_cache is not int8.
        v_scale: likewise, of v_cache. Its shape need not be that of k_scale.
        num_splits: accepted and not needed.
        score_mod: as in `flex_attention`. Keys are numbered as for bias, and the last query's
            number is that of the last key.
        return_softmax_lse: also return the logarithm of each softmax's denominator.

    Returns:
        `[B, H, L, Dv]`, laid out in memory like query; with return_softmax_lse also `[B, H, L]`, in
        float32 (float64 for float64). Where there is nothing to attend to, in an empty row for
        example, the output is 0 and the lse -inf (the sink, if there is one).

    Raises:
        RuntimeError: shapes, dtypes, lengths, tables or strides that do not fit, by the argument's
            name; one of two caches int8, an int8 cache without its scale, a scale without one; two
            batch items that would write to the same place; caches that share memory with
            themselves, each other, or what is appended; a tensor that requires grad while gradients
            are recorded. The caches are then as they were.
        ValueError: a number that is out of range: softmax_scale, window_size, softcap.
        NotImplementedError: tensors that are not on the CPU.

    Under `torch.autocast`, query, key and value are cast; the caches must have its dtype.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 4, 128, 64)
        >>> prompt, step = torch.randn(3, 1, 4, 10, 64), torch.randn(3, 1, 4, 1, 64)
        >>> output = qkv.attention_with_kvcache(
        ...     prompt[0], k_cache, v_cache, *prompt[1:], cache_seqlens=0, causal=True)
        >>> output = qkv.attention_with_kvcache(
        ...     step[0], k_cache, v_cache, *step[1:], cache_seqlens=10, causal=True)
        >>> output.shape
        torch.Size([1, 4, 1, 64])

    Source: the paged cache, Kwon et al., "Efficient memory management for large language model
    serving with PagedAttention", 2023; keys split over the cores, Dao et al., "Flash-Decoding",
    2023.
    """
    given = _keywords(
        lengths_of(cache_seqlens, query), cache_batch_idx, cache_leftpad, block_table,
        rotary_cos, rotary_sin, None if rotary_interleaved is True else rotary_interleaved,
        softmax_scale, causal, None if window_size == (-1, -1) else window_size, softcap,
        alibi_slopes, bias, spans, sinks, k_scale, v_scale,
    )  # fmt: skip
    if score_mod is not None:
        given |= score_keywords(score_mod, query)
    output, lse = _attention_with_kvcache(query, k_cache, v_cache, key, value, **given)
    return (output, lse) if return_softmax_lse else output
