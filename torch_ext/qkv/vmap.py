"""torch.func.vmap: one fused call with one more leading dimension.

torch's fallback would loop over the batch. In Python, because the C++ headers for it need a
library that torch does not ship; LibTorch has no vmap.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# The low-level operators' tensors, which are all their positional arguments.
_SCORES = ("alibi_slopes", "sinks", "dropout_seed")
_FORWARD = ("query", "key", "value", "attn_mask", *_SCORES, "cu_seq_q", "cu_seq_k", "seqused_k")
_BACKWARD = ("grad_output", "grad_logsumexp", *_FORWARD, "output", "logsumexp")
_WEIGHTS = ("query", "key", "attn_mask", *_SCORES)
_WEIGHTS_BACKWARD = ("grad_weights", *_WEIGHTS, "logsumexp")
_HARD = ("query", "key", "value", "attn_mask", "alibi_slopes")
_HARD_BACKWARD = ("grad_output", *_HARD, "index")
_LEAVES = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
# How many dimensions fewer than query they have.
_FEWER = {"grad_logsumexp": 1, "logsumexp": 1, "index": 1, "alibi_slopes": 2, "sinks": 2}
# What all samples of a fused call have in common.
_SHARED = ("dropout_seed", "cu_seq_q", "cu_seq_k", "seqused_k")


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


def _fused(op, call, dims, size, result_ranks, options):
    # Of the dimensions that the function under vmap sees.
    ranks = {n: t.dim() - (dims[n] is not None) for n, t in call.items() if t is not None}
    user_rank = max(ranks.get(n, 0) for n in ("query", "key", "value"))
    rank = max(user_rank, 3)  # with a dimension of heads, so that the new one is not taken for it
    reduced = options.get("reduce")
    fewer = _FEWER | {"grad_weights": 0 if reduced is None else 1}
    tensors = (
        t if n in _SHARED else _batched(t, dims[n], rank - fewer.get(n, 0), size)
        for n, t in call.items()
    )
    results = zip(op(*tensors, **options), result_ranks(ranks, user_rank, reduced), strict=True)
    return tuple(_unpadded(x, r) for x, r in results)


def _loop(op, call, dims, size, own_seeds, options):
    """For what one call cannot do. own_seeds: every sample gets a seed of its own."""
    results = []
    for i in range(size):
        sample = {n: t if dims[n] is None else t.select(dims[n], i) for n, t in call.items()}
        if own_seeds:
            sample["dropout_seed"] = sample["dropout_seed"] + i
        results.append(op(*sample.values(), **options))
    return tuple(None if x[0] is None else torch.stack(x) for x in zip(*results, strict=True))


def _refuse_randomness() -> None:
    raise RuntimeError(
        "vmap: attention with dropout was called in randomness error mode. Pass randomness='same' "
        "or 'different' to vmap, or dropout_p=0"
    )


def _rule(op, names: tuple[str, ...], result_ranks: Callable) -> Callable:
    """names: of op's tensors. result_ranks: from the ranks of its tensors by name, that of the
    output and `reduce`, as the function under vmap sees them."""

    def rule(info, in_dims, *tensors, **options):
        call, dims = (dict(zip(names, x, strict=True)) for x in (tensors, in_dims))
        dropout = call.get("dropout_seed") is not None
        is_forward = "logsumexp" not in names
        if dropout and is_forward and info.randomness == "error":
            _refuse_randomness()
        # A backward pass alone under vmap must keep what its one forward pass has kept.
        different = info.randomness == "different" and (is_forward or dims["logsumexp"] is not None)
        shared = call.get("cu_seq_q") is None and all(dims.get(n) is None for n in _SHARED)
        if shared and (different or not dropout):
            results = _fused(op, call, dims, info.batch_size, result_ranks, options)
        else:
            results = _loop(op, call, dims, info.batch_size, dropout and different, options)
        return results, tuple(None if x is None else 0 for x in results)

    return rule


def _dropout_seed(info, in_dims, query):
    """One seed for all samples: see `_rule` for what becomes of it."""
    if info.randomness == "error":
        _refuse_randomness()
    return torch.ops.qkv.dropout_seed(query), None


def _two(ranks, rank, reduced):
    """Of the output, and of lse or index."""
    return rank, rank - 1


def _weights(ranks, rank, reduced):
    full = {None: rank, "heads": max(rank, 3) - 1, "queries": rank - 1}
    return full[reduced], rank - 1


def _gradients(ranks, rank, reduced):
    return [ranks.get(name, 0) for name in _LEAVES]


# What is made of the low-level operators, and drops down to them.
_COMPOSITES = (
    "attention",
    "attention_with_lse",
    "varlen_attention",
    "attention_weights",
    "hard_attention",
    "merge",
)
_library = torch.library.Library("qkv", "IMPL")


def register() -> None:
    for name, tensors, result_ranks in (
        ("attention_forward", _FORWARD, _two),
        ("attention_backward", _BACKWARD, _gradients),
        ("weights_forward", _WEIGHTS, _weights),
        ("weights_backward", _WEIGHTS_BACKWARD, _gradients),
        ("hard_forward", _HARD, _two),
        ("hard_backward", _HARD_BACKWARD, _gradients),
    ):
        op = getattr(torch.ops.qkv, name).default
        torch.library.register_vmap(f"qkv::{name}", _rule(op, tensors, result_ranks))
    torch.library.register_vmap("qkv::dropout_seed", _dropout_seed)
    for name in _COMPOSITES:
        _library.impl(name, getattr(torch.ops.qkv, name).default.decompose, "FuncTorchBatched")
