"""The keys that an indexer chose for each query, as a mask that hides the others: blocks of keys,
and keys that the operator cannot have as indices."""

from typing import Any

import torch
from torch import Tensor

from qkv.integrations.transformers._pattern_mask import PatternMask


def with_chosen(
    mask: Tensor | None, module: Any, query: Tensor, keys: int, is_causal: bool,
    given: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """The mask, `[B, 1, L, S]` or `[B, H, L, S]`, which also hides what is not among the keys that
    given has, if it has any. A mask of None with is_causal hides the keys behind a query.

    given, of which they are taken: `indices`, `[B, L, K]`, keys; `block_indices`, `[B, Hi, L, K]`,
    blocks of `module.indexer.block_size` keys, for Hi groups of the heads. -1 is none."""
    indices, blocks = given.pop("indices", None), given.pop("block_indices", None)
    if indices is not None:
        chosen = _marked(indices.unsqueeze(1), keys)
    elif blocks is not None:
        size = module.indexer.block_size
        chosen = _marked(blocks, -(-keys // size)).repeat_interleave(size, -1)[..., :keys]
        chosen = chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1)
    else:
        return mask
    if mask is None:
        return chosen.tril() if is_causal and query.shape[2] > 1 else chosen
    if isinstance(mask, PatternMask):
        mask = mask.written
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, float("-inf"))


def _marked(indices: Tensor, count: int) -> Tensor:
    """`[..., count]`, True at the indices, of which those below 0 are left out."""
    places = indices.long()
    marked = torch.zeros(*places.shape[:-1], count + 1, dtype=torch.bool, device=places.device)
    return marked.scatter(-1, places.where(places >= 0, count), True)[..., :count]
