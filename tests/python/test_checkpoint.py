"""Activation checkpointing: what is computed again, what is kept, and that dropout keeps the same
weights both times."""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import qkv

FORWARD, BACKWARD = (
    torch.ops.qkv.attention_forward.default,
    torch.ops.qkv.attention_backward.default,
)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [func] if func in (FORWARD, BACKWARD) else []
        return func(*args, **(kwargs or {}))


def block(query, key, value):
    return qkv.attention(query.sin(), key, value, dropout_p=0.4, is_causal=True).cos()


def make():
    return [torch.randn(2, 3, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def check(**options):
    """The gradients of a checkpointed block are the block's. Returns the calls of the backward
    pass."""
    inputs, results = make(), []
    for f in (block, partial(checkpoint, block, **options)):
        torch.manual_seed(3)
        output = f(*inputs)
        with Calls() as calls:
            results.append([output.detach(), *torch.autograd.grad(output.sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    return calls.seen


def test_all_is_computed_again():
    assert check(use_reentrant=False) == [FORWARD, BACKWARD]


def test_reentrant():
    inputs = make()
    grads = []
    for f in (block, partial(checkpoint, block, use_reentrant=True)):
        torch.manual_seed(3)
        f(*inputs).sum().backward()
        grads.append([x.grad for x in inputs])
        for x in inputs:
            x.grad = None
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("policy, calls", [
    (CheckpointPolicy.MUST_SAVE, [BACKWARD]),
    (CheckpointPolicy.MUST_RECOMPUTE, [FORWARD, BACKWARD]),
])  # fmt: skip
def test_selective(policy, calls):
    """A policy sees attention_forward, and can keep its results."""

    def choose(context, op, *args, **kwargs):
        return policy if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    assert check(use_reentrant=False, context_fn=contexts) == calls


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("keeps", [True, False])
def test_selective_and_compiled(keeps):
    torch.compiler.reset()
    graphs = []

    def see(graph, inputs):
        graphs.append([n.target for n in graph.graph.nodes if n.target in (FORWARD, BACKWARD)])
        return graph.forward

    op = FORWARD if keeps else torch.ops.aten.sin.default
    contexts = partial(create_selective_checkpoint_contexts, [op])
    backend = aot_autograd(
        fw_compiler=see, bw_compiler=see, partition_fn=min_cut_rematerialization_partition
    )
    f = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    torch.compile(f, backend=backend, fullgraph=True)(*make()).sum().backward()
    assert graphs == [[FORWARD], [BACKWARD] if keeps else [FORWARD, BACKWARD]]
