"""qkv.attention_weights and qkv.attention_with_weights: all weights, their mean over heads, their
sum over queries; gradients."""

import pytest
import torch
from common import compute_type, dtypes_of, fused
from gradients import LEAVES, gradients, is_float, leaves_of, reference_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_within_rounding, magnitudes
from strategies import cases, one_example_in

import qkv
from qkv import testing

reductions = pytest.mark.parametrize("reduce", [None, "heads", "queries"])


def attend_weights(query, key, reduce=None, **options):
    """As torch's math path would compute them; in f64 the truth."""
    weights = testing.attention_weights(
        query, key, reduce=reduce, **options, dtype=compute_type(query.dtype)
    )
    return weights.to(query.dtype)


def seed_of(query):
    """The dropout seed that a call after torch.manual_seed(3) draws."""
    torch.manual_seed(3)
    return torch.ops.qkv.dropout_seed(query).item()


def call(query, key, reduce, dropout_seed=None, **options):
    """attend_weights() by the operator; dropout_seed is seed_of(query)."""
    torch.manual_seed(3)
    return qkv.attention_weights(query, key, reduce=reduce, **options)


def make(L=20, S=23, H=4, Hkv=4, dtype=torch.float64):
    return [torch.randn(2, h, n, 8, dtype=dtype).requires_grad_() for h, n in [(H, L), (Hkv, S)]]


def compare(query, key, reduce, **options):
    """Compares the weights in f64 with the truth, and the gradients of all that require one."""
    if options.get("dropout_p"):
        options["dropout_seed"] = seed_of(query)
    ours, truth = (f(query, key, reduce, **options) for f in (call, attend_weights))
    torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)
    assert ours.is_contiguous()
    leaves = [x for x in (query, key, *options.values()) if is_float(x) and x.requires_grad]
    g = torch.randn_like(truth)
    found, expected = (torch.autograd.grad(x, leaves, g) for x in (ours, truth))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "bool mask": {"attn_mask": torch.arange(20)[:, None] % 7 < torch.arange(23) % 5},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.4},
    "all of it": {"dropout_p": 0.4, "softcap": 1.5, "window_size": (9, 3), "is_causal": True},
}


