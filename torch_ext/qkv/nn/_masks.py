"""The masks of torch.nn.MultiheadAttention as arguments of the operator.

torch's layer says what to hide, the operator what may be seen, and torch adds up all masks to one
`[B * H, L, S]`. The operator takes two, a mask and a bias, each as it broadcasts, so that nothing
of that size is made."""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_arguments(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    attn_bias: Tensor | None,
    num_heads: int,
    is_batched: bool,
) -> dict[str, Any]:
    """attn_mask and bias of `qkv.attention`, as far as there is something to say: of what
    `MultiheadAttention.forward` was given."""
    masks = []
    if attn_mask is not None:
        per_head = is_batched and attn_mask.dim() == 3
        masks.append(attn_mask.unflatten(0, (-1, num_heads)) if per_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None] if is_batched else key_padding_mask)
    if len(masks) == 2 and attn_bias is not None:  # one place is left for two: [B, 1, L, S]
        dtypes = (x.dtype for x in (*masks, attn_bias))
        wide = reduce(torch.promote_types, dtypes, torch.float32)  # the operator adds in no less
        masks = [as_added(masks[0]).to(wide) + as_added(masks[1])]
    masks.sort(key=lambda mask: mask.dtype != torch.bool)  # the operator's bias must be floating
    arguments = {}
    if masks:
        arguments["attn_mask"] = ~masks[0] if masks[0].dtype == torch.bool else masks[0]
    if len(masks) == 2:
        attn_bias = as_added(masks[1])
    if attn_bias is not None:
        arguments["bias"] = as_bias(attn_bias)
    return arguments


def as_bias(added: Tensor) -> Tensor:
    """Autocast gives the operator's attn_mask its dtype, but not the bias. float32 goes with any
    dtype of query."""
    is_half = added.dtype in (torch.bfloat16, torch.float16)
    return added.float() if is_half and torch.is_autocast_enabled("cpu") else added


def as_added(mask: Tensor) -> Tensor:
    """Floating: -inf where a bool mask hides."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, float("-inf"))


def hidden_too(mask: Tensor, hidden: Tensor) -> Tensor:
    """mask, bool or floating, that also hides where `hidden` is True."""
    return mask | hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, float("-inf"))


def with_columns(
    masks: tuple[Tensor | None, ...], keys: int, all_keys: int
) -> tuple[Tensor | None, ...]:
    """The masks of `keys` keys for `all_keys`: every query sees those that come behind."""
    return tuple(
        None if mask is None else F.pad(mask.expand(*mask.shape[:-1], keys), (0, all_keys - keys))
        for mask in masks
    )
