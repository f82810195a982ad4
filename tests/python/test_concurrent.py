"""Several Python threads, each with forward and backward passes of its own, at the same time: the
bits that each gets alone."""

import concurrent.futures
import random
import threading

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest

import qkv

pytestmark = pytest.mark.usefixtures("isa")

LSE = AuxRequest(lse=True)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def leaf(generator, dtype, *shape):
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def soft(generator, dtype):
    q, k, v = (leaf(generator, dtype, 2, h, n, 24) for h, n in [(4, 70), (2, 90), (2, 90)])
    mask, sinks = leaf(generator, dtype, 4, 70, 90), leaf(generator, torch.float32, 4)

    def call(query, key, value, mask, sinks):
        options = {"is_causal": True, "enable_gqa": True, "sinks": sinks, "return_lse": True}
        return qkv.attention(query, key, value, mask, **options)

    return call, (q, k, v, mask, sinks)


def decode(generator, dtype):
    """A call whose keys are split over the threads, and the parts merged."""
    inputs = [leaf(generator, dtype, 1, 4, n, 64) for n in (1, 1500, 1500)]
    return lambda *x: qkv.attention(*x, window_size=(1200, 0), return_lse=True), inputs


def masked_nan(generator, dtype):
    """A call with masked NaN, whose products leave out hidden keys."""
    inputs = [leaf(generator, dtype, 1, 2, 40, 16) for _ in range(3)]
    inputs[1].data[..., 30:, :] = float("nan")
    mask = torch.arange(40) < 30
    return lambda *x: qkv.attention(*x, mask, return_lse=True), inputs


def weights(generator, dtype):
    inputs = [leaf(generator, dtype, 2, 3, n, 16) for n in (50, 60)]
    return lambda *x: (qkv.attention_weights(*x, reduce="heads", softcap=3.0),), inputs


def hard(generator, dtype):
    inputs = [leaf(generator, dtype, 2, 3, n, 16) for n in (50, 60, 60)]
    return lambda *x: (qkv.hard_attention(*x, straight_through=True),), inputs


def packed(generator, dtype):
    inputs = [leaf(generator, dtype, 120, 2, 16) for _ in range(3)]
    ends = torch.tensor([0, 70, 71, 120])
    return lambda *x: qkv.varlen_attn(*x, ends, None, 70, 70, return_aux=LSE), inputs


def results_of(work):
    """The results of the call, and every gradient."""
    call, inputs = work
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = call(*inputs)
    seeds = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, inputs, seeds)]


def bits(x):
    return x.detach().contiguous().view(torch.uint8)


def run_together(threads, turns):
    works = [
        make(torch.Generator().manual_seed(n), dtype)
        for n, dtype in enumerate(DTYPES)
        for make in (soft, decode, masked_nan, weights, hard, packed)
    ]
    expected = [results_of(work) for work in works]
    start = threading.Barrier(threads)

    def caller(number):
        order = random.Random(number)
        start.wait(timeout=60)
        for _ in range(turns):
            n = order.randrange(len(works))
            for x, y in zip(results_of(works[n]), expected[n], strict=True):
                assert torch.equal(bits(x), bits(y)), f"turn {n} of thread {number}"
        return turns

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(caller, range(threads), timeout=1200))
    assert done == [turns] * threads


@pytest.mark.bf16
def test_a_few():
    run_together(threads=3, turns=15)


@pytest.mark.bf16
@pytest.mark.long
@pytest.mark.parametrize("threads", [2, 8])
def test_many(threads):
    run_together(threads, turns=400)
