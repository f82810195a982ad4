"""The gradient of a floating attn_mask, for every way in which it may broadcast."""

import pytest
import torch
from common import DTYPES, INF, attend, compute_type, fused, unfused
from gradients import gradients, reference_gradients
from rounding import assert_within_rounding, magnitudes

pytestmark = pytest.mark.usefixtures("isa")
B, H, L, S = 2, 3, 37, 41
MASKS = {
    "full": (B, H, L, S),
    "one for all": (L, S),
    "one a head, for every query": (H, 1, S),
    "one a batch item": (B, 1, L, S),
    "one a head": (1, H, L, S),
    "one a head, fewer dimensions": (H, L, S),
    "key padding": (B, 1, 1, S),
    "one a key": (S,),
    "one a query": (L, 1),
    "one a query and head": (1, H, L, 1),
    "one a batch item and head": (B, H, 1, 1),
    "scalar": (),
    "one": (1, 1, 1, 1),
}


def make(dtype=torch.float32, heads=H):
    return [torch.randn(B, h, n, 16, dtype=dtype) for h, n in [(H, L), (heads, S), (heads, S)]]


def grads_of(dtype):
    return torch.randn(B, H, L, 16, dtype=dtype), torch.randn(B, H, L, dtype=compute_type(dtype))


def check(inputs, options, grads):
    wanted = ("attn_mask", "query", "value")
    ours = gradients(fused, inputs, options, grads, wanted)
    theirs = gradients(attend, inputs, options, grads, wanted)
    truths = reference_gradients(attend, inputs, options, grads, wanted)
    sizes = magnitudes(*inputs, **options, grads=tuple(grads))
    for name, g in ours.items():
        assert_within_rounding(g, theirs[name], truths[name], sizes[name], inputs[0].dtype)
    assert ours["attn_mask"].dtype == options["attn_mask"].dtype
    return ours["attn_mask"]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtypes", [
    ("f32", "f32"), ("f64", "f64"), ("f64", "f32"), ("bf16", "bf16"), ("bf16", "f32"),
    ("f16", "f16"), ("f16", "f32"),
], ids=", mask ".join)  # fmt: skip
class TestShapes:
    def test_gradient(self, shape, dtypes):
        dtype, mask_dtype = (DTYPES[name] for name in dtypes)
        mask = torch.randn(MASKS[shape], dtype=mask_dtype)
        check(make(dtype), {"attn_mask": mask}, grads_of(dtype))

    def test_with_hidden_entries(self, shape, dtypes):
        """Entries of -inf hide: their gradient is 0, and so is that of a row that sees nothing."""
        dtype, mask_dtype = (DTYPES[name] for name in dtypes)
        mask = torch.randn(MASKS[shape], dtype=mask_dtype)
        mask = mask.masked_fill(torch.rand(mask.shape) < 0.4, -INF)
        g = check(make(dtype), {"attn_mask": mask, "is_causal": True}, grads_of(dtype))
        assert (g[mask == -INF] == 0).all()

    @pytest.mark.one_in(4)
    def test_grouped_heads_and_other_options(self, shape, dtypes):
        dtype, mask_dtype = (DTYPES[name] for name in dtypes)
        options = {
            "attn_mask": torch.randn(MASKS[shape], dtype=mask_dtype), "enable_gqa": True,
            "window_size": (20, 9), "softcap": 4.0, "sinks": torch.randn(H),
            "alibi_slopes": torch.rand(B, H), "dropout_p": 0.2, "dropout_seed": 4,
        }  # fmt: skip
        check(make(dtype, heads=1), options, grads_of(dtype))


@pytest.mark.parametrize("shape", ["one for all", "one a head", "key padding", "one a query"])
def test_is_rounded_once(shape):
    """Of a float32 mask beside float64 queries: what heads and batch items add to is float64."""
    inputs, options = make(torch.float64), {"attn_mask": torch.randn(MASKS[shape])}
    grads, wanted = grads_of(torch.float64), ["attn_mask"]
    ours = gradients(fused, inputs, options, grads, wanted)["attn_mask"]
    truth = reference_gradients(attend, inputs, options, grads, wanted)["attn_mask"]
    assert torch.equal(ours, truth.float())


