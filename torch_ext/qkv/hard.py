"""Hard attention: the value at the best key alone."""

import torch
from torch import Tensor

_hard_attention = torch.ops.qkv.hard_attention.default


def hard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    straight_through: bool = False,
    return_index: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A lookup as in a dictionary: every query gets the one value whose key matches it best.

    `attention` gives a query the average of all values; this gives the value at the largest score,
    the first if several keys have it. A score that is NaN counts as the largest.

    Args:
        straight_through: query, key, a floating attn_mask and alibi_slopes get the gradients that
            `attention` would give them, so that the choice can be learned. Otherwise they get none,
            as the choice does not change with them.
        return_index: also return which key was chosen.
        Everything else: as in `attention`.

    Returns:
        `[..., H, L, Dv]`; with return_index also the number of the key, int64 `[..., H, L]`.
        A row with nothing to attend to gets 0, and the index -1. The gradient of the output goes to
        the values that were chosen.

    Raises:
        As `attention` does.
    """
    output, index = _hard_attention(
        query, key, value, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        straight_through=straight_through,
    )  # fmt: skip
    return (output, index) if return_index else output
