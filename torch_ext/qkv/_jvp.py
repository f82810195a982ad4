"""The derivative of attention in a direction, as a function."""

import torch
from torch import Tensor

from qkv._jagged import jagged_attention
from qkv.options import TangentOptions, Unpack, refuse_unknown, show_options

_attention_jvp = torch.ops.qkv.attention_jvp.default


@show_options(_attention_jvp)
def attention_jvp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Unpack[TangentOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention`, and how its results change when its inputs change along given directions: a
    Jacobian times a vector, in one pass over the keys and in memory linear in the sequence.

    It computes what `torch.func.jvp` of `attention` does, for those who have the tangents at hand.
    A tangent has the shape and the dtype of its tensor; None stands for zeros, and costs nothing.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal: as in `attention`.
        **options: see `qkv.options.TangentOptions`.

    Returns:
        (output, lse, output_tangent, lse_tangent): `[..., H, L, Dv]` and `[..., H, L]`, as
        `attention(..., return_lse=True)` returns them, and the change of each, of its shape, dtype
        and strides. A row with nothing to attend to has tangents of 0 (its lse that of the sink, if
        there is one). With dropout all four are those of the same kept weights. All are
        differentiable in turn, and their gradients take linear memory, too.

    Raises:
        RuntimeError: as `attention` does; a tangent of another shape or dtype than its tensor's, or
            of an argument that is None or not floating.
        ValueError: as `attention` does.
        NotImplementedError: what is still to come; tensors that are not on the CPU.

    Under `torch.autocast("cpu")` the tangents of what is cast are cast, too. Of jagged nested
    tensors the tangents are jagged with the same offsets; torch's own forward mode has none for
    them.

    Example:
        >>> query, key, value, direction = torch.randn(4, 2, 8, 100, 64)
        >>> output, lse, change, lse_change = qkv.attention_jvp(
        ...     query, key, value, is_causal=True, query_tangent=direction)
        >>> f = lambda q: qkv.attention(q, key, value, is_causal=True)
        >>> change.equal(torch.func.jvp(f, (query,), (direction,))[1])
        True

    Source: forward mode of attention in one pass, Lu and Song, "Simplifying, stabilizing and
    scaling continuous-time consistency models", 2024.
    """
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    try:
        nested = query.is_nested or key.is_nested or value.is_nested
    except AttributeError:  # not tensors: the operator says which
        nested = False
    try:
        if nested:
            results = jagged_attention("attention_jvp", *args, **options)
            output, lse, output_tangent, lse_tangent = results
            return output, lse, output_tangent, lse_tangent
        return _attention_jvp(*args, **options)
    except RuntimeError:
        refuse_unknown(attention_jvp, options)
        raise
