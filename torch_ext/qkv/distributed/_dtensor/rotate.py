"""qkv.rotate on DTensors: batch, heads and sequence may be divided, the head dimension may not.

A row needs its own row of the tables and the weights, so that no process needs another one. Unlike
in attention (plan.py), the heads of query and key are divided each by themselves.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from qkv._vmap.levels import put_together, taken_apart
from qkv.distributed._dtensor.rule import on_one_mesh, shapes_of, whole_of

_BACKWARD = torch.ops.qkv.rotate_backward.default
_SEQUENCE, _HEADS = 2, 3  # dimensions of query, counted from its last one, which is 1
_WITHOUT_HEADS, _WITHOUT_ROWS = ("cos", "sin"), ("query_weight", "key_weight")


@torch.no_grad()
def rule(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors, options = taken_apart(op, args, kwargs)
    with implicit_replication() if op is _BACKWARD else nullcontext():  # a Node keeps shapes alone
        given = on_one_mesh(op, tensors)
    shapes = shapes_of(op, given, options)
    divided = _divided(given)
    sizes = next(x.shape for name, x in given.items() if name.endswith(("query", "key")))[::-1]

    def placements(name: str, otherwise: Placement) -> list[Placement]:
        rank, shape = given[name].dim(), given[name].shape
        found: list[Placement] = []
        for dim in divided:
            own = None if dim is None else _own(name, dim)
            has = (
                own is not None
                and dim is not None
                and own <= rank
                and (own <= _HEADS or shape[rank - own] == sizes[dim - 1])
            )
            whole = Replicate() if dim is None else otherwise
            found.append(Shard(rank - own) if has else whole)  # type: ignore[operator]
        return found

    parts = {n: x.redistribute(placements=placements(n, Replicate())) for n, x in given.items()}
    results = op(**options | {n: x.to_local() for n, x in parts.items()})

    def whole(name: str, local: Tensor) -> DTensor:
        of = name.removeprefix("grad_").removeprefix("rotated_")
        mesh = given[of].device_mesh
        return whole_of(local, mesh, placements(of, Partial("sum")), shapes[name])

    return put_together(op, results, whole)


def _divided(given: Mapping[str, DTensor]) -> list[int | None]:
    """What each dimension of the mesh divides, a dimension of query or nothing: that of the first
    of query and key, and of their gradients, that is divided."""
    names = ("query", "key", "grad_rotated_query", "grad_rotated_key")
    rows = [given[name] for name in names if name in given]
    found: list[int | None] = []
    for i in range(rows[0].device_mesh.ndim):
        dims = [x.dim() - p.dim for x in rows if isinstance(p := x.placements[i], Shard)]
        found.append(next((dim for dim in dims if dim >= _SEQUENCE), None))
    return found


def _own(name: str, dim: int) -> int | None:
    """The dimension of a tensor that is this one of query's; None: it has none."""
    if name in _WITHOUT_HEADS:
        return dim if dim < _HEADS else dim - 1 if dim > _HEADS else None
    if name in _WITHOUT_ROWS:
        return dim - 2 if dim > _HEADS else None
    return dim
