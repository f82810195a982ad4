"""The weights of attention, as a composition of torch's operators."""

import torch
from torch import Tensor

from qkv.testing._dropout import dropped
from qkv.testing._functional import softmax
from qkv.testing._scores import Place, attention_scores


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
        raise ValueError(f"reduce is {reduce!r}, but 'heads', 'queries' or None is expected")
    scores, _ = attention_scores(
        query, key, attn_mask, is_causal, dtype=dtype, place=place, **score_options
    )
    weights = dropped(softmax(scores, sinks)[0], dropout_p, dropout_seed, place)
    if reduce == "heads":
        return weights.mean(-3) if weights.dim() > 2 else weights
    return weights.sum(-2) if reduce == "queries" else weights
