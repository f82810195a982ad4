"""Hard attention: the value at the best key alone."""

from typing import Literal, overload

import torch
from torch import Tensor

from qkv.options import HardOptions, Unpack, keywords_of
from qkv.spans import Spans

_hard_attention = torch.ops.qkv.hard_attention.default
_keywords = keywords_of(_hard_attention, after="value")


@overload
def hard_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, *, straight_through: bool = False,
    return_index: Literal[False] = False, **options: Unpack[HardOptions],
) -> Tensor: ...  # fmt: skip
@overload
def hard_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, *, straight_through: bool = False,
    return_index: Literal[True], **options: Unpack[HardOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def hard_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, *, straight_through: bool = False,
    return_index: bool, **options: Unpack[HardOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def hard_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None,
    straight_through: bool = False, return_index: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """A lookup as in a dictionary: every query gets the one value whose key matches it best.

    `attention` gives a query the average of all values; this gives the value at the largest score,
    the first if several keys have it. A score that is NaN counts as the largest.

    Args:
        query, key, value, attn_mask, is_causal: as in `attention`.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans: likewise.
        straight_through: query, key, a floating attn_mask, bias and alibi_slopes get the gradients
            that `attention` would give them, and change the output in forward mode as they would
            its, so that the choice can be learned. Otherwise there are none, as the choice does not
            change with them.
        return_index: also return which key was chosen.

    Returns:
        `[..., H, L, Dv]`; with return_index also the number of the key, int64 `[..., H, L]`.
        A row with nothing to attend to gets 0, and the index -1. The gradient of the output goes to
        the values that were chosen, and its tangent in forward mode is theirs. A tangent can be
        differentiated once more, a gradient cannot.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as `attention` does.

    Example:
        >>> keys, values = torch.eye(4), torch.tensor([[10.], [20.], [30.], [40.]])
        >>> output, index = qkv.hard_attention(keys[[2, 0]], keys, values, return_index=True)
        >>> output.flatten().tolist(), index.tolist()
        ([30.0, 10.0], [2, 0])

    Sources: hard attention, Xu et al., "Show, attend and tell", 2015; straight_through, Bengio et
    al., "Estimating or propagating gradients through stochastic neurons", 2013.
    """
    given = _keywords(
        attn_mask, is_causal, scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans,
        straight_through,
    )  # fmt: skip
    output, index = _hard_attention(query, key, value, **given)
    return (output, index) if return_index else output
