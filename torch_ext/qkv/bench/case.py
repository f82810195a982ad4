"""One entry made concrete: tensors, our call, torch's calls, and what our time is compared with."""

import functools
import itertools

import torch

import qkv

from .call import Call, leaves_of


class Case:
    """inputs: {argument: value}; of `leaves` the gradients are wanted. calls: {"qkv": Call}, and
    "base" where the entry has one. ways: torch's."""

    def __init__(self, entry, dtype):
        self.entry = entry
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
            "query": tensor(shape.heads, shape.seqlen_q, shape.head_dim).requires_grad_(),
            "key": tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim).requires_grad_(),
            "value": tensor(shape.kv_heads, shape.seqlen_k, shape.head_dim_v).requires_grad_(),
        }
        self.grad_output = tensor(shape.heads, shape.seqlen_q, shape.head_dim_v)
        self.inputs |= how.arguments(shape, randn)
        self.inputs |= {"is_causal": shape.is_causal, "enable_gqa": shape.is_grouped}
        if self.documents:
            self.inputs["cu_seq_q"] = torch.tensor(ends, dtype=torch.int32)
        self.leaves = tuple(leaves_of(self.inputs))
        ours = packed if self.documents else attention
        self.calls = {"qkv": Call(ours, self.inputs, self.grad_output)}
        self.base = Case(entry.base, dtype) if entry.base else None
        if self.base:
            self.calls["base"] = self.base.calls["qkv"]

    @functools.cached_property
    def ways(self):
        """{name: Call}: torch's."""
        ways = self.entry.how.ways
        return {name: way(self.inputs, self.grad_output) for name, way in ways.items()}


def attention(**inputs):
    return qkv.attention(**inputs)


def packed(is_causal, cu_seq_q, **inputs):
    longest = cu_seq_q.diff().max().item()
    window = (-1, 0) if is_causal else (-1, -1)
    return qkv.varlen_attn(
        **inputs, cu_seq_q=cu_seq_q, cu_seq_k=None, max_q=longest, max_k=longest, window_size=window
    )
