"""Intervals of keys for each query, as two tensors: begins and ends, int64 `[..., L, n]`."""

import torch
from torch import Tensor

# A span is two compares for every vector of scores, so that more of them cost more than a mask.
MOST = 64
_END = torch.iinfo(torch.int64).max


class TooMany(ValueError):
    """More than MOST spans of a query."""


def runs_of_mask(name: str, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of keys that a boolean mask `[..., L, S]` shows. name: of the function that asks."""
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff(dim=-1)
    count = _most_of(name, (edges > 0).sum(-1))
    begins, ends = edges.new_zeros((2, *mask.shape[:-1], count), dtype=torch.int64)
    for found, edge in ((begins, edges > 0), (ends, edges < 0)):
        *row, key = edge.nonzero(as_tuple=True)
        found[(*row, edge.cumsum(-1)[(*row, key)] - 1)] = key
    return begins, ends


def merged(name: str, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """As few intervals as hold the same keys, in their order. name: of the function that asks."""
    is_empty = ends <= begins
    begins, order = begins.long().masked_fill(is_empty, _END).sort(-1)
    ends = ends.long().masked_fill(is_empty, 0).gather(-1, order)
    before = torch.nn.functional.pad(ends.cummax(-1).values[..., :-1], (1, 0), value=-1)
    is_new = (begins > before) & (begins < _END)
    number = (is_new.cumsum(-1) - 1).clamp(min=0)
    shape = (*begins.shape[:-1], _most_of(name, is_new.sum(-1)))
    first, last = (
        begins.new_zeros(shape).scatter_reduce(-1, number, x, how, include_self=False)
        for x, how in ((begins, "amin"), (ends, "amax"))
    )
    return first.minimum(last), last  # where a query has none, first is _END and last 0


def _most_of(name: str, counts: Tensor) -> int:
    """The largest number of intervals that a query has, at least 1."""
    count = int(counts.max()) if counts.numel() else 0
    if count > MOST:
        raise TooMany(
            f"Spans: {name} makes {count} spans of a query, but at most {MOST} are expected; pass "
            "a boolean attn_mask"
        )
    return max(count, 1)
