"""Output and weights of one attention."""

from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from qkv._functional import attention
from qkv._weights import attention_with_weights


def attend(
    inputs: tuple[Tensor, Tensor, Tensor], need_weights: bool, average: bool, call: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of query `[..., H, L, D]`, key `[..., H, S, D]`, value `[..., H, S, Dv]`.

    weights: None, or `[..., H, L, S]`, or with `average` their mean over the heads, `[..., L, S]`;
    those that the values were averaged with, after dropout. call: what else `qkv.attention` is
    told, by its keywords."""
    if not need_weights:
        return attention(*inputs, **call), None
    return attention_with_weights(*inputs, reduce="heads" if average else None, **call)


def attend_documents(
    inputs: tuple[Tensor, ...], ends: Tensor, need_weights: bool, average: bool,
    call: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(output, weights) of N packed documents, each of which attends to itself. inputs: query, key
    and value, `[T, H, D]` each.

    ends: `[N + 1]`, document n lies from `ends[n]` up to `ends[n + 1]`. The weights are
    `[N, H, longest, longest]`, by the longest document, or with `average` `[N, longest, longest]`,
    and 0 beyond a document's end."""
    if not need_weights:
        query, key, value = (nested_tensor_from_jagged(x, ends).transpose(1, 2) for x in inputs)
        return attention(query, key, value, **call).transpose(1, 2).values(), None
    # The weights are padded, and so is everything they are made of.
    place = torch.arange(int(ends.diff().max()))
    inside = place < ends.diff().unsqueeze(1)  # [N, longest]
    rows = (ends[:-1].unsqueeze(1) + place).where(inside, 0)
    query, key, value = (x[rows].transpose(1, 2) for x in inputs)
    call["attn_mask"] = (inside.unsqueeze(2) & inside.unsqueeze(1)).unsqueeze(1)
    output, weights = attend((query, key, value), True, average, call)
    return output.transpose(1, 2)[inside], weights
