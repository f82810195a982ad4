"""The forward pass against the f64 reference and against torch's own attention."""

import itertools

import pytest
import torch
from common import (
    HALVES,
    as_torch,
    attend,
    compute_type,
    dtypes_of,
    fused,
    reference,
    sdpa,
    unfused,
)
from gradients import INPUTS, gradients, reference_gradients
from grid import GRID, grid_inputs
from hypothesis import given, settings
from rounding import (
    assert_no_less_accurate,
    assert_within_rounding,
    magnitudes,
)
from strategies import LAYOUTS, cases, lay_out, one_example_in
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv
from qkv import testing
from qkv.testing import max_error, rms_error


@pytest.mark.usefixtures("isa")
class TestAgainstReference:
    def check(self, dtype, case):
        inputs, options = case.tensors(dtype)
        output, lse = fused(*inputs, **options)
        assert output.dtype == dtype and lse.dtype == compute_type(dtype)
        theirs, truths = (f(*inputs, **options) for f in (unfused, reference))
        sizes = magnitudes(*inputs, **options)
        assert_within_rounding(output, theirs[0], truths[0], sizes["output"], dtype)
        assert_within_rounding(lse, theirs[1], truths[1], sizes["lse"], lse.dtype)

    @dtypes_of("f32", "f64")
    @given(case=cases())
    def test_drawn(self, dtype, case):
        self.check(dtype, case)

    @dtypes_of("bf16", "f16")
    @settings(max_examples=one_example_in(3))
    @given(case=cases(max_work=500_000))
    def test_drawn_halves(self, dtype, case):
        self.check(dtype, case)


@pytest.mark.usefixtures("isa")
class TestErrorIsNoLargerThanTorchs:
    @pytest.mark.one_in(12)
    @pytest.mark.parametrize("shape", GRID)
    @dtypes_of("f32", "f64", "bf16", "f16")
    def test_grid(self, shape, dtype):
        inputs, options = grid_inputs(shape, dtype)
        truth, truth_lse = reference(*inputs, **options)
        ours, lse = torch.ops.qkv.attention_with_lse(*inputs, **options)
        if dtype == torch.float64:
            assert rms_error(ours, truth) <= 1e-14 and rms_error(lse, truth_lse) <= 1e-14
            return
        assert_no_less_accurate(ours, sdpa(*inputs, **options), truth)
        # Products of halves are exact in f32: only the order of their sums differs from torch's.
        limit = 1.15 if dtype in HALVES else 1.02
        assert_no_less_accurate(lse, attend(*inputs, **options)[1], truth_lse, limit)

    @pytest.mark.one_in(3)
    @dtypes_of("f32", "bf16", "f16")
    @pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
    def test_mask(self, mask_dtype, dtype):
        inputs = [torch.randn(2, 3, 700, 64, dtype=dtype) for _ in range(3)]
        mask = torch.randn(2, 1, 700, 700)
        mask = mask > 0 if mask_dtype == torch.bool else mask
        truth, _ = reference(*inputs, attn_mask=mask)
        ours = torch.ops.qkv.attention(*inputs, mask)
        assert_no_less_accurate(ours, sdpa(*inputs, attn_mask=mask), truth)

    @pytest.mark.one_in(3)
    @dtypes_of("f32", "bf16", "f16")
    @pytest.mark.parametrize("spread", [0.01, 3.0, 10.0])
    def test_flat_and_peaked_weights(self, spread, dtype):
        query, key, value = (torch.randn(1, 4, 700, 64, dtype=dtype) for _ in range(3))
        query, key = query * spread, key * spread
        truth, _ = reference(query, key, value)
        ours = torch.ops.qkv.attention(query, key, value)
        assert_no_less_accurate(ours, sdpa(query, key, value), truth)


@pytest.mark.usefixtures("isa")
class TestAgainstTorchsPaths:
    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    @pytest.mark.parametrize("shape", GRID)
    def test_close(self, backend, shape):
        inputs, options = grid_inputs(shape, torch.float32)
        with sdpa_kernel(backend):
            theirs = sdpa(*inputs, **options)
        torch.testing.assert_close(
            torch.ops.qkv.attention(*inputs, **options), theirs, rtol=2e-5, atol=2e-6
        )


