"""The masks of torch.nn.MultiheadAttention as arguments of the operator.

torch's layer says what to hide, the operator what may be seen, and torch adds up all masks to one
`[B * H, L, S]`. The operator takes two, a mask and a bias, each as it broadcasts, so that nothing
of that size is made."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mask_arguments(
    given: dict[str, Tensor | None], dtype: torch.dtype, num_heads: int, is_batched: bool
) -> dict[str, Any]:
    """attn_mask and bias of `qkv.attention`, as far as there is something to say: of the masks that
    `MultiheadAttention.forward` was given. dtype: the projected query's."""
    masks, attn_bias = [], given["attn_bias"]
    if (mask := given["attn_mask"]) is not None:
        per_head = is_batched and mask.dim() == 3
        masks.append(mask.unflatten(0, (-1, num_heads)) if per_head else mask)
    if (mask := given["key_padding_mask"]) is not None:
        masks.append(mask[:, None, None] if is_batched else mask)
    if len(masks) == 2 and attn_bias is not None:  # one place is left for two: [B, 1, L, S]
        wide = torch.promote_types(dtype, torch.float32)  # what the operator adds in
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


def with_columns(
    masks: dict[str, Tensor | None], call: dict[str, Any], sizes: tuple[int, int], key: Tensor
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """The masks, and is_causal and spans of the call, that are for sizes queries and keys, for all
    that key has, `[..., S + more, D]`: every query sees those that come behind. is_causal, which
    would hide them, becomes a part of attn_mask."""
    keys, more = sizes[1], key.size(-2) - sizes[1]
    if call["is_causal"]:
        later = torch.ones(sizes, dtype=torch.bool, device=key.device).triu(1)
        mask = later if masks["attn_mask"] is None else masks["attn_mask"]
        is_bool = mask.dtype == torch.bool
        mask = mask | later if is_bool else mask.masked_fill(later, float("-inf"))
        masks = masks | {"attn_mask": mask}
    found = {
        name: x if x is None else F.pad(x.expand(*x.shape[:-1], keys), (0, more))
        for name, x in masks.items()
    }
    spans = call["spans"]
    if spans is not None and spans.dim():  # the operator refuses what has none
        added = spans.new_tensor([keys, keys + more]).expand(*spans.shape[:-1], 2)
        spans = torch.cat([spans, added], -1)
    return found, call | {"spans": spans, "is_causal": False}
