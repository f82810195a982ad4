"""window_size: FlashAttention's definition, together with is_causal, and nothing outside leaks."""

import pytest
import torch
from common import INF, attend, dtypes_of, fused, reference
from gradients import gradients
from rounding import assert_within_rounding, magnitudes
from torch.autograd import gradcheck

import qkv

pytestmark = pytest.mark.usefixtures("isa")
SIDES = [(-1, -1), (0, 0), (3, 0), (0, 3), (-1, 2), (2, -1), (5, 70), (40, 40), (2**40, 1)]
SIZES = [(50, 50), (30, 71), (71, 30), (1, 90), (90, 1), (200, 200), (3, 3)]


def make(L, S, D=8, batch=(1, 2), dtype=torch.float64):
    return [torch.randn(*batch, n, D, dtype=dtype) for n in (L, S, S)]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sides", [(30, 0), (200, 90)])
def test_time_goes_with_the_window(sides):
    """2^34 keys, one row of memory, of which a window shows few: forward, backward, a tangent, and
    second derivatives look at these, and give what near keys would."""
    query = torch.randn(1, 2, 300, 8, requires_grad=True)
    key, value = torch.randn(2, 1, 2, 1, 8)
    sinks = torch.randn(2, dtype=torch.float64)
    tangent = torch.randn_like(query)
    found = []
    for S in (2**34, 700):
        keys, values = (x.expand(1, 2, S, 8) for x in (key, value))
        options = {"window_size": sides, "sinks": sinks}
        f = lambda q: qkv.attention(q, keys, values, **options)  # noqa: E731, B023
        (grad,) = torch.autograd.grad(f(query), query, tangent, create_graph=True)
        (second,) = torch.autograd.grad(grad, query, tangent)
        found.append([f(query), grad, second, torch.func.jvp(f, (query,), (tangent,))[1]])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert all(x.abs().max() > 1e-3 for x in found[0])


def flash_attention_window(L, S, left, right):
    """In the words of flash_attn_func: query i attends to keys between
    [i + seqlen_k - seqlen_q - window_size[0], i + seqlen_k - seqlen_q + window_size[1]]."""
    allowed = torch.zeros(L, S, dtype=torch.bool)
    for i in range(L):
        first = 0 if left < 0 else max(0, i + S - L - left)
        last = S - 1 if right < 0 else min(S - 1, i + S - L + right)
        allowed[i, first : max(last + 1, first)] = True
    return allowed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("is_causal", [False, True])
class TestSameAsAMask:
    @pytest.mark.one_in(4)
    def test_forward_and_gradients(self, size, sides, is_causal):
        inputs = make(*size)
        mask = flash_attention_window(*size, *sides)
        windowed = {"window_size": sides, "is_causal": is_causal}
        masked = {"attn_mask": mask, "is_causal": is_causal}
        ours, expected = fused(*inputs, **windowed), attend(*inputs, **masked)
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        grads = [torch.randn_like(x) for x in ours]
        ours, expected = (
            gradients(f, inputs, o, grads) for f, o in ((fused, windowed), (attend, masked))
        )
        for name, g in ours.items():
            torch.testing.assert_close(g, expected[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("L, S", SIZES)
def test_open_sides_are_the_same_bits(L, S):
    inputs = make(L, S, dtype=torch.float32)
    plain = qkv.attention(*inputs)
    for sides in [(-1, -1), (L + S, L + S), (2**62, -1), (2**63 - 1, 2**63 - 1)]:
        assert torch.equal(qkv.attention(*inputs, window_size=sides), plain)


def test_causal_is_a_window_for_equal_lengths():
    inputs = make(130, 130, dtype=torch.float32)
    causal = qkv.attention(*inputs, is_causal=True)
    torch.testing.assert_close(qkv.attention(*inputs, window_size=(-1, 0)), causal)


def test_alignments_differ():
    """is_causal is aligned top-left and the window bottom-right, so they differ where L and S
    do."""
    weights = qkv.attention(
        *make(2, 5)[:2], torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5), window_size=(1, 0)
    )
    assert torch.equal(weights[0, 0] > 0, torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]) > 0)
    weights = qkv.attention(
        *make(2, 5)[:2], torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5), is_causal=True
    )
    assert torch.equal(weights[0, 0] > 0, torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]) > 0)


def test_rows_whose_window_is_empty():
    """With more queries than keys, the first queries look before the first key."""
    output, lse = qkv.attention(*make(10, 4), window_size=(2, 0), return_lse=True)
    assert (output[..., :6, :] == 0).all() and (lse[..., :6] == -INF).all()
    assert lse[..., 6:].isfinite().all()


@dtypes_of("f32", "f64", "bf16", "f16")
@pytest.mark.parametrize("junk", [float("nan"), INF])
def test_nothing_outside_leaks(dtype, junk):
    """Junk in keys and values that only the last query sees changes no other row."""
    inputs = make(300, 300, dtype=dtype)
    options = {"window_size": (40, 0)}
    theirs, truth = (f(*inputs, **options)[0][..., :299, :] for f in (attend, reference))
    size = magnitudes(*inputs, **options)["output"]
    for x in inputs[1:]:
        x[..., 299, :] = junk
    leaves = [x.requires_grad_() for x in inputs]
    output = qkv.attention(*leaves, **options)
    assert_within_rounding(output[..., :299, :], theirs, truth, size, dtype)
    for g in torch.autograd.grad(output[..., :200, :].sum(), leaves[:2]):
        assert g[..., :200, :].isfinite().all()


@pytest.mark.parametrize("sides", [(2, 1), (0, -1), (-1, 0)])
@pytest.mark.parametrize("L, S", [(5, 7), (7, 5)])
def test_gradcheck(sides, L, S):
    def f(*inputs):
        output, lse = fused(*inputs, window_size=sides)
        return output, lse.masked_fill(lse == -INF, 0)

    assert gradcheck(f, [x.requires_grad_() for x in make(L, S, D=3)])


def test_far_places_in_a_long_sequence():
    """Tiles far down a long sequence have the right positions: their rows give the same as
    alone."""
    query, key, value = make(5000, 5000, batch=(1, 1), dtype=torch.float32)
    output = qkv.attention(query, key, value, window_size=(100, 0))
    for i in (0, 99, 100, 2047, 2048, 4999):
        first = max(0, i - 100)
        keys = slice(first, i + 1)
        row = qkv.attention(query[..., i : i + 1, :], key[..., keys, :], value[..., keys, :])
        torch.testing.assert_close(output[..., i : i + 1, :], row, rtol=1e-5, atol=1e-6)
