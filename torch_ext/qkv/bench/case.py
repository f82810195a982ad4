"""One entry made concrete: tensors, our call, and torch's."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import qkv


def leaves_of(inputs):
    """{name: tensor} of those that want a gradient."""
    return {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}


@dataclass(frozen=True)
class Call:
    """function(**inputs) returns the output, of grad_output's shape."""

    function: Callable[..., Tensor]
    inputs: dict
    grad_output: Tensor

    def timed(self, direction):
        """A function without arguments, made by the method of this name: "forward" or
        "backward"."""
        return getattr(self, direction)()

    def forward(self):
        """Records no gradients."""
        return torch.no_grad()(lambda: self.function(**self.inputs))

    def backward(self):
        """Of a forward pass that is made here."""
        output, leaves = self.function(**self.inputs), tuple(leaves_of(self.inputs).values())
        return lambda: torch.autograd.grad(output, leaves, self.grad_output, retain_graph=True)

    def output(self):
        """With the random numbers of derivatives()."""
        torch.manual_seed(0)
        return self.forward()()

    def derivatives(self):
        """{"grad_query", "grad_key", ...}: of all leaves."""
        names = leaves_of(self.inputs)
        if not names:
            return {}
        torch.manual_seed(0)
        return {f"grad_{n}": x for n, x in zip(names, self.backward()(), strict=True)}

    def mapped(self, change):
        """With change(name, x) in place of each input x and of grad_output. What was a leaf is one
        again."""

        def changed(name, x):
            found = change(name, x)
            return found.detach().requires_grad_() if name in leaves else found

        leaves = leaves_of(self.inputs)
        inputs = {name: changed(name, x) for name, x in self.inputs.items()}
        grad_output = change("grad_output", self.grad_output)
        return replace(self, inputs=inputs, grad_output=grad_output)


class Case:
    """inputs: {argument: value}; of `leaves` the gradients are wanted. A case can be pickled: it
    becomes its entry and dtype, from which another process draws the same numbers."""

    base: "Case | None" = None  # another, whose answers are checked too
    documents = ()  # (begin, end) of each of a packed batch; dense: none

    def __init__(self, entry, dtype):
        self.entry, self.dtype = entry, dtype
        self._random = torch.Generator().manual_seed(0)
        shape = entry.shape
        self.inputs = {
            "query": self._tensor(shape.heads, shape.seqlen_q, shape.head_dim),
            "key": self._tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim),
            "value": self._tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim_v),
        }
        for x in self.inputs.values():
            x.requires_grad_()
        self.inputs |= {"is_causal": shape.is_causal, "enable_gqa": shape.is_grouped}
        self.grad_output = self._tensor(shape.heads, shape.seqlen_q, shape.head_dim_v)

    def __reduce__(self) -> tuple:
        return type(self), (self.entry, self.dtype)

    def resized(self, seqlen):
        """The same case of so many queries and keys."""
        kind, (entry, *more) = self.__reduce__()
        shape = replace(entry.shape, seqlen_q=seqlen, seqlen_k=seqlen)
        return kind(replace(entry, shape=shape), *more)

    def randn(self, *sizes):
        return torch.randn(*sizes, dtype=self.dtype, generator=self._random)

    def _tensor(self, heads, seqlen, head_dim):
        return self.randn(self.entry.shape.batch, heads, seqlen, head_dim)

    @property
    def leaves(self):
        return tuple(leaves_of(self.inputs))

    def call(self, function):
        """Of the inputs as qkv.testing.attention takes them."""
        return Call(function, self.inputs, self.grad_output)

    @functools.cached_property
    def calls(self):
        """{"qkv": Call}"""
        return {"qkv": self.call(lambda **inputs: qkv.attention(**inputs))}

    @functools.cached_property
    def ways(self):
        """{name: Call}: torch's."""
        return {"SDPA": self.call(F.scaled_dot_product_attention)}

    def way(self, name):
        return self.ways[name]

    def timed(self, direction):
        """{"qkv": function to time, "torch": function}, and what the run says of torch's: {"way":
        its name}."""
        calls = {"qkv": self.calls["qkv"], "torch": self.ways["SDPA"]}
        return {name: call.timed(direction) for name, call in calls.items()}, {"way": "SDPA"}
