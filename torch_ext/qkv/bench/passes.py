"""One shape made concrete: tensors, our passes and torch's, and the answers of both."""

from functools import partial

import torch
import torch.nn.functional as F

import qkv
from qkv.testing import assert_close

DIRECTIONS = ("forward", "backward")
RESULTS: tuple[str, ...] = ("output", "grad_query", "grad_key", "grad_value")


class Passes:
    """Attention without options to random numbers, the same for a shape and a dtype each time."""

    def __init__(self, shape, dtype):
        self.shape, random = shape, torch.Generator().manual_seed(0)
        sizes = (
            (shape.heads, shape.seqlen_q, shape.head_dim),
            (shape.kv_heads, shape.seqlen_k, shape.head_dim),
            (shape.kv_heads, shape.seqlen_k, shape.head_dim_v),
            (shape.heads, shape.seqlen_q, shape.head_dim_v),
        )
        *inputs, self.grad_output = (
            torch.randn(shape.batch, *size, dtype=dtype, generator=random) for size in sizes
        )
        self.inputs = [x.requires_grad_() for x in inputs]

    def timed(self, direction):
        """{"qkv": function without arguments, "torch": function}. A backward pass is that of a
        forward pass that is made here; a forward pass records no gradients."""
        functions = {"qkv": qkv.attention, "torch": F.scaled_dot_product_attention}
        return {name: self._pass(direction, function) for name, function in functions.items()}

    def _pass(self, direction, function):
        call = partial(self._attend, function, self.inputs)
        if direction == "forward":
            return torch.no_grad()(call)
        output = call()
        return lambda: torch.autograd.grad(output, self.inputs, self.grad_output, retain_graph=True)

    def _attend(self, function, inputs):
        shape = self.shape
        return function(*inputs, is_causal=shape.is_causal, enable_gqa=shape.is_grouped)

    def _answers(self, function, dtype) -> dict[str, torch.Tensor]:
        """{"output": tensor, "grad_query": tensor, ...}, computed in this dtype."""
        inputs = [x.detach().to(dtype).requires_grad_() for x in self.inputs]
        output = self._attend(function, inputs)
        grads = torch.autograd.grad(output, inputs, self.grad_output.to(dtype))
        if self.shape.sees_one_key:
            # What rounding leaves of a zero has no size of its own to be held to: grad_value's is.
            return {"output": output, "gradients": torch.cat([x.flatten() for x in grads])}
        return dict(zip(RESULTS, (output, *grads), strict=True))

    def check(self, name):
        """Compares output and gradients with torch's attention in float64, as it does torch's own.

        Raises:
            AssertionError: our largest error exceeds twice torch's plus rounding, by the tensor's
                name and that of the shape.
        """
        dtype, sdpa = self.grad_output.dtype, F.scaled_dot_product_attention
        ours, torchs = (self._answers(function, dtype) for function in (qkv.attention, sdpa))
        assert_close(ours, self._answers(sdpa, torch.float64), torchs, times=2, name=name)
