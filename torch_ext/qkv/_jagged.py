"""Jagged nested tensors: their values are documents packed into one tensor already."""

from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from qkv.options import ScoreOptions, Unpack, defaults

_attention_forward = torch.ops.qkv.attention_forward.default
_dropout_seed = torch.ops.qkv.dropout_seed.default
_DEFAULTS = defaults(torch.ops.qkv.attention.default)

Jagged = Any  # a Tensor that has offsets() and lengths(), for which torch has no public type


def jagged_attention(
    query: Jagged,
    key: Jagged,
    value: Jagged,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]:
    """(output, lse), jagged like query. query, key and value are `[B, H, j, D]`."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    if attn_mask is not None:
        raise RuntimeError(
            "attention: attn_mask is given, but None is expected with jagged nested tensors; "
            "see is_causal, window_size and alibi_slopes"
        )
    _check_items(query, key, value)
    cu_seq_q, cu_seq_k, seqused_k = _documents(query, key)
    call = {**_DEFAULTS, **options, "dropout_p": dropout_p, "is_causal": is_causal}
    if query.lengths() is not None:
        call.update({name: _per_document(call[name], 2) for name in ("alibi_slopes", "sinks")})
        call["bias"] = _per_document(call["bias"], 4)
    output, lse = _attention_forward(
        **{name: x.values().transpose(0, 1) for name, x in tensors.items()},
        dropout_seed=_dropout_seed(query.values()) if dropout_p > 0 else None,
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        seqused_k=seqused_k,
        **call,
    )
    output, lse = (
        nested_tensor_from_jagged(x, query.offsets(), query.lengths(), jagged_dim=2)
        for x in (output.transpose(0, 1), lse)
    )
    return output, lse


def _check_tensor(name: str, tensor: Jagged) -> None:
    if not tensor.is_nested:
        found = f"dense, [{', '.join(map(str, tensor.shape))}]"
    elif tensor.layout != torch.jagged:
        found = "a nested tensor with the layout torch.strided"
    elif tensor.dim() != 4 or tensor._ragged_idx != 2:
        found = f"a jagged tensor of {tensor.dim()} dimensions, ragged in {tensor._ragged_idx}"
    else:
        return
    raise RuntimeError(
        f"attention: {name} is {found}, but where one of query, key and value is a nested tensor, "
        "all must be [B, H, j, D] with the layout torch.jagged: ragged in dimension 2, as "
        ".transpose(1, 2) makes it of [B, j, H, D]"
    )


def _check_items(query: Jagged, key: Jagged, value: Jagged) -> None:
    if not query.size(0) == key.size(0) == value.size(0):
        raise RuntimeError(
            f"attention: query, key and value have {query.size(0)}, {key.size(0)} and "
            f"{value.size(0)} items, but nested tensors must have equally many"
        )
    if key.size(2) == value.size(2):  # they share their offsets
        return
    if not torch.equal(key.offsets(), value.offsets()) or not torch.equal(
        _lengths(key), _lengths(value)
    ):
        raise RuntimeError(
            "attention: value's items lie elsewhere than key's, but the same offsets (and lengths) "
            f"are expected; key's offsets are {key.offsets().tolist()}, value's "
            f"{value.offsets().tolist()}"
        )


def _lengths(tensor: Jagged) -> Tensor:
    return tensor.offsets().diff() if tensor.lengths() is None else tensor.lengths()


def _documents(query: Jagged, key: Jagged) -> tuple[Tensor, Tensor, Tensor | None]:
    """cu_seq_q, cu_seq_k and seqused_k. Unused room after the items of key is left out by
    seqused_k. After those of query it becomes documents of its own, which see no keys: the end of
    the queries is what window_size and alibi_slopes are aligned to."""
    if query.lengths() is None:
        return query.offsets(), key.offsets(), key.lengths()
    cu_seq_q, cu_seq_k = (
        torch.cat([torch.stack([begin, begin + _lengths(x)], 1).flatten(), x.offsets()[-1:]])
        for x, begin in ((x, x.offsets()[:-1]) for x in (query, key))
    )
    used = _lengths(key)
    return cu_seq_q, cu_seq_k, torch.stack([used, torch.zeros_like(used)], 1).flatten()


def _per_document(option: Tensor | None, rank: int) -> Tensor | None:
    """[B, ...], of so many dimensions, for the twice as many documents that `_documents` makes of
    queries with holes."""
    if option is None or option.dim() != rank or option.size(0) == 1:
        return option
    return option.repeat_interleave(2, 0)
