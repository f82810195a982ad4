"""What each dimension of the mesh divides in a call: the heads, a batch dimension or nothing.

Grouped heads: query head h reads key/value head h // (heads / kv_heads), and a call on one process
counts both from 0 again. So either a process has whole groups: all query heads of some key/value
heads, and these. Or all its query heads belong to one key/value head, and its call gets that one
alone.
"""

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from qkv._vmap.packed import laid_out_like
from qkv.distributed._dtensor.layout import HEADS, Dims, Layout

_KEYS_AND_VALUES = ("key", "value", "k_cache", "v_cache")  # may have fewer heads than the query


class Share(NamedTuple):
    """Of the dimensions of the mesh that divide the query heads, the first `divided` ones divide
    the key/value heads as well, into parts of `heads`. The others do not. head: the one of these
    that the calls of this process get; None: they get all."""

    divided: int
    heads: int
    head: int | None


class Plan(NamedTuple):
    """layout: of the call's tensors. sizes: of what each label stands for, in all processes
    together; without labels over which no tensor broadcasts. labels: what each dimension of the
    mesh divides; None: nothing, its processes compute the same."""

    mesh: DeviceMesh
    layout: Layout
    sizes: dict[int, int]
    labels: tuple[int | None, ...]

    def dims(self, name: str, shape: Sequence[int]) -> Dims:
        """What can be divided of a tensor: not the dimensions over which it broadcasts."""
        dims = self.layout(name, len(shape))
        return {n: dim for n, dim in dims.items() if shape[dim] == self.sizes.get(n, shape[dim])}

    def placements(self, name: str, shape: Sequence[int], otherwise: Placement) -> list[Placement]:
        """Of a tensor of the call; `otherwise` for the dimensions of the mesh that divide what it
        does not have."""
        dims, share = self.dims(name, shape), self.share(name, shape)
        found: list[Placement] = []
        for i, label in enumerate(self.labels):
            dim = None if label is None else dims.get(label)
            if share is not None and label == HEADS:
                is_whole = self.labels[:i].count(HEADS) >= share.divided
                dim = None if is_whole else self.layout(name, len(shape))[HEADS]
            whole = Replicate() if label is None else otherwise
            found.append(whole if dim is None else Shard(dim))
        return found

    def share(self, name: str, shape: Sequence[int]) -> Share | None:
        """Of a key or a value that has fewer heads than the query. None: for other tensors, or the
        heads cannot be divided like that."""
        kv_heads = self.grouped_heads(name, shape)
        if kv_heads is None:
            return None
        processes = [self.mesh.size(i) for i, label in enumerate(self.labels) if label == HEADS]
        heads, divided = self.sizes[HEADS], 0
        while divided < len(processes) and kv_heads % processes[divided] == 0:
            kv_heads, heads = kv_heads // processes[divided], heads // processes[divided]
            divided += 1
        if divided == len(processes):
            return Share(divided, kv_heads, None)
        if kv_heads == 1:
            return Share(divided, kv_heads, 0)
        group, sharing = heads // kv_heads, prod(processes[divided:])
        if heads % sharing or group % (heads // sharing):
            return None
        return Share(divided, kv_heads, self.first(HEADS) // group % kv_heads)

    def grouped_heads(self, name: str, shape: Sequence[int]) -> int | None:
        """How many heads a key or a value has, if that is fewer than the query; else None."""
        heads = self.layout(name, len(shape)).get(HEADS)
        if HEADS not in self.labels or heads is None or laid_out_like(name) not in _KEYS_AND_VALUES:
            return None
        return shape[heads] if shape[heads] != self.sizes[HEADS] else None

    def is_possible(self, shapes: Mapping[str, torch.Size]) -> bool:
        """Whether every process gets something of everything that is divided, and whole groups."""
        for label in {label for label in self.labels if label is not None}:
            parts = prod(self.mesh.size(i) for i, own in enumerate(self.labels) if own == label)
            if self.sizes.get(label, 1) < parts:
                return False
        return all(self.share(*x) or self.grouped_heads(*x) is None for x in shapes.items())

    def first(self, label: int) -> int:
        """The number that the first of this process's heads or batch items has among those of
        all. Counted as torch does, but without the tensors that it makes for this, which have no
        numbers while torch.compile traces."""
        first, size, place = 0, self.sizes[label], self.mesh.get_coordinate()
        assert place is not None  # or on_one_mesh has raised
        for i, own in enumerate(self.labels):
            if own == label:
                chunk = -(-size // self.mesh.size(i))
                before = min(size, chunk * place[i])
                first, size = first + before, min(chunk, size - before)
        return first


def sizes_of(layout: Layout, shapes: Mapping[str, torch.Size]) -> dict[int, int]:
    """Those to which query, key and value broadcast; the query's number of heads, where key and
    value have fewer."""
    sizes: dict[int, int] = {}
    for name in ("query", "k_cache", "v_cache", "key", "value"):
        if name in shapes:
            for label, dim in layout(name, len(shapes[name])).items():
                if sizes.get(label, 1) == 1:
                    sizes[label] = shapes[name][dim]
    return sizes


def plan_of(
    layout: Layout, sizes: dict[int, int], tensors: Mapping[str, DTensor], allowed: Container[int]
) -> Plan:
    """Follows what is divided already: in each dimension of the mesh the first of the tensors that
    is divided in a way that is possible. What is divided otherwise, along the sequence for example,
    is divided into heads instead, if that is possible. allowed: the labels that may be divided."""
    shapes = {name: x.shape for name, x in tensors.items()}
    plan = Plan(next(iter(tensors.values())).device_mesh, layout, sizes, ())
    for i in range(plan.mesh.ndim):
        wanted: list[int] = []
        for name, x in tensors.items():
            placement = x.placements[i]
            if isinstance(placement, Shard):
                labels = {dim: label for label, dim in plan.dims(name, x.shape).items()}
                wanted.append(labels.get(placement.dim, HEADS))
        tries = [plan._replace(labels=(*plan.labels, w)) for w in wanted if w in allowed]
        none = plan._replace(labels=(*plan.labels, None))
        plan = next((p for p in tries if p.is_possible(shapes)), none)
    return plan
