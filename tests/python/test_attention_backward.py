"""The gradients against the f64 reference's, torch's own, and finite differences."""

import itertools

import pytest
import torch
from common import (
    assert_no_less_accurate,
    assert_within_rounding,
    attend,
    magnitudes,
    rms_error,
    sdpa,
)
from grid import GRID, grid_inputs
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAYOUTS, cases, lay_out
from torch.autograd import gradcheck

NAMES = ["query", "key", "value"]


def gradients(f, inputs, options, grads, wanted=(0, 1, 2)):
    """d <f's outputs, grads> / d inputs[wanted]; None in grads leaves that output out."""
    inputs = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(inputs)]
    used = [(y, g) for y, g in zip(f(*inputs, **options), grads, strict=True) if g is not None]
    pairs = [(y, g) for y, g in used if y.requires_grad]
    needed = [inputs[n] for n in wanted]
    if not pairs:
        return [torch.zeros_like(x) for x in needed]
    outputs, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, needed, seeds, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, needed, strict=True)]


def reference_gradients(inputs, options, grads, wanted=(0, 1, 2)):
    grads = [None if g is None else g.double() for g in grads]
    return gradients(attend, [x.double() for x in inputs], options, grads, wanted)


def torch_gradients(inputs, options, grads, wanted=(0, 1, 2)):
    """Through scaled_dot_product_attention where it can give them."""
    if grads[1] is not None:
        return gradients(attend, inputs, options, grads, wanted)
    return gradients(lambda *a, **o: (sdpa(*a, **o), None), inputs, options, grads, wanted)


def our_gradients(inputs, options, grads, wanted=(0, 1, 2)):
    return gradients(torch.ops.qkv.attention_with_lse, inputs, options, grads, wanted)


@pytest.mark.usefixtures("isa")
class TestAgainstReference:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
    @given(
        case=cases(max_work=600_000),
        through=st.sampled_from([(True, False), (True, False), (False, True), (True, True)]),
        wanted=st.sampled_from([(0, 1, 2), (0, 1, 2), (0,), (1,), (2,), (0, 2), (1, 2), (0, 1)]),
        grad_layout=st.sampled_from([*LAYOUTS, "scalar"]),
    )
    def test_drawn(self, dtype, case, through, wanted, grad_layout):
        inputs, options = case.tensors(dtype)
        torch.manual_seed(case.seed)
        grads = []
        for used, x in zip(through, attend(*inputs, **options), strict=True):
            g = torch.randn(x.shape, dtype=dtype)
            g = g[:1].sum().expand(x.shape) if grad_layout == "scalar" else lay_out(g, grad_layout)
            grads.append(g if used else None)
        sizes = magnitudes(inputs, *grads, **options)[2:]
        ours, theirs, truths = (
            f(inputs, options, grads, wanted)
            for f in (our_gradients, torch_gradients, reference_gradients)
        )
        for n, x, y, truth in zip(wanted, ours, theirs, truths, strict=True):
            assert x.dtype == dtype
            assert_within_rounding(x, y, truth, sizes[n])


@pytest.mark.usefixtures("isa")
class TestErrorIsNoLargerThanTorchs:
    @pytest.mark.parametrize("shape", GRID)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
    def test_grid(self, shape, dtype):
        inputs, options = grid_inputs(shape, dtype)
        grads = [torch.randn_like(inputs[0]), None]
        truths = reference_gradients(inputs, options, grads)
        ours = our_gradients(inputs, options, grads)
        if dtype == torch.float64:
            assert max(rms_error(x, y) for x, y in zip(ours, truths, strict=True)) <= 1e-13
            return
        theirs = torch_gradients(inputs, options, grads)
        for x, y, truth in zip(ours, theirs, truths, strict=True):
            assert_no_less_accurate(x, y, truth)

    @pytest.mark.parametrize("through", ["lse", "both", "masked"])
    def test_lse_and_mask(self, through):
        inputs = [torch.randn(2, 3, 500, 64) for _ in range(3)]
        mask = torch.rand(3, 500, 500) < 0.7 if through == "masked" else None
        options = {"attn_mask": mask}
        grads = [torch.randn_like(inputs[0]), torch.randn(2, 3, 500)]
        if through != "both":
            grads[0 if through == "lse" else 1] = None
        wanted = (0, 1) if through == "lse" else (0, 1, 2)
        truths = reference_gradients(inputs, options, grads, wanted)
        ours = our_gradients(inputs, options, grads, wanted)
        theirs = torch_gradients(inputs, options, grads, wanted)
        for x, y, truth in zip(ours, theirs, truths, strict=True):
            assert_no_less_accurate(x, y, truth)


