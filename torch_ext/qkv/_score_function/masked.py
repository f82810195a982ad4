"""A BlockMask beside a score function: as spans, or as a part of the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._block_mask import FULL, PARTIAL, kinds_of
from qkv._intervals import TooMany
from qkv._refuse import refuse
from qkv.spans import tensor_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_refuse = functools.partial(refuse, "block_mask", function="flex_attention")


def check_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        _refuse("sliced", "one that has its mask_mod is expected", RuntimeError)
    L, S = query.size(-2), key.size(-2)
    if tuple(block_mask.seq_lengths) != (L, S):
        sizes = "for {} queries and {} keys".format(*block_mask.seq_lengths)
        _refuse(sizes, f"for {L} and {S} is expected")
    for n, most, what in zip(
        block_mask.kv_num_blocks.shape, query.shape[:2], ("batch items", "heads"), strict=False
    ):
        if n not in (1, most):
            _refuse(f"for {n} {what}", f"for 1 or {most} is expected")


def spans_of(block_mask: Any) -> Tensor | None:
    """None of a mask that is too many spans, or whose spans cannot be counted yet."""
    if hasattr(block_mask, "_qkv_spans"):
        return tensor_of(block_mask)
    if torch.compiler.is_compiling() or hasattr(block_mask, "_qkv_is_no_spans"):
        return None
    try:
        return tensor_of(block_mask)
    except TooMany:
        block_mask._qkv_is_no_spans = True
        return None


def masked(
    score_mod: Callable[..., Any] | None, block_mask: BlockMask
) -> tuple[Callable[..., Any], Tensor]:
    """The score function, -inf where the mask hides, and a span of each query outside of which all
    is hidden: for masks that are too many spans, and in torch.compile, where how many they are
    would depend on data."""
    kinds = kinds_of(block_mask)
    sizes = tuple(block_mask.BLOCK_SIZE)
    function = functools.partial(_masked, score_mod, block_mask.mask_mod, kinds, sizes)
    return function, _outer_span(kinds > 0, sizes, block_mask.seq_lengths)


def _outer_span(is_listed: Tensor, sizes: tuple[int, ...], lengths: tuple[int, int]) -> Tensor:
    """`[B, H, L, 2]`: from the first to the last block of the query's row that is listed."""
    listed = is_listed.int()
    begins = listed.argmax(-1) * sizes[1]
    ends = (listed.size(-1) - listed.flip(-1).argmax(-1)) * sizes[1] * listed.amax(-1)
    span = torch.stack([begins, ends.clamp(max=lengths[1])], -1).int()
    return span.repeat_interleave(sizes[0], 2)[:, :, : lengths[0]]


def _masked(
    score_mod: Any, mask_mod: Any, kinds: Tensor, sizes: tuple[int, ...],
    score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor,
) -> Tensor:  # fmt: skip
    block = (b if kinds.size(0) > 1 else 0, h if kinds.size(1) > 1 else 0)
    kind = kinds[(*block, q // sizes[0], k // sizes[1])]
    is_shown = (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q, k))
    changed = score if score_mod is None else score_mod(score, b, h, q, k)
    return torch.where(is_shown, changed, -torch.inf)
