"""One entry made concrete: tensors, our call, torch's calls, and what our time is compared with."""

import functools
import itertools
import math
from dataclasses import replace

import torch

from .call import Call, Unavailable, leaves_of
from .machine import uncached_bytes
from .ways import on_math_path

MOST_COPIES = 64


class Case:
    """inputs: {argument: value}; of `leaves` the gradients are wanted. calls: {"qkv": Call}, and
    "base" where the entry has one. ways: torch's. with_tangents: there are tangents of the leaves
    too, and torch's ways take the path that has derivatives in forward mode and of second order."""

    def __init__(self, entry, dtype, with_gradients=True, with_tangents=False):
        self.entry, self.dtype = entry, dtype
        shape, how = entry.shape, entry.how
        random = torch.Generator().manual_seed(0)

        def randn(*sizes):
            return torch.randn(*sizes, dtype=dtype, generator=random)

        def tensor(heads, seqlen, head_dim):
            if self.documents:
                return randn(self.documents[-1][1], heads, head_dim)
            return randn(shape.batch, heads, seqlen, head_dim)

        ends = list(itertools.accumulate(how.lengths(shape), initial=0)) if how.lengths else []
        self.documents = list(itertools.pairwise(ends))  # (begin, end) of each; dense: none
        self.inputs = {
            "query": tensor(shape.heads, shape.seqlen_q, shape.head_dim),
            "key": tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim),
            "value": tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim_v),
        }
        for x in self.inputs.values():
            x.requires_grad_(with_gradients and not how.is_cold)
        self.grad_output = tensor(shape.heads, shape.seqlen_q, shape.head_dim_v)
        self.inputs |= how.arguments(shape, randn)
        self.inputs |= {"is_causal": shape.is_causal, "enable_gqa": shape.is_grouped}
        if self.documents:
            self.inputs["cu_seq_q"] = torch.tensor(ends, dtype=torch.int32)
        self.leaves = tuple(leaves_of(self.inputs))
        moving = self.leaves if with_tangents else ()
        self.tangents = {name: randn(*self.inputs[name].shape) for name in moving}
        self.turns = copies(how.prepare(self.inputs), how.is_cold)
        self.calls = {"qkv": self._call(lambda *x: Call(how.call, *x))}
        self.base = Case(entry.base, dtype, with_gradients, with_tangents) if entry.base else None
        if self.base:
            self.calls["base"] = self.base.calls["qkv"]

    def _call(self, way):
        call = Call.in_turn([way(inputs, self.grad_output) for inputs in self.turns])
        return replace(call, tangents=self.tangents)

    def way(self, name):
        """One of torch's, as a Call. Raises Unavailable."""
        call = self._call(self.entry.how.ways[name])
        if not self.tangents:
            return call
        if "jvp" in call.refuses:
            raise Unavailable(call.refuses["jvp"])
        return replace(call, function=on_math_path(call.function))

    @property
    def ways(self):
        """{name: Call}: torch's, but for those in `unavailable`."""
        return self._every_way[0]

    @property
    def unavailable(self):
        """{name: why torch's way cannot be had}"""
        return self._every_way[1]

    @functools.cached_property
    def _every_way(self):
        ways, unavailable = {}, {}
        for name in self.entry.how.ways:
            try:
                ways[name] = self.way(name)
            except Unavailable as why:
                unavailable[name] = str(why)
        return ways, unavailable

    def ways_in(self, direction):
        """{name: Call} of torch's ways that can be timed in that direction, and {name: why not} of
        all others."""
        refused = {n: c.refuses[direction] for n, c in self.ways.items() if direction in c.refuses}
        able = {name: call for name, call in self.ways.items() if name not in refused}
        return able, self.unavailable | refused


def copies(inputs, is_cold):
    """[inputs]; if they shall not be found in a CPU's cache, as many copies of the keys and values
    as no cache holds."""
    caches = [name for name in ("key", "value") if is_cold]
    size = sum(inputs[name].nbytes for name in caches)
    number = min(MOST_COPIES, math.ceil(uncached_bytes() / size)) if caches else 1
    more = [inputs | {name: inputs[name].clone() for name in caches} for _ in range(number - 1)]
    return [inputs, *more]
