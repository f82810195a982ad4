"""Attention whose rows lie one after the other in memory, each attending to itself alone: packed
documents, and batch items of which each has a number of keys of its own."""

from typing import Any

import torch
from torch import Tensor

import qkv
from qkv.integrations.transformers._pattern_mask import FAR, Band, PatternMask

Bounds = tuple[Tensor, Tensor]  # where documents begin, and where the last ends: queries, keys


def document_bounds(mask: Tensor | None, kwargs: dict[str, Any]) -> Bounds | None:
    """The documents that a mask has, or else those that `cu_seq_lens_q` and `cu_seq_lens_k` say, if
    the mask says no more than how far a query sees."""
    if isinstance(mask, PatternMask) and mask.documents is not None:
        bounds = _bounds(mask.documents)
        return bounds, bounds
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    says_more = mask is not None
    if isinstance(mask, PatternMask):
        has_more = mask.padding is not None or mask.spans is not None
        says_more = has_more or mask.shape[2] != mask.shape[3]
    return None if says_more or queries is None or keys is None else (queries, keys)


def _bounds(documents: Tensor) -> Tensor:
    """Of documents in several rows, `[B, L]`, taken as one row after the other."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    begins = torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1).flatten()
    end = torch.tensor([documents.numel()])
    return torch.cat([begins.nonzero().flatten(), end])


def band_without_mask(is_causal: bool, sliding_window: int | None) -> Band:
    """What FlashAttention makes of these: if not causal, the window is as wide on either side."""
    low = -FAR if sliding_window is None else 1 - sliding_window
    return Band(low, 0 if is_causal else -low)


def attend_packed(query, key, value, bounds: Bounds, band: Band, options: dict) -> Tensor:
    """`[B, L, H, Dv]` of `[B, H, L, D]`. The band is aligned to the end of each document."""
    window = tuple(-1 if bound == FAR else bound for bound in (-band.low, band.high))
    return _attend(query, key, value, bounds, options | {"window_size": window})


def attend_to_lengths(query, key, value, lengths: Tensor, options: dict[str, Any]) -> Tensor:
    """`[B, L, H, Dv]` of `[B, H, L, D]`, where all queries of item b attend to its first
    `lengths[b]` keys. What a mask would hide is not computed."""
    items = torch.arange(query.shape[0] + 1)
    bounds = items * query.shape[2], items * key.shape[2]
    return _attend(query, key, value, bounds, options | {"seqused_k": lengths})


def one_after_the_other(*tensors: Tensor) -> bool:
    """Whether `[B, H, L, D]` is `[B * L, H, D]` without being copied."""
    return all(x.stride(0) == x.shape[2] * x.stride(2) for x in tensors)


def _attend(query, key, value, bounds: Bounds, options: dict[str, Any]) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = qkv.varlen_attn(q, k, v, *bounds, q.shape[0], k.shape[0], **options)
    assert isinstance(output, Tensor)
    return output.unflatten(0, (query.shape[0], query.shape[2])).contiguous()
