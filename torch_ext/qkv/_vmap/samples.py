"""The tensors of a call under vmap."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLES = ("score_tables", "score_indices", "score_tables_tangent")  # of score programs


class Samples(NamedTuple):
    """values: the tensors that a call has, by name, of all samples. dims: along which dimension of
    each the samples lie, None: it is the same for all of them. size: how many samples there are.
    randomness: vmap's argument, "error", "same" or "different"."""

    values: dict[str, Tensor]
    dims: dict[str, int | None]
    size: int
    randomness: str

    def is_batched(self, name: str) -> bool:
        return self.dims.get(name) is not None

    def each(self, name: str) -> Tensor:
        """[size, ...], without a copy."""
        tensor, dim = self.values[name], self.dims[name]
        tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        return tensor.expand(self.size, *tensor.shape[1:])

    def padded(self, name: str, rank: int) -> Tensor:
        """[size, 1..., dimensions of a sample], with `rank` dimensions after the first; no copy."""
        tensor = self.each(name)
        while tensor.dim() <= rank:
            tensor = tensor.unsqueeze(1)
        return tensor

    def rows(self, name: str) -> Tensor:
        """[size * n, ...], of samples [n, ...]; no copy if they lie one after the other."""
        return self.each(name).flatten(0, 1)

    def of_items(self, name: str, items: int, dims_after: int) -> Tensor:
        """[size, items, ...] of an option that broadcasts to [items, ...], with so many dimensions
        after it: to the documents or batch items of a sample."""
        return self.padded(name, dims_after + 1).expand(-1, items, *(-1,) * dims_after)

    def is_one_for_all(self, name: str, dims_after: int) -> bool:
        """Whether such an option is the same for all samples and all items."""
        tensor = self.values[name]
        is_one = tensor.dim() <= dims_after or tensor.size(0) == 1
        return is_one and not self.is_batched(name)

    def own(self, name: str, gradient: Tensor, items: int | None = None) -> Tensor:
        """[size, ...], of a sample's own shape, of a gradient [size * n, ...]: of n items, or of so
        many, behind which others are that the sample has not."""
        parts = gradient.unflatten(0, (self.size, gradient.size(0) // max(self.size, 1)))
        own = self.each(name)
        is_one = own.dim() < parts.dim() or own.size(1) == 1
        parts = parts[:, :items].sum(1, keepdim=True) if is_one else parts[:, : own.size(1)]
        return parts.reshape(own.shape)

    def tables(self, options: dict[str, Any]) -> dict[str, Tensor]:
        """[size, R, N] of each of the tables of a score program: a row for each sample, or, nested,
        the rows of each. Batch items are numbered from 0 in the part that has a row of tables, so
        that there are rows even where a program reads none."""
        if not options.get("score_program"):
            return {}
        found = {name: self.padded(name, 2) for name in TABLES if name in self.values}
        device = self.values["query"].device
        none = torch.empty(self.size, 1, 0, dtype=torch.int32, device=device)
        return found or {"score_indices": none}


def flat(tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """[size * R, N], as the operators take tables: those of one sample after the other."""
    return {name: rows.flatten(0, 1) for name, rows in tables.items()}


def refuse_int8(samples: Samples, operator: str) -> None:
    if {"k_scale", "v_scale"} & samples.values.keys():
        raise NotImplementedError(
            f"vmap: {operator} has k_scale or v_scale, but int8 keys and values are not "
            "implemented under vmap; call it once for each sample, or with the samples as its batch"
        )
