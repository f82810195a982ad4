"""qkv.convert of layers with random code: what they give is what it was before."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_layers import RandomAttention, inputs, layers
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import qkv
from qkv._conversion import scores

MODES = {
    "gradients": torch.enable_grad, "parameters": torch.enable_grad, "none": torch.no_grad,
    "inference": torch.inference_mode,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def numbers():
    """Those in a layer's text are float64, too. A layer whose first call comes to something else
    would be left, so that the rest of the test held nothing."""
    is_close = scores._is_close

    def held(found, expected):
        assert is_close(found, expected)
        return True

    torch.set_default_dtype(torch.float64)
    scores._is_close = held
    yield
    scores._is_close = is_close
    torch.set_default_dtype(torch.float32)


def results(layer, arguments, mode):
    """Outputs, query, key and value after the call, and gradients."""
    arguments = [x.clone() for x in arguments]
    if mode == "gradients":
        arguments = [x.requires_grad_(n < 3) for n, x in enumerate(arguments)]
    with MODES[mode]():
        outputs = [x + 0 for x in tree_leaves(layer(*arguments))]
    known = [x.detach().clone() for x in (*outputs, *arguments[:3])]
    losses = [(x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in outputs]
    leaves = [x for x in (*arguments, *layer.parameters()) if x.requires_grad]
    losses = [x for x in losses if x.requires_grad]
    if not losses or not leaves:
        return known
    found = torch.autograd.grad(losses, leaves, allow_unused=True, materialize_grads=True)
    return [*known, *found]


def assert_same_where_finite(found, expected):
    """Each by its own size, where the layer itself has a number."""
    known = expected.isfinite()
    size = expected[known].abs().max().item() if known.any() else 0.0
    assert found.shape == expected.shape
    assert_close(found[known], expected[known], rtol=0, atol=1e-6 * (size + 1e-3))


@pytest.mark.parametrize("sizes", [(1, 5, 6), (2, 4, 6), (2, 1, 4), (1, 5, 1), (3, 5, 5)], ids=str)
@settings(max_examples=4 * settings().max_examples)  # a layer takes milliseconds
@given(layers(), st.lists(st.sampled_from([*MODES]), min_size=1, max_size=3), st.integers(0, 2**31))
def test_layers_give_what_they_gave(sizes, lines, modes, seed):
    """sizes: B, L and S."""
    plain, generator = RandomAttention(lines, *sizes[1:]), torch.Generator().manual_seed(seed)
    converted = copy.deepcopy(plain)
    for n, mode in enumerate(modes):
        arguments = inputs(generator, *sizes)
        try:
            expected = results(plain, arguments, mode)
        except RuntimeError:  # torch refuses what this layer does
            assume(False)
        if not n:
            qkv.convert(converted)
        found = results(converted, arguments, mode)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_where_finite(ours, theirs)
