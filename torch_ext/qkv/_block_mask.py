"""FlexAttention's BlockMask: made without evaluating every pair, see `block_mask`, and as spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._intervals import runs_of_mask
from qkv._refuse import refuse

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PARTIAL, FULL = 1, 2  # kinds of blocks, beside 0

# So many pairs are evaluated at once, of which a mask function makes a few int64 tensors.
_PAIRS = 1 << 20
_refuse = partial(refuse, function="block_mask")


def block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: str | torch.device = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """torch's `create_block_mask`, in time and memory that grow with the number of blocks.

    `mask_mod` is evaluated with bounds in place of numbers, so that most blocks are known to be
    full or empty. Pair by pair are evaluated those that are cut by an edge of the mask, and all
    where it does more than integer arithmetic, comparisons, logic, `where` and look-ups in tables.

    Args:
        mask_mod: of batch item, head, query and key, tensors without dimensions, whether the query
            attends to the key; as FlexAttention takes it.
        B: number of batch items, None where they have one mask.
        H: number of heads, None where they have one mask.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: the CPU.
        BLOCK_SIZE: queries and keys of a block, one number or two.

    Returns:
        torch.nn.attention.flex_attention.BlockMask, with the very lists of `create_block_mask`;
        `spans` takes it, and so does `flex_attention`.

    Raises:
        ValueError: a size below 1, another device, or a mask_mod that gives no bool.

    Example:
        >>> mask = qkv.block_mask(lambda b, h, q, k: q >= k, 1, 1, 512, 512)
        >>> mask.full_kv_num_blocks.tolist(), mask.kv_num_blocks.tolist()
        ([[[0, 1, 2, 3]]], [[[1, 1, 1, 1]]])
        >>> query = torch.randn(1, 8, 512, 64)
        >>> qkv.attention(query, query, query, spans=mask).shape
        torch.Size([1, 8, 512, 64])

    Source: FlexAttention's BlockMask; Moore, "Interval analysis", 1966.
    """
    # torch's own lists of blocks; the module takes time to import.
    from torch.nn.attention.flex_attention import _create_sparse_block_from_block_mask

    batch = (1 if B is None else B, 1 if H is None else H)
    lengths = (Q_LEN, KV_LEN)
    sizes = tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE,) * 2
    if not callable(mask_mod):
        _refuse("mask_mod", repr(mask_mod), "a function is expected")
    if torch.device(device).type != "cpu":
        _refuse("device", device, "cpu is expected")
    names = ["B", "H", "Q_LEN", "KV_LEN", *["BLOCK_SIZE"] * len(sizes)]
    for name, n in zip(names, (*batch, *lengths, *sizes), strict=True):
        if not isinstance(n, Integral) or n < 1:
            _refuse(name, repr(n), "a number from 1 is expected")
    if len(sizes) != 2:
        _refuse("BLOCK_SIZE", BLOCK_SIZE, "1 or 2 numbers are expected")
    # NumPy's numbers are taken, too, but not by all that torch does with the mask.
    batch, lengths, sizes = ((int(x), int(y)) for x, y in (batch, lengths, sizes))
    with torch.device("cpu"):  # whatever torch.set_default_device says
        blocks = _blocks(mask_mod, batch, lengths, sizes)
        return _create_sparse_block_from_block_mask(blocks, mask_mod, lengths, *sizes)


def _blocks(
    mask_mod: Any, batch: tuple[int, int], lengths: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Which blocks show some of their pairs, and which all, `[B, H, rows, columns]`. torch takes
    what lies behind the ends for hidden, so a block that is cut by an end is never full."""
    from qkv._mask_bounds import bounds_of

    first = [torch.arange(0, n, size) for n, size in zip(lengths, sizes, strict=True)]
    last = [(x + size).clamp(max=n) - 1 for x, n, size in zip(first, lengths, sizes, strict=True)]
    b, h = torch.arange(batch[0])[:, None, None, None], torch.arange(batch[1])[:, None, None]
    places = [(b, b), (h, h), (first[0][:, None], last[0][:, None]), (first[1], last[1])]
    shape = (*batch, first[0].numel(), first[1].numel())
    least, most = (x.expand(shape) for x in bounds_of(mask_mod, places))
    is_whole = [y - x + 1 == size for x, y, size in zip(first, last, sizes, strict=True)]
    is_full = least & is_whole[0][:, None] & is_whole[1]
    is_partial = least & ~is_full
    for blocks, seen in seen_in(mask_mod, (most & ~least).nonzero(), lengths, sizes):
        to = blocks.unbind(1)
        every, some = seen.flatten(1).all(1), seen.flatten(1).any(1)
        is_full[to], is_partial[to] = every, some & ~every
    return is_partial, is_full


def ends_of(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """begins and ends of what it shows, `[B, H, L, n]`, which may touch and be empty. Its function
    is evaluated for the pairs of partial blocks alone."""
    (rows, columns), L = block_mask.BLOCK_SIZE, block_mask.seq_lengths[0]
    kinds = kinds_of(block_mask)
    runs = runs_of_mask("from_block_mask", kinds == FULL)
    whole, partial = [x * columns for x in runs], _partial_runs(block_mask, kinds == PARTIAL)
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


def _partial_runs(block_mask: BlockMask, is_partial: Tensor) -> list[Tensor]:
    """Of each query, begins and ends of what it sees in partial blocks, `[B, H, L, n]`, with the
    rows of the last block in full."""
    lengths, (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    seen = seen_in(block_mask.mask_mod, is_partial.nonzero(), lengths, (rows, columns))
    evaluated = [(blocks, runs_of_mask("from_block_mask", x)) for blocks, x in seen]
    most = max((runs[0].size(-1) for _, runs in evaluated), default=0)
    number = is_partial.cumsum(-1) - 1  # of a partial block among those of its row
    width = int(number.max()) + 1 if number.numel() else 0
    found = [number.new_zeros((*number.shape[:3], rows, width, most)) for _ in "be"]
    for blocks, runs in evaluated:
        b, h, row, column = blocks.unbind(1)
        for to, ends in zip(found, runs, strict=True):
            ends = ends + (column * columns)[:, None, None]
            to[b, h, row, :, number[b, h, row, column], : ends.size(-1)] = ends
    return [x.flatten(-2).flatten(2, 3) for x in found]


def seen_in(
    mask_mod: Any, blocks: Tensor, lengths: tuple[int, int], sizes: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of the blocks and which of their pairs they show, `[n, rows, columns]`, as many at once
    as memory is meant to hold. blocks: batch item, head, row and column of each, `[blocks, 4]`."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    function: Any = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, dims)
    for some in blocks.split(max(1, _PAIRS // (sizes[0] * sizes[1]))) if len(blocks) else ():
        b, h, *places = some.unbind(1)
        within = (torch.arange(n, device=blocks.device) for n in sizes)
        query, key = (x[:, None] * n + y for x, n, y in zip(places, sizes, within, strict=True))
        last_query, last_key = (n - 1 for n in lengths)
        with TransformGetItemToIndex():
            seen = function(b, h, query.clamp(max=last_query), key.clamp(max=last_key))
        if seen.dtype != torch.bool or seen.dim() != 3:
            raise ValueError(
                f"block_mask: mask_mod gives {seen.dtype}, {[*seen.shape[3:]]}, but bool, [] is "
                "expected"
            )
        yield some, seen & (query <= last_query)[:, :, None] & (key <= last_key)[:, None]
