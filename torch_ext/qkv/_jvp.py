"""The derivative of attention in a direction, as a function."""

import torch
from torch import Tensor

from qkv._jagged import jagged_attention, refuse_mixed
from qkv.options import keywords_of
from qkv.spans import Spans

_attention_jvp = torch.ops.qkv.attention_jvp.default
_keywords = keywords_of(_attention_jvp)


def attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    window_size: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, bias: Tensor | None = None,
    spans: Spans | Tensor | None = None, sinks: Tensor | None = None,
    query_tangent: Tensor | None = None, key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None, attn_mask_tangent: Tensor | None = None,
    bias_tangent: Tensor | None = None, alibi_slopes_tangent: Tensor | None = None,
    sinks_tangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`attention`, and how its results change when its inputs change along given directions: a
    Jacobian times a vector, in one pass over the keys and in memory linear in the sequence.

    It computes what `torch.func.jvp` of `attention` does, for those who have the tangents at hand.
    A tangent has the shape and the dtype of its tensor; None stands for zeros, and costs nothing.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal: as in `attention`.
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks: likewise.
        query_tangent: `[..., H, L, D]`: the direction of query.
        key_tangent: `[..., H, S, D]`, of key.
        value_tangent: `[..., H, S, Dv]`, of value.
        attn_mask_tangent: of a floating attn_mask, of its own shape.
        bias_tangent, alibi_slopes_tangent, sinks_tangent: of these, of their own shapes.

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
    given = _keywords(
        scale, enable_gqa, window_size, softcap, alibi_slopes, bias, spans, sinks, query_tangent,
        key_tangent, value_tangent, attn_mask_tangent, bias_tangent, alibi_slopes_tangent,
        sinks_tangent,
    )  # fmt: skip
    args = (query, key, value)
    if attn_mask is not None or dropout_p != 0.0 or is_causal is not False:
        args += (attn_mask, dropout_p, is_causal)
    # Jagged tensors are of a class of their own. What else is wrong with query the operator says.
    if type(query) is not Tensor and getattr(query, "is_nested", False):
        output, lse, output_tangent, lse_tangent = jagged_attention(
            "attention_jvp", query, key, value, attn_mask, dropout_p, is_causal, **given
        )
        return output, lse, output_tangent, lse_tangent
    try:
        return _attention_jvp(*args, **given)
    except RuntimeError:
        refuse_mixed("attention_jvp", query, key, value)
        raise
