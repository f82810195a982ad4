"""What a rank computes while keys and values come from the others, and while gradients go back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qkv.distributed._block import (
    Options,
    Queries,
    block_backward,
    block_forward,
    heads_of,
    option_heads,
    rows_of,
)
from qkv.distributed._exchange import Exchange
from qkv.distributed._plan import Plan, Range
from qkv.distributed._ranks import Ranks
from qkv.distributed._sinks import starting_lse
from qkv.distributed._transport import wide

# Keys and values travel by parts: of their heads, and where these are few, of their rows. What is
# on its way, and the gradients that go back, then take the memory of a few parts, and not a few
# times that of all keys and values of a rank. But more parts also mean that output and gradients
# of the queries are read and written more often, for fewer keys each time. So there are this many
# at most, and none of fewer bytes than that: a MiB takes 0.1 ms at 100 Gbit/s, beside which a delay
# of 20 us is little.
MOST_PARTS, LEAST_BYTES = 32, 1 << 20


def parts_of(heads: int, size: int) -> tuple[int, int]:
    """Into how many parts of their heads keys and values of `size` bytes are cut, a divisor of
    `heads`, and into how many of their rows each of these."""
    most = min(MOST_PARTS, size // LEAST_BYTES)
    parts = next((n for n in range(min(heads, most), 1, -1) if heads % n == 0), 1)
    return parts, max(1, most // parts)


@dataclass(frozen=True)
class Ring:
    """What a call is beside its tensors. lead: `[..., H]` of the output."""

    ranks: Ranks
    plan: Plan
    lead: tuple[int, ...]
    options: Options  # but for its tensors

    def parts(self, key: Tensor, value: Tensor) -> tuple[int, int]:
        """Into how many parts of the heads the work is cut, a divisor of the number of key's heads
        and of value's, and into how many of the rows."""
        heads = math.gcd(*(x.size(-3) if x.dim() > 2 else 1 for x in (key, value)))
        return parts_of(heads, (key.numel() + value.numel()) * key.element_size())


def forward_pass(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: dict[str, Tensor],
    sinks: Tensor | None,
    ring: Ring,
) -> tuple[Tensor, Tensor]:
    """Output `[..., H, L_local, Dv]` and lse `[..., H, L_local]`, in float32 or float64."""
    dtype, options = wide(query.dtype), replace(ring.options, tensors=tensors)
    parts, cuts = ring.parts(key, value)
    shape = (*ring.lead, query.size(-2))
    output = torch.zeros(*shape, value.size(-1), dtype=dtype)
    # In float64 until it is whole, so that it is not rounded at every step.
    lse = starting_lse(sinks, shape, ring.ranks.rank, ring.plan, torch.float64)
    exchange = Exchange((key, value), ring.ranks, ring.plan, parts, cuts, "forward")
    for visit, arrival in exchange.arrivals():
        part = visit.part, parts
        own, queries = options.of_heads(*part), heads_of(query, -3, *part)
        own_output, own_lse = heads_of(output, -3, *part), heads_of(lse, -2, *part)
        keys, values = (x.to(dtype) for x in arrival.wait())
        for block in exchange.seen(visit).blocks:
            found = block_forward(queries, keys, values, block, own)
            merge(rows_of(own_output, block.rows), rows_of(own_lse, block.rows, -1), *found)
        del keys, values
    return output, lse.to(dtype)


def merge(output: Tensor, lse: Tensor, more_output: Tensor, more_lse: Tensor) -> None:
    """Adds what the same queries get from other keys to output and lse, in place."""
    total = torch.logaddexp(lse, more_lse)
    nothing = total == -math.inf
    before, more = (
        (x - total).exp_().masked_fill_(nothing, 0).to(output.dtype).unsqueeze(-1)
        for x in (lse, more_lse)
    )
    output.mul_(before).addcmul_(more_output, more)
    lse.copy_(total)


def backward_pass(
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
    tensors: dict[str, Tensor],
    option_grads: dict[str, Tensor],
    ring: Ring,
) -> list[Tensor | None]:
    """The gradients of query, key and value, in float32 or float64, as far as they are wanted;
    those of the options are added to what is in option_grads."""
    query, key, value = inputs
    dtype, options = wide(query.dtype), replace(ring.options, tensors=tensors)
    parts, cuts = ring.parts(key, value)
    found = [
        torch.zeros_like(x, dtype=dtype) if is_wanted else None
        for x, is_wanted in zip(inputs, wanted, strict=True)
    ]
    all_queries = Queries(query, results[0], results[1], grads[0], grads[1], found[0])
    exchange = Exchange((key, value), ring.ranks, ring.plan, parts, cuts, "backward")
    returning = None
    for visit, arrival in exchange.arrivals():
        part = visit.part, parts
        queries, own = all_queries.of_heads(*part), options.of_heads(*part)
        own_grads = option_heads(option_grads, *part)
        keys = [x.to(dtype) for x in arrival.wait()]
        shares: list[Tensor | None] = [None, None]
        for block in exchange.seen(visit).blocks:
            more = block_backward(queries, keys, wanted[1:], block, own, own_grads)
            shares = [_added(*x, block.columns) for x in zip(shares, more, keys, strict=True)]
        shares = _or_zeros(shares, keys, wanted[1:])
        del keys
        if returning is not None:
            returning.finish()
        returning = exchange.send_back(visit, shares, found[1:])
    if returning is not None:
        returning.finish()
    return found


def _added(
    share: Tensor | None, more: Tensor | None, like: Tensor, columns: Range
) -> Tensor | None:
    """The share of a gradient of `like`, with that of some of its rows added."""
    if more is None or share is None and columns.size == like.size(-2):
        return more
    share = torch.zeros_like(like) if share is None else share
    rows_of(share, columns).add_(more)
    return share


def _or_zeros(
    shares: list[Tensor | None], like: list[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Where there was no block, because nothing is seen."""
    return [
        torch.zeros_like(x) if is_wanted and share is None else share
        for share, x, is_wanted in zip(shares, like, wanted, strict=True)
    ]