class TestStrides:
    @pytest.mark.parametrize("make_mask", [
        lambda: torch.randn(L, 1).expand(B, H, L, S),
        lambda: torch.randn(1, 1, 1, S).expand(B, H, L, S),
        lambda: torch.randn(B, 1, 1, S).expand(B, 1, L, S),
        lambda: torch.randn(()).expand(L, S),
        lambda: torch.randn(S, L).mT,
        lambda: torch.randn(H, L, 2 * S)[..., ::2],
        lambda: torch.randn(L, S, H).permute(2, 0, 1),
        lambda: torch.randn(L, S + 7)[:, 3 : 3 + S],
    ])  # fmt: skip
    def test_any(self, make_mask):
        mask = make_mask()
        assert check(make(), {"attn_mask": mask}, grads_of(torch.float32)).shape == mask.shape

    def test_expanded_from_a_leaf(self):
        """The usual way to broadcast: autograd sums the gradient of the expanded mask."""
        leaf = torch.randn(1, H, 1, S, dtype=torch.float64, requires_grad=True)
        inputs = make(torch.float64)
        g = torch.randn(B, H, L, 16, dtype=torch.float64)
        mask = leaf.expand(B, H, L, S)
        ours, truth = (
            torch.autograd.grad(f(*inputs, attn_mask=mask)[0], leaf, g)[0] for f in (fused, attend)
        )
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-11)


class TestReproducible:
    @pytest.mark.parametrize("shape", MASKS)
    def test_any_number_of_threads(self, shape, threads):
        inputs, options = make(), {"attn_mask": torch.randn(MASKS[shape]), "is_causal": True}
        grads = grads_of(torch.float32)
        threads(1)
        expected = gradients(fused, inputs, options, grads, ["attn_mask"])["attn_mask"]
        for n in (2, 3, 4, 4):
            threads(n)
            found = gradients(fused, inputs, options, grads, ["attn_mask"])["attn_mask"]
            assert torch.equal(found, expected)

    def test_of_one_number_for_many_queries(self, threads):
        """Torch's own sum of so many numbers to one depends on the number of threads."""
        inputs, g = [torch.randn(2, 3, n, 8) for n in (11000, 3, 3)], torch.randn(2, 3, 11000)

        def grad(mask, items=slice(None)):
            mask = mask[items].clone().requires_grad_()
            lse = fused(*(x[items] for x in inputs), attn_mask=mask)[1]
            return torch.autograd.grad(lse, mask, g[items])[0]

        mask, masks = torch.randn(1, 1), torch.randn(2, 1, 1, 1)
        threads(1)
        one, both = grad(mask), grad(masks)
        torch.testing.assert_close(one.squeeze(), g.sum(), rtol=0, atol=1e-3)
        for n in (2, 3, 7):
            threads(n)
            assert grad(mask).equal(one)
            assert grad(masks, slice(1)).equal(both[:1])

    def test_other_gradients_do_not_change(self):
        """The other gradients have the same bits whether that of the mask is asked for or not."""
        inputs, options = make(), {"attn_mask": torch.randn(H, L, S)}
        grads = grads_of(torch.float32)
        alone = gradients(fused, inputs, options, grads)
        for name, g in alone.items():
            both = gradients(fused, inputs, options, grads, [name, "attn_mask"])
            assert torch.equal(both[name], g)


def test_learned_bias_trains():
    """A relative position bias, [H, L, S] picked from a table, learns: it is what this gradient is
    for."""
    table = torch.zeros(H, 2 * L, requires_grad=True)
    place = torch.arange(L)[:, None] - torch.arange(L) + L
    x = torch.randn(B, H, L, 16)
    target = torch.roll(x, 1, -2)
    optimizer = torch.optim.Adam([table], 0.5)
    losses = []
    for _ in range(60):
        loss = (torch.ops.qkv.attention(x, x, x, table[:, place]) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    table.detach()[:, 1] = -INF  # so row 0 looks at the last key
    assert (table.argmax(-1) == L + 1).all()


def test_frozen_mask():
    """Without requires_grad a mask has no gradient, and none is computed."""
    inputs = [x.requires_grad_() for x in make()]
    mask = torch.randn(L, S)
    torch.ops.qkv.attention(*inputs, mask).sum().backward()
    assert mask.grad is None
    mask.requires_grad_()
    with torch.no_grad():
        assert not torch.ops.qkv.attention(*inputs, mask).requires_grad
    output = torch.ops.qkv.attention(*(x.detach() for x in inputs), mask)
    assert torch.autograd.grad(output.sum(), mask)[0].shape == mask.shape


def test_as_torch_gives_it():
    inputs, options = make(), {"attn_mask": torch.randn(1, H, L, S)}
    grads = (torch.randn(B, H, L, 16), None)
    ours, theirs = (
        gradients(f, inputs, options, grads, ["attn_mask"])["attn_mask"] for f in (fused, unfused)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
