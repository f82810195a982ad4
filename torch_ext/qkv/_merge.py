"""Attention over parts of the keys, put together."""

from collections.abc import Sequence

import torch
from torch import Tensor

_merge = torch.ops.qkv.merge.default


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention of the same queries to the keys of all parts.

    With `parts = [qkv.attention(query, k, v, return_lse=True) for k, v in ...]`, each over some of
    the keys, `merge(*zip(*parts))` is `qkv.attention(query, key, value, return_lse=True)` over
    all of them: for keys that come in pieces, lie on several machines, or are shared by a prefix.

    Args:
        outputs: of each part, `[..., H, L, Dv]`, of one shape and one floating dtype.
        lses: of each part, `[..., H, L]`: the second result of `attention`; of `varlen_attn`, whose
            logarithms are `[H, T]` beside outputs `[T, H, Dv]`, transposed.

    Returns:
        output `[..., H, L, Dv]` in the dtype of outputs and lse `[..., H, L]` in that of lses, in
        which the sums are computed. A row to which no part has anything to attend (lse -inf in all)
        is 0, with lse -inf and gradients 0, as long as no part's output is NaN there: `attention`
        gives 0, softmax NaN. Differentiable any number of times, also in forward mode. On any
        device.

    Raises:
        RuntimeError: numbers of tensors, shapes or dtypes that do not fit, by the argument's name.

    Example:
        >>> query, key, value = torch.randn(3, 4, 100, 64)
        >>> halves = zip(key.chunk(2, 1), value.chunk(2, 1))
        >>> parts = [qkv.attention(query, k, v, return_lse=True) for k, v in halves]
        >>> output, lse = qkv.merge(*zip(*parts))
        >>> output.allclose(qkv.attention(query, key, value), atol=1e-6)
        True

    Source: Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021; over several
    machines, Liu et al., "Ring attention with blockwise transformers", 2023.
    """
    return _merge(list(outputs), list(lses))
