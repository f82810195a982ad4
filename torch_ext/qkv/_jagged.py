"""Jagged nested tensors: their values are documents packed into one tensor already."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from qkv._refuse import refuse
from qkv.options import BY_HEAD, MASKS, defaults

_ops = torch.ops.qkv
_dropout_seed = _ops.dropout_seed.default
# What computes each function for packed documents, and the defaults of its options.
_OPERATORS = {
    "attention": (_ops.attention_forward.default, defaults(_ops.attention.default)),
    "attention_jvp": (_ops.attention_forward_jvp.default, defaults(_ops.attention_jvp.default)),
}
_INPUTS = ("query", "key", "value")

Jagged = Any  # a Tensor that has offsets() and lengths(), for which torch has no public type


def jagged_attention(
    function: Literal["attention", "attention_jvp"], query: Jagged, key: Jagged, value: Jagged,
    **options: Any,
) -> Any:  # fmt: skip
    """The results of the function, output and lse or these and their tangents, jagged like query.
    query, key and value, and their tangents, are `[B, H, j, D]`."""
    operator, defaults_of_options = _OPERATORS[function]
    call = defaults_of_options | options
    tensors = {"query": query, "key": key, "value": value}
    tangents = {f"{name}_tangent": call.get(f"{name}_tangent") for name in _INPUTS}
    tensors |= {name: tensor for name, tensor in tangents.items() if tensor is not None}
    for name, tensor in tensors.items():
        _check_tensor(function, name, tensor)
    if "attn_mask" in options:
        wanted = "None is expected with jagged nested tensors; see is_causal, window_size and"
        refuse("attn_mask", "given", f"{wanted} alibi_slopes", RuntimeError, function)
    _check_items(function, tensors)
    cu_seq_q, cu_seq_k, seqused_k = _documents(query, key)
    if query.lengths() is not None:
        for name, rank in (dict.fromkeys(BY_HEAD, 2) | dict.fromkeys(MASKS, 4)).items():
            for option in (name, f"{name}_tangent"):
                x = call.get(option)  # [B, ...], for the twice as many documents
                if x is not None and x.dim() == rank and x.size(0) != 1:
                    if x.size(0) != query.size(0):
                        wanted = f"1 or {query.size(0)} items are expected, as many as query has"
                        refuse(option, x, wanted, RuntimeError, function)
                    call[option] = x.repeat_interleave(2, 0)
    call |= {name: x.values().transpose(0, 1) for name, x in tensors.items()}
    results = operator(
        dropout_seed=_dropout_seed(query.values()) if call["dropout_p"] > 0 else None,
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        seqused_k=seqused_k,
        **call,
    )
    return tuple(
        nested_tensor_from_jagged(
            x.transpose(0, 1) if x.dim() == 3 else x, query.offsets(), query.lengths(), jagged_dim=2
        )
        for x in results
    )


def refuse_mixed(function: str, query: Jagged, key: Jagged, value: Jagged) -> None:
    """Raises what is wrong where one of them is nested. Called when the operator, which takes none,
    has refused a call, since looking before each takes time."""
    tensors = {"query": query, "key": key, "value": value}
    if any(getattr(x, "is_nested", False) for x in tensors.values()):
        for name, tensor in tensors.items():
            _check_tensor(function, name, tensor)


def _check_tensor(function: str, name: str, tensor: Jagged) -> None:
    if not tensor.is_nested:
        found = f"dense, [{', '.join(map(str, tensor.shape))}]"
    elif tensor.layout != torch.jagged:
        found = "a nested tensor with the layout torch.strided"
    elif tensor.dim() != 4 or tensor._ragged_idx != 2:
        found = f"a jagged tensor of {tensor.dim()} dimensions, ragged in {tensor._ragged_idx}"
    else:
        return
    wanted = "where one of query, key and value is a nested tensor, all must be [B, H, j, D] with "
    wanted += "the layout torch.jagged: ragged in dimension 2, as .transpose(1, 2) makes it of "
    refuse(name, found, wanted + "[B, j, H, D]", RuntimeError, function)


def _check_items(function: str, tensors: dict[str, Jagged]) -> None:
    """That there are equally many, and those of value lie where key's do, those of a tangent where
    its tensor's do."""
    query, key, value = (tensors[name] for name in _INPUTS)
    if not query.size(0) == key.size(0) == value.size(0):
        raise RuntimeError(
            f"{function}: query, key and value have {query.size(0)}, {key.size(0)} and "
            f"{value.size(0)} items, but nested tensors must have equally many"
        )
    for name, tensor in tensors.items():
        same = "key" if name == "value" else name.removesuffix("_tangent")
        other = tensors[same]
        # They share their offsets; or their lengths, where these are given, and not always both.
        if tensor.size(2) == other.size(2) and (
            tensor.lengths() is None or tensor.offsets() is other.offsets()
        ):
            continue
        if not torch.equal(tensor.offsets(), other.offsets()) or not torch.equal(
            _lengths(tensor), _lengths(other)
        ):
            raise RuntimeError(
                f"{function}: {name}'s items lie elsewhere than {same}'s, but the same offsets "
                f"(and lengths) are expected; {same}'s offsets are {other.offsets().tolist()}, "
                f"{name}'s {tensor.offsets().tolist()}"
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
