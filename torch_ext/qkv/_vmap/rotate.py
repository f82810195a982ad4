"""Rotations: the samples are one more leading dimension."""

from typing import Any

from qkv._vmap.samples import Samples

# How many dimensions fewer than query they have.
_FEWER_DIMS = {"cos": 1, "sin": 1, "query_weight": 2, "key_weight": 2}


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    rank = samples.each("query").dim() - 1
    tensors = {n: samples.padded(n, rank - _FEWER_DIMS.get(n, 0)) for n in samples.values}
    results = op(**options | tensors)
    found = []
    for x, r in zip(results, op._schema.returns, strict=True):
        of = r.name.removeprefix("grad_")
        # Without the ones that `padded` put after the first dimension.
        found.append(
            x if x is None or of not in samples.values else x.reshape(samples.each(of).shape)
        )
    return tuple(found), tuple(None if x is None else 0 for x in found)
