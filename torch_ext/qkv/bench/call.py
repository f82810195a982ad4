"""One way to compute one case, as functions to time."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def leaves_of(inputs):
    """{name: tensor} of those that want a gradient."""
    return {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


@dataclass(frozen=True)
class Call:
    """function(**inputs) returns the output, of grad_output's shape. ours(x) brings the output
    or a gradient into the layout of the case, where that is another. more_inputs, forward only:
    others of the same sizes, which calls take in turn so as to find none in a CPU's cache."""

    function: Callable[..., Tensor]
    inputs: dict
    grad_output: Tensor
    ours: Callable[[Tensor], Tensor] = lambda x: x
    more_inputs: tuple = ()

    @classmethod
    def in_turn(cls, calls):
        """One call of many that differ in their inputs alone."""
        return replace(calls[0], more_inputs=tuple(call.inputs for call in calls[1:]))

    def timed(self, direction):
        """A function without arguments: "forward" records no gradients; "backward" is of a forward
        pass made here; "both" is a step of training."""
        return {"forward": self._forward, "backward": self._backward, "both": self._both}[
            direction
        ]()

    def _forward(self):
        if not self.more_inputs:
            return torch.no_grad()(lambda: self.function(**self.inputs))
        turns = itertools.cycle((self.inputs, *self.more_inputs))
        return torch.no_grad()(lambda: self.function(**next(turns)))

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
        names = leaves_of(self.inputs)
        if not names:
            return {}
        torch.manual_seed(0)
        grads = self.timed("backward")()
        return {f"grad_{n}": self.ours(grad) for n, grad in zip(names, grads, strict=True)}
