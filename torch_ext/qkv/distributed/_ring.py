"""Attention over a sequence that is cut over a ring of ranks, and its gradients."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from qkv.distributed._block import (
    OPTION_TENSORS,
    Options,
    block_backward,
    block_forward,
    heads_of,
    option_heads,
    rows_of,
)
from qkv.distributed._exchange import Exchange
from qkv.distributed._plan import Block, Plan, Range
from qkv.distributed._ranks import Ranks
from qkv.distributed._sinks import sinks_gradient, starting_lse

# Keys and values travel by parts of their heads, as many as leave messages of this many bytes or
# more. The memory for what is on its way, and for the gradients that come back, is then that of a
# few messages rather than of a few times all keys and values of a rank. The time of a message of
# 4 MiB is 0.3 ms at 100 Gbit/s, beside which a delay of 20 us is little.
_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Ring:
    """What a call is beside its tensors. lead: `[..., H]` of the output."""

    ranks: Ranks
    plan: Plan
    lead: tuple[int, ...]
    scalars: dict  # of Options

    def options(self, tensors: dict[str, Tensor]) -> Options:
        return Options(tensors=tensors, **self.scalars)

    def parts(self, key: Tensor, value: Tensor) -> int:
        """Into how many parts of the heads the work is cut: a divisor of the number of key's heads
        and of value's."""
        heads = math.gcd(*(x.size(-3) if x.dim() > 2 else 1 for x in (key, value)))
        size = (key.numel() + value.numel()) * key.element_size()
        most = max(1, min(heads, size // _MESSAGE_BYTES))
        return next(n for n in range(most, 0, -1) if heads % n == 0) if heads else 1


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class RingAttention(Function):
    """(output, lse, wide), where wide is the output in float32 if the inputs are in half precision,
    else None.

    Takes query, key, value, attn_mask, bias, alibi_slopes, sinks, ring.
    """

    @staticmethod
    def forward(query, key, value, attn_mask, bias, alibi_slopes, sinks, ring: Ring):
        with torch.autocast("cpu", enabled=False):
            tensors = _present((attn_mask, bias, alibi_slopes))
            output, lse = _ring_forward(query, key, value, tensors, sinks, ring)
        if output.dtype == query.dtype:
            return output, lse, None
        return output.to(query.dtype), lse, output

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.ring = inputs
        result, lse, wide = output
        if wide is not None:
            ctx.mark_non_differentiable(wide)
        ctx.save_for_backward(*tensors, result if wide is None else wide, lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_output, grad_lse, _):
        if grad_output is None and grad_lse is None:
            return (None,) * 8
        wanted = ctx.needs_input_grad[:7]
        grads = RingGradients.apply(grad_output, grad_lse, *ctx.saved_tensors, ctx.ring, wanted)
        return *grads, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_ONE_DERIVATIVE.format("forward mode"))


class RingGradients(Function):
    """The gradients of the tensors that RingAttention takes, as far as they are `wanted`, from
    those of its results."""

    @staticmethod
    def forward(
        grad_output, grad_lse, query, key, value, attn_mask, bias, alibi_slopes, sinks, output, lse,
        ring: Ring, wanted: tuple[bool, ...],
    ):  # fmt: skip
        with torch.autocast("cpu", enabled=False):
            tensors = _present((attn_mask, bias, alibi_slopes))
            sums = {
                name: torch.zeros_like(tensors[name], dtype=_wide(tensors[name].dtype))
                for name, is_wanted in zip(OPTION_TENSORS, wanted[3:6], strict=True)
                if is_wanted
            }
            inputs, results, grads = (query, key, value), (output, lse), (grad_output, grad_lse)
            found = _ring_backward(inputs, results, grads, wanted[:3], tensors, sums, ring)
            of_sinks = None
            if wanted[6]:
                of_sinks = sinks_gradient(sinks, results, grads, ring.ranks.rank, ring.plan)
        return (
            *(x if x is None else x.to(query.dtype) for x in found),
            *(sums[n].to(tensors[n].dtype) if n in sums else None for n in OPTION_TENSORS),
            of_sinks,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(_ONE_DERIVATIVE.format("a second derivative"))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_ONE_DERIVATIVE.format("a second derivative"))


_ONE_DERIVATIVE = (
    "ring_attention: {} is asked for, but over a ring of ranks there are only first derivatives, by "
    'backward; with method="heads", or on one rank, there are all of them'
)


def _present(tensors: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    named = zip(OPTION_TENSORS, tensors, strict=True)
    return {name: tensor for name, tensor in named if tensor is not None}


def _ring_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: dict[str, Tensor],
    sinks: Tensor | None,
    ring: Ring,
) -> tuple[Tensor, Tensor]:
    """Output `[..., H, L_local, Dv]` and lse `[..., H, L_local]`, in float32 or float64."""
    wide, parts, options = _wide(query.dtype), ring.parts(key, value), ring.options(tensors)
    shape = (*ring.lead, query.size(-2))
    output = torch.zeros(*shape, value.size(-1), dtype=wide)
    lse = starting_lse(sinks, shape, ring.ranks.rank, ring.plan, wide)
    exchange = Exchange((key, value), ring.ranks, ring.plan, parts, "forward")
    for visit, arrival in exchange.arrivals():
        part = visit.part, parts
        own, queries = options.of_heads(*part), heads_of(query, -3, *part)
        own_output, own_lse = heads_of(output, -3, *part), heads_of(lse, -2, *part)
        keys, values = (x.to(wide) for x in arrival.wait())
        for block in exchange.steps[visit.step].blocks:
            rows, columns = block.rows, block.columns
            found = block_forward(
                rows_of(queries, rows).to(wide), rows_of(keys, columns), rows_of(values, columns),
                block, own,
            )  # fmt: skip
            _merge(rows_of(own_output, rows), _numbers_of(own_lse, rows), *found)
        del keys, values
    return output, lse


def _numbers_of(tensor: Tensor, rows: Range) -> Tensor:
    """A view of these rows of `[..., L]`."""
    return tensor.narrow(-1, rows.begin, rows.size)


def _merge(output: Tensor, lse: Tensor, more_output: Tensor, more_lse: Tensor) -> None:
    """Adds what the same queries get from other keys to output and lse, in place."""
    total = torch.logaddexp(lse, more_lse)
    nothing = total == -math.inf
    before, more = ((x - total).exp_().masked_fill_(nothing, 0) for x in (lse, more_lse))
    output.mul_(before.unsqueeze(-1)).addcmul_(more_output, more.unsqueeze(-1))
    lse.copy_(total)


def _ring_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    wanted: tuple[bool, ...],
    tensors: dict[str, Tensor],
    sums: dict[str, Tensor],
    ring: Ring,
) -> list[Tensor | None]:
    """The gradients of query, key and value, in float32 or float64; those of the options are added
    to `sums`."""
    query, key, value = inputs
    wide, parts, options = _wide(query.dtype), ring.parts(key, value), ring.options(tensors)
    found = [
        torch.zeros_like(x, dtype=wide) if is_wanted else None
        for x, is_wanted in zip(inputs, wanted, strict=True)
    ]
    home = [x for x in found[1:] if x is not None]
    exchange = Exchange((key, value), ring.ranks, ring.plan, parts, "backward")
    returning = None
    for visit, arrival in exchange.arrivals():
        part = visit.part, parts
        of_rows = _OfRows(*(
            x if x is None else heads_of(x, dim, *part)
            for x, dim in zip((query, *results, *grads, found[0]), _HEADS_OF_ROWS, strict=True)
        ))  # fmt: skip
        shares = exchange.shares(visit, home)
        own, own_sums = options.of_heads(*part), option_heads(sums, *part)
        keys = [x.to(wide) for x in arrival.wait()]
        for block in exchange.steps[visit.step].blocks:
            _add_block(of_rows, keys, shares.views, block, own, wanted, own_sums)
        if returning is not None:
            returning.wait()
        returning = exchange.send_back(visit, shares, home)
        del keys, shares
    if returning is not None:
        returning.wait()
    return found


