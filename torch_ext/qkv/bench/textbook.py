"""Attention and its gradients in float64, without the memory that all scores would take."""

import math

import torch

BLOCK_ELEMENTS = 1 << 22  # of a block of scores in float64: 32 MiB


def batches(shape):
    """Slices of the batch, few items at a time where they are large."""
    item = max(shape.heads * shape.seqlen_q, shape.kv_heads * shape.head_dim) * shape.seqlen_k
    step = max(1, BLOCK_ELEMENTS // item)
    return [slice(start, start + step) for start in range(0, shape.batch, step)]


def attention_f64(query, key, value, grad_output, is_causal):
    """(output, grad_query, grad_key, grad_value) in float64, by the textbook, a block of queries
    at a time. query [B, H, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv],
    grad_output [B, H, L, Dv].
    """
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_k = key.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, seqlen_q, -1)
    query, grad_output = (t.double().view(grouped) for t in (query, grad_output))
    key, value = key.double(), value.double()
    scale = head_dim**-0.5
    output, grad_query = torch.empty_like(grad_output), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    rows = max(1, BLOCK_ELEMENTS // (batch * heads * seqlen_k))
    for start in range(0, seqlen_q, rows):
        block = slice(start, min(start + rows, seqlen_q))
        q, do = query[..., block, :], grad_output[..., block, :]
        scores = torch.einsum("bhgld,bhsd->bhgls", q, key).mul_(scale)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1 + start)
            scores.masked_fill_(future, -math.inf)
        weights = scores.softmax(-1)
        output[..., block, :] = o = torch.einsum("bhgls,bhsd->bhgld", weights, value)
        grad_weights = torch.einsum("bhgld,bhsd->bhgls", do, value)
        grad_scores = (grad_weights - (do * o).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_query[..., block, :] = torch.einsum("bhgls,bhsd->bhgld", grad_scores, key)
        grad_key += torch.einsum("bhgls,bhgld->bhsd", grad_scores, q)
        grad_value += torch.einsum("bhgls,bhgld->bhsd", weights, do)
    return output.flatten(1, 2), grad_query.flatten(1, 2), grad_key, grad_value
