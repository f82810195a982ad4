"""Latent attention: keys and values of all heads out of one short vector for each position."""

from typing import Literal, overload

import torch
from torch import Tensor

from qkv.options import SoftmaxOptions, Unpack, keywords_of
from qkv.spans import Spans

_latent_attention = torch.ops.qkv.latent_attention.default
_keywords = keywords_of(_latent_attention)


def latent_attention(
    query_nope: Tensor, query_rope: Tensor, latents: Tensor, rope_keys: Tensor | None,
    key_weight: Tensor, value_weight: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, absorb: bool | None = None,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Multi-head latent attention (MLA), that of DeepSeek's models: each position has a latent of C
    numbers and one rotated key of R that all heads share, and head h has the keys
    `cat(latents @ key_weight[h].mT, rope_keys)` and the values `latents @ value_weight[h].mT`.

    There are two ways to the same result, up to rounding. *Expanding* makes keys and values of all
    heads, then attends. *Absorbing* uses that `q . (W c) = (q W) . c`: the queries go through
    key_weight, all heads attend to the latents themselves, as if to one head whose keys are C + R
    wide and whose values are their first C numbers, and the output goes through value_weight.
    Keys and values are then never made, which pays where queries are few: in decoding.

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
        scale, absorb, window_size, softcap, alibi_slopes, bias, spans, sinks
    )  # fmt: skip
    output, lse = _latent_attention(
        query_nope, query_rope, latents, rope_keys, key_weight, value_weight,
        attn_mask, dropout_p, is_causal, **given,
    )  # fmt: skip
    return (output, lse) if return_lse else output
