"""What the tensors of a call must be. Each error names the argument, what it was and what was
expected; torch's own layer raises for the same calls, with other words."""

import torch
from torch import Tensor


def check_inputs(layer: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor):
    """query `[L, B, E]` or `[B, L, E]`, unbatched `[L, E]`; key and value likewise, with S."""
    if query.dim() not in (2, 3):
        raise RuntimeError(
            f"MultiheadAttention: query has {query.dim()} dimensions, but 3, or 2 if it is not "
            "batched, are expected"
        )
    widths = {"query": (query, layer.embed_dim), "key": (key, layer.kdim)}
    widths["value"] = (value, layer.vdim)
    for name, (tensor, width) in widths.items():
        if tensor.dim() != query.dim() or tensor.size(-1) != width:
            raise RuntimeError(
                f"MultiheadAttention: {name} is {_shape(tensor)}, but {query.dim()} dimensions as "
                f"query has, the last of {width}, are expected"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise RuntimeError(
            f"MultiheadAttention: value is {_shape(value)}, but as many keys and batch items as in "
            f"key, {_shape(key)}, are expected"
        )
    if query.dim() == 3:
        batch = 0 if layer.batch_first else 1
        if query.size(batch) != key.size(batch):
            raise RuntimeError(
                f"MultiheadAttention: key is {_shape(key)}, but as many batch items as in query, "
                f"{_shape(query)}, are expected: batch_first is {layer.batch_first}"
            )


def check_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, batch: tuple[int, ...], *sizes: int
):
    """batch: `(B,)`, or `()` if not batched. sizes: heads, queries, keys."""
    heads, queries, keys = sizes
    expected = {
        "key_padding_mask": (key_padding_mask, ((*batch, keys),)),
        "attn_mask": (attn_mask, ((queries, keys), (heads * sum(batch or (1,)), queries, keys))),
    }
    for name, (mask, shapes) in expected.items():
        if mask is None:
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise RuntimeError(
                f"MultiheadAttention: {name} is {mask.dtype}, but bool (True = hidden) or floating "
                "is expected"
            )
        if tuple(mask.shape) not in shapes:
            raise RuntimeError(
                f"MultiheadAttention: {name} is {_shape(mask)}, but "
                f"{' or '.join(map(str, map(list, shapes)))} is expected"
            )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