class _OfRows(NamedTuple):
    """What has a row for each query, of some of the heads."""

    query: Tensor
    output: Tensor
    lse: Tensor
    grad_output: Tensor | None
    grad_lse: Tensor | None
    grad_query: Tensor | None


# Which dimension of each of them is the heads.
_HEADS_OF_ROWS = (-3, -3, -2, -3, -2, -3)


def _add_block(
    own: _OfRows,
    keys: list[Tensor],
    shares: list[Tensor],
    block: Block,
    options: Options,
    wanted: tuple[bool, ...],
    sums: dict[str, Tensor],
) -> None:
    """Adds what a block has of the gradients: to grad_query, to the `shares` of keys and values
    that are wanted, and to the `sums` of the options."""
    rows, columns = block.rows, block.columns
    query, output, lse, grad_output, grad_lse, grad_query = own
    wide = lse.dtype
    found = block_backward(
        (rows_of(query, rows).to(wide), *(rows_of(x, columns) for x in keys)),
        (rows_of(output, rows), _numbers_of(lse, rows)),
        (
            None if grad_output is None else rows_of(grad_output, rows).to(wide),
            None if grad_lse is None else _numbers_of(grad_lse, rows),
        ),
        block,
        options,
        wanted,
        sums,
    )
    if grad_query is not None:
        rows_of(grad_query, rows).add_(found[0])
    for share, more in zip(shares, (x for x in found[1:] if x is not None), strict=True):
        rows_of(share, columns).add_(more)
