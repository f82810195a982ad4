"""One entry made concrete: tensors, our call, torch's calls, and what our time is compared with."""

import functools
import itertools
import math
import timeit
from dataclasses import replace

import torch

import qkv
from qkv.bench.measure import warm_up

from .call import Call, Unavailable, leaves_of, on_math_path
from .entry import PLAIN_PASS

MOST_COPIES = 64
NO_OPTIONS = ("cu_seq_q", "seqlen_k")  # of a call on documents, or on a cache


class Case:
    """inputs: {argument: value}. documents: (begin, end) of each of a packed batch; dense: none.
    base: another case, whose answers are checked too, or None. A case can be pickled: it becomes
    what it was made of, from which another process draws the same numbers.

    with_tangents: there are tangents of the leaves too, and torch's ways take the path that has
    derivatives in forward mode and of second order."""

    def __init__(self, entry, dtype, with_gradients=True, with_tangents=False):
        how, self._with = entry.how, (with_gradients, with_tangents)
        lengths = how.lengths(entry.shape) if how.lengths else []
        ends = list(itertools.accumulate(lengths, initial=0))
        self.documents = list(itertools.pairwise(ends))
        self.entry, self.dtype, shape = entry, dtype, entry.shape
        self._random = torch.Generator().manual_seed(0)
        self.inputs = {
            "query": self._tensor(shape.heads, shape.seqlen_q, shape.head_dim),
            "key": self._tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim),
            "value": self._tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim_v),
        }
        for x in self.inputs.values():
            x.requires_grad_(with_gradients and not how.is_cold)
        self.grad_output = self._tensor(shape.heads, shape.seqlen_q, shape.head_dim_v)
        self.inputs |= {"is_causal": shape.is_causal, "enable_gqa": shape.is_grouped}
        self.inputs |= how.arguments(shape, self.randn)
        if self.documents:
            self.inputs["cu_seq_q"] = torch.tensor(ends, dtype=torch.int32)
        moving = self.leaves if with_tangents else ()
        self.tangents = {name: self.randn(*self.inputs[name].shape) for name in moving}
        self.turns = copies(how.prepare(self.inputs), how.is_cold)
        self.base = Case(entry.base, dtype, *self._with) if entry.base else None

    def __reduce__(self):
        return type(self), (self.entry, self.dtype, *self._with)

    def resized(self, seqlen):
        """The same case of so many queries and keys."""
        shape = replace(self.entry.shape, seqlen_q=seqlen, seqlen_k=seqlen)
        return Case(replace(self.entry, shape=shape), self.dtype, *self._with)

    def randn(self, *sizes):
        return torch.randn(*sizes, dtype=self.dtype, generator=self._random)

    def _tensor(self, heads, seqlen, head_dim):
        if self.documents:
            return self.randn(self.documents[-1][1], heads, head_dim)
        return self.randn(self.entry.shape.batch, heads, seqlen, head_dim)

    @property
    def leaves(self):
        """The inputs of which the gradients are wanted."""
        return tuple(leaves_of(self.inputs))

    def call(self, function):
        """Of the inputs as qkv.testing.attention takes them."""
        inputs = {name: x for name, x in self.inputs.items() if name not in NO_OPTIONS}
        return Call(function, inputs, self.grad_output, tangents=self.tangents)

    @functools.cached_property
    def calls(self):
        """{"qkv": Call}, and "base" where the entry has one."""
        found = {"qkv": self._in_turn(lambda *x: Call(self.entry.how.call, *x))}
        return found | ({"base": self.base.calls["qkv"]} if self.base else {})

    def _in_turn(self, way):
        call = Call.in_turn([way(inputs, self.grad_output) for inputs in self.turns])
        return replace(call, tangents=self.tangents)

    def way(self, name):
        """One of torch's, as a Call. Raises Unavailable."""
        call = self._in_turn(self.entry.how.ways[name])
        if not self.tangents:
            return call
        if "jvp" in call.refuses:
            raise Unavailable(call.refuses["jvp"])
        return replace(call, function=on_math_path(call.function))

    @functools.cached_property
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

    def timed(self, direction):
        """Ours, torch's fastest and our own without the option, and {"way": the fastest, "tried_s":
        seconds of all, where there are several, "skipped": {way: why it took no part}}."""
        ways, skipped = self.ways_in(direction)
        way, tried_s = fastest_way(ways, direction)
        calls = {name: call.timed(direction) for name, call in self.calls.items()}
        if direction in PLAIN_PASS:
            calls["base"] = self.calls["qkv"].timed(PLAIN_PASS[direction])
        if way:
            calls["torch"] = ways[way].timed(direction)
        return calls, {"way": way, "tried_s": tried_s, "skipped": skipped}


def fastest_way(ways, direction):
    """Its name, or None, and {way: seconds} where there are several, each tried a few times."""
    if len(ways) < 2:
        return next(iter(ways), None), {}
    seconds = {n: warm_up(timeit.Timer(call.timed(direction))) for n, call in ways.items()}
    return min(seconds, key=lambda name: seconds[name]), seconds


def uncached_bytes():
    """So much that no cache of this machine holds a useful part of it."""
    return torch.ops.qkv._probe_uncached_bytes()


def copies(inputs, is_cold):
    """[inputs]; if they shall not be found in a CPU's cache, as many of them as no cache holds,
    whose keys and values lie where new_cache puts them, for torch's ways, too."""
    if not is_cold:
        return [inputs]
    caches = {name: inputs[name] for name in ("key", "value")}
    number = math.ceil(uncached_bytes() / sum(x.nbytes for x in caches.values()))
    return [
        inputs | {n: qkv.new_cache(x.shape, dtype=x.dtype).copy_(x) for n, x in caches.items()}
        for _ in range(min(MOST_COPIES, number))
    ]
