"""Which dimensions of an operator's tensors are its heads and its batch dimensions.

What a dimension of the mesh can divide has a number, a label: 0 for the heads, 1 for the batch
dimension left of them, 2 for the one left of that, and so on.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from qkv._vmap.dense import FEWER_DIMS
from qkv._vmap.packed import laid_out_like
from qkv.options import BY_HEAD, MASKS

HEADS, BATCH = 0, 1
Dims = dict[int, int]  # the dimension of each label that a tensor has
Layout = Callable[[str, int], Dims]  # of a tensor, by its name and its number of dimensions

_OF_ITEMS = ("cache_seqlens", "cache_leftpad")  # [B]
_OF_ALL = ("dropout_seed", "cu_seq_q", "cu_seq_k", "seqused_k", "cache_batch_idx", "block_table")
_OPTIONS = (*MASKS, *BY_HEAD)
_FEWER_DIMS = FEWER_DIMS | {"softmax_lse": 1}


def layout_of(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> Layout:
    """For a call with these tensors, those that are not None, and with these options.

    Raises:
        NotImplementedError: for int8 keys and values.
    """
    if {"k_scale", "v_scale"} & set(tensors):
        raise NotImplementedError(
            "k_scale or v_scale is given, but int8 keys and values are not implemented for "
            "DTensors; expected the tensors of this process, to_local(), and a call on each"
        )
    if "cu_seq_q" in tensors:
        return _paged if "block_table" in tensors else _packed
    if "k_cache" in tensors:
        return _pooled if {"block_table", "cache_batch_idx"} & set(tensors) else _cache
    return partial(_dense, reduce=options.get("reduce"))


def _without_batch(dims: Dims) -> Dims:
    return {label: dim for label, dim in dims.items() if label == HEADS}


def _dense(name: str, rank: int, reduce: str | None = None) -> Dims:
    """[..., H, L, D], and what has fewer dimensions after the heads."""
    own = laid_out_like(name)
    if own in _OF_ALL:
        return {}
    if own == "weights" and reduce == "heads":  # [..., L, S]
        return {label: rank - 2 - label for label in range(BATCH, rank - 1)}
    fewer = 1 if own == "weights" and reduce == "queries" else _FEWER_DIMS.get(own, 0)
    heads = rank - 3 + fewer  # and all to the left of it is a batch
    return {label: heads - label for label in range(heads + 1)}


def _cache(name: str, rank: int) -> Dims:
    return {BATCH: 0} if name in _OF_ITEMS else _dense(name, rank)


def _pooled(name: str, rank: int) -> Dims:
    """A cache in which a batch item may have any place, so that its batch cannot be divided."""
    return {} if name in _OF_ITEMS else _without_batch(_dense(name, rank))


def _packed(name: str, rank: int) -> Dims:
    """query [T, H, D], logsumexp [H, T]. Documents are not divided."""
    own = laid_out_like(name)
    if own in _OF_ALL or own in _OPTIONS:
        return _without_batch(_dense(own, rank))
    return {HEADS: 0 if own in _FEWER_DIMS else 1}


def _paged(name: str, rank: int) -> Dims:
    """key and value are [blocks, block size, Hkv, D]."""
    return {HEADS: 2} if name in ("key", "value") else _packed(name, rank)
