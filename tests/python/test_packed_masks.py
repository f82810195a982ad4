"""Gradients of biases that the documents of a packed batch share, or have one each, held against
float64: documents without keys or queries in every place, one thread and several."""

import itertools

import pytest
import torch

import qkv

HEADS, DIM = 4, 8


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def attend_one_by_one(query, key, value, cu_seq_q, cu_seq_k, bias):
    """The formula, document by document; bias is [N or 1, H or 1, L or 1, S or 1]."""
    outputs = []
    for n in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[n] : cu_seq_q[n + 1]]
        k, v = (x[cu_seq_k[n] : cu_seq_k[n + 1]] for x in (key, value))
        if not len(k):
            outputs.append(0 * q)
            continue
        scores = torch.einsum("lhd,shd->hls", q, k) / DIM**0.5
        own = bias[min(n, len(bias) - 1)]
        rows, columns = (min(x, y) for x, y in zip(own.shape[1:], scores.shape[1:], strict=True))
        weights = (scores + own[:, :rows, :columns]).softmax(-1)
        outputs.append(torch.einsum("hls,shd->lhd", weights, v))
    return torch.cat(outputs)


def check(q_lengths, k_lengths, shape, threads):
    """Gradients of query, key, value and bias, each by its own size."""
    torch.manual_seed(0)
    cu_seq_q, cu_seq_k = cumulative(q_lengths), cumulative(k_lengths)
    inputs = [torch.randn(int(cu[-1]), HEADS, DIM) for cu in (cu_seq_q, cu_seq_k, cu_seq_k)]
    inputs.append(torch.randn(shape))
    grad = torch.randn_like(inputs[0])
    true = [x.double().requires_grad_() for x in inputs]
    output = attend_one_by_one(*true[:3], cu_seq_q, cu_seq_k, true[3])
    truths = torch.autograd.grad(output, true, grad.double())
    found = []
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            ours = [x.clone().requires_grad_() for x in inputs]
            longest = max(q_lengths), max(k_lengths)
            output = qkv.varlen_attn(*ours[:3], cu_seq_q, cu_seq_k, *longest, bias=ours[3])
            found.append(torch.autograd.grad(output, ours, grad))
    finally:
        torch.set_num_threads(before)
    for name, truth, *of_threads in zip(
        ("query", "key", "value", "bias"), truths, *found, strict=True
    ):
        # 1e-5 is some hundred roundings; the gradient of a bias that all keys share is 0, and the 1
        # is what its terms come to. A share that is lost or counted twice is off by as much.
        size = truth.abs().max() + 1
        for gradient in of_threads:
            assert (gradient.double() - truth).abs().max() < 1e-5 * size, name
            assert torch.equal(gradient, of_threads[0]), f"{name}, by other threads"


LENGTHS = ([(3, 0), (5, 5), (6, 6)], [(3, 4), (0, 5), (0, 0), (6, 2)], [(2, 7), (7, 2), (2, 7)])
SHAPES = [
    (n, h, rows, columns)
    for n, h, rows, columns in itertools.product((0, 1), (HEADS, 1), (7, 1), (7, 1))
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_empty_documents_in_every_place(isa, lengths, shape):
    for order in set(itertools.permutations(lengths)):
        documents = shape[0] or len(order)
        check(*zip(*order, strict=True), (documents, *shape[1:]), (1,))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_long_documents_on_several_threads(isa, heads, place):
    q_lengths, k_lengths = [512, 512], [512, 512]
    q_lengths.insert(place, 3), k_lengths.insert(place, 0)
    check(q_lengths, k_lengths, (1, heads, 512, 512), (1, 2, 3, 7))


def test_memory_goes_with_the_documents():
    """2048 documents and one number a head: the gradient takes some numbers a query, not one for
    each document and query, which would be a gigabyte."""
    lengths = [16] * 2048
    cu_seq, rows = cumulative(lengths), sum(lengths)
    q, k, v = (torch.randn(rows, HEADS, DIM, requires_grad=True) for _ in range(3))
    bias = torch.zeros(HEADS, 1, 1, requires_grad=True)
    output = qkv.varlen_attn(q, k, v, cu_seq, cu_seq, 16, 16, bias=bias)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(output.sum(), bias)
    taken = [e.self_cpu_memory_usage for e in profile.events()]
    assert max(taken) < 64 * rows * HEADS
