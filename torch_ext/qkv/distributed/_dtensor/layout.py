"""Which dimensions of an operator's tensors are its heads and its batch dimensions.

What a dimension of the mesh can divide has a number, a label: 0 for the heads, 1 for the batch
dimension left of them, 2 for the one left of that, and so on.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from qkv._vmap.dense import FEWER_DIMS
from qkv._vmap.packed import laid_out_like
from qkv.options import BY_HEAD, MASKS, TABLES

HEADS, BATCH = 0, 1
Dims = dict[int, int]  # the dimension of each label that a tensor has
Layout = Callable[[str, int], Dims]  # of a tensor, by its name and its number of dimensions

_OF_ITEMS = ("cache_seqlens", "cache_leftpad")  # [B]
_OF_ALL = (
    "dropout_seed", "cu_seq_q", "cu_seq_k", "seqused_k", "cache_batch_idx", "block_table",
    "rotary_cos", "rotary_sin", *TABLES,
)  # fmt: skip
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
    paged, packed = "block_table" in tensors, "cu_seq_q" in tensors
    # Documents are not divided. In a paged or indexed cache a batch item may have any place.
    has_batch = not (packed or paged or "cache_batch_idx" in tensors)
    reduce = options.get("reduce")

    def layout(name: str, rank: int) -> Dims:
        own = laid_out_like(name)
        if own in _OF_ITEMS:
            return {BATCH: 0} if has_batch else {}
        if own in _OF_ALL:
            return {}
        if packed and own not in _OPTIONS:  # query [T, H, D], logsumexp [H, T]
            if paged and own in ("key", "value"):  # [blocks, block size, Hkv, D]
                return {HEADS: 2}
            return {HEADS: 0 if own in _FEWER_DIMS else 1}
        if own == "weights" and reduce == "heads":  # [..., L, S]
            return {label: rank - 2 - label for label in range(BATCH, rank - 1)}
        # [..., H, L, D], and what has fewer dimensions after the heads.
        heads = rank - 3 + (own == "weights" and reduce == "queries") + _FEWER_DIMS.get(own, 0)
        labels = heads + 1  # all to the left of the heads is a batch
        return {label: heads - label for label in range(labels if has_batch else min(labels, 1))}

    return layout
