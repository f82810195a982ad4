"""Latent attention: keys and values of all heads out of one short vector for each position."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from qkv._kvcache import CacheOptions, lengths_of
from qkv.options import SoftmaxOptions, Unpack, keywords_of, score_keywords
from qkv.spans import Spans

_latent_attention = torch.ops.qkv.latent_attention.default
_latent_attention_with_kvcache = torch.ops.qkv.latent_attention_with_kvcache.default
_keywords = keywords_of(_latent_attention)
_cache_keywords = keywords_of(_latent_attention_with_kvcache)


class _Options(SoftmaxOptions, total=False):
    absorb: bool | None
    window_size: tuple[int, int] | None
    score_mod: Callable[..., Any] | None
    scale: float | None
    indices: Tensor | None


class _CacheOptions(CacheOptions, total=False):
    absorb: bool | None
    cache_scale: Tensor | None


@overload
def latent_attention(
    query_nope: Tensor, query_rope: Tensor, latents: Tensor, rope_keys: Tensor | None,
    key_weight: Tensor, value_weight: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def latent_attention(
    query_nope: Tensor, query_rope: Tensor, latents: Tensor, rope_keys: Tensor | None,
    key_weight: Tensor, value_weight: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def latent_attention(
    query_nope: Tensor, query_rope: Tensor, latents: Tensor, rope_keys: Tensor | None,
    key_weight: Tensor, value_weight: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    return_lse: bool, **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def latent_attention(
    query_nope: Tensor, query_rope: Tensor, latents: Tensor, rope_keys: Tensor | None,
    key_weight: Tensor, value_weight: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, absorb: bool | None = None,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    indices: Tensor | None = None, score_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Multi-head latent attention (MLA), that of DeepSeek's models: each position has a latent of C
    numbers and one rotated key of R that all heads share, and head h has the keys
    `cat(latents @ key_weight[h].mT, rope_keys)` and the values `latents @ value_weight[h].mT`.

    There are two ways to the same result, up to rounding: *expanding* makes keys and values of all
    heads, and *absorbing* attends to the latents themselves, which pays where queries are few, as
    in decoding. docs/decoding.md has both.

    Args:
        query_nope: `[..., H, L, N]`, the part of the queries without rotation, with at least 3
            dimensions, float32, float64, bfloat16 or float16; all other tensors have its dtype.
        query_rope: `[..., H, L, R]`, the rotated part.
        latents: `[..., 1, S, C]`; or `[..., 1, S, C + R]` with rope_keys None: rows that have the
            latent and, behind it, the rotated key, as a cache best holds them.
        rope_keys: `[..., 1, S, R]` or None.
        key_weight: `[H, N, C]`.
        value_weight: `[H, Dv, C]`. A model whose `kv_b_proj.weight` has both is
            `kv_b_proj.weight.view(H, N + Dv, C).split([N, Dv], 1)`.
        scale: multiplies the scores; `1 / sqrt(N + R)` if None.
        absorb: which of the two ways; None: the one that multiplies less, by the shapes.
        attn_mask, dropout_p, is_causal, window_size, softcap, alibi_slopes, bias, spans, sinks: as
            in `attention`.
        indices: as in `attention`.
        score_mod: as in `flex_attention`.
        return_lse: also return the logarithm of each softmax's denominator, `[..., H, L]`.

    Returns:
        `[..., H, L, Dv]`, or that and the lse. Differentiable with respect to all floating tensors,
        as often and in the modes that `attention` is.

    Raises:
        RuntimeError: shapes or dtypes that do not fit, by the argument's name.
        ValueError, TypeError, NotImplementedError: as `attention` does.

    Example:
        >>> query_nope, query_rope = torch.randn(1, 16, 1, 128), torch.randn(1, 16, 1, 64)
        >>> rows = torch.randn(1, 1, 1000, 512 + 64)
        >>> key_weight, value_weight = torch.randn(2, 16, 128, 512) / 512**0.5
        >>> qkv.latent_attention(query_nope, query_rope, rows, None, key_weight, value_weight).shape
        torch.Size([1, 16, 1, 128])

    Source: DeepSeek-AI, "DeepSeek-V2: A strong, economical, and efficient mixture-of-experts
    language model", 2024, section 2.1.
    """
    given = _keywords(
        scale, absorb, window_size, softcap, alibi_slopes, bias, spans, sinks, indices
    )
    if score_mod is not None:
        given |= score_keywords(score_mod, query_nope)
    output, lse = _latent_attention(
        query_nope, query_rope, latents, rope_keys, key_weight, value_weight,
        attn_mask, dropout_p, is_causal, **given,
    )  # fmt: skip
    return (output, lse) if return_lse else output


