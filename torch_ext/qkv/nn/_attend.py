"""The projections W_Q, W_K and W_V, by the fewest matrix products; and output and weights of one
attention, of nested tensors too: their values are packed documents."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from qkv._functional import attention
from qkv._varlen import varlen_attn
from qkv._weights import attention_with_weights
from qkv.nn._linear import linear


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


def packed(nested: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """The values of `[B, j, E]`, `[T, E]`; where each item begins, and the last ends, `[B + 1]`;
    and what makes a nested tensor like this one of other values."""
    if nested.layout == torch.jagged:
        ends = nested.offsets()  # the same tensor makes the result's j the same j
        return nested.values(), ends, lambda values: nested_tensor_from_jagged(values, ends)
    nested = nested.contiguous()
    sizes = nested._nested_tensor_size()  # [B, 2]
    ends = F.pad(sizes[:, 0].cumsum(0), (1, 0))
    layout = (sizes, nested._nested_tensor_strides(), nested._nested_tensor_storage_offsets())
    values = nested.values().view(-1, nested.size(2))
    view: Any = torch._nested_view_from_buffer  # pyright: ignore[reportPrivateImportUsage]
    return values, ends, lambda values: view(values.flatten(), *layout)


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
        left, right = call.pop("window_size", None) or (-1, -1)
        call["window_size"] = (left, 0 if call.pop("is_causal") else right)
        query, key, value = inputs
        longest = len(query), len(key)  # at most
        output = varlen_attn(query, key, value, ends, ends, *longest, return_aux=None, **call)
        return output, None
    # The weights are padded, and so is everything they are made of.
    place = torch.arange(int(ends.diff().max()) if len(ends) > 1 else 0)
    inside = place < ends.diff().unsqueeze(1)  # [N, longest]
    rows = (ends[:-1].unsqueeze(1) + place).where(inside, 0)
    query, key, value = (x[rows].transpose(1, 2) for x in inputs)
    call["attn_mask"] = (inside.unsqueeze(2) & inside.unsqueeze(1)).unsqueeze(1)
    output, weights = attend((query, key, value), True, average, call)
    return output.transpose(1, 2)[inside], weights


def in_weights(layer: torch.nn.MultiheadAttention) -> Sequence[Tensor]:
    """W_Q, W_K and W_V: one tensor `[3 E, E]`, or three `[E, width]`."""
    if layer.in_proj_weight is not None:
        return (layer.in_proj_weight,)
    return layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight


def project(
    layer: torch.nn.MultiheadAttention, query: Tensor | None, key: Tensor | None,
    value: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`[..., H, E / H]` of each `[..., E]` that is not None. One product where query, key and value
    are the same tensor, two where key and value are; the results are views of it, not copies."""
    weights, counts = in_weights(layer), (1, 1, 1)
    if len(weights) == 1:
        counts = (3,) if query is key is value else (1, 2) if key is value else (1, 1, 1)
    biases: Any = (None, None, None)
    if layer.in_proj_bias is not None:
        biases = (layer.in_proj_bias,)
    if len(counts) > 1:  # the gradient of a part is copied into the whole
        sizes = [n * layer.embed_dim for n in counts]
        weights, biases = (x[0].split(sizes) if len(x) == 1 else x for x in (weights, biases))
    found: list[Tensor] = []
    for x, weight, bias, n in zip((query, key, value), weights, biases, counts, strict=False):
        if x is None:
            continue
        heads = linear(x, weight, bias).unflatten(-1, (n, layer.num_heads, layer.head_dim))
        found += heads.unbind(-3)
    return tuple(found)
