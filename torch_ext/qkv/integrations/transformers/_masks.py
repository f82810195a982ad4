"""The mask function: what transformers calls once in a forward pass (once for each kind of layer)
with a function of batch, head, query and key, to get the mask that it hands to every layer."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from qkv.integrations.transformers import _private
from qkv.integrations.transformers._pattern import pattern_of
from qkv.integrations.transformers._pattern_mask import Band, PatternMask, begins_of, lengths_of


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = _private.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask `[batch_size, 1, q_length, kv_length]`, bool, True where a query may see a key.

    Query i has the place `q_offset + i`, key j the place `kv_offset + j`; mask_function gets
    places. attention_mask is the user's, `[batch_size, places]`, bool, False for padding.

    Returns:
        A `PatternMask`, which no layer can mistake for a mask that is added. Where mask_function is
        made of functions of transformers whose meaning is known, it has no L x S elements. For a
        single query, whose mask is a row anyway, None if it sees all keys and may be without mask,
        else the row. For any other function the whole mask. On other devices and in torch.compile,
        what transformers' `sdpa_mask` returns, as for an attention_mask that torch.func transforms,
        whose numbers nobody can ask for: `_own_attention` sees to it that none but layers that ask
        the interface get it.
    """

    of_transformers = partial(
        _private.sdpa_mask, batch_size, q_length, kv_length, cast(int, q_offset), kv_offset,
        mask_function, attention_mask, device=device, **kwargs,
    )  # fmt: skip

    def written_out() -> PatternMask:
        mask = of_transformers(allow_is_causal_skip=False)
        assert mask is not None  # it was not allowed to be skipped
        return PatternMask(mask.shape, dense=mask)

    if torch.device(device).type != "cpu" or _private.is_tracing(attention_mask):
        return of_transformers(
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )
    if attention_mask is not None and is_functorch_wrapped_tensor(attention_mask):
        return of_transformers(allow_is_causal_skip=False)
    found = pattern_of(mask_function)
    if found is None or (attention_mask is not None and attention_mask.dim() != 2):
        return written_out()
    padding = _private.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:  # of the keys that there are, [batch_size, kv_length]
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    band = found.band.within(q_length, kv_length, ahead=int(q_offset) - kv_offset)
    window = band.window(q_length, kv_length)
    if window is None:
        return written_out()
    documents, spans, last = found.documents, None, int(q_offset) + q_length
    if documents is not None:
        fits = q_length == kv_length and documents.shape == (batch_size, q_length)
        if padding is not None or found.spans or not fits or (documents.diff(dim=-1) < 0).any():
            return written_out()
    if found.spans is not None:
        try:
            spans = found.spans(max(last, kv_offset + kv_length)).tensor
        except ValueError:  # more spans of a query than are fast, or a block in several pieces
            return written_out()
        spans = (spans[..., last - q_length : last, :] - kv_offset).clamp(0, window[0])
        if (spans == spans.new_tensor([0, window[0]] * (spans.size(-1) // 2))).all():
            spans = None
    padding = None if padding is None or padding[:, : window[0]].all() else padding
    lengths = lengths_of(padding) if band == Band() and spans is None else None
    begins = begins_of(padding, window[0]) if spans is None else None
    mask = PatternMask(
        (batch_size, 1, q_length, kv_length), band, padding=padding, lengths=lengths,
        begins=begins, documents=documents, spans=spans,
    )  # fmt: skip
    if q_length > 1 or mask.begins is not None:
        return mask
    may_be_none = allow_is_causal_skip or allow_is_bidirectional_skip
    sees_all = band == Band() and spans is None and mask.padding is None
    return None if may_be_none and sees_all else PatternMask(mask.shape, dense=mask.written)
