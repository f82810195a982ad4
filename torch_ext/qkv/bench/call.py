"""One way to compute one case, as functions to time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def leaves_of(inputs):
    """{name: tensor} of those that want a gradient."""
    return {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


@dataclass(frozen=True)
class Call:
    """function(**inputs) returns the output, of grad_output's shape. ours(x) brings the output
    or a gradient into the layout of the case, where that is another."""

    function: Callable[..., Tensor]
    inputs: dict
    grad_output: Tensor
    ours: Callable[[Tensor], Tensor] = lambda x: x

    def timed(self, direction):
        """A function without arguments: "forward" records no gradients; "backward" is of a forward
        pass made here; "both" is a step of training."""
        return {"forward": self._forward, "backward": self._backward, "both": self._both}[
            direction
        ]()

    def _forward(self):
        return torch.no_grad()(lambda: self.function(**self.inputs))

    def _backward(self):
        output, leaves = self.function(**self.inputs), tuple(leaves_of(self.inputs).values())
        return lambda: torch.autograd.grad(output, leaves, self.grad_output, retain_graph=True)

    def _both(self):
        leaves = tuple(leaves_of(self.inputs).values())
        return lambda: torch.autograd.grad(self.function(**self.inputs), leaves, self.grad_output)

    def output(self):
        """As the case has it, with the random numbers of grads()."""
        torch.manual_seed(0)
        return self.ours(self.timed("forward")())

    def grads(self):
        """{"grad_query", "grad_key", ...}: of all leaves, as the case has them."""
        torch.manual_seed(0)
        grads = self.timed("backward")()
        names = leaves_of(self.inputs)
        return {f"grad_{n}": self.ours(grad) for n, grad in zip(names, grads, strict=True)}
