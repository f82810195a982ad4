"""attention_with_kvcache: the batch items of all samples, one sample after the other."""

from typing import Any

import torch
from torch import Tensor

from qkv._vmap.pools import Pool
from qkv._vmap.samples import Samples, refuse_int8
from qkv.options import BY_HEAD

_CACHES = ("k_cache", "v_cache")
_ROWS = ("query", "key", "value", "cache_seqlens", "cache_leftpad")


def rule(op: Any, samples: Samples, options: dict[str, Any]):
    refuse_int8(samples, "attention_with_kvcache")
    appends = samples.get("key") is not None
    if appends:
        _refuse_shared_caches(samples)
    place = "cache_batch_idx" if samples.get("block_table") is None else "block_table"
    pool = Pool(samples, _CACHES, samples.each(place))
    tensors = {name: samples.rows(name) for name in _ROWS}
    index = pool.index
    query = samples.needed("query")
    items = query.size(1)
    if index is None and not pool.is_batched:
        # Row b of the one cache of all.
        index = torch.arange(items, device=query.device).expand(samples.size, -1)
    if index is not None:
        tensors[place] = index.flatten(0, 1)
    for name, dims_after in ({"bias": 3, "spans": 3} | dict.fromkeys(BY_HEAD, 1)).items():
        tensors[name] = _option(samples, name, items, dims_after)
    results = op(**pool.tensors, **tensors, **options)
    if appends:
        pool.write_back()
    return tuple(x.unflatten(0, (samples.size, items)) for x in results), (0, 0)


def _refuse_shared_caches(samples: Samples) -> None:
    for name in _CACHES:
        if not samples.is_batched(name):
            raise RuntimeError(
                f"vmap: attention_with_kvcache appends key and value of {samples.size} samples, "
                f"but {name} is the same tensor for all of them; expected a cache for each, "
                "batched by in_dims"
            )


def _option(samples: Samples, name: str, items: int, dims_after: int) -> Tensor | None:
    """[size * items, ...] of what broadcasts to [items, ...], with so many dimensions after it."""
    if samples.get(name) is None or samples.is_one_for_all(name, dims_after):
        return samples.get(name)
    return samples.of_items(name, items, dims_after).flatten(0, 1)
