"""Output and weights of one attention, from the same numbers."""

from typing import Any

import torch
from torch import Tensor

from qkv.functional import attention
from qkv.options import defaults

_attention_forward = torch.ops.qkv.attention_forward.default
_weights_forward = torch.ops.qkv.weights_forward.default
_dropout_seed = torch.ops.qkv.dropout_seed.default
# What the operators above are told where a call says nothing. `defaults` also lists dropout_p.
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

    weights: None, or `[..., H, L, S]`, or with `average` their mean over the heads, `[..., L, S]`.
    Output and weights have the same dropout, so that the weights are those that the values were
    averaged with. call: what else `qkv.attention` is told, by its keywords."""
    if not need_weights:
        return attention(query, key, value, dropout_p=dropout_p, **call), None
    call = _complete(query, dropout_p, call)
    return _output(query, key, value, call), _weights(query, key, average, call)


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
    call = _complete(query, dropout_p, call)
    output = _output(query, key, value, call, ends)
    if longest is None:
        return output, None
    place = torch.arange(longest)
    inside = place < ends.diff().unsqueeze(1)  # [N, longest]
    rows = (ends[:-1].unsqueeze(1) + place).where(inside, 0)
    query, key = (x[rows].transpose(1, 2) for x in (query, key))  # [N, H, longest, D]
    call["attn_mask"] = (inside.unsqueeze(2) & inside.unsqueeze(1)).unsqueeze(1)
    return output, _weights(query, key, average, call)


def _complete(query: Tensor, dropout_p: float, call: dict[str, Any]) -> dict[str, Any]:
    """The call with every keyword that the forward operators have, and one seed for all of them."""
    seed = _dropout_seed(query) if dropout_p > 0 else None
    return {**_DEFAULTS, **call, "dropout_p": dropout_p, "dropout_seed": seed}


def _output(
    query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any], ends: Tensor | None = None
) -> Tensor:
    documents = {"cu_seq_q": ends, "cu_seq_k": ends, "seqused_k": None}
    return _attention_forward(query, key, value, **documents, **call)[0]


def _weights(query: Tensor, key: Tensor, average: bool, call: dict[str, Any]) -> Tensor:
    return _weights_forward(query, key, reduce="heads" if average else None, **call)[0]
