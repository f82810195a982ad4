"""One way to compute one case, in every direction that is measured."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkv.bench import case
from qkv.bench.case import leaves_of


class Unavailable(Exception):
    """Why one of torch's ways cannot be had, on this machine or for these inputs."""


@dataclass(frozen=True)
class Call(case.Call):
    """ours(x) brings the output or a gradient into the layout of the case, where that is another.
    more_inputs, forward only: others of the same sizes, which calls take in turn so as to find none
    in a CPU's cache. tangents: {leaf: the direction in which it moves}, for the derivatives of a
    second order and of forward mode; in double backward they are what the first gradients are
    multiplied with. refuses: {direction: why the call cannot be timed in it}."""

    ours: Callable[[Tensor], Tensor] = lambda x: x
    more_inputs: tuple = ()
    tangents: dict = field(default_factory=dict)
    refuses: dict = field(default_factory=dict)

    @classmethod
    def in_turn(cls, calls):
        """One call of many that differ in their inputs alone."""
        return replace(calls[0], more_inputs=tuple(call.inputs for call in calls[1:]))

    def forward(self):
        if not self.more_inputs:
            return super().forward()
        turns = itertools.cycle((self.inputs, *self.more_inputs))
        return torch.no_grad()(lambda: self.function(**next(turns)))

    def both(self):
        """A step of training."""
        leaves = tuple(leaves_of(self.inputs).values())
        return lambda: torch.autograd.grad(self.function(**self.inputs), leaves, self.grad_output)

    def jvp(self):
        """Records no gradients."""

        def moving(*leaves):
            return self.function(**self.inputs | dict(zip(self.tangents, leaves, strict=True)))

        leaves = tuple(self.inputs[name].detach() for name in self.tangents)
        tangents = tuple(self.tangents.values())
        return torch.no_grad()(lambda: torch.func.jvp(moving, leaves, tangents))

    def double_backward(self):
        """Of a first backward pass that is made here."""
        first, second = self._orders()
        grads = first()
        return lambda: second(grads)

    def backward_twice(self):
        """Both of these passes."""
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
        return self.ours(super().output())

    def derivatives(self):
        """The gradients, as the case has them; where there are tangents also {"tangent": of the
        output, "second_query", ..., "second_grad_output"}."""
        found = {name: self.ours(x) for name, x in super().derivatives().items()}
        if not self.tangents:
            return found
        torch.manual_seed(0)
        found["tangent"] = self.jvp()()[1]
        torch.manual_seed(0)
        names = (*leaves_of(self.inputs), "grad_output")
        seconds = self.backward_twice()()
        return found | {f"second_{n}": x for n, x in zip(names, seconds, strict=True)}

    def mapped(self, change):
        tangents = {name: change(name, x) for name, x in self.tangents.items()}
        return replace(super().mapped(change), tangents=tangents)


def on_math_path(function):
    """function with SDPA as matrix products and a softmax: of its paths on a CPU, the only one that
    torch can derive a second time, or in forward mode."""

    def on_math(**inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(**inputs)

    return on_math
