"""The value at the best key, as a composition of torch's operators."""

import torch
from torch import Tensor

from qkv.testing._arguments import check_value
from qkv.testing._functional import attention
from qkv.testing._scores import attention_scores, repeat_heads


def hard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    straight_through: bool = False,
    return_index: bool = False,
    dtype: torch.dtype = torch.float64,
    **score_options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`qkv.hard_attention` in torch's operators; what is not named here is as in `attention`.

    Returns:
        `[..., H, L, Dv]` in dtype; with return_index also the number of the key, int64
        `[..., H, L]`. A row with nothing to attend to gets 0, and the index -1. Of keys whose
        scores differ by less than rounding, float64 may choose another than a float32 kernel.

    Raises:
        ValueError, TypeError: as `attention` does.
    """
    score_options = score_options | {"enable_gqa": enable_gqa, "dtype": dtype}
    scores, seen = attention_scores(query, key, attn_mask, is_causal, **score_options)
    check_value(value, key, query, enable_gqa)
    output, index = look_up(value.to(dtype), scores, seen)
    if straight_through:
        soft, _ = attention(
            query, key, value.detach(), attn_mask, 0.0, is_causal, return_lse=True, **score_options
        )
        output = output + (soft - soft.detach())  # 0, with soft's derivatives
    return (output, index) if return_index else output


def look_up(value: Tensor, scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The value at the first of the largest scores, and its number."""
    rows = repeat_heads(value, scores)
    lead = torch.broadcast_shapes(scores.shape[:-2], rows.shape[:-2])
    shape = (*lead, scores.size(-2))
    if scores.size(-1) == 0:
        return value.new_zeros(*shape, value.size(-1)), scores.new_full(shape, -1).long()
    index = scores.argmax(-1).expand(shape)
    blind = (~seen.any(-1)).expand(shape)
    places = index[..., None].expand(*shape, value.size(-1))
    chosen = rows.expand(*lead, *rows.shape[-2:]).gather(-2, places)
    return chosen.masked_fill(blind[..., None], 0), index.masked_fill(blind, -1)
