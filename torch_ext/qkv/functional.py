"""Attention as a function."""

import torch
from torch import Tensor

_attention = torch.ops.qkv.attention.default
_attention_with_lse = torch.ops.qkv.attention_with_lse.default


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(scale * query @ key.mT + attn_mask) @ value`, without the L x S matrix.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `[..., H, L, D]`, float32 or float64; at least 2-D. The leading dimensions of
            query, key and value broadcast, and any strides will do.
        key: `[..., H, S, D]`, of query's dtype.
        value: `[..., H, S, Dv]`, of query's dtype.
        attn_mask: broadcastable to `[..., H, L, S]`; bool (True = may attend), or float32 or
            query's dtype, added to the scores. Its gradient is not implemented yet.
        dropout_p: 0; dropout is not implemented yet.
        is_causal: query i sees keys j <= i, as well as what attn_mask says.
        scale: multiplies the scores; `1 / sqrt(D)` if None.
        enable_gqa: key and value may have fewer heads than query, as long as they divide H.
        return_lse: also return the logarithm of each softmax's denominator.

    Returns:
        `[..., H, L, Dv]`, laid out in memory like query; with return_lse also `[..., H, L]`.
        A row with nothing to attend to is 0, its lse -inf. Both are differentiable, once.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, by the argument's name.
        ValueError: a scale that is not finite, or dropout_p outside [0, 1].
        NotImplementedError: what is still to come.

    Tensors on another device than the CPU go to torch's own attention.
    """
    options = {}  # a keyword argument costs the dispatcher 0.5 us
    if scale is not None:
        options["scale"] = scale
    if enable_gqa:
        options["enable_gqa"] = True
    op = _attention_with_lse if return_lse else _attention
    return op(query, key, value, attn_mask, dropout_p, is_causal, **options)