MASKS = {
    "none": lambda L, S: None,
    "bool": lambda L, S: torch.rand(L, S) > 0.3,
    "float": lambda L, S: torch.randn(2, 1, L, S, dtype=torch.float64),
    "f32": lambda L, S: torch.randn(S).expand(L, S),
    "-inf": lambda L, S: torch.randn(L, 1, dtype=torch.float64).masked_fill(
        torch.arange(L)[:, None] == 1, -torch.inf
    ),
}


@pytest.mark.usefixtures("isa")
class TestGradcheck:
    """f64, finite differences, through output and lse."""

    def check(self, shapes, layout="contiguous", **options):
        inputs = [lay_out(torch.randn(s, dtype=torch.float64), layout) for s in shapes]

        def f(*xs):
            output, lse = torch.ops.qkv.attention_with_lse(*xs, **options)
            return output, lse.masked_fill(lse == -torch.inf, 0)

        assert gradcheck(f, [x.requires_grad_() for x in inputs])

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_masks(self, mask, is_causal):
        shapes = [(2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3)]
        self.check(shapes, attn_mask=MASKS[mask](5, 7), is_causal=is_causal)

    @pytest.mark.parametrize("shapes", [
        [(1, 4, 5, 3), (1, 2, 6, 3), (1, 2, 6, 3)],
        [(1, 4, 5, 3), (1, 1, 6, 3), (1, 1, 6, 3)],
        [(1, 4, 5, 3), (1, 2, 6, 3), (1, 4, 6, 3)],
        [(4, 5, 3), (2, 6, 3), (1, 6, 3)],
    ])  # fmt: skip
    def test_grouped_heads(self, shapes):
        self.check(shapes, enable_gqa=True)

    @pytest.mark.parametrize("shapes", [
        [(5, 3), (6, 3), (6, 4)],
        [(2, 5, 3), (2, 6, 3), (2, 6, 1)],
        [(2, 3, 5, 3), (6, 3), (3, 6, 3)],
        [(1, 3, 5, 3), (2, 1, 6, 3), (2, 3, 6, 5)],
        [(5, 3), (2, 1, 2, 4, 3), (1, 2, 1, 4, 3)],
    ])  # fmt: skip
    def test_broadcasting_and_ranks(self, shapes):
        self.check(shapes)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        self.check([(2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 4)], layout)

    @pytest.mark.parametrize("scale", [0.0, -1.3, 5.0])
    def test_scale(self, scale):
        self.check([(1, 1, 4, 3), (1, 1, 5, 3), (1, 1, 5, 3)], scale=scale)

    @pytest.mark.parametrize("L, S", [(1, 1), (1, 9), (9, 1), (17, 3), (3, 17)])
    def test_sizes(self, L, S):
        self.check([(1, 2, L, 2), (1, 2, S, 2), (1, 2, S, 2)], is_causal=True)


@pytest.mark.usefixtures("isa")
class TestWhatIsReturned:
    def test_only_what_is_asked_for(self):
        inputs = [torch.randn(1, 2, 19, 8) for _ in range(3)]
        grads = [torch.randn(1, 2, 19, 8), torch.randn(1, 2, 19)]
        whole = our_gradients(inputs, {}, grads)
        for r in (1, 2):
            for wanted in itertools.combinations(range(3), r):
                for n, g in zip(wanted, our_gradients(inputs, {}, grads, wanted), strict=True):
                    assert torch.equal(g, whole[n]), NAMES[n]

    def test_same_tensor_as_query_key_and_value(self):
        x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
        g = torch.randn(1, 2, 9, 4, dtype=torch.float64)
        (ours,) = torch.autograd.grad(torch.ops.qkv.attention(x, x, x), x, g)
        (truth,) = torch.autograd.grad(attend(x, x, x)[0], x, g)
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)

    def test_empty(self):
        for L, S in [(0, 4), (4, 0), (0, 0)]:
            inputs = [torch.randn(2, 3, n, 8) for n in (L, S, S)]
            for g in our_gradients(inputs, {}, [torch.randn(2, 3, L, 8), torch.randn(2, 3, L)]):
                assert torch.equal(g, torch.zeros_like(g))
