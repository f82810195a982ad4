"""The projections W_Q, W_K and W_V, by the fewest matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor


def project(
    layer: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """`[..., H, E / H]` of each `[..., E]`. One product where query, key and value are the same
    tensor, two where key and value are; the results are views of it, not copies."""
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    if weight is not None and key is value:
        if query is key:
            return _products(layer, query, weight, bias, 3)
        weights = weight.tensor_split([layer.embed_dim])
        biases = (None, None) if bias is None else bias.tensor_split([layer.embed_dim])
        return (
            *_products(layer, query, weights[0], biases[0], 1),
            *_products(layer, key, weights[1], biases[1], 2),
        )
    if weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    inputs = zip((query, key, value), weights, biases, strict=True)
    return tuple(product for x in inputs for product in _products(layer, *x, 1))


def _products(
    layer: torch.nn.MultiheadAttention, x: Tensor, weight: Tensor, bias: Tensor | None, count: int
) -> tuple[Tensor, ...]:
    heads = F.linear(x, weight, bias).unflatten(-1, (count, layer.num_heads, layer.head_dim))
    return heads.unbind(-3)
