"""Attention over a sequence that is cut over a ring of ranks, and its gradients."""

import torch
from torch import Tensor
from torch.autograd import Function

from qkv.distributed._block import OPTION_TENSORS
from qkv.distributed._passes import backward_pass, forward_pass
from qkv.distributed._sinks import sinks_gradient
from qkv.distributed._transport import wide


class RingAttention(Function):
    """Output and lse, both in float32 or float64.

    Takes query, key, value, the tensors of OPTION_TENSORS or None, sinks, ring.
    """

    @staticmethod
    def forward(query, key, value, *others):
        *tensors, sinks, ring = others
        with torch.autocast("cpu", enabled=False):
            tensors = _present(dict(zip(OPTION_TENSORS, tensors, strict=True)))
            return forward_pass(query, key, value, tensors, sinks, ring)

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
    def forward(grad_output, grad_lse, query, key, value, *others):
        *tensors, sinks, output, lse, ring, wanted = others
        with torch.autocast("cpu", enabled=False):
            tensors = _present(dict(zip(OPTION_TENSORS, tensors, strict=True)))
            sums = {
                name: torch.zeros_like(tensors[name], dtype=wide(tensors[name].dtype))
                for name, is_wanted in zip(OPTION_TENSORS, wanted[3:-1], strict=True)
                if is_wanted
            }
            rows = {"query": query, "output": output, "lse": lse}
            rows |= _present({"grad_output": grad_output, "grad_lse": grad_lse})
            if wanted[0]:
                rows["grad_query"] = torch.zeros_like(query, dtype=wide(query.dtype))
            found = backward_pass(rows, key, value, wanted[1:3], tensors, sums, ring)
            of_sinks = None
            if wanted[-1]:
                of_sinks = sinks_gradient(sinks, rows, ring.ranks.rank, ring.plan)
        return (
            *(x if x is None else x.to(query.dtype) for x in (rows.get("grad_query"), *found)),
            *(sums[n].to(tensors[n].dtype) if n in sums else None for n in OPTION_TENSORS),
            of_sinks,
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(_ONE_DERIVATIVE.format("a second derivative"))

    jvp = backward


_ONE_DERIVATIVE = (
    "ring_attention: {} is asked for, but over a ring of ranks there are only first derivatives, "
    'by backward; with method="heads", or on one rank, there are all of them'
)


def _present(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