@overload
def latent_attention_with_kvcache(
    query_nope: Tensor, query_rope: Tensor, cache: Tensor, key_weight: Tensor, value_weight: Tensor,
    latents: Tensor | None = None, rope_keys: Tensor | None = None, *,
    return_softmax_lse: Literal[False] = False, **options: Unpack[_CacheOptions],
) -> Tensor: ...  # fmt: skip
@overload
def latent_attention_with_kvcache(
    query_nope: Tensor, query_rope: Tensor, cache: Tensor, key_weight: Tensor, value_weight: Tensor,
    latents: Tensor | None = None, rope_keys: Tensor | None = None, *,
    return_softmax_lse: Literal[True], **options: Unpack[_CacheOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def latent_attention_with_kvcache(
    query_nope: Tensor, query_rope: Tensor, cache: Tensor, key_weight: Tensor, value_weight: Tensor,
    latents: Tensor | None = None, rope_keys: Tensor | None = None, *,
    return_softmax_lse: bool, **options: Unpack[_CacheOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def latent_attention_with_kvcache(
    query_nope: Tensor, query_rope: Tensor, cache: Tensor, key_weight: Tensor, value_weight: Tensor,
    latents: Tensor | None = None, rope_keys: Tensor | None = None, *,
    cache_seqlens: Tensor | int | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, absorb: bool | None = None, causal: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    cache_scale: Tensor | None = None, score_mod: Callable[..., Any] | None = None,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A step of decoding with latent attention: appends latents and rotated keys to a cache that
    has both in one row, in place, then attends to all that each row has. The values are a part of
    the rows: nothing else is kept, and nothing is expanded where queries are few.

    For inference: there are no gradients.

    Args:
        query_nope, query_rope: `[B, H, L, N]` and `[B, H, L, R]`, as in `latent_attention`.
        cache: `[B, 1, S_max, C + R]`, or with block_table `[blocks, 1, block_size, C + R]`; in
            query_nope's dtype, or int8. Any strides.
        key_weight, value_weight: `[H, N, C]` and `[H, Dv, C]`.
        latents: `[B, 1, L_new, C]`, or rows `[B, 1, L_new, C + R]` with rope_keys None. None: the
            cache stays as it is.
        rope_keys: `[B, 1, L_new, R]` or None.
        absorb: as in `latent_attention`; a prompt is expanded from the cache.
        cache_scale: float32, what the numbers of an int8 cache are multiplied by: `[1]`, or a
            number for each row, `[B, 1, S_max]`, which appending writes. See k_scale in
            `attention_with_kvcache`.
        cache_seqlens, cache_batch_idx, cache_leftpad, block_table: as in `attention_with_kvcache`.
        softmax_scale, causal, window_size, softcap, alibi_slopes, bias, spans, sinks: as in
            `attention_with_kvcache`; the scale is `1 / sqrt(N + R)` if None.
        score_mod: as in `flex_attention`. The last query's number is that of the last key.
        return_softmax_lse: also return the logarithm of each softmax's denominator, `[B, H, L]`.

    Returns:
        `[B, H, L, Dv]`, or that and the lse.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as `attention_with_kvcache` does.

    Example:
        >>> cache = torch.zeros(1, 1, 1024, 512 + 64)
        >>> queries, step = torch.randn(1, 16, 1, 128 + 64), torch.randn(1, 1, 1, 512 + 64)
        >>> key_weight, value_weight = torch.randn(2, 16, 128, 512) / 512**0.5
        >>> qkv.latent_attention_with_kvcache(
        ...     *queries.split([128, 64], -1), cache, key_weight, value_weight, step,
        ...     cache_seqlens=10, causal=True).shape
        torch.Size([1, 16, 1, 128])

    Source: that of `latent_attention`.
    """
    given = _cache_keywords(
        lengths_of(cache_seqlens, query_nope), cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, absorb, causal, window_size, softcap, alibi_slopes, bias, spans, sinks,
        cache_scale,
    )  # fmt: skip
    if score_mod is not None:
        given |= score_keywords(score_mod, query_nope)
    output, lse = _latent_attention_with_kvcache(
        query_nope, query_rope, cache, key_weight, value_weight, latents, rope_keys, **given
    )
    return (output, lse) if return_softmax_lse else output