@pytest.mark.usefixtures("isa")
@reductions
class TestAgainstReference:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_options(self, reduce, options):
        compare(*make(), reduce, **OPTIONS[options])

    @pytest.mark.parametrize("shape", [(20, 23), (4, 1, 23), (2, 1, 20, 23), (20, 1), ()])
    def test_learned_options(self, reduce, shape):
        """The gradients of the mask, the slopes and the sinks are those of the truth."""
        options = {
            "attn_mask": torch.randn(shape),
            "alibi_slopes": torch.rand(4),
            "sinks": torch.randn(2, 4),
        }
        options = {n: x.double().requires_grad_() for n, x in options.items()}
        compare(*make(), reduce, **options, dropout_p=0.2)

    def test_grouped_heads(self, reduce):
        compare(*make(H=6, Hkv=2), reduce, enable_gqa=True, is_causal=True)

    @pytest.mark.parametrize("shapes", [
        ((5, 8), (6, 8)), ((3, 5, 8), (3, 6, 8)), ((3, 5, 8), (1, 6, 8)),
        ((2, 1, 3, 5, 8), (1, 2, 3, 6, 8)), ((1, 3, 5, 8), (2, 1, 6, 8)),
    ])  # fmt: skip
    def test_ranks_and_broadcasting(self, reduce, shapes):
        compare(*(torch.randn(s).double().requires_grad_() for s in shapes), reduce)

    @pytest.mark.parametrize("L, S", [(0, 4), (4, 0), (0, 0), (1, 1), (1, 300), (300, 1)])
    def test_sizes(self, reduce, L, S):
        compare(*make(L, S), reduce)

    @dtypes_of("f32", "f64", "bf16", "f16")
    @settings(max_examples=one_example_in(8))
    @given(case=cases(max_work=200_000), wanted=st.sets(st.sampled_from(LEAVES), min_size=1))
    def test_drawn(self, reduce, dtype, case, wanted):
        (query, key, value), options = case.tensors(dtype)
        query = query.expand(*fused(query, key, value, **options)[1].shape, -1)
        if options.get("dropout_p"):
            options["dropout_seed"] = seed_of(query)
        names = [n for n in leaves_of(options) if n in wanted and n != "value"] or ["key"]
        eye = torch.eye(key.size(-2), dtype=dtype)
        inputs = query, key, eye.expand(*key.shape[:-1], -1)

        def one(f):
            return lambda query, key, value, **more: (f(query, key, reduce, **more),)

        wide = {n: x.double() if is_float(x) else x for n, x in options.items()}
        truth = attend_weights(query.double(), key.double(), reduce, **wide)
        g = torch.randn(truth.shape, dtype=dtype)
        whole = {None: g, "queries": g[..., None, :]}.get(reduce)
        if reduce == "heads":
            whole = g / query.size(-3) if query.dim() > 2 else g
            whole = whole[..., None, :, :] if query.dim() > 2 else whole
        whole = whole.expand(*query.shape[:-1], key.size(-2))
        sizes = magnitudes(*inputs, **options, grads=(whole, None))
        terms = query.size(-2) if reduce == "queries" else 1
        ours, theirs = (f(query, key, reduce, **options) for f in (call, attend_weights))
        assert ours.dtype == dtype
        size = sizes["output"]._replace(terms=terms * sizes["output"].terms)
        assert_within_rounding(ours, theirs, truth, size, dtype)
        ours, theirs = (gradients(one(f), inputs, options, [g], names)
                        for f in (call, attend_weights))  # fmt: skip
        truths = reference_gradients(one(attend_weights), inputs, options, [g], names)
        for n, x in ours.items():
            assert_within_rounding(x, theirs[n], truths[n], sizes[n], dtype)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("isa")
@reductions
@pytest.mark.parametrize("options", ["plain", "all of it"])
def test_gradcheck(reduce, options):
    inputs = [x.detach()[..., :6, :3].requires_grad_() for x in make()]

    def f(*inputs):
        torch.manual_seed(3)
        return qkv.attention_weights(*inputs, reduce=reduce, **OPTIONS[options])

    assert torch.autograd.gradcheck(f, inputs)


OPTIONS_WITH_VALUE = {
    **OPTIONS,
    "learned": {
        "attn_mask": torch.randn(4, 1, 23).double().requires_grad_(),
        "alibi_slopes": torch.rand(4).double().requires_grad_(),
        "sinks": torch.randn(2, 4).double().requires_grad_(),
        "dropout_p": 0.2,
    },
}


