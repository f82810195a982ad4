"""torch.profiler shows every operator by its name, with the shapes of its arguments."""

import pytest
import samples
import torch
from torch.profiler import ProfilerActivity, profile

import qkv


def seen(f):
    """{name: the shapes of its arguments} of the operators and Nodes that f runs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        f()
    return {event.name: event.input_shapes for event in profiler.events()}


@pytest.mark.parametrize("name", samples.names())
def test_names_and_shapes(name):
    for call in samples.calls(name):
        shapes = seen(lambda c=call: samples.operator(name)(**c))[f"qkv::{name}"]
        for argument, shape in zip(samples.arguments(name), shapes, strict=True):
            x = call.get(argument)
            # The profiler gives no shapes of lists of tensors, which merge takes.
            assert shape == ([*x.shape] if isinstance(x, torch.Tensor) else []), argument


def test_forward_and_backward_of_a_call():
    """Small calls skip the dispatcher, but not while somebody profiles them."""
    inputs = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    found = seen(lambda: qkv.attention(*inputs).sum().backward())
    for name in ("qkv::attention", "qkv::attention_forward"):
        assert found[name][:3] == [[1, 2, 5, 8]] * 3
    assert found["qkv::attention_backward"][0] == [1, 2, 5, 8]  # grad_output
    assert found["AttentionBackward"][0] == [1, 2, 5, 8]
