"""Rotary position embedding of query and key, and the norm before it."""

import torch
from torch import Tensor

from qkv.options import keywords_of

_rotate = torch.ops.qkv.rotate.default
_keywords = keywords_of(_rotate)


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *,
    query_weight: Tensor | None = None, key_weight: Tensor | None = None,
    eps: float = 1e-6, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary position embedding, after an RMS norm of each head where a weight is given.

    Pair i of the first R numbers of a head, `(a, b)`, becomes `(a * cos_i - b * sin_i, b * cos_i +
    a * sin_i)`; the other D - R numbers pass through. One pass over the memory of query and key.

    Args:
        query: `[..., H, L, D]`, float32, float64, bfloat16 or float16.
        key: `[..., Hkv, L, D]`, of query's dtype and shape but for the number of heads.
        cos, sin: `[L, R / 2]`, or `[..., L, R / 2]` with dimensions that broadcast to the leading
            ones of query, where positions differ from item to item: one number for each pair, R <=
            D. Float32 or query's dtype. Of tables that have every number twice, as
            transformers' models make them, give `cos[..., : R // 2]`, or with interleaved
            `cos[..., ::2]` where neighbours are equal: no copy is made.
        query_weight, key_weight: `[D]`, or `[..., D]` with dimensions that broadcast to the leading
            ones of query; float32 or query's dtype. `x` becomes `x * weight / sqrt(mean(x^2) +
            eps)`, over the D numbers of a head, before it is rotated. For a norm that multiplies by
            `1 + weight`, as Gemma's does, give `1 + weight`.
        eps: not negative.
        interleaved: pair i is the numbers 2 i and 2 i + 1 (GPT-J), instead of i and i + R / 2
            (GPT-NeoX, Llama).

    Returns:
        query and key, rotated, in their dtype and laid out in memory like them. Everything is
        computed in float32 (float64 of float64) and rounded once. Any strides are read as they
        are. Differentiable with respect to all six tensors, any number of times and in forward
        mode. Autocast casts nothing. The same bits for any number of threads.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, by the argument's name.
        ValueError: an eps below 0.
        NotImplementedError: tensors that are not on the CPU.

    Example:
        >>> query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64)
        >>> angles = torch.outer(torch.arange(100.0), 10_000 ** -(torch.arange(32) / 32))
        >>> query, key = qkv.rotate(query, key, angles.cos(), angles.sin())
        >>> query.shape, key.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([2, 2, 100, 64]))

    Sources: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021; the
    norm, Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023.
    """
    given = _keywords(query_weight, key_weight, eps, interleaved)
    return _rotate(query, key, cos, sin, **given)
