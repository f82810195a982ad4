"""Operators with leading dimensions: the samples are one more."""

from typing import Any

from torch import Tensor

from qkv._vmap import seeds
from qkv._vmap.levels import put_together
from qkv._vmap.samples import TABLES, Samples, flat
from qkv.options import BY_HEAD

_INPUTS = ("query", "key", "value")
# How many dimensions fewer than query they have.
FEWER_DIMS = {"grad_logsumexp": 1, "logsumexp": 1, "index": 1} | dict.fromkeys(BY_HEAD, 2)
FEWER_DIMS |= {f"{name}_tangent": FEWER_DIMS[name] for name in ("logsumexp", *BY_HEAD)}
FEWER_DIMS |= {"cos": 1, "sin": 1, "query_weight": 2, "key_weight": 2}  # of rotations


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    user_rank = max(samples.each(n).dim() - 1 for n in _INPUTS if n in samples.values)
    rank = max(user_rank, 3)  # with a dimension of heads, so that the new one is not taken for it
    reduced = options.get("reduce")
    fewer = FEWER_DIMS | {"grad_weights": 0 if reduced is None else 1}
    tensors: dict[str, Tensor | None] = {
        name: samples.padded(name, rank - fewer.get(name, 0))
        for name in samples.values
        if name not in TABLES
    }
    tensors |= flat(samples.tables(options))
    if "dropout_seed" in samples.values:
        seed = seeds.of(samples, options)
        tensors["dropout_seed"] = None if seed is None else seed.flatten()
    results = op(**options | tensors)
    results = put_together(op, results, lambda n, x: _unpadded(samples, n, x, user_rank, reduced))
    return results, tuple(None if x is None else 0 for x in results)


def _unpadded(samples: Samples, name: str, x: Tensor, rank: int, reduced: str | None) -> Tensor:
    """A result as the function under vmap sees it, without the ones that `Samples.padded` put after
    the first dimension. rank: of output there, without reduction."""
    of = name.removeprefix("grad_").removeprefix("rotated_")
    if of == "score_tables":
        return samples.own(of, x)
    if of != name and of in samples.values:
        return x.reshape(samples.each(of).shape)
    if name == "weights" and reduced is not None:
        rank = max(rank, 3) - 1 if reduced == "heads" else rank - 1
    return x.reshape(x.shape[:1] + x.shape[x.dim() - rank + FEWER_DIMS.get(name, 0) :])
