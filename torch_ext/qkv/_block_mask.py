"""torch.nn.attention.flex_attention.BlockMask as spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._intervals import runs_of_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PARTIAL, FULL = 1, 2  # kinds of blocks, beside 0

# So many pairs are evaluated at once, of which a mask function makes a few int64 tensors.
_PAIRS = 1 << 20


def ends_of(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """begins and ends of what it shows, `[B, H, L, n]`, which may touch and be empty. Its function
    is evaluated for the pairs of partial blocks alone."""
    (rows, columns), L = block_mask.BLOCK_SIZE, block_mask.seq_lengths[0]
    runs = runs_of_mask("from_block_mask", kinds_of(block_mask) == FULL)
    whole, partial = [x * columns for x in runs], _partial_runs(block_mask)
    found = [
        torch.cat([of_block.repeat_interleave(rows, 2)[:, :, :L], of_row[:, :, :L]], -1)
        for of_block, of_row in zip(whole, partial, strict=True)
    ]
    return found[0], found[1].clamp(max=block_mask.seq_lengths[1])


def kinds_of(block_mask: BlockMask) -> Tensor:
    """Of each block whether it is partial, full or neither, `[B, H, rows, columns]`."""
    # A list may be shorter than a row of blocks.
    needed = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    columns = max(needed, block_mask.kv_indices.size(-1))
    shape = (*block_mask.kv_num_blocks.shape, columns + 1)
    kinds = block_mask.kv_num_blocks.new_zeros(shape, dtype=torch.int32)
    for kind, counts, blocks in (
        (PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
        (FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if counts is not None and blocks is not None:
            # What the lists have behind their counts goes to one more column, which is left out.
            is_listed = torch.arange(blocks.size(-1), device=blocks.device) < counts[..., None]
            to = blocks.long().masked_fill(~is_listed, columns)
            kinds = kinds.scatter(-1, to, kind)
    return kinds[..., :columns].contiguous()


def _partial_runs(block_mask: BlockMask) -> list[Tensor]:
    """Of each query, begins and ends of what it sees in partial blocks, `[B, H, L, n]`, with the
    rows of the last block in full."""
    counts, blocks = block_mask.kv_num_blocks, block_mask.kv_indices
    rows, columns = block_mask.BLOCK_SIZE
    listed = torch.arange(blocks.size(-1), device=blocks.device)
    place = (listed < counts[..., None]).nonzero()
    b, h, row, n = place.unbind(1)
    where = torch.stack([b, h, row * rows, blocks[b, h, row, n] * columns], 1)
    seen = seen_in(block_mask.mask_mod, where, block_mask.seq_lengths, block_mask.BLOCK_SIZE)
    evaluated = [runs_of_mask("from_block_mask", x) for x in seen]
    most = max((begins.size(-1) for begins, _ in evaluated), default=0)
    width = int(counts.max()) if counts.numel() else 0
    found = [where.new_zeros((*counts.shape, rows, width, most)) for _ in "be"]
    parts = [begins.size(0) for begins, _ in evaluated]
    for some, at, pieces in zip(place.split(parts), where.split(parts), evaluated, strict=True):
        for to, piece in zip(found, pieces, strict=True):
            b, h, row, n = some.unbind(1)
            to[b, h, row, :, n, : piece.size(-1)] = piece + at[:, 3, None, None]
    return [x.flatten(-2).flatten(2, 3) for x in found]


def seen_in(
    mask_mod: Any, where: Tensor, lengths: tuple[int, int], sizes: tuple[int, int]
) -> Iterator[Tensor]:
    """Which pairs some blocks show, `[n, rows, columns]`, for as many at once as memory is meant to
    hold. where: batch item, head, first query and first key of each block, `[blocks, 4]`."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    function: Any = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, dims)
    for some in where.split(max(1, _PAIRS // (sizes[0] * sizes[1]))) if len(where) else ():
        b, h, *first = some.unbind(1)
        within = (torch.arange(n, device=where.device) for n in sizes)
        query, key = (x[:, None] + y for x, y in zip(first, within, strict=True))
        last_query, last_key = (n - 1 for n in lengths)
        with TransformGetItemToIndex():
            seen = function(b, h, query.clamp(max=last_query), key.clamp(max=last_key))
        if seen.dtype != torch.bool or seen.dim() != 3:
            raise ValueError(
                f"block_mask: mask_mod gives {seen.dtype}, {[*seen.shape[3:]]}, but bool, [] is "
                "expected"
            )
        yield seen & (query <= last_query)[:, :, None] & (key <= last_key)[:, None]
