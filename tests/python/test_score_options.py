"""softcap, ALiBi and sinks against the formulas of the models that have them, and at extremes."""

import math

import pytest
import torch
from common import INF, TOLERANCES, attend, compute_type, dtypes_of, fused
from gradients import LEAVES, gradients, reference_gradients
from torch.autograd import gradcheck

import qkv

pytestmark = pytest.mark.usefixtures("isa")
dtypes = dtypes_of("f32", "f64")
every_dtype = dtypes_of("f32", "f64", "bf16", "f16")


def make(L=37, S=45, H=4, D=16, dtype=torch.float32):
    return [torch.randn(2, H, n, D, dtype=dtype) for n in (L, S, S)]


def close(x, y):
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


class TestSoftcap:
    @dtypes
    @pytest.mark.parametrize("softcap", [0.3, 2.0, 50.0])
    def test_as_gemma2(self, dtype, softcap):
        query, key, value = make(dtype=dtype)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * 0.5
        attn_weights = attn_weights / softcap
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * softcap
        expected = torch.softmax(attn_weights, dim=-1) @ value
        close(qkv.attention(query, key, value, scale=0.5, softcap=softcap), expected)

    @every_dtype
    def test_a_very_large_cap_is_none(self, dtype):
        inputs = make(dtype=dtype)
        close(qkv.attention(*inputs, softcap=1e8), qkv.attention(*inputs))

    @every_dtype
    @pytest.mark.parametrize("softcap", [1e-30, 1e-3])
    def test_a_very_small_cap_makes_all_equal(self, dtype, softcap):
        inputs = make(dtype=dtype)
        output = qkv.attention(*inputs, softcap=softcap)
        torch.testing.assert_close(
            output, inputs[2].mean(-2, keepdim=True).expand_as(output), rtol=2e-2, atol=3e-3
        )

    @dtypes
    def test_huge_scores_saturate(self, dtype):
        """tanh of at least 2^100 is +-1: weights of two sizes, gradients of query and key exactly
        0. An odd number of equal terms is never 0."""
        query, key, value = make(D=15, dtype=dtype)
        inputs = [query.sign() * 2.0**50, key.sign() * 2.0**50, value]
        ours, expected = (f(*inputs, softcap=3.0) for f in (fused, attend))
        grads = [torch.randn_like(x) for x in ours]
        found, truth = (gradients(f, inputs, {"softcap": 3.0}, grads) for f in (fused, attend))
        for x, y in zip((*ours, found["value"]), (*expected, truth["value"]), strict=True):
            close(x, y)
        assert (found["query"] == 0).all() and (found["key"] == 0).all()

    @every_dtype
    def test_masks_come_after(self, dtype):
        inputs = make(dtype=dtype)
        mask = torch.randn(37, 45, dtype=dtype) * 100
        close(qkv.attention(*inputs, mask, softcap=1.0), attend(*inputs, mask, softcap=1.0)[0])

    def test_gradcheck(self):
        inputs = [x.double().requires_grad_() for x in make(5, 6, 2, 3)]
        assert gradcheck(lambda *x: fused(*x, softcap=0.7), inputs)


def bloom_slopes(heads):
    """The slopes of Press et al.: 2^(-8/n), 2^(-16/n), ... for n heads."""
    return torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])


