"""What is read through an index: the pages of packed documents, the rows or pages of a cache."""

import torch
from torch import Tensor

from qkv._vmap.samples import Samples


class Pool:
    """The pools `[P, ...]` of all samples: one after the other, or one for all if not batched.

    tensors: of key and value, by name. index: which places of them each sample has, [size, ...].
    """

    def __init__(self, samples: Samples, names: tuple[str, str], index: Tensor | None):
        self._samples, self._names = samples, names
        self.is_batched = any(map(samples.is_batched, names))
        self.tensors: dict[str, Tensor] = {}
        self._copied: list[str] = []
        for name in names:
            pool = samples.values[name]
            assert pool is not None
            self.tensors[name] = self._one_after_the_other(name) if self.is_batched else pool
        self.index = index
        if index is not None and self.is_batched:
            self.index = self._in_all_pools(index)

    def _one_after_the_other(self, name: str) -> Tensor:
        pools = self._samples.needed(name)
        shape = pools.size(0) * pools.size(1), *pools.shape[2:]
        try:
            return pools.view(shape)
        except RuntimeError:  # its strides do not allow it
            self._copied.append(name)
            return pools.reshape(shape)

    def _in_all_pools(self, index: Tensor) -> Tensor:
        """What is in no place of the sample's own pool becomes -1, for the operator to refuse."""
        size, places = self._samples.size, self.tensors[self._names[0]].size(0)
        places = places // max(size, 1)
        first = torch.arange(size, device=index.device) * places
        first = first.view(-1, *[1] * (index.dim() - 1))
        return torch.where((index >= 0) & (index < places), index + first, -1)

    def write_back(self) -> None:
        """What the operator has written into copies."""
        for name in self._copied:
            pools = self._samples.needed(name)
            pools.copy_(self.tensors[name].view(pools.shape))
