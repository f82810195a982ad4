"""FlashAttention's functions on CPU tensors: the names, arguments and layouts of flash_attn 2.8.

    from qkv.compat.flash_attn import flash_attn_func

For code that others import flash_attn in, before it does so:

    sys.modules["flash_attn"] = qkv.compat.flash_attn

Rows stand before heads here, `[B, L, H, D]`, and causal is bottom-right aligned. Dtypes, strides
and derivatives are those of `qkv.attention`; `deterministic` and `num_splits` are accepted and
change nothing. docs/compare.md says what is different."""

from typing import Any

from torch import Tensor

from qkv._functional import attention
from qkv._kvcache import attention_with_kvcache
from qkv._refuse import refuse
from qkv._varlen import _varlen_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"  # of the flash_attn that these are the functions of


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int] | None:
    """Causal takes the keys on the right away from any window. None: all keys."""
    left, right = window_size
    window = (left, 0 if causal else right)
    return None if window == (-1, -1) else window


def _heads_first(**tensors: Tensor | None) -> list[Any]:
    """`[B, L, H, D]` as `[B, H, L, D]`. With fewer dimensions a transposed head would be a row."""
    for name, x in tensors.items():
        if x is not None and x.dim() != 4:
            refuse(name, x, "[B, L, H, D], 4 dimensions, are expected", RuntimeError)
    return [None if x is None else x.transpose(1, 2) for x in tensors.values()]


def _rows_first(result: Any, *more: None) -> Any:
    """An output `[B, H, L, D]` as `[B, L, H, D]`, with what else is returned."""
    if isinstance(result, Tensor):
        return result.transpose(1, 2)
    return (result[0].transpose(1, 2), *result[1:], *more)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`[B, L, H, D]`, `[B, S, Hkv, D]` and `[B, S, Hkv, Dv]` to `[B, L, H, Dv]`.

    With return_attn_probs also the lse, `[B, H, L]`, and None. alibi_slopes: `[H]` or `[B, H]`.
    """
    query, key, value = _heads_first(q=q, k=k, v=v)
    result = attention(
        query, key, value, None, dropout_p,
        scale=softmax_scale, enable_gqa=True, window_size=_window(causal, window_size),
        softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return _rows_first(result, None)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """Packed sequences, `[T, H, D]`, `[Tk, Hkv, D]` and `[Tk, Hkv, Dv]` to `[T, H, Dv]`.

    With block_table, `[N, M]`, k and v are pages, `[blocks, block_size, Hkv, D]`. With
    return_attn_probs also the lse, `[H, T]`, and None.
    """
    seqused_k = None if block_table is None else cu_seqlens_k.diff()
    output, lse = _varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        scale=softmax_scale, window_size=_window(causal, window_size), enable_gqa=True,
        seqused_k=seqused_k, block_table=block_table, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return (output, lse, None) if return_attn_probs else output


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Appends k and v to the caches, in place, and attends to what is in them.

    `[B, L, H, D]`, with caches `[B, S, Hkv, D]`, or pages `[blocks, block_size, Hkv, D]`, to
    `[B, L, H, Dv]`; with return_softmax_lse also the lse, `[B, H, L]`.
    """
    result = attention_with_kvcache(
        *_heads_first(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v),
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
    return _rows_first(result)


def _unpacked(name: str, x: Tensor, layout: str, count: int) -> tuple[Tensor, ...]:
    if x.dim() < 3 or x.size(-3) != count:
        refuse(name, x, f"{layout} is expected", RuntimeError)
    return x.unbind(-3)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`[B, L, 3, H, D]`, and then the arguments of `flash_attn_func` from dropout_p on."""
    q, k, v = _unpacked("qkv", qkv, "[B, L, 3, H, D]", 3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`[B, S, 2, Hkv, D]` for k and v, and then the arguments of `flash_attn_func`."""
    k, v = _unpacked("kv", kv, "[B, S, 2, Hkv, D]", 2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`[T, 3, H, D]`, and then the arguments of `flash_attn_varlen_func` from dropout_p on."""
    q, k, v = _unpacked("qkv", qkv, "[T, 3, H, D]", 3)
    ends = (cu_seqlens, cu_seqlens)
    return flash_attn_varlen_func(q, k, v, *ends, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`[Tk, 2, Hkv, D]` for k and v, and then the arguments of `flash_attn_varlen_func`."""
    k, v = _unpacked("kv", kv, "[Tk, 2, Hkv, D]", 2)
    return flash_attn_varlen_func(q, k, v, *args, **options)