class TestAlibi:
    @dtypes
    def test_as_bloom(self, dtype):
        """BLOOM adds slope * j, which with a causal mask gives the same weights."""
        query, key, value = make(45, 45, dtype=dtype)
        slopes = bloom_slopes(4)
        alibi = slopes[:, None] * torch.arange(45)
        scores = query @ key.mT / math.sqrt(16) + alibi[:, None].to(dtype)
        scores = scores.masked_fill(torch.ones(45, 45).triu(1) > 0, -INF)
        expected = scores.softmax(-1) @ value
        close(qkv.attention(query, key, value, is_causal=True, alibi_slopes=slopes), expected)

    @dtypes
    @pytest.mark.parametrize("L, S", [(37, 45), (45, 37), (1, 60), (60, 1)])
    def test_as_flash_attention(self, dtype, L, S):
        """The distance is counted from the end, as in attn_bias_from_alibi_slopes of
        FlashAttention's tests."""
        query, key, value = make(L, S, dtype=dtype)
        slopes = torch.rand(2, 4, dtype=torch.float32)
        row = torch.arange(L)[:, None]
        relative = torch.abs(row + S - L - torch.arange(S))
        scores = query @ key.mT / math.sqrt(16) - slopes[..., None, None].to(dtype) * relative
        close(qkv.attention(query, key, value, alibi_slopes=slopes), scores.softmax(-1) @ value)

    @pytest.mark.one_in(3)
    @every_dtype
    @pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (2, 1), (2, 4)])
    @pytest.mark.parametrize("slopes_dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_shapes_and_dtypes(self, dtype, shape, slopes_dtype):
        inputs = make(dtype=dtype)
        slopes = torch.rand(shape).to(slopes_dtype)
        close(fused(*inputs, alibi_slopes=slopes)[0], attend(*inputs, alibi_slopes=slopes)[0])
        grads = (torch.randn_like(inputs[0]), None)
        g = gradients(fused, inputs, {"alibi_slopes": slopes}, grads, ["alibi_slopes"])
        assert g["alibi_slopes"].shape == shape and g["alibi_slopes"].dtype == slopes_dtype

    def test_negative_slopes(self):
        inputs = make(dtype=torch.float64)
        slopes = -torch.rand(4, dtype=torch.float64)
        close(fused(*inputs, alibi_slopes=slopes)[0], attend(*inputs, alibi_slopes=slopes)[0])

    @every_dtype
    def test_steep_slopes_leave_the_nearest_key(self, dtype):
        inputs = make(45, 45, dtype=dtype)
        close(qkv.attention(*inputs, alibi_slopes=torch.full((4,), 1e6)), inputs[2])

    def test_gradcheck(self):
        inputs = [x.double() for x in (*make(5, 6, 2, 3), torch.rand(2))]
        f = lambda *x: fused(*x[:3], alibi_slopes=x[3])  # noqa: E731
        assert gradcheck(f, [x.requires_grad_() for x in inputs])


class TestSinks:
    @dtypes
    def test_as_gpt_oss(self, dtype):
        """The same numbers as eager_attention_forward of transformers' gpt-oss, with one key head
        for each query head."""
        query, key, value = make(dtype=dtype)
        module_sinks = torch.randn(4, dtype=dtype)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * 0.25
        sinks = module_sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
        combined_logits = torch.cat([attn_weights, sinks], dim=-1)
        combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
        probs = torch.softmax(combined_logits, dim=-1)
        expected = torch.matmul(probs[..., :-1], value)
        close(qkv.attention(query, key, value, scale=0.25, sinks=module_sinks), expected)

    @pytest.mark.parametrize("sink", [0.0, -INF])
    def test_rows_of_large_scores_whose_keys_are_dropped(self, sink):
        """Their output is 0, as that of rows without keys, but the sink has no part in them."""
        query, key = (torch.full((1, 1, n, 64), 2e3) for n in (64, 2))
        sinks = torch.full((1,), sink, requires_grad=True)
        output, lse = qkv.attention(query, key, key, sinks=sinks, dropout_p=0.5, return_lse=True)
        assert (output == 0).all(-1).any()
        (found,) = torch.autograd.grad([output, lse], sinks, [output, lse])
        assert found == 0

    @every_dtype
    def test_minus_inf_is_none(self, dtype):
        inputs = make(dtype=dtype)
        ours = qkv.attention(*inputs, sinks=torch.full((4,), -INF), return_lse=True)
        for x, y in zip(ours, qkv.attention(*inputs, return_lse=True), strict=True):
            close(x, y)

    @every_dtype
    def test_minus_inf_and_nothing_to_attend_to(self, dtype):
        mask = torch.zeros(37, 45, dtype=torch.bool)
        options = {"attn_mask": mask, "sinks": torch.full((4,), -INF)}
        output, lse = qkv.attention(*make(dtype=dtype), **options, return_lse=True)
        assert (output == 0).all() and (lse == -INF).all()
        found = gradients(fused, make(dtype=dtype), options, (output + 1, lse.abs()), LEAVES[:3])
        assert all((g == 0).all() for g in found.values())

    @every_dtype
    def test_nothing_else_to_attend_to(self, dtype):
        """The lse of a row that sees no key is the sink, which gets all of the lse's gradient."""
        mask = torch.zeros(37, 45, dtype=torch.bool)
        options = {"attn_mask": mask, "sinks": torch.randn(4, dtype=compute_type(dtype))}
        output, lse = qkv.attention(*make(dtype=dtype), **options, return_lse=True)
        assert (output == 0).all()
        close(lse, options["sinks"][:, None].expand(2, 4, 37))
        g = torch.randn(2, 4, 37, dtype=lse.dtype)
        found = gradients(fused, make(dtype=dtype), options, (output, g), ["sinks"])
        close(found["sinks"], g.sum((0, 2)))

    @every_dtype
    @pytest.mark.parametrize("sink", [-1e30, -1e4, -100.0, 100.0, 1e4, 1e30])
    def test_extremes(self, dtype, sink):
        inputs = make(dtype=dtype)
        sinks = torch.tensor([sink, 0.0, -sink, sink], dtype=compute_type(dtype))
        ours, truth = (f(*inputs, sinks=sinks) for f in (fused, attend))
        for x, y in zip(ours, truth, strict=True):
            close(x, y)
        grads = (torch.randn_like(ours[0]), torch.randn_like(ours[1]))
        wanted = (*LEAVES[:3], "sinks")
        found = gradients(fused, inputs, {"sinks": sinks}, grads, wanted)
        truths = reference_gradients(attend, inputs, {"sinks": sinks}, grads, wanted)
        for name, g in found.items():
            tolerance = 2 * max(TOLERANCES[dtype], 1e-5)
            torch.testing.assert_close(g.double(), truths[name], rtol=tolerance, atol=tolerance)

    @every_dtype
    @pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (2, 1), (2, 4)])
    def test_shapes(self, dtype, shape):
        inputs, options = make(dtype=dtype), {"sinks": torch.randn(shape, dtype=dtype)}
        close(fused(*inputs, **options)[0], attend(*inputs, **options)[0])
        grads = (torch.randn_like(inputs[0]), torch.randn(2, 4, 37, dtype=compute_type(dtype)))
        ours, truth = (gradients(f, inputs, options, grads, ["sinks"]) for f in (fused, attend))
        tolerance = 10 * max(TOLERANCES[dtype], 1e-5)
        torch.testing.assert_close(ours["sinks"], truth["sinks"], rtol=tolerance, atol=tolerance)

    def test_gradcheck(self):
        inputs = [x.double() for x in (*make(5, 6, 2, 3), torch.randn(2))]
        f = lambda *x: fused(*x[:3], sinks=x[3])  # noqa: E731
        assert gradcheck(f, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_gradients_repeat_for_any_number_of_threads(name, threads):
    inputs, options = make(200, 300), {name: torch.rand(4), "is_causal": True}
    grads = (torch.randn(2, 4, 200, 16), torch.randn(2, 4, 200))
    threads(1)
    expected = gradients(fused, inputs, options, grads, [name])[name]
    for n in (2, 3, 4):
        threads(n)
        assert torch.equal(gradients(fused, inputs, options, grads, [name])[name], expected)


def test_all_together_gradcheck():
    mask = torch.randn(2, 5, 6).masked_fill(torch.rand(2, 5, 6) < 0.2, -INF)
    tensors = [*make(5, 6, 2, 3), torch.zeros_like(mask), torch.randn(1, 2, 5, 6), torch.rand(2)]
    tensors.append(torch.randn(2, 2))

    def f(*tensors):
        arguments = dict(zip(LEAVES, tensors, strict=True))
        arguments["attn_mask"] = arguments["attn_mask"] + mask
        return fused(**arguments, softcap=1.5, window_size=(3, 1), is_causal=True)

    assert gradcheck(f, [x.double().requires_grad_() for x in tensors])
