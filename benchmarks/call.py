"""One way to compute one case, in every direction that is measured."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def leaves_of(inputs):
    """{name: tensor} of those that want a gradient."""
    return {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


class Unavailable(Exception):
    """Why one of torch's ways cannot be had, on this machine or for these inputs."""


@dataclass(frozen=True)
class Call:
    """function(**inputs) returns the output, of grad_output's shape, and may have it in another
    layout than the case: ours(x) brings the output or a gradient into that of the case.
    more_inputs, forward only: others of the same sizes, which calls take in turn so as to find none
    in a CPU's cache. tangents: {leaf: the direction in which it moves}, for the derivatives of a
    second order and of forward mode; in double backward they are what the first gradients are
    multiplied with. refuses: {direction: why the call cannot be timed in it}."""

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
        """A function without arguments, made by the method of this name: "forward", "backward" or
        another of those below."""
        return getattr(self, direction)()

    def forward(self):
        """Records no gradients."""
        turns = itertools.cycle((self.inputs, *self.more_inputs))
        return torch.no_grad()(lambda: self.function(**next(turns)))

    def backward(self):
        """Of a forward pass that is made here."""
        output, leaves = self.function(**self.inputs), tuple(leaves_of(self.inputs).values())
        return lambda: torch.autograd.grad(output, leaves, self.grad_output, retain_graph=True)

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
        """With the random numbers of derivatives()."""
        torch.manual_seed(0)
        return self.ours(self.forward()())

    def derivatives(self):
        """The gradients, as the case has them; where there are tangents also {"tangent": of the
        output, "second_query", ..., "second_grad_output"}."""
        leaves, found = leaves_of(self.inputs), {}
        if leaves:
            torch.manual_seed(0)
            grads = zip(leaves, self.backward()(), strict=True)
            found = {f"grad_{name}": self.ours(x) for name, x in grads}
        if not self.tangents:
            return found
        torch.manual_seed(0)
        found["tangent"] = self.jvp()()[1]
        torch.manual_seed(0)
        names = (*leaves, "grad_output")
        seconds = self.backward_twice()()
        return found | {f"second_{n}": x for n, x in zip(names, seconds, strict=True)}

    def mapped(self, change):
        """With change(name, x) in place of each input x, of its tangent and of grad_output. What
        was a leaf is one again."""

        def changed(name, x):
            found = change(name, x)
            return found.detach().requires_grad_() if name in leaves else found

        leaves = leaves_of(self.inputs)
        return replace(
            self,
            inputs={name: changed(name, x) for name, x in self.inputs.items()},
            grad_output=change("grad_output", self.grad_output),
            tangents={name: change(name, x) for name, x in self.tangents.items()},
        )


def on_math_path(function):
    """function with SDPA as matrix products and a softmax: of its paths on a CPU, the only one that
    torch can derive a second time, or in forward mode."""

    def on_math(**inputs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(**inputs)

    return on_math
