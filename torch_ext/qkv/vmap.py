"""torch.func.vmap: one fused call with one more leading dimension.

torch's fallback would loop over the batch. In Python, because the C++ headers for it need a
library that torch does not ship; LibTorch has no vmap.
"""

import torch
from torch import Tensor


def _rank(tensor: Tensor, dim: int | None) -> int:
    """The number of dimensions that the function under vmap sees."""
    return tensor.dim() - (dim is not None)


def _batched(tensor: Tensor | None, dim: int | None, rank: int, size: int) -> Tensor | None:
    """[size, 1..., user's dimensions], with `rank` dimensions after the first; no copy."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    while tensor.dim() <= rank:
        tensor = tensor.unsqueeze(1)
    return tensor.expand(size, *tensor.shape[1:])


def _unpadded(tensor: Tensor | None, rank: int) -> Tensor | None:
    """Without the ones that `_batched` put after the first dimension."""
    while tensor is not None and tensor.dim() > rank + 1:
        tensor = tensor.squeeze(1)
    return tensor


def _forward(info, in_dims, query, key, value, attn_mask=None, *options, **more):
    dims = (*in_dims[:3], in_dims[3] if attn_mask is not None else None)
    user_rank = max(map(_rank, (query, key, value), dims))
    rank = max(user_rank, 3)  # with a dimension of heads, so that the new one is not taken for it
    query = _batched(query, dims[0], rank, info.batch_size)
    key, value, attn_mask = (
        tensor if dim is None else _batched(tensor, dim, rank, info.batch_size)
        for tensor, dim in zip((key, value, attn_mask), dims[1:], strict=True)
    )
    op = torch.ops.qkv.attention_with_lse
    output, lse = op(query, key, value, attn_mask, *options, **more)
    return (_unpadded(output, user_rank), _unpadded(lse, user_rank - 1)), (0, 0)


def _attention(*args, **options):
    (output, _), (dim, _) = _forward(*args, **options)
    return output, dim


def _backward(
    info,
    in_dims,
    grad_output,
    grad_lse,
    query,
    key,
    value,
    attn_mask,
    output,
    lse,
    *options,
    **more,
):
    """Every sample has gradients of its own, also for what the samples share."""
    ranks = [_rank(t, dim) for t, dim in zip((query, key, value), in_dims[2:5], strict=True)]
    rank = max(*ranks, 3)
    tensors = (grad_output, grad_lse, query, key, value, attn_mask, output, lse)
    user_ranks = (rank, rank - 1, rank, rank, rank, rank, rank, rank - 1)
    tensors = (
        _batched(t, dim, r, info.batch_size)
        for t, dim, r in zip(tensors, in_dims[:8], user_ranks, strict=True)
    )
    gradients = torch.ops.qkv.attention_backward(*tensors, *options, **more)
    gradients = tuple(_unpadded(g, r) for g, r in zip(gradients, ranks, strict=True))
    return gradients, tuple(None if g is None else 0 for g in gradients)


def register() -> None:
    torch.library.register_vmap("qkv::attention", _attention)
    torch.library.register_vmap("qkv::attention_with_lse", _forward)
    torch.library.register_vmap("qkv::attention_backward", _backward)
