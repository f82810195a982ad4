"""Operators with leading dimensions: the samples are one more."""

from typing import Any

from torch import Tensor

from qkv._vmap import programs, seeds
from qkv._vmap.samples import Samples
from qkv.options import BY_HEAD

# How many dimensions fewer than query they have.
FEWER_DIMS = {"grad_logsumexp": 1, "logsumexp": 1, "index": 1} | dict.fromkeys(BY_HEAD, 2)
FEWER_DIMS |= {f"{name}_tangent": FEWER_DIMS[name] for name in ("logsumexp", *BY_HEAD)}


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    ranks = {name: samples.each(name).dim() - 1 for name in samples.values}
    user_rank = max(ranks.get(name, 0) for name in ("query", "key", "value"))
    rank = max(user_rank, 3)  # with a dimension of heads, so that the new one is not taken for it
    reduced = options.get("reduce")
    fewer = FEWER_DIMS | {"grad_weights": 0 if reduced is None else 1}
    tensors: dict[str, Tensor | None] = {
        name: samples.padded(name, rank - fewer.get(name, 0))
        for name in samples.values
        if name not in programs.TABLES
    }
    tensors |= programs.flat(programs.tables(samples, options))
    if "dropout_seed" in samples.values:
        seed = seeds.of(samples, options)
        tensors["dropout_seed"] = None if seed is None else seed.flatten()
    results = op(**options | tensors)
    results = tuple(
        programs.gradient(samples, x)
        if x is not None and r.name == "grad_score_tables"
        else _unpadded(x, _rank_of_result(r.name, ranks, user_rank, reduced))
        for x, r in zip(results, op._schema.returns, strict=True)
    )
    return results, tuple(None if x is None else 0 for x in results)


def _unpadded(tensor: Tensor | None, rank: int) -> Tensor | None:
    """Without the ones that `Samples.padded` put after the first dimension."""
    while tensor is not None and tensor.dim() > rank + 1:
        tensor = tensor.squeeze(1)
    return tensor


def _rank_of_result(name: str, ranks: dict[str, int], rank: int, reduced: str | None) -> int:
    """As the function under vmap sees it. ranks: of the tensors, by their names; rank: of output,
    without reduction."""
    if name.startswith("grad_"):
        return ranks.get(name.removeprefix("grad_"), 0)
    if name == "weights" and reduced is not None:
        return max(rank, 3) - 1 if reduced == "heads" else rank - 1
    return rank - FEWER_DIMS.get(name, 0)
