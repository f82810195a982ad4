"""`shard` of the low-level operators under transforms and compilers, and what it may not be."""

import pytest
import torch
from common import NO_OPTIONS
from test_varlen import cumulative
from torch.func import vmap

L, S = 12, 10
FORWARD = torch.ops.qkv.attention_forward
WHOLE = (4, 3, 30, 40, 2, 8, 5)


def tensors(batch=2, heads=3):
    return torch.randn(batch, heads, L, 4), torch.randn(batch, heads, S, 4)


def call(query, key, shard=WHOLE, **options):
    seed = torch.tensor([1])
    return FORWARD(query, key, key, **NO_OPTIONS | {"dropout_seed": seed} | options, shard=shard)


@pytest.mark.parametrize(
    "shard, message",
    {
        (0, 0, 12): "shard is \\[0, 0, 12\\], but seven numbers",
        (-1, 0, 30, 40, 0, 3, 0): "shard is \\[-1, 0, .*numbers from 0",
        (0, 0, 30, 2**41, 0, 3, 0): "shard is .*numbers from 0 to",
        (19, 0, 30, 40, 0, 3, 0): "shard has 12 queries from number 19 on, of 30",
        (0, 31, 30, 40, 0, 3, 0): "shard has 10 keys from number 31 on, of 40",
        (0, 0, 30, 40, 1, 3, 0): "shard has 3 heads from number 1 on, of 3",
        (1, 0, 0, 0, 0, 0, 0): "shard has 12 queries from number 1 on, of 0",
    }.items(),
)
def test_errors(shard, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(*tensors(), shard=shard)


def test_packed_documents_are_whole():
    query, key = torch.randn(L, 2, 4), torch.randn(S, 2, 4)
    ends = {"cu_seq_q": cumulative([5, 7]), "cu_seq_k": cumulative([4, 6])}
    with pytest.raises(ValueError, match="the documents of a packed call are whole"):
        call(query, key, shard=(1, 0, 30, 0, 0, 0, 0), **ends)
    # But they may be some of the documents of a larger call, and some of its heads.
    options = {"dropout_p": 0.5}
    query, key = torch.randn(L, 4, 4), torch.randn(S, 4, 4)
    output, _ = call(query, key, None, **ends, **options)
    ends = {"cu_seq_q": cumulative([7]), "cu_seq_k": cumulative([6])}
    part, _ = call(query[5:, 1:3], key[4:, 1:3], (0, 0, 0, 0, 1, 4, 1), **ends, **options)
    torch.testing.assert_close(part, output[5:, 1:3])


def test_zeros_are_the_whole():
    query, key = tensors()
    options = {"is_causal": True, "dropout_p": 0.3, "window_size": (3, 2)}
    found = call(query, key, (0,) * 7, **options)
    torch.testing.assert_close(found, call(query, key, None, **options), rtol=0, atol=0)


def test_vmap_numbers_the_items_of_each_part():
    query, key = torch.randn(3, 2, 3, L, 4), torch.randn(3, 2, 3, S, 4)
    options = {"is_causal": True, "dropout_p": 0.3}
    found = vmap(lambda q, k: call(q, k, **options), randomness="same")(query, key)
    one_by_one = [call(q, k, **options) for q, k in zip(query, key, strict=True)]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*one_by_one, strict=True))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def loss(query, key, first):
        shard = (first, 3, 30, 40, 2, 8, 5)
        return call(query, key, shard, is_causal=True, window_size=(4, -1))[0].sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for first in (4, 7):
        query, key = (x.requires_grad_() for x in tensors())
        expected = torch.autograd.grad(loss(query, key, first), (query, key))
        found = torch.autograd.grad(compiled(query, key, first), (query, key))
        torch.testing.assert_close(found, expected)


def test_compiled_autograd():
    query, key = (x.requires_grad_() for x in tensors())
    expected = torch.autograd.grad(call(query, key, is_causal=True)[0].sum(), (query, key))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        call(query, key, is_causal=True)[0].sum().backward()
    torch.testing.assert_close((query.grad, key.grad), expected)


def test_no_third_derivatives():
    query, key = (x.double().requires_grad_() for x in tensors())
    loss = call(query, key, is_causal=True)[0].sin().sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, query, create_graph=True)
        loss = gradient.sin().sum()
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(loss, query)
