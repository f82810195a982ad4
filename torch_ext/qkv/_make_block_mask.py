"""FlexAttention's BlockMask without evaluating every pair: see `block_mask`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._block_mask import seen_in
from qkv._refuse import refuse

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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
    from torch.nn.attention.flex_attention import BlockMask  # which takes time to import

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
        is_full, is_partial = _blocks(mask_mod, batch, lengths, sizes)
    return BlockMask.from_kv_blocks(
        *_listed(is_partial),
        *_listed(is_full),
        BLOCK_SIZE=sizes,
        mask_mod=mask_mod,
        seq_lengths=lengths,
    )


def _blocks(
    mask_mod: Any, batch: tuple[int, int], lengths: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Which blocks show all of their pairs, and which some, `[B, H, rows, columns]`. torch takes
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
    left = (most & ~least).nonzero()
    where = left * torch.tensor([1, 1, *sizes])
    found = 0
    for seen in seen_in(mask_mod, where, lengths, sizes):
        to = left[found : found + seen.size(0)].unbind(1)
        found += seen.size(0)
        every, some = seen.flatten(1).all(1), seen.flatten(1).any(1)
        is_full[to], is_partial[to] = every, some & ~every
    return is_full, is_partial


def _listed(is_in: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are in, and all blocks of the row, those that are in first."""
    numbers = is_in.int()
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.int()
