"""Attention over a sequence that is cut over a ring of ranks, and its gradients: what a rank
computes while keys and values come from the others, and while gradients go back."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import Function

from qkv.distributed._block import (
    OPTION_TENSORS,
    block_backward,
    block_forward,
    rows_of,
    tensors_of_heads,
)
from qkv.distributed._exchange import Exchange, Return
from qkv.distributed._transport import Messages, wide

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


def parts_of_both(key: Tensor, value: Tensor) -> tuple[int, int]:
    """Into how many parts of the heads the work is cut, a divisor of the number of key's heads and
    of value's, and into how many of the rows."""
    heads = math.gcd(*(x.size(-3) if x.dim() > 2 else 1 for x in (key, value)))
    return parts_of(heads, (key.numel() + value.numel()) * key.element_size())


def merge(output: Tensor, lse: Tensor, more_output: Tensor, more_lse: Tensor) -> None:
    """Adds what the same queries get from other keys to output and lse, in place."""
    total = torch.logaddexp(lse, more_lse)
    # Not exp(lse - total): where lse is so large that the logarithm of a sum is rounded away, in
    # rows of finfo.min for one, both weights would be 1. An infinite total has no weights, as in a
    # softmax; but what sees nothing adds nothing, also to a sink that is NaN or infinite.
    apart = lse - more_lse + (total - total)
    apart.masked_fill_(lse == -math.inf, -math.inf).masked_fill_(more_lse == -math.inf, math.inf)
    before, more = (x.sigmoid().to(output.dtype).unsqueeze(-1) for x in (apart, -apart))
    output.mul_(before).addcmul_(more_output, more)
    lse.copy_(total.masked_fill_(apart.isnan(), math.nan))


class RingAttention(Function):
    """Output `[..., H, L_local, Dv]` and lse `[..., H, L_local]`, both in float32 or float64.

    Takes query, key, value, the tensors of OPTION_TENSORS or None, ring.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(query, key, value, *others):
        *tensors, ring = others
        tensors = _present(dict(zip(OPTION_TENSORS, tensors, strict=True)))
        dtype, ring = wide(query.dtype), replace(ring, tensors=tensors)
        parts, cuts = parts_of_both(key, value)
        shape = (*ring.lead, query.size(-2))
        output = torch.zeros(*shape, value.size(-1), dtype=dtype)
        # In float64 until it is whole, so that it is not rounded at every step.
        lse = torch.full(shape, -math.inf, dtype=torch.float64)
        rows = {"query": query, "output": output, "lse": lse}
        exchange = Exchange((key, value), ring.ranks, ring.plan, parts, cuts, "forward")
        for visit, arrived in exchange.arrivals():
            own_ring = ring.of_heads(visit.part, parts)
            own = tensors_of_heads(rows, visit.part, parts)
            keys, values = (x.to(dtype) for x in arrived)
            for block in visit.seen.blocks:
                found = block_forward(own["query"], keys, values, block, own_ring)
                here = rows_of(own["output"], block.rows), rows_of(own["lse"], block.rows, -1)
                merge(*here, *found)
            del keys, values
        return output, lse.to(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.ring = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        *tensors, output, lse = ctx.saved_tensors
        grad_output, grad_lse = grads
        if grad_output is None and grad_lse is None:  # the others may have some, and wait
            grad_lse = torch.zeros_like(lse)
        found = RingGradients.apply(
            grad_output, grad_lse, *tensors, output, lse, ctx.ring, ctx.needs_input_grad[:-1]
        )
        return *found, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_ONE_DERIVATIVE.format("forward mode"))


class RingGradients(Function):
    """The gradients of the tensors that RingAttention takes, as far as they are `wanted`, from
    those of its results."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(grad_output, grad_lse, query, key, value, *others):
        *tensors, output, lse, ring, wanted = others
        tensors = _present(dict(zip(OPTION_TENSORS, tensors, strict=True)))
        dtype, ring = wide(query.dtype), replace(ring, tensors=tensors)
        inputs = {"query": query, "key": key, "value": value, **tensors}
        names = ("query", "key", "value", *OPTION_TENSORS)
        wanted = [n for n, is_wanted in zip(names, wanted, strict=True) if is_wanted]
        sums = {n: torch.zeros_like(inputs[n], dtype=wide(inputs[n].dtype)) for n in wanted}
        home = [sums[name] for name in ("key", "value") if name in sums]
        rows = {"query": query, "output": output, "lse": lse}
        rows |= _present({"grad_output": grad_output, "grad_lse": grad_lse})
        parts, cuts = parts_of_both(key, value)
        exchange = Exchange((key, value), ring.ranks, ring.plan, parts, cuts, "backward")
        returning = Return([], [], Messages([]), Messages([]))  # of the visit before the first
        for visit, arrived in exchange.arrivals():
            part = visit.part, parts
            own_rows, own_ring = tensors_of_heads(rows, *part), ring.of_heads(*part)
            keys = [x.to(dtype) for x in arrived]
            named = zip(("key", "value"), keys, strict=True)
            shares = {name: torch.zeros_like(x) for name, x in named if name in sums}
            own_sums = tensors_of_heads(sums, *part) | shares
            for block in visit.seen.blocks:
                block_backward(own_rows, keys, own_sums, block, own_ring)
            del keys
            returning.finish()
            returning = exchange.send_back(visit, [*shares.values()], home)
        returning.finish()
        return tuple(sums[n].to(inputs[n].dtype) if n in sums else None for n in names)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(_ONE_DERIVATIVE.format("a second derivative"))

    jvp = backward


_ONE_DERIVATIVE = (
    "ring_attention: {} is asked for, but over a ring of ranks, and of packed documents with "
    'masks, there are only first derivatives, by backward; otherwise, with method="heads" or on '
    "one rank, there are all of them"
)


def _present(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
