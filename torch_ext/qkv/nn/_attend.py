"""Output and weights of one attention."""

from typing import Any

import torch
from torch import Tensor

from qkv._functional import attention
from qkv._weights import attention_with_weights
from qkv.options import defaults

_attention_forward = torch.ops.qkv.attention_forward.default
_dropout_seed = torch.ops.qkv.dropout_seed.default
# What the operator above is told where a call says nothing. `defaults` also lists dropout_p.
_DEFAULTS = defaults(torch.ops.qkv.attention.default)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    need_weights: bool,
    average: bool,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of `[..., H, L, D]`, `[..., H, S, D]` and `[..., H, S, Dv]`.

    weights: None, or `[..., H, L, S]`, or with `average` their mean over the heads, `[..., L, S]`;
    those that the values were averaged with, after dropout. call: what else `qkv.attention` is
    told, by its keywords."""
    if not need_weights:
        return attention(query, key, value, dropout_p=dropout_p, **call), None
    reduce = "heads" if average else None
    return attention_with_weights(query, key, value, dropout_p=dropout_p, reduce=reduce, **call)


def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int | None,
    dropout_p: float,
    average: bool,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of N packed documents, each of which attends to itself: `[T, H, D]` each.

    ends: `[N + 1]`, document n lies from `ends[n]` up to `ends[n + 1]`. longest: the length of the
    longest document if weights are wanted. They are `[N, H, longest, longest]`, or with `average`
    `[N, longest, longest]`, and 0 beyond a document's end."""
    if longest is None:
        call = {**_DEFAULTS, **call, "dropout_p": dropout_p}
        documents = {"cu_seq_q": ends, "cu_seq_k": ends, "seqused_k": None}
        seed = _dropout_seed(query) if dropout_p > 0 else None
        call |= {**documents, "dropout_seed": seed}
        output, _ = _attention_forward(query, key, value, **call)
        return output, None
    # The weights are padded, and so is everything they are made of.
    place = torch.arange(longest)
    inside = place < ends.diff().unsqueeze(1)  # [N, longest]
    rows = (ends[:-1].unsqueeze(1) + place).where(inside, 0)
    query, key, value = (x[rows].transpose(1, 2) for x in (query, key, value))
    call["attn_mask"] = (inside.unsqueeze(2) & inside.unsqueeze(1)).unsqueeze(1)
    output, weights = attend(query, key, value, dropout_p, True, average, call)
    return output.transpose(1, 2)[inside], weights
