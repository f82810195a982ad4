"""bfloat16 and float16: every function and transform gives what it gives for the same numbers in
f32, rounded at the end; and what only halves have: sums in f32, overflow, dtypes of the results."""

import pytest
import torch
import torch._dynamo.testing
from common import (
    HALVES,
    INF,
    TOLERANCES,
    attend,
    dtypes_of,
    fused,
    reference,
    sdpa,
    unfused,
)
from gradients import INPUTS, gradients, reference_gradients
from rounding import assert_no_less_accurate
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention.varlen import AuxRequest
from torch.utils.checkpoint import checkpoint

import qkv
from qkv.testing import max_error, rms_error

H, L, S, D, DV = 2, 20, 23, 8, 6
SAMPLES = 3
halves = dtypes_of("bf16", "f16")
# The inputs of a function: the same numbers in any dtype.
MASK = torch.randn(L, S, generator=torch.Generator().manual_seed(1)).bfloat16().float()
SLOPES, SINKS = torch.tensor([0.5, 0.25]), torch.tensor([0.7, -1.0], dtype=torch.float64)
ENDS = torch.tensor([0, 7, 20]), torch.tensor([0, 12, 23])


def packed(query, key, value):
    output, lse = qkv.varlen_attn(
        *(x.transpose(0, 1) for x in (query, key, value)), *ENDS, 13, 12, window_size=(9, 3),
        alibi_slopes=SLOPES, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return output, lse


# Functions of query [H, L, D], key [H, S, D] and value [H, S, Dv]. The first result is in their
# dtype.
FUNCTIONS = {
    "attention": lambda *x: qkv.attention(*x, is_causal=True, return_lse=True),
    "every option": lambda *x: qkv.attention(
        *x, MASK, is_causal=True, dropout_p=0.3, window_size=(15, 4), softcap=3.0, scale=0.5,
        alibi_slopes=SLOPES, sinks=SINKS, return_lse=True,
    ),
    "varlen": packed,
    "hard": lambda *x: (qkv.hard_attention(*x, straight_through=True),),
    "weights": lambda q, k, v: (qkv.attention_weights(q, k, MASK > 0, dropout_p=0.3),),
    "weights over heads": lambda q, k, v: (qkv.attention_weights(q, k, MASK, reduce="heads"),),
    "weights over queries": lambda q, k, v: (
        qkv.attention_weights(q, k, is_causal=True, reduce="queries"),
    ),
}  # fmt: skip


def make(dtype, samples=()):
    return [torch.randn(*samples, H, n, d).to(dtype) for n, d in [(L, D), (S, D), (S, DV)]]


def run(f, inputs):
    """The results of f, and the gradients of all inputs that have one."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.manual_seed(2)
    results = f(*leaves)
    seeds = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)) for y in results]
    seeds = [g.to(inputs[0].dtype).to(y.dtype) for y, g in zip(results, seeds, strict=True)]
    grads = torch.autograd.grad(results, leaves, seeds, allow_unused=True)
    assert all(g is None or g.dtype == x.dtype for g, x in zip(grads, leaves, strict=True))
    return [*results, *(g for g in grads if g is not None)]


def assert_close(found, expected, dtype):
    """Compares relative to the largest element: weights that almost cancel are rounded like the
    others."""
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        scale = max(1.0, y.abs().max().item())
        tolerance = TOLERANCES[dtype if x.dtype in HALVES else torch.float32]
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=tolerance * scale)


@pytest.mark.usefixtures("isa")
@halves
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_f32(name, dtype):
    inputs = make(dtype)
    ours = run(FUNCTIONS[name], inputs)
    expected = run(FUNCTIONS[name], [x.float() for x in inputs])
    assert ours[0].dtype == dtype
    assert_close(ours, expected, dtype)


@halves
@pytest.mark.parametrize("name", FUNCTIONS)
class TestTransforms:
    """Every transform gives what the function gives without it."""

    def check(self, transformed, f, inputs):
        assert_close(run(transformed, inputs), run(f, inputs), inputs[0].dtype)

    def test_checkpoint(self, name, dtype):
        f = FUNCTIONS[name]
        again = lambda *x: checkpoint(f, *x, use_reentrant=False)  # noqa: E731
        self.check(again, f, make(dtype))

    def test_functional_gradient(self, name, dtype):
        inputs, f = make(dtype), FUNCTIONS[name]
        torch.manual_seed(2)
        loss = lambda *x: sum(y.float().sin().sum() for y in f(*x))  # noqa: E731
        found = torch.func.grad(loss, (0, 1, 2))(*inputs)
        assert all(g.dtype == dtype for g in found)
        torch.manual_seed(2)
        leaves = [x.requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
        assert_close(found, expected, dtype)

    def test_vmap(self, name, dtype):
        inputs, f = make(dtype, (SAMPLES,)), FUNCTIONS[name]

        def one_by_one(*inputs):
            results = []
            for sample in zip(*inputs, strict=True):
                torch.manual_seed(2)
                results.append(f(*sample))
            return tuple(torch.stack(x) for x in zip(*results, strict=True))

        self.check(torch.func.vmap(f, randomness="same"), one_by_one, inputs)

    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_compile(self, name, dtype):
        torch.compiler.reset()
        f = lambda *x: tuple(y * 2 for y in FUNCTIONS[name](*x))  # noqa: E731
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        self.check(compiled, f, make(dtype))

    @pytest.mark.one_in(4)
    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    def test_compiled_autograd(self, name, dtype):
        inputs, f = make(dtype), FUNCTIONS[name]
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            found = run(f, inputs)
        assert_close(found, run(f, inputs), dtype)


@halves
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compile_with_dynamic_shapes(dtype):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = lambda *x: qkv.attention(*x, is_causal=True, return_lse=True)  # noqa: E731
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for n in (9, 17, 70):
        inputs = [torch.randn(2, 3, n, D, dtype=dtype) for _ in range(3)]
        assert_close(run(compiled, inputs), run(f, inputs), dtype)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


@halves
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_jagged(dtype):
    offsets = torch.tensor([0, 5, 6, 20])

    def f(*inputs):
        x = (nested_tensor_from_jagged(y, offsets, jagged_dim=2) for y in inputs)
        return tuple(y.values() for y in qkv.attention(*x, is_causal=True, return_lse=True))

    inputs = [torch.randn(H, 20, D).to(dtype) for _ in range(3)]
    ours, expected = run(f, inputs), run(f, [x.float() for x in inputs])
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    assert_close(ours, expected, dtype)


@halves
def test_the_gradients_of_options_have_their_dtypes(dtype):
    inputs = make(dtype)
    for other in (torch.float32, dtype):
        shapes = {"attn_mask": (L, S), "alibi_slopes": (H,), "sinks": (H,)}
        options = {n: torch.randn(s).to(other).requires_grad_() for n, s in shapes.items()}
        output, lse = qkv.attention(*inputs, **options, return_lse=True)
        assert output.dtype == dtype and lse.dtype == torch.float32
        (output.float().sum() + lse.sum()).backward()
        assert all(x.grad.dtype == other for x in options.values())


@pytest.mark.usefixtures("isa")
class TestAccuracy:
    @pytest.mark.one_in(8)
    @halves
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_long_sequence(self, dtype, is_causal):
        """torch adds up the gradients of key and value in halves: a gradient of f32 sums, rounded
        once, is at most half as far off."""
        inputs = [torch.randn(1, 1, 2048, 64, dtype=dtype) for _ in range(3)]
        options, grads = {"is_causal": is_causal}, [torch.randn_like(inputs[0]), None]
        truth = reference(*inputs, **options)[0]
        ours, torchs = fused(*inputs, **options)[0], sdpa(*inputs, **options)
        assert_no_less_accurate(ours, torchs, truth)
        ours = gradients(fused, inputs, options, grads)
        torchs = gradients(unfused, inputs, options, grads)
        truths = reference_gradients(attend, inputs, options, grads)
        for name in INPUTS:
            assert_no_less_accurate(ours[name], torchs[name], truths[name])
        if is_causal:
            for name in ("key", "value"):
                our_error, their_error = (rms_error(x[name], truths[name]) for x in (ours, torchs))
                assert our_error <= their_error / 2, f"{name}: {our_error / their_error:.2f}"
                our_worst, their_worst = (max_error(x[name], truths[name]) for x in (ours, torchs))
                assert our_worst <= their_worst / 2, f"{name}: {our_worst / their_worst:.2f}"

    @halves
    def test_many_small_terms(self, dtype):
        """The output and dV are sums of n equal terms: sums of halves would stop growing at 256
        terms of one size in bf16, at 2048 in f16."""
        n = 1024 if dtype == torch.bfloat16 else 4096
        query = torch.zeros(1, 1, n, 4, dtype=dtype)
        value = torch.ones(1, 1, n, 4, dtype=dtype)
        found = gradients(fused, [query, query, value], {}, [torch.ones_like(value), None])
        assert torch.equal(found["value"], value)
        output, lse = fused(query, query, value)
        assert torch.equal(output, value)
        torch.testing.assert_close(lse, torch.full((1, 1, n), n).log())

    @halves
    def test_the_lse_is_not_rounded_to_half(self, dtype):
        inputs = [x.mul(3).to(dtype) for x in make(torch.float32)]
        torch.testing.assert_close(
            fused(*inputs)[1].double(), reference(*inputs)[1], rtol=1e-6, atol=1e-6
        )


@pytest.mark.usefixtures("isa")
class TestDtypes:
    @halves
    def test_masks_of_either_dtype_are_the_same_bits(self, dtype):
        """The numbers of a mask count, and not the dtype that they are written in."""
        inputs = make(dtype)
        mask = torch.randn(H, L, S).to(dtype).masked_fill(torch.rand(H, L, S) < 0.3, -INF)
        grads = [torch.randn(H, L, DV).to(dtype), torch.randn(H, L)]
        results = []
        for m in (mask, mask.float()):
            own = {"attn_mask": m}
            found = gradients(fused, inputs, own, grads, (*INPUTS, "attn_mask"))
            assert found["attn_mask"].dtype == m.dtype
            found["attn_mask"] = found["attn_mask"].to(dtype)
            results.append([*fused(*inputs, **own), *found.values()])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)

    @halves
    def test_dropout_keeps_the_same_set(self, dtype):
        inputs = [torch.randn(2, 3, n, D) for n in (33, 70)]
        kept = []
        for x in (torch.float32, dtype):
            query, key = (y.to(x) for y in inputs)
            value = torch.eye(70, dtype=x).expand(2, 3, 70, 70)
            torch.manual_seed(5)
            kept.append(qkv.attention(query, key, value, dropout_p=0.4) != 0)
        assert torch.equal(*kept) and kept[0].any() and not kept[0].all()

    @halves
    def test_hard_attention_is_exact(self, dtype):
        """The output is chosen and not averaged: it is the value itself, and scores in f32 choose
        it."""
        inputs = make(dtype)
        output, index = qkv.hard_attention(*inputs, return_index=True)
        wide, expected = qkv.hard_attention(*(x.float() for x in inputs), return_index=True)
        assert torch.equal(index, expected) and torch.equal(output, wide.to(dtype))


@pytest.mark.usefixtures("isa")
class TestOverflow:
    def test_scores_may_exceed_f16(self):
        query, key, value = make(torch.float16)
        query, key = query * 3000, key * 3000
        output, lse = fused(query, key, value, scale=1.0)
        assert lse.max() > 65504 and output.isfinite().all()
        expected, expected_lse = attend(query, key, value, scale=1.0)
        torch.testing.assert_close(output, expected, rtol=3e-3, atol=3e-3)
        torch.testing.assert_close(lse, expected_lse)

    @pytest.mark.bf16
    def test_results_that_exceed_f16_are_infinite(self):
        """Rounding to f16 makes them infinite; in bf16 the same results are finite."""
        options = {"dropout_p": 0.5, "dropout_seed": 4}
        for dtype in HALVES:
            query, key = (x[:, :n] for x, n in zip(make(dtype), (L, 5), strict=False))
            value = torch.full((H, 5, DV), 6e4, dtype=dtype)
            value[..., 0] *= -1
            grads = [torch.full((H, L, DV), 3e4, dtype=dtype), None]
            ours, expected = (f(query, key, value, **options)[0] for f in (fused, attend))
            found, truth = (
                gradients(f, (query, key, value), options, grads, ["value"])["value"]
                for f in (fused, attend)
            )
            for x, y in ((ours, expected), (found, truth)):
                assert y.isinf().any() == (dtype == torch.float16)
                torch.testing.assert_close(x, y, rtol=TOLERANCES[dtype], atol=0)

    def test_subnormal_numbers_of_f16_count(self):
        """Inputs and results below 6e-5 are subnormal in f16, and are not taken for 0."""
        query, key, value = make(torch.float16)
        value = (value * 2.0**-20).to(torch.float16)
        ours, _ = fused(query, key, value)
        truth, _ = reference(query, key, value)
        assert max_error(ours, truth) <= 2.0**-24 and ours.count_nonzero() > 0
