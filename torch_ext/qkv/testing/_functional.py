"""Attention as a composition of torch's operators: docs/options.md, line by line."""

import torch
from torch import Tensor

from qkv._refuse import refuse
from qkv.testing._arguments import check_broadcast, check_value
from qkv.testing._dropout import dropped
from qkv.testing._scores import Place, attention_scores, leading, repeat_heads


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dropout_seed: int | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    nonfinite: bool = False,
    place: Place | None = None,
    **score_options,
) -> Tensor | tuple[Tensor, Tensor]:
    """`qkv.attention` in torch's operators: the truth, in float64, or torch's own error, in less.

    Differentiable any number of times, backward and forward, with respect to every floating tensor;
    gradients have the dtypes of their arguments. Works under torch.func.

    Args:
        query: `[..., H, L, D]`, of any floating dtype, which may be unlike the others'.
        key: `[..., H, S, D]`; with enable_gqa `[..., Hkv, S, D]`.
        value: `[..., H, S, Dv]`, likewise.
        dropout_seed: which weights are dropped, if dropout_p > 0: see `dropout_seed`.
        dtype: what is computed in, and what the results are in: float64 for the truth; float32 or
            less for what torch makes of the same steps. As torch's math path, which computes half
            precision in float32, `attention(..., dtype=torch.float32).bfloat16()`.
        nonfinite: as in `attention_scores`. Without it, NaN and infinity must not be hidden from
            any query. Memory for H * L * S * (D + Dv) numbers.
        place, score_options: as in `attention_scores`.
        Everything else: as in `qkv.attention`.

    Returns:
        `[..., H, L, Dv]`; with return_lse also `[..., H, L]`.

    Raises:
        ValueError: shapes and numbers.
        TypeError: dtypes and unknown keywords.
    """
    scores, seen = attention_scores(
        query, key, attn_mask, is_causal, enable_gqa=enable_gqa, dtype=dtype, nonfinite=nonfinite,
        place=place, **score_options,
    )  # fmt: skip
    check_value(value, key, query, enable_gqa)
    weights, lse = softmax(scores, sinks)
    value = value.to(dtype)
    lead = leading(weights, value, enable_gqa)
    weights = dropped(weights.expand(*lead, -1, -1), dropout_p, dropout_seed, place)
    if nonfinite:
        copies = repeat_heads(value, weights)[..., None, :, :].where(seen[..., None], 0)
        output = (weights[..., None] * copies).sum(-2).where(seen.any(-1, keepdim=True), 0)
    else:
        output = weights @ repeat_heads(value, weights)
    return (output, lse.expand(*lead, -1)) if return_lse else output


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    sinks: Tensor | None = None,
    reduce: str | None = None,
    dropout_seed: int | Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    place: Place | None = None,
    **score_options,
) -> Tensor:
    """`qkv.attention_weights` in torch's operators; what is not named here, and what dtype,
    dropout_seed and place mean, is as in `attention`.

    Returns:
        In dtype: `[..., H, L, S]`; with reduce="heads" their mean, `[..., L, S]`; with
        reduce="queries" their sum, `[..., H, S]`.

    Raises:
        TypeError: as `attention` does.
        ValueError: as `attention` does, and for another reduce.
    """
    if reduce not in (None, "heads", "queries"):
        refuse("reduce", repr(reduce), "'heads', 'queries' or None is expected")
    scores, _ = attention_scores(
        query, key, attn_mask, is_causal, dtype=dtype, place=place, **score_options
    )
    weights = dropped(softmax(scores, sinks)[0], dropout_p, dropout_seed, place)
    if reduce == "heads":
        return weights.mean(-3) if weights.dim() > 2 else weights
    return weights.sum(-2) if reduce == "queries" else weights


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


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights `[..., H, L, S]` and the logarithm of their denominator, `[..., H, L]`. Where every
    score is -inf, the weights are 0, and the lse is the sink, -inf without one."""
    if sinks is None:
        sinks = scores.new_full((), -torch.inf)
    check_broadcast("sinks", sinks, scores.shape[:-2], "[..., H]")
    lead = torch.broadcast_shapes(scores.shape[:-2], sinks.shape)
    scores = scores.expand(*lead, *scores.shape[-2:])
    # A sink is the score of one more key.
    column = sinks.to(scores.dtype)[..., None, None].expand(*lead, scores.size(-2), 1)
    # Where it is finite, nothing is special about a row without other scores.
    nothing = (scores.detach() == -torch.inf).all(-1, keepdim=True) & ~column.isfinite()
    scores = torch.cat([scores, column], -1).masked_fill(nothing, 0)
    # Relative to the largest of a row, which cancels out and so takes no part in derivatives.
    largest = scores.detach().amax(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(nothing, 0)[..., :-1]
    lse = (scores - largest).exp().sum(-1).log() + largest.squeeze(-1)
    # A sink of -inf is none, and has no gradient.
    alone = column.masked_fill(column == -torch.inf, -torch.inf).squeeze(-1)
    return weights, lse.where(~nothing.squeeze(-1), alone)
