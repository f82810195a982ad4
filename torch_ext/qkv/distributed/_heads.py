"""All-to-all over heads, after Jacobs et al., "DeepSpeed Ulysses", 2023: from some rows of all
heads to all rows of some heads, and back."""

import torch
from torch import Tensor

from qkv.distributed._block import OPTION_TENSORS, heads_of
from qkv.distributed._ranks import Ranks
from qkv.distributed._shards import natural, zigzag
from qkv.distributed._transport import all_to_all, linear
from qkv.options import MASKS

_DOING = "ring_attention: all-to-all over heads, {}"


def _to_heads(tensor: Tensor, ranks: Ranks) -> Tensor:
    """`[..., n * H, L, D]`, in the order of shards, to `[..., H, n * L, D]`, in the order of the
    sequence. Each number goes to one place, so that the way back is the gradient too."""
    parts = tensor.chunk(ranks.size, -3)
    return natural(all_to_all(parts, ranks, _DOING.format("rows to heads")), -2)


def _to_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The way back of _to_heads."""
    parts = zigzag(tensor, -2, ranks.size)
    return torch.cat(all_to_all(parts, ranks, _DOING.format("heads to rows")), -3)


def own_heads(tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's heads of all rows. Where there are fewer heads than ranks, some have the same."""
    if tensor.size(-3) < ranks.size:
        tensor = tensor.repeat_interleave(ranks.size // tensor.size(-3), -3)
    return linear(_to_heads, _to_rows, tensor, ranks=ranks)


def option_heads(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """What acts on the scores of this rank's heads. Rows of masks come from all ranks."""
    if name in MASKS and tensor.dim() > 1 and tensor.size(-2) > 1:
        return own_heads(tensor if tensor.dim() > 2 else tensor[None], ranks)
    return heads_of(tensor, OPTION_TENSORS.get(name, -1), ranks.rank, ranks.size)


def own_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The way back of `own_heads`, where there are enough heads: this rank's rows of all heads."""
    return linear(_to_rows, _to_heads, tensor, ranks=ranks)
