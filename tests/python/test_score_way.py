"""Scores are made in several ways, each with its own last digits: few rows or tiles, elements or
pairs. With scores of 1e6 a pass that makes them in another way than the pass that left the
log-sum-exp gets weights that have nothing to do with 1."""

import pytest
import torch

import qkv

# f32 scores of 1e6 are whole numbers of sixteenths, and an lse is rounded to one: a row's weights
# add up to 1 but for that.
ROUNDED = 0.04


def make(dtype=torch.float32, rows=8):
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, n, 64) * 1000 for n in (rows, 64))
    return [x.to(dtype).requires_grad_() for x in (q, k, torch.randn(1, 2, 64, 64))]


def weights_from(output, value):
    """What the weights of a row add up to, on average, by the gradient of the value."""
    (gradient,) = torch.autograd.grad(output.sum(), value)
    return gradient.double().sum((-1, -2)) / output.shape[-1] / output.shape[-2]


def assert_ones(sums):
    assert (sums - 1).abs().max() < ROUNDED, sums


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_sums_over_queries(isa, rows):
    with torch.no_grad():
        q, k, v = make(rows=rows)
        assert_ones(qkv.attention_with_weights(q, k, v, reduce="queries")[1].sum(-1) / rows)
        assert_ones(qkv.attention_weights(q, k, reduce="queries").sum(-1) / rows)


@pytest.mark.bf16
@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_jvp(isa, dtype, rows):
    q, k, v = make(dtype, rows)
    output = qkv.attention_jvp(q, k, v, query_tangent=torch.zeros_like(q))[0]
    assert_ones(weights_from(output, v))


@pytest.mark.bf16
@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives(isa, dtype, rows):
    """The derivative of grad_value in direction of grad_output is the weights'."""
    q, k, v = make(dtype, rows)
    g = torch.ones(1, 2, rows, 64, dtype=dtype, requires_grad=True)
    output = qkv.attention(q, k, v)
    (gradient,) = torch.autograd.grad(output, v, g, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), g)
    # Every column of grad_value has the weights' sum over the queries, of which each adds up to 1.
    assert (second.double() - 1).abs().max() < ROUNDED


@pytest.mark.bf16
@pytest.mark.parametrize("rows", [8, 20])
@pytest.mark.parametrize("forward, backward", [("native", "float32"), ("float32", "native")])
def test_settings_that_change_before_the_backward_pass(isa, rows, forward, backward):
    q, k, v = make(torch.bfloat16, rows)
    before = qkv.active_half_products()
    try:
        qkv.set_half_products(forward)
        output = qkv.attention(q, k, v)
        expected = weights_from(qkv.attention(q, k, v), v)
        qkv.set_half_products(backward)
        assert torch.equal(weights_from(output, v), expected)
    finally:
        qkv.set_half_products(before)


def test_a_way_that_is_none():
    q, k, v = make()
    ops = torch.ops.qkv
    with pytest.raises(ValueError, match="scores is 'rows', but None, 'elements', 'pairs', 't"):
        ops.attention_forward(
            q, k, v, *[None] * 9, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
            window_size=None, softcap=0.0, scores="rows",
        )  # fmt: skip
