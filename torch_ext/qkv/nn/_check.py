"""What the tensors of a call must be. Each error names the argument, what it was and what was
expected; torch's own layer raises for the same calls, with other words."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qkv._refuse import refuse

_refuse = partial(refuse, error=RuntimeError, function="MultiheadAttention")


def check_inputs(
    layer: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """query `[L, B, E]` or `[B, L, E]`, unbatched `[L, E]`; key and value likewise, with S."""
    dims = query.dim()
    if dims not in (2, 3):
        _refuse("query", query, "3 dimensions, or 2 if it is not batched, are expected")
    widths = (
        ("query", query, layer.embed_dim),
        ("key", key, layer.kdim),
        ("value", value, layer.vdim),
    )
    for name, tensor, width in widths:
        if tensor.dim() != dims or tensor.size(-1) != width:
            wanted = f"{dims} dimensions as query has, the last of {width}, are expected"
            _refuse(name, tensor, wanted)
    if key.shape[:-1] != value.shape[:-1]:
        wanted = f"as many keys and batch items as in key, {[*key.shape]}, are expected"
        _refuse("value", value, wanted)
    batch = 0 if layer.batch_first else 1
    if dims == 3 and query.size(batch) != key.size(batch):
        wanted = f"as many batch items as in query, {[*query.shape]}, are expected: batch_first is"
        _refuse("key", key, f"{wanted} {layer.batch_first}")


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
        # Not "in", by which torch.compile finds no number equal to a symbol.
        if mask is not None and all([*mask.shape] != shape for shape in shapes):
            _refuse(name, mask, f"{' or '.join(map(str, shapes))} is expected")


def check_broadcast(
    name: str, mask: Tensor, whole: list[int], function: str = "MultiheadAttention"
) -> None:
    sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
    # Not "in", as in check_masks.
    if mask.dim() > len(whole) or any(size != 1 and size != most for size, most in sizes):
        _refuse(name, mask, f"what broadcasts to {whole} is expected", function=function)


def check_dtypes(
    dtype: torch.dtype, function: str = "MultiheadAttention", true: str = "hidden", /,
    **masks: Tensor | None,
) -> None:  # fmt: skip
    """dtype: that of the projected query, which autocast may have chosen. true: what it means in a
    mask. The operator, which has the masks under other names, would speak of those."""
    added = {torch.float32, dtype}
    if torch.is_autocast_enabled("cpu") and dtype != torch.float64:
        added |= {torch.bfloat16, torch.float16}
    for name, mask in masks.items():
        may_hide = name != "attn_bias"
        if mask is None or mask.dtype in added or (may_hide and mask.dtype == torch.bool):
            continue
        wanted = f"float32 or the dtype of the projected query, {dtype}, is expected"
        wanted = f"bool (True = {true}), {wanted}" if may_hide else wanted
        _refuse(name, mask.dtype, wanted, function=function)


def check_nested(layer: torch.nn.MultiheadAttention, inputs: Any, **masks: Tensor | None) -> None:
    """inputs: query, key and value, of which one is a nested tensor."""
    query, key, value = inputs
    if query is not key or key is not value:
        wanted = "the same tensor three times is expected then"
        _refuse("of query, key and value one", "a nested tensor", wanted)
    for name in [name for name, mask in masks.items() if mask is not None]:
        _refuse(name, "given", "None is expected with a nested tensor, which has no padding")
    made_with = {
        "add_bias_kv": layer.bias_k is not None,
        "add_zero_attn": layer.add_zero_attn,
        "kdim or vdim": layer.in_proj_weight is None,
    }
    for name in [name for name, is_so in made_with.items() if is_so]:
        _refuse("query", "a nested tensor", f"a dense one is expected by a layer with {name}")
    if query.dim() != 3:
        _refuse("query", f"a nested tensor of {query.dim()} dimensions", "[B, j, E] is expected")
    if query.layout == torch.jagged and (query._ragged_idx != 1 or query.lengths() is not None):
        found = "a jagged tensor that is transposed or has holes"
        _refuse("query", found, "a contiguous [B, j, E] is expected")
