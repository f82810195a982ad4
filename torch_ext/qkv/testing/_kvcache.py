"""Decoding with a cache, as a composition of torch's operators: each batch item alone."""

import torch
from torch import Tensor

from qkv.testing._functional import attention, of_item
from qkv.testing._scores import Place


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
    window_size: tuple[int, int] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`qkv.attention_with_kvcache` in torch's operators, which writes to nothing.

    Arguments are as there, without return_softmax_lse; options are those of `attention`, with the
    numbers of heads broadcastable to `[B, H]`, bias and spans by positions from the first key that
    is seen. Always returns output `[B, H, L, Dv]`, lse `[B, H, L]`, and the caches as the call
    would leave them, all in dtype; of int8 caches the numbers that they stand for.

    Raises:
        TypeError: as `attention` does.
        ValueError: as `attention` does, and for key without value, or without cache_seqlens.
    """
    _check_appended(key, value, cache_seqlens)
    batch, (left, right) = query.size(0), window_size or (-1, -1)
    window = (left, 0) if causal else (left, right)
    scales = [x if x is None else _by_row(x) for x in (k_scale, v_scale)]
    caches = [_wide(x, s, dtype) for x, s in zip((k_cache, v_cache), scales, strict=True)]
    if block_table is None:  # one block for each item, as long as the cache
        rows = torch.arange(batch) if cache_batch_idx is None else cache_batch_idx
        block_table = rows.unsqueeze(1)
    slots = _slots(block_table, k_cache.size(2))
    ends = block_table.size(1) * k_cache.size(2) if cache_seqlens is None else cache_seqlens
    begins = 0 if cache_leftpad is None else cache_leftpad
    begins, ends = (torch.as_tensor(x).expand(batch).tolist() for x in (begins, ends))
    if key is not None and rotary_cos is not None and rotary_sin is not None:
        tables = rotary_cos.to(dtype), rotary_sin.to(dtype), rotary_interleaved
        stays = max(window) < 0
        key, query = _turned(key, ends, *tables), _turned(query, ends, *tables, stays)
    if key is not None and value is not None:
        for b, (rows, at) in enumerate(slots):
            new = slice(ends[b], ends[b] + key.size(2))
            ends[b] = new.stop
            for cache, x, scale in zip(caches, (key, value), scales, strict=True):
                x = x[b] if scale is None else _rounded(x[b], scale)
                cache[rows[new], :, at[new]] = x.to(dtype).transpose(0, 1)

    output = query.new_zeros(*query.shape[:3], v_cache.size(3), dtype=dtype)
    lse = query.new_zeros(query.shape[:3], dtype=dtype)
    for b, (rows, at) in enumerate(slots):
        seen = slice(begins[b], ends[b])
        keys, values = (x[rows[seen], :, at[seen]].transpose(0, 1) for x in caches)
        own = of_item(options, query.shape[:2], b, query.size(2), keys.size(1))
        # score_mod counts queries as places in the row, whose last one is that of the last key.
        place = Place(keys.size(1) - query.size(2), offset=0, first_item=b)
        output[b], lse[b] = attention(
            query[b], keys, values, **own, scale=softmax_scale, enable_gqa=True,
            window_size=window, dtype=dtype, return_lse=True, place=place,
        )  # fmt: skip
    return output, lse, caches[0], caches[1]


def _check_appended(
    key: Tensor | None, value: Tensor | None, cache_seqlens: Tensor | int | None
) -> None:
    if (key is None) != (value is None):
        raise ValueError("key and value: both or neither are expected")
    if key is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None, but with key the place to append at is expected")


def _wide(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A copy of a cache; of an int8 one, of what its numbers stand for."""
    return cache.to(dtype, copy=True) if scale is None else (cache.double() * scale).to(dtype)


def _slots(block_table: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Where the keys of each batch item are, by the caches' dimensions 0 and 2."""
    place = torch.arange(block_table.size(1) * size)
    return [(blocks.long()[place // size], place % size) for blocks in block_table]


def _turned(
    x: Tensor, begins: list[int], cos: Tensor, sin: Tensor, interleaved: bool, stays: bool = False
) -> Tensor:
    """`[B, H, L, D]` rotated: row i of item b by row `begins[b] + i` of cos and sin, or, if it
    stays, by row `begins[b]`."""
    places = torch.tensor(begins).view(-1, 1, 1) + torch.arange(x.size(2)) * (not stays)
    pairs = torch.arange(cos.size(1))
    a, b = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + len(pairs))
    x, cos, sin = x.to(cos.dtype), cos[places], sin[places]
    result = x.clone()
    result[..., a] = x[..., a] * cos - x[..., b] * sin
    result[..., b] = x[..., b] * cos + x[..., a] * sin
    return result


def quantize(rows: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows as int8, and the scale by which to multiply them: what appending to an int8 cache does.

    Args:
        rows: `[..., D]`, floating.
        scale: float32, to divide by, broadcastable to `[..., D]`. None: for each row its largest
            number over 127; NaN for a row that is not finite.

    Returns:
        int8 `[..., D]`, rounded to the nearest even from -127 to 127, and 0 for NaN; the scale, as
        it was given or float32 `[...]`.
    """
    rows = rows.float()
    if scale is None:
        scale = rows.abs().amax(-1) / 127 if rows.size(-1) else rows.new_zeros(rows.shape[:-1])
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        divisor = scale.unsqueeze(-1)
    else:
        divisor = scale
    return (rows / divisor).round().clamp(-127, 127).nan_to_num().to(torch.int8), scale


def _by_row(scale: Tensor) -> Tensor:
    """A scale, in double, that broadcasts to a cache `[rows, Hkv, S, D]`."""
    return scale.double().unsqueeze(-1) if scale.dim() > 1 else scale.double().reshape(-1, 1, 1)


def _rounded(rows: Tensor, scale: Tensor) -> Tensor:
    """`[Hkv, L_new, D]`: what new rows become in an int8 cache with such a scale, in double."""
    given = scale.float() if scale.dim() == 3 else None  # or each row gets one of its own
    numbers, own = quantize(rows, given)
    return numbers.double() * (_by_row(own) if given is None else scale)
