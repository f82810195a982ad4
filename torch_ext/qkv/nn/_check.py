"""What the tensors of a call must be. Each error names the argument, what it was and what was
expected; torch's own layer raises for the same calls, with other words."""

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor


def refuse(layer: str, message: str, error: type[Exception] = RuntimeError) -> NoReturn:
    """What all layers say: their name, and what does not fit."""
    raise error(f"{layer}: {message}")


_refuse = partial(refuse, "MultiheadAttention")


def check_inputs(
    layer: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """query `[L, B, E]` or `[B, L, E]`, unbatched `[L, E]`; key and value likewise, with S."""
    dims = query.dim()
    if dims not in (2, 3):
        _refuse(f"query has {dims} dimensions, but 3, or 2 if it is not batched, are expected")
    widths = {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim}
    for (name, width), tensor in zip(widths.items(), (query, key, value), strict=True):
        if tensor.dim() != dims or tensor.size(-1) != width:
            _refuse(
                f"{name} is {_shape(tensor)}, but {dims} dimensions as query has, the last of "
                f"{width}, are expected"
            )
    if key.shape[:-1] != value.shape[:-1]:
        _refuse(
            f"value is {_shape(value)}, but as many keys and batch items as in key, {_shape(key)}, "
            "are expected"
        )
    batch = 0 if layer.batch_first else 1
    if dims == 3 and query.size(batch) != key.size(batch):
        _refuse(
            f"key is {_shape(key)}, but as many batch items as in query, {_shape(query)}, are "
            f"expected: batch_first is {layer.batch_first}"
        )


def check_masks(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, batch: tuple[int, ...], *sizes: int
) -> None:
    """batch: `(B,)`, or `()` if not batched. sizes: heads, queries, keys."""
    heads, queries, keys = sizes
    expected = {
        "key_padding_mask": (key_padding_mask, ([*batch, keys],)),
        "attn_mask": (attn_mask, ([queries, keys], [heads * sum(batch or (1,)), queries, keys])),
    }
    for name, (mask, shapes) in expected.items():
        if mask is not None and list(mask.shape) not in shapes:
            _refuse(f"{name} is {_shape(mask)}, but {' or '.join(map(str, shapes))} is expected")


def check_dtypes(dtype: torch.dtype, **masks: Tensor | None) -> None:
    """dtype: that of the projected query, which autocast may have chosen. The operator, which has
    the masks under other names, would speak of those."""
    added = {torch.float32, dtype}
    if torch.is_autocast_enabled("cpu") and dtype != torch.float64:
        added |= {torch.bfloat16, torch.float16}
    for name, mask in masks.items():
        may_hide = name != "attn_bias"
        if mask is None or mask.dtype in added or (may_hide and mask.dtype == torch.bool):
            continue
        hiding = "bool (True = hidden), " if may_hide else ""
        _refuse(
            f"{name} is {mask.dtype}, but {hiding}float32 or the dtype of the projected query, "
            f"{dtype}, is expected"
        )


def check_nested(layer: torch.nn.MultiheadAttention, inputs: Any, **masks: Tensor | None) -> None:
    """inputs: query, key and value, of which one is a nested tensor."""
    query, key, value = inputs
    if query is not key or key is not value:
        _refuse(
            "of query, key and value one is a nested tensor, but the same tensor three times is "
            "expected then"
        )
    for name in [name for name, mask in masks.items() if mask is not None]:
        _refuse(f"{name} is given, but None is expected with a nested tensor, which has no padding")
    made_with = {
        "add_bias_kv": layer.bias_k is not None,
        "add_zero_attn": layer.add_zero_attn,
        "kdim or vdim": layer.in_proj_weight is None,
    }
    for name in [name for name, is_so in made_with.items() if is_so]:
        _refuse(f"query is a nested tensor, but a dense one is expected by a layer with {name}")
    if query.dim() != 3:
        _refuse(f"query is a nested tensor of {query.dim()} dimensions, but [B, j, E] is expected")
    if query.layout == torch.jagged and (query._ragged_idx != 1 or query.lengths() is not None):
        _refuse(
            "query is a jagged tensor that is transposed or has holes, but a contiguous [B, j, E] "
            "is expected"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
