"""attention_with_kvcache: the batch items of all samples, one sample after the other; and what is
read through an index, the rows or pages of a cache or the pages of packed documents."""

from typing import Any

import torch
import torch._C._functorch as _functorch
from torch import Tensor

from qkv._vmap.samples import Samples, flat, refuse_int8
from qkv.options import BY_HEAD

_CACHES = ("k_cache", "v_cache")
_ROTARY = ("rotary_cos", "rotary_sin")
_is_alias: Any = torch._C._is_alias_of  # pyright: ignore[reportAttributeAccessIssue]
_ROWS = ("query", "key", "value", "cache_seqlens", "cache_leftpad", "cache_batch_idx")


class Pool:
    """The pools `[P, ...]` of all samples: one after the other, or one for all if not batched.

    tensors: of key and value, by name. index: which places of them each sample has, [size, ...].
    """

    def __init__(self, samples: Samples, names: tuple[str, str], index: Tensor | None):
        self._samples, self._names = samples, names
        self.is_batched = any(map(samples.is_batched, names))
        self.tensors: dict[str, Tensor] = {}
        key, value = names
        for name in (key,) if _begins_rows(samples, value, key) else names:
            self.tensors[name] = samples.rows(name) if self.is_batched else samples.values[name]
        if value not in self.tensors:
            self.tensors[value] = _begin_of(self.tensors[key], samples, value)
        self.index = index
        if index is not None and self.is_batched:
            self.index = self._in_all_pools(index)

    def _in_all_pools(self, index: Tensor) -> Tensor:
        """What is in no place of the sample's own pool becomes -1, for the operator to refuse."""
        size, places = self._samples.size, self.tensors[self._names[0]].size(0)
        places = places // max(size, 1)
        first = torch.arange(size, device=index.device) * places
        first = first.view(-1, *[1] * (index.dim() - 1))
        return torch.where((index >= 0) & (index < places), index + first, -1)

    def write_back(self) -> None:
        """What the operator has written into copies."""
        for name, pool in self.tensors.items():
            pools = self._samples.each(name)
            if not _is_alias(_bare(pool), _bare(pools)):
                pools.copy_(pool.view(pools.shape))


def _bare(tensor: Tensor) -> Tensor:
    """As it lies in memory, with the samples of each level in front."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        dim, tensor = _functorch.maybe_get_bdim(tensor), _functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(max(dim, 0), 0)
    return tensor


def _begins_rows(samples: Samples, part: str, whole: str) -> bool:
    """Whether the rows of `part` are the first numbers of those of `whole`, in the same memory, as
    the values of latent attention are. Copies of the two would not be."""
    one, all_ = (_bare(samples.each(name)) for name in (part, whole))
    # torch writes any stride where there is one step or none.
    places = [
        ([(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1], x.storage_offset())
        for x in (one, all_[..., : one.size(-1)])
    ]
    return places[0] == places[1] and _is_alias(one, all_)


def _begin_of(whole: Tensor, samples: Samples, part: str) -> Tensor:
    return whole.narrow(-1, 0, samples.each(part).size(-1))


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    refuse_int8(samples, "attention_with_kvcache")
    given = samples.values.keys()
    for name in _CACHES if "key" in given else ():
        if not samples.is_batched(name):
            raise RuntimeError(
                f"vmap: attention_with_kvcache appends key and value of {samples.size} samples, "
                f"but {name} is the same tensor for all of them; expected a cache for each, "
                "batched by in_dims"
            )
    place = "block_table" if "block_table" in given else "cache_batch_idx"
    pool = Pool(samples, _CACHES, samples.each(place) if place in given else None)
    tensors = {name: samples.rows(name) for name in _ROWS if name in given}
    if "value" in given and _begins_rows(samples, "value", "key"):
        tensors["value"] = _begin_of(tensors["key"], samples, "value")
    tables = {name: samples.values[name] for name in _ROTARY if name in given}
    if "key" in given and any(map(samples.is_batched, _ROTARY)):
        try:
            tensors |= _rotated(samples, tensors, options)
            tables = {}
        except LookupError:  # what is missing, or too short, is for the operator to refuse
            tables = {name: samples.each(name)[0] for name in tables}
    tensors |= tables
    tensors |= flat(samples.tables(options))
    index = pool.index
    query = samples.each("query")
    items = query.size(1)
    if index is None and not pool.is_batched:
        # Row b of the one cache of all.
        index = torch.arange(items, device=query.device).expand(samples.size, -1)
    if index is not None:
        tensors[place] = index.flatten(0, 1)
    for name, dims_after in ({"bias": 3, "spans": 3} | dict.fromkeys(BY_HEAD, 1)).items():
        if name in given and samples.is_one_for_all(name, dims_after):
            tensors[name] = samples.values[name]
        elif name in given:
            tensors[name] = samples.of_items(name, items, dims_after).flatten(0, 1)
    results = op(**options | pool.tensors | tensors)
    if "key" in given:
        pool.write_back()
    return tuple(x.unflatten(0, (samples.size, items)) for x in results), (0, 0)


def _rotated(
    samples: Samples, tensors: dict[str, Tensor], options: dict[str, Any]
) -> dict[str, Tensor]:
    """query and key, rotated by the tables of each sample."""
    moves = options.get("causal") or max(options.get("window_size") or (-1, -1)) >= 0
    begins = tensors["cache_seqlens"]
    sample = torch.arange(samples.size, device=begins.device)
    sample = sample.repeat_interleave(len(begins) // max(samples.size, 1)).unsqueeze(1)
    found = {}
    for name, steps in {"query": moves, "key": True}.items():
        x = tensors[name]
        places = begins.unsqueeze(1) + torch.arange(x.size(2), device=x.device) * bool(steps)
        cos, sin = (samples.each(table)[sample, places] for table in _ROTARY)
        interleaved = options.get("rotary_interleaved") is not False
        found[name] = torch.ops.qkv.rotate(x, x, cos, sin, eps=0.0, interleaved=interleaved)[0]
    return found
