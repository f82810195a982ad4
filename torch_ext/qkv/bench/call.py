"""One way to compute one case, as functions to time."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


def leaves_of(inputs):
    """{name: tensor} of those that want a gradient."""
    return {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


class Unavailable(Exception):
    """Why one of torch's ways cannot be had, on this machine or for these inputs."""


@dataclass(frozen=True)
class Call:
    """function(**inputs) returns the output, of grad_output's shape. ours(x) brings the output
    or a gradient into the layout of the case, where that is another. more_inputs, forward only:
    others of the same sizes, which calls take in turn so as to find none in a CPU's cache.
    tangents: {leaf: the direction in which it moves}, for the derivatives of a second order and of
    forward mode; in double backward they are what the first gradients are multiplied with.
    refuses: {direction: why the call cannot be timed in it}."""

    function: Callable[..., Tensor]
    inputs: dict
    grad_output: Tensor
    ours: Callable[[Tensor], Tensor] = lambda x: x
    more_inputs: tuple = ()
    tangents: dict = field(default_factory=dict)
    refuses: dict = field(default_factory=dict)

    @classmethod
    def in_turn(cls, calls):
        """One call of many that differ in their inputs alone."""
        return replace(calls[0], more_inputs=tuple(call.inputs for call in calls[1:]))

    def timed(self, direction):
        """A function without arguments: "forward" and "jvp" record no gradients; "backward" is of a
        forward pass made here; "both" is a step of training; "double_backward" is of a first
        backward pass made here, and "backward_twice" is both of these passes."""
        return {
            "forward": self._forward,
            "backward": self._backward,
            "both": self._both,
            "jvp": self._jvp,
            "double_backward": self._double_backward,
            "backward_twice": self._backward_twice,
        }[direction]()

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

    def _jvp(self):
        def moving(*leaves):
            return self.function(**self.inputs | dict(zip(self.tangents, leaves, strict=True)))

        leaves = tuple(self.inputs[name].detach() for name in self.tangents)
        tangents = tuple(self.tangents.values())
        return torch.no_grad()(lambda: torch.func.jvp(moving, leaves, tangents))

    def _double_backward(self):
        first, second = self._orders()
        grads = first()
        return lambda: second(grads)

    def _backward_twice(self):
        first, second = self._orders()
        return lambda: second(first())

    def _orders(self):
        """A function that returns the gradients, and one that takes them and returns the gradients
        of their product with the tangents: with respect to the leaves and to grad_output."""
        leaves = tuple(leaves_of(self.inputs).values())
        grad_output = self.grad_output.detach().requires_grad_()
        output, tangents = self.function(**self.inputs), tuple(self.tangents.values())

        def first():
            return torch.autograd.grad(output, leaves, grad_output, create_graph=True)

        def second(grads):
            return torch.autograd.grad(grads, (*leaves, grad_output), tangents, retain_graph=True)

        return first, second

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

    def derivatives(self):
        """{"tangent": of the output, "second_query", ..., "second_grad_output"}; {} if the case
        has no tangents."""
        if not self.tangents:
            return {}
        torch.manual_seed(0)
        found = {"tangent": self.timed("jvp")()[1]}
        torch.manual_seed(0)
        names = (*leaves_of(self.inputs), "grad_output")
        seconds = self.timed("backward_twice")()
        return found | {f"second_{n}": x for n, x in zip(names, seconds, strict=True)}
