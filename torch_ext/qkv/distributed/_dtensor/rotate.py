"""qkv.rotate on DTensors: batch, heads and sequence may be divided, the head dimension may not.

A row needs its own row of the tables and the weights, so that no process needs another one. Unlike
in attention, the heads of query and key are divided each by themselves. A label (layout.py) is a
dimension of query here, counted from its last one, which is 1.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from qkv._vmap.levels import taken_apart
from qkv.distributed._dtensor.layout import Dims
from qkv.distributed._dtensor.plan import Plan
from qkv.distributed._dtensor.rule import call_on_parts, on_one_mesh, shapes_of

_BACKWARD = torch.ops.qkv.rotate_backward.default
_SEQUENCE, _HEADS = 2, 3
_LACKS: dict[str, set[int]] = dict.fromkeys(("cos", "sin"), {_HEADS})
_LACKS |= dict.fromkeys(("query_weight", "key_weight"), {_SEQUENCE, _HEADS})


@torch.no_grad()
def rule(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    tensors, options = taken_apart(op, args, kwargs)
    with implicit_replication() if op is _BACKWARD else nullcontext():  # a Node keeps shapes alone
        given = on_one_mesh(op, tensors)
    shapes = shapes_of(op, given, options)
    return call_on_parts(op, given, options, _plan_of(given), shapes)


def _plan_of(given: Mapping[str, DTensor]) -> Plan:
    """Each dimension of the mesh divides what it divides of the first of query and key, and of
    their gradients, that is divided."""
    names = ("query", "key", "grad_rotated_query", "grad_rotated_key")
    rows = [given[name] for name in names if name in given]
    labels: list[int | None] = []
    for i in range(rows[0].device_mesh.ndim):
        found = [x.dim() - p.dim for x in rows if isinstance(p := x.placements[i], Shard)]
        labels.append(next((label for label in found if label >= _SEQUENCE), None))
    sizes = {n: size for n, size in enumerate(rows[0].shape[::-1], 1) if n > _HEADS}
    return Plan(rows[0].device_mesh, _layout, sizes, tuple(labels))


def _layout(name: str, rank: int) -> Dims:
    lacks = _LACKS.get(name, set())
    labels = [x for x in range(_SEQUENCE, rank + 1 + len(lacks)) if x not in lacks]
    return {label: rank - 2 - i for i, label in enumerate(labels)}