@pytest.mark.usefixtures("isa")
class TestShapes:
    @dtypes_of("f32", "bf16", "f16")
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
    def test_layout(self, layout, which, dtype):
        inputs = [torch.randn(2, 3, 37, 24, dtype=dtype) for _ in range(3)]
        truth, _ = reference(*inputs)
        theirs, _ = as_torch(dtype)(*inputs)
        inputs[which] = lay_out(inputs[which], layout)
        testing.assert_close(torch.ops.qkv.attention(*inputs), truth, theirs)

    @dtypes_of("f32", "bf16", "f16")
    @pytest.mark.parametrize("L", range(1, 36))
    def test_every_small_size(self, L, dtype):
        """Sizes of queries, keys and head_dim for every remainder of every tile, at once and
        apart."""
        for S, D in [(L, L), (35, L), (L, 8), (36 - L, 36 - L)]:
            inputs = [torch.randn(1, 2, n, D, dtype=dtype) for n in (L, S, S)]
            theirs, truth = (f(*inputs)[0] for f in (as_torch(dtype), reference))
            testing.assert_close(torch.ops.qkv.attention(*inputs), truth, theirs)

    @pytest.mark.one_in(12)
    @dtypes_of("f32", "f64", "bf16", "f16")
    @pytest.mark.parametrize("heads, D", [((4, 1), 64), ((8, 2), 80), ((2, 2), 24), ((6, 1), 128)])
    @pytest.mark.parametrize("lengths", [range(n, 34, 3) for n in (1, 2, 3)], ids=str)
    def test_few_queries_on_many_keys(self, lengths, heads, D, dtype):
        """As in a step of decoding, the keys are split, and the parts merged."""
        H, Hkv = heads
        hidden = torch.arange(901) % 300 < 250  # some splits have no visible key
        variants = (
            {}, {"window_size": (400, 0), "sinks": torch.randn(H), "softcap": 2.0},
            {"attn_mask": ~hidden, "alibi_slopes": torch.rand(H) / 100},
        )  # fmt: skip
        for L, options in itertools.product([n for n in lengths if n < 18 or n == 32], variants):
            sizes = [(H, L), (Hkv, 901), (Hkv, 901)]
            inputs = [torch.randn(1, h, n, D, dtype=dtype) for h, n in sizes]
            results = (
                f(*inputs, **options, enable_gqa=True) for f in (fused, as_torch(dtype), reference)
            )
            (output, lse), (theirs, _), (truth, truth_lse) = results
            testing.assert_close(output, truth, theirs)
            testing.assert_close(lse, truth_lse)

    def test_empty(self):
        attention = torch.ops.qkv.attention_with_lse
        q, none = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 0, 8)
        output, lse = attention(none, q, q)
        assert output.shape == (2, 3, 0, 8) and lse.shape == (2, 3, 0)
        output, lse = attention(q, none, none)
        assert torch.equal(output, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((2, 3, 4), -torch.inf))
        output, lse = attention(none, none, none)
        assert output.shape == (2, 3, 0, 8) and lse.shape == (2, 3, 0)
        for shape in [(0, 3, 4, 8), (2, 0, 4, 8)]:
            x = torch.randn(shape)
            output, lse = attention(x, x, x)
            assert output.shape == shape and lse.shape == shape[:-1]

    @dtypes_of("f32", "f64", "bf16", "f16")
    @pytest.mark.parametrize("L", [1, 4, 70])
    def test_no_value_columns(self, L, dtype):
        q, k = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (L, 9))
        inputs = (q, k, k[..., :0])
        output, lse = torch.ops.qkv.attention_with_lse(*inputs)
        assert output.shape == (2, 3, L, 0)
        torch.testing.assert_close(lse, attend(*inputs)[1])
        grads = (None, torch.ones_like(lse))
        sizes = magnitudes(*inputs, grads=grads)
        ours, theirs = (gradients(f, inputs, {}, grads, INPUTS[:2]) for f in (fused, attend))
        truths = reference_gradients(attend, inputs, {}, grads, INPUTS[:2])
        for n, x in ours.items():
            assert_within_rounding(x, theirs[n], truths[n], sizes[n], dtype)

    @dtypes_of("f32", "f64", "bf16", "f16")
    @pytest.mark.parametrize("L", [1, 4, 70])
    def test_head_dim_zero(self, L, dtype):
        """Without a head dimension every score is 0, and the output the mean of the values,
        whatever the scale."""
        q, k, value = (torch.randn(2, 3, *n, dtype=dtype) for n in [(L, 0), (5, 0), (5, 7)])
        output = torch.ops.qkv.attention(q, k, value.requires_grad_(), scale=1.0)
        expected = value.float().mean(-2, keepdim=True).expand(2, 3, L, 7)
        torch.testing.assert_close(output, expected.to(dtype))
        (grad,) = torch.autograd.grad(output.sum(), value)
        torch.testing.assert_close(grad, torch.full_like(grad, L / 5))

    def test_causal_is_top_left(self):
        for L, S in [(3, 5), (5, 3)]:
            value = torch.eye(S).expand(1, 1, S, S)
            weights = torch.ops.qkv.attention(
                torch.randn(1, 1, L, 4), torch.randn(1, 1, S, 4), value, is_causal=True
            )
            assert torch.equal(weights[0, 0] > 0, torch.ones(L, S, dtype=torch.bool).tril())

    def test_many_batch_dimensions(self):
        q = torch.randn(2, 1, 2, 1, 2, 1, 2, 1, 2, 3, 4)  # none of them merge with the others
        k = torch.randn(1, 2, 1, 2, 1, 2, 1, 2, 2, 3, 4)
        truth, _ = reference(q, k, k)
        assert max_error(torch.ops.qkv.attention(q, k, k), truth) < 1e-6


def test_python_wrapper():
    q = torch.randn(1, 2, 5, 8)
    output, lse = torch.ops.qkv.attention_with_lse(q, q, q, is_causal=True, scale=0.3)
    assert torch.equal(qkv.attention(q, q, q, is_causal=True, scale=0.3), output)
    both = qkv.attention(q, q, q, None, 0.0, True, scale=0.3, return_lse=True)
    assert torch.equal(both[0], output) and torch.equal(both[1], lse)
    assert torch.equal(torch.ops.qkv.attention(q, q, q, None, 0.0, True, scale=0.3), output)