@pytest.mark.usefixtures("isa")
@reductions
class TestWithOutput:
    """attention_with_weights: what attention and attention_weights return, at once."""

    @pytest.mark.parametrize("options", OPTIONS_WITH_VALUE)
    @pytest.mark.parametrize("used", ["output", "weights", "both"])
    def test_against_reference(self, reduce, options, used):
        options = OPTIONS_WITH_VALUE[options]
        query, key = make()
        value = torch.randn(2, 4, 23, 9).double().requires_grad_()
        seed = {"dropout_seed": seed_of(query)} if options.get("dropout_p") else {}
        torch.manual_seed(3)
        ours = qkv.attention_with_weights(query, key, value, reduce=reduce, **options)
        truth = (
            testing.attention(query, key, value, **options, **seed),
            attend_weights(query, key, reduce, **options, **seed),
        )
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)
        wanted = {"output": (1.0, 0.0), "weights": (0.0, 1.0), "both": (1.0, 1.0)}[used]
        leaves = [x for x in (query, key, value, *options.values()) if is_float(x)]
        leaves = [x for x in leaves if x.requires_grad and not (used == "weights" and x is value)]
        g = [torch.randn_like(x) for x in truth]
        found, expected = (
            torch.autograd.grad(
                [x for x, w in zip(results, wanted, strict=True) if w], leaves,
                [x for x, w in zip(g, wanted, strict=True) if w],
            )
            for results in (ours, truth)
        )  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("L, S", [(0, 4), (4, 0), (0, 0), (1, 1), (300, 1)])
    def test_sizes(self, reduce, L, S):
        """With sinks, whose gradient asks for the output of rows even where there are no keys."""
        query, key = make(L, S)
        value, sinks = torch.randn(2, 4, S, 9).double(), torch.randn(4).double().requires_grad_()
        ours = qkv.attention_with_weights(query, key, value, reduce=reduce, sinks=sinks)
        truth = (
            testing.attention(query, key, value, sinks=sinks),
            attend_weights(query, key, reduce, sinks=sinks),
        )
        g = [torch.randn_like(x) for x in truth]
        found, expected = (
            torch.autograd.grad(results, (query, key, sinks), g, materialize_grads=True)
            for results in (ours, truth)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def test_no_gradient_reaches_the_value_through_the_weights(self, reduce):
        query, key = make()
        value = torch.randn(2, 4, 23, 9).double().requires_grad_()
        _, weights = qkv.attention_with_weights(query, key, value, reduce=reduce)
        (grad,) = torch.autograd.grad(weights.sin().sum(), value)
        assert (grad == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_is_what_the_two_are(self, reduce, dtype):
        """The weights to the last bit, the output as well but for the order in which the keys of
        few rows are added up."""
        query, key = (x.detach() for x in make(200, 300, dtype=dtype))
        value = torch.randn(2, 4, 300, 9).to(dtype)
        output, weights = qkv.attention_with_weights(query, key, value, reduce=reduce)
        assert torch.equal(weights, qkv.attention_weights(query, key, reduce=reduce))
        assert torch.equal(output, qkv.attention(query, key, value))
        one = query[..., :1, :]
        output, weights = qkv.attention_with_weights(one, key, value, reduce=reduce)
        assert torch.equal(weights, qkv.attention_weights(one, key, reduce=reduce))
        torch.testing.assert_close(output, qkv.attention(one, key, value))

    @pytest.mark.bf16
    def test_broadcast_key_in_half_precision(self, reduce):
        """The gradient of a key that several queries share is added up in float32."""
        query = torch.randn(2, 4, 20, 8).bfloat16().requires_grad_()
        key, value = (torch.randn(1, 4, 23, 8).bfloat16().requires_grad_() for _ in range(2))
        leaves = (query, key, value)
        ours = qkv.attention_with_weights(*leaves, reduce=reduce)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        truth = qkv.attention_with_weights(*wide, reduce=reduce)
        g = [torch.randn_like(x) for x in ours]
        found = torch.autograd.grad(ours, leaves, g)
        expected = torch.autograd.grad(truth, wide, [x.double() for x in g])
        for x, y in zip((*ours, *found), (*truth, *expected), strict=True):
            assert testing.rms_error(x.detach(), y.detach()) < 1e-2


@pytest.mark.one_in(8)
@pytest.mark.usefixtures("isa")
@reductions
@pytest.mark.parametrize("options", [
    {}, {"dropout_p": 0.4, "is_causal": True}, {"softcap": 1.5, "window_size": (2, 1)},
])  # fmt: skip
@pytest.mark.parametrize("function", [qkv.attention_weights, qkv.attention_with_weights])
def test_second_order_and_forward_mode(reduce, options, function):
    inputs = [x.detach()[:1, :2, :4, :3].requires_grad_() for x in make()]
    if function is qkv.attention_with_weights:
        inputs.append(torch.randn(1, 2, 4, 3).double().requires_grad_())

    def f(*inputs):
        torch.manual_seed(3)
        return function(*inputs, reduce=reduce, **options)

    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.mark.usefixtures("isa")
class TestMeaning:
    def test_they_are_what_attention_uses(self):
        query, key = make(dtype=torch.float32)
        value = torch.randn(2, 4, 23, 9)
        for options in OPTIONS.values():
            torch.manual_seed(5)
            weights = qkv.attention_weights(query, key, **options)
            torch.manual_seed(5)
            output = qkv.attention(query, key, value, **options)
            torch.testing.assert_close(weights @ value, output, rtol=1e-5, atol=1e-6)

    def test_rows_sum_to_one(self):
        query, key = make(dtype=torch.float32)
        mask = torch.ones(20, 23, dtype=torch.bool)
        mask[3] = False
        sums = qkv.attention_weights(query, key, mask).sum(-1)
        expected = torch.ones(2, 4, 20).masked_fill(torch.arange(20) == 3, 0)
        torch.testing.assert_close(sums, expected)

    def test_what_is_hidden_is_exactly_zero(self):
        query, key = make(dtype=torch.float32)
        weights = qkv.attention_weights(query, key, window_size=(2, 0), is_causal=True)
        seen = testing.visible(20, 23, True, (2, 0)).expand(2, 4, -1, -1)
        assert torch.equal(weights != 0, seen)

    def test_hidden_junk_does_not_leak(self):
        query, key = (x.detach() for x in make(dtype=torch.float32))
        key[..., 20:, :] = float("nan")
        for reduce in (None, "heads", "queries"):
            weights = qkv.attention_weights(query, key, torch.arange(23) < 20, reduce=reduce)
            assert weights.isfinite().all() and (weights[..., 20:] == 0).all()

    @pytest.mark.parametrize("H, Hkv, L", [(4, 4, 20), (4, 4, 1), (6, 2, 90)])
    def test_rows_that_see_junk_are_nan_where_they_see(self, H, Hkv, L):
        query, key = (x.detach() for x in make(L, 23, H, Hkv, torch.float32))
        key[..., 7, :] = float("nan")
        mask = torch.arange(23) < 20
        mask = torch.where(torch.arange(L)[:, None] % 2 == 0, mask, mask & (torch.arange(23) != 7))
        weights = qkv.attention_weights(query, key, mask, enable_gqa=H != Hkv)
        assert torch.equal(weights.isnan(), (mask & mask[:, 7:8]).expand(weights.shape))
        assert (weights[~mask.expand(weights.shape)] == 0).all()


@pytest.mark.usefixtures("isa")
@reductions
def test_any_number_of_threads(reduce, threads):
    inputs = make(200, 300, dtype=torch.float32)
    options = {"is_causal": True, "reduce": reduce}
    threads(1)
    weights = qkv.attention_weights(*inputs, **options)
    g = torch.randn_like(weights)
    expected = torch.autograd.grad(weights, inputs, g)
    for n in (2, 3, 4):
        threads(n)
        again = qkv.attention_weights(*inputs, **options)
        assert torch.equal(again, weights)
        for x, y in zip(torch.autograd.grad(again, inputs, g), expected, strict=True):
            assert torch.equal(x, y)


def in_derivatives(function, leaves, options, order):
    """The gradients up to that order, each of all of those before it along fixed seeds."""
    call = dict(zip(("query", "key", *options), leaves, strict=True))
    results, found = [function(**call)], []
    for _ in range(order):
        draws = torch.Generator().manual_seed(0)
        seeds = [torch.randn(x.shape, generator=draws, dtype=x.dtype) for x in results]
        results = torch.autograd.grad(results, leaves, seeds, create_graph=True)
        found += [x.detach() for x in results]
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("learned", [False, True])
# The products are torch's, and what divides a matrix among threads changes its last digits, with a
# D of 1 too on Intel's CPUs. So there are more matrices than threads.
@pytest.mark.parametrize("B, H, L, S, D", [
    (4, 2, 300, 17, 8), (2, 4, 140, 33, 8), (2, 4, 100, 100, 8), (2, 4, 40, 1000, 8),
    (8, 1, 1100, 33, 1), (2, 4, 64, 1000, 1), (8, 1, 400, 100, 1),
])  # fmt: skip
def test_derivatives_of_any_order_and_number_of_threads(B, H, L, S, D, learned, dtype, threads):
    """Composed of torch's operators from the second one on: single numbers, such as the gradient of
    a slope or of a scalar bias, are sums of as many products as there are scores."""
    torch.manual_seed(0)
    shapes = {"query": (B, H, L, D), "key": (B, H, S, D)}
    if learned:
        shapes |= {"alibi_slopes": (H,), "sinks": (H,), "bias": (1, 1)}
    leaves = [torch.randn(x, dtype=dtype).requires_grad_() for x in shapes.values()]
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(in_derivatives(qkv.attention_weights, leaves, list(shapes)[2:], 3))
    for found in results[1:]:
        for x, y in zip(found, results[0], strict=True):
            assert torch.equal(x, y)


def test_compile():
    torch.compiler.reset()
    query, key = make()

    def f(query, key):
        weights = qkv.attention_weights(query * 2, key, dropout_p=0.3)
        return weights.sin() + qkv.attention_weights(query, key, reduce="heads")[..., None, :, :]

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        weights = g(query, key)
        results.append([weights, *torch.autograd.grad(weights.sum(), (query, key))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("change, exception, message", [
    ({"reduce": "keys"}, ValueError, "reduce is .*keys.*heads.*queries"),
    ({"key": torch.zeros(2, 4, 5, 7)}, RuntimeError, "key has the shape"),
    ({"dropout_p": -1.0}, ValueError, "dropout_p is -1"),
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"sinks": torch.zeros(3)}, RuntimeError, "sinks"),
    ({"query": torch.zeros(2, 4, 5, 8).half()}, RuntimeError, "key is float32, but query is float"),
])  # fmt: skip
def test_bad_call(change, exception, message):
    arguments = {"query": torch.zeros(2, 4, 5, 8), "key": torch.zeros(2, 4, 5, 8), **change}
    with pytest.raises(exception, match=message):
        qkv.attention_weights(**arguments)
    with pytest.raises(exception, match=message):
        qkv.attention_with_weights(**arguments, value=torch.zeros(2, 4, 5, 8))


def slope_and_keys(offset, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(8, 64, 64), torch.randn(8, 256, 64) + offset
    return [x.requires_grad_() for x in (q, k, torch.full((8,), -0.5))]


def formula(query, key, slopes):
    """All weights, out of torch's operators."""
    L, S = query.size(-2), key.size(-2)
    distance = (torch.arange(L)[:, None] + S - L - torch.arange(S)).abs()
    scores = query @ key.transpose(-1, -2) / 8 - slopes[:, None, None] * distance
    return scores.softmax(-1)


@reductions
@pytest.mark.parametrize("offset", [4, 16, 1000])
def test_keys_with_a_mean(isa, reduce, offset):
    """Gradients are differences from a mean over the keys. Where the keys have much in common, that
    mean is large, and weights that do not quite add up to 1 leave some of it."""
    reduced = {None: lambda w: w, "heads": lambda w: w.mean(-3), "queries": lambda w: w.sum(-2)}
    errors = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(3):
        leaves = slope_and_keys(offset, seed)
        wide = [x.detach().double().requires_grad_() for x in leaves]
        ours = qkv.attention_weights(*leaves[:2], alibi_slopes=leaves[2], reduce=reduce)
        grad = torch.randn_like(ours)
        found = [torch.autograd.grad(ours, leaves, grad)]
        found.append(torch.autograd.grad(reduced[reduce](formula(*leaves)), leaves, grad))
        truth = torch.autograd.grad(reduced[reduce](formula(*wide)), wide, grad.double())
        for which, gradients_of in enumerate(found):
            for i, (x, y) in enumerate(zip(gradients_of, truth, strict=True)):
                errors[which, i] += (x.double() - y).pow(2).sum()
    ratios = (errors[0] / errors[1]).sqrt()
    # Ours were 5 to 290 times as large. A slope's error is that of one number a head, and so noisy.
    assert (ratios < torch.tensor([1.1, 1.1, 2.0])).all(), ratios
