"""The tensors of a call, of which at least one is a DTensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def on_one_mesh(op: Any, tensors: Mapping[str, Tensor | None]) -> dict[str, DTensor]:
    """Those that are not None.

    Raises:
        RuntimeError: for tensors on different meshes; for a tensor that is none of DTensor's, since
            nobody knows what part of the whole it is (numbers aside, and within torch's
            `implicit_replication()`); on a process that has no place in the mesh.
    """
    name = op._schema.name
    first = next(n for n, x in tensors.items() if isinstance(x, DTensor))
    mesh = tensors[first].device_mesh  # type: ignore[union-attr]
    replicated = [Replicate()] * mesh.ndim
    found = {}
    for n, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, DTensor):
            if x.dim() > 0 and not DTensor._op_dispatcher._allow_implicit_replication:
                raise RuntimeError(
                    f"{name}: {n} is a torch.Tensor, but {first} is a DTensor; expected a DTensor, "
                    f"too: DTensor.from_local({n}, mesh) if all processes have the same one, "
                    f"or distribute_tensor({n}, mesh, placements)"
                )
            x = DTensor.from_local(x, mesh, replicated)
        elif x.device_mesh != mesh:
            raise RuntimeError(
                f"{name}: {n} is on {x.device_mesh}, but {first} on {mesh}; expected one mesh for "
                "all tensors"
            )
        found[n] = x
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"{name}: {first} is on {mesh}, in which rank {torch.distributed.get_rank()} has no "
            "place; expected calls from the ranks of the mesh alone"
        )
    return found
