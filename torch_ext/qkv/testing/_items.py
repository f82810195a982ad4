"""Packed documents, and batch items with a cache, as compositions of torch's operators: each of
them alone, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv.options import MASKS
from qkv.spans import tensor_of
from qkv.testing._functional import attention
from qkv.testing._scores import Place

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    return_aux: AuxRequest | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`qkv.varlen_attn` in torch's operators; what is not named here is as in `attention`.

    Args:
        query: `[T, H, D]`. key: `[Tk, Hkv, D]`. value: `[Tk, Hkv, Dv]`; with block_table key and
            value are `[blocks, block_size, Hkv, ...]`.
        max_q, max_k, num_splits: not needed.
        k_scale, v_scale: what the numbers of an int8 key and value are multiplied by: `[]`, `[1]`,
            `[Hkv]` or `[blocks, block_size, Hkv]`.
        options: those of `attention`, with the numbers of heads, alibi_slopes and the like,
            broadcastable to `[N, H]`, masks and spans to `[N, H, L, S]` and `[N, H, L, 2 n]`, by
            positions within a document; attn_mask and is_causal, too, which `qkv.varlen_attn` has
            not. For dropout_seed documents count as batch items.

    Returns:
        `[T, H, Dv]` in dtype; with `return_aux.lse` also `[H, T]`.

    Raises:
        TypeError: as `attention` does.
        ValueError: as `attention` does, and for block_table without seqused_k.
    """
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k is None, but with block_table `[N]` is expected")
    key, value = (
        x if scale is None else x.double() * scale.double().unsqueeze(-1)
        for x, scale in ((key, k_scale), (value, v_scale))
    )
    slots = [] if block_table is None else _slots(block_table, key.size(1))
    per_document = (len(cu_seq_q) - 1, query.size(1))
    # Rows that lie in no document stay as they are here.
    output = query.new_zeros(*query.shape[:2], value.size(-1), dtype=dtype)
    lse = query.new_full((query.size(1), query.size(0)), -torch.inf, dtype=dtype)
    for n in range(per_document[0]):
        rows = torch.arange(*cu_seq_q[n : n + 2].tolist(), device=query.device)
        if block_table is None or seqused_k is None:
            begin, end = (cu_seq_q if cu_seq_k is None else cu_seq_k)[n : n + 2].tolist()
            keys = slice(begin, end if seqused_k is None else begin + int(seqused_k[n]))
        else:
            keys = tuple(x[: int(seqused_k[n])] for x in slots[n])
        its = (x.transpose(0, 1) for x in (query[rows], key[keys], value[keys]))
        found = _alone(n, per_document, its, options, dtype=dtype, place=Place(first_item=n))
        output = output.index_copy(0, rows, found[0].transpose(0, 1))
        lse = lse.index_copy(1, rows, found[1])
    return (output, lse) if return_aux is not None and return_aux.lse else output


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
        # score_mod counts queries as places in the row, whose last one is that of the last key.
        place = Place(keys.size(1) - query.size(2), offset=0, first_item=b)
        output[b], lse[b] = _alone(
            b, query.shape[:2], (query[b], keys, values), options, dtype=dtype, place=place,
            scale=softmax_scale, enable_gqa=True, window_size=window,
        )  # fmt: skip
    return output, lse, caches[0], caches[1]


def _alone(
    item: int, lead: tuple[int, ...], inputs: Iterable[Tensor], options: dict[str, Any], **call: Any
) -> Any:
    """Output and lse of one batch item, or document. inputs: its query `[H, L, D]`, key
    `[Hkv, S, D]` and value `[Hkv, S, Dv]`.

    options: of all items. What has a number for each head, and broadcasts to lead, `[B, H]`,
    becomes `[H]`; what broadcasts to `[B, H, L, S]`, where L and S may be larger than the item's,
    becomes `[H or 1, L or 1, S or 1]`."""
    query, key, value = inputs
    L, S = query.size(1), key.size(1)
    if not S:  # without a pair, nobody looks at masks
        options = {name: x for name, x in options.items() if name not in MASKS}
    own = dict(options)
    for name, x in options.items():
        if name in MASKS and x is not None:
            x = tensor_of(x)
            x = x[(None,) * (4 - x.dim())]
            x = x[item if x.size(0) > 1 else 0, :, :L]
            own[name] = x if name == "spans" else x[..., :S]
        elif isinstance(x, Tensor) and name != "dropout_seed":
            own[name] = x.expand(lead)[item]
    return attention(query, key, value, **own, **call, return_lse=True)


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
    place = torch.arange(block_table.size(1) * size, device=block_table.device)
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
    """Rows `[..., D]` as int8, and the scale by which to multiply them: what appending to an int8
    cache does. They are rounded to the nearest even from -127 to 127, and NaN to 0.

    scale: float32, to divide by, broadcastable to rows. None: for each row, `[...]`, its largest
    number over 127; NaN for a row that is not finite."""
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
