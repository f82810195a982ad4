"""torch.func.vmap: one fused call with one more leading dimension.

torch's fallback would loop over the batch. In Python, because the C++ headers for it need a
library that torch does not ship; LibTorch has no vmap.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# How many dimensions fewer than query they have.
_FEWER = {"grad_logsumexp": 1, "logsumexp": 1, "index": 1, "alibi_slopes": 2, "sinks": 2}
_FEWER |= {f"{name}_tangent": _FEWER[name] for name in ("logsumexp", "alibi_slopes", "sinks")}
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


def _fused(op, call, dims, size, options):
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
    results = op(*tensors, **options)
    return tuple(
        _unpadded(x, _rank_of_result(r.name, ranks, user_rank, reduced))
        for x, r in zip(results, op._schema.returns, strict=True)
    )


def _rank_of_result(name: str, ranks: dict[str, int], rank: int, reduced: str | None) -> int:
    """As the function under vmap sees it. ranks: of the tensors, by their names; rank: of output,
    without reduction."""
    if name.startswith("grad_"):
        return ranks.get(name.removeprefix("grad_"), 0)
    if name == "weights" and reduced is not None:
        return max(rank, 3) - 1 if reduced == "heads" else rank - 1
    return rank - _FEWER.get(name, 0)


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


def _rule(op) -> Callable:
    """From the operator's schema: tensors are all its positional arguments."""
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

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
            results = _fused(op, call, dims, info.batch_size, options)
        else:
            results = _loop(op, call, dims, info.batch_size, dropout and different, options)
        return results, tuple(None if x is None else 0 for x in results)

    return rule


def _dropout_seed(info, in_dims, query):
    """One seed for all samples: see `_rule` for what becomes of it."""
    if info.randomness == "error":
        _refuse_randomness()
    return torch.ops.qkv.dropout_seed(query), None


_COMPUTING = (
    "attention_forward",
    "attention_forward_jvp",
    "attention_backward",
    "weights_forward",
    "weights_backward",
    "with_weights_forward",
    "with_weights_backward",
    "hard_forward",
    "hard_backward",
)
# What is made of the low-level operators, and drops down to them.
_COMPOSITES = (
    "attention",
    "attention_with_lse",
    "varlen_attention",
    "attention_weights",
    "attention_with_weights",
    "hard_attention",
    "merge",
)
_library = torch.library.Library("qkv", "IMPL")


def register() -> None:
    for name in _COMPUTING:
        op = getattr(torch.ops.qkv, name).default
        torch.library.register_vmap(f"qkv::{name}", _rule(op))
    torch.library.register_vmap("qkv::dropout_seed", _dropout_seed)
    for name in _COMPOSITES:
        _library.impl(name, getattr(torch.ops.qkv, name).default.decompose, "FuncTorchBatched")
