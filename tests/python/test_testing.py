"""qkv.testing itself: against torch's own attention, by finite differences, and where it has to
refuse. What the kernels make of the same calls, the other files say."""

import inspect
import math

import pytest
import torch
from common import DTYPES, INF, sdpa
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import qkv
from qkv import testing

SHAPES = {
    "plain": [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)],
    "two dimensions": [(5, 4), (7, 4), (7, 4)],
    "broadcast": [(2, 1, 3, 5, 4), (1, 2, 3, 7, 4), (3, 7, 2)],
    "no keys": [(2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 4)],
    "no queries": [(2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 4)],
}
MASKS = {
    "none": None,
    "bool": torch.arange(5)[:, None] % 4 < torch.arange(7) % 5,
    "a row that sees nothing": torch.arange(5)[:, None] != torch.arange(7) * 0 + 2,
    "float": torch.linspace(-3, 3, 35, dtype=torch.float64).sin().view(5, 7),
    "-inf": torch.zeros(5, 7, dtype=torch.float64).masked_fill(torch.arange(7) > 4, -INF),
}


def make(*shapes, dtype=torch.float64):
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


class TestAgainstTorch:
    """torch's math path in float64, where torch can say it; gradients by autograd through both."""

    def check(self, inputs, **options):
        ours = testing.attention(*inputs, **options)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = sdpa(*inputs, **options)
        close(ours, theirs)
        g = torch.randn_like(ours)
        close(*(torch.autograd.grad(x, inputs, g, materialize_grads=True) for x in (ours, theirs)))

    @pytest.mark.parametrize("shapes", SHAPES)
    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.3}], ids=str)
    def test_shapes(self, shapes, options):
        self.check(make(*SHAPES[shapes]), **options)

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_masks(self, mask, is_causal):
        self.check(make(*SHAPES["plain"]), attn_mask=MASKS[mask], is_causal=is_causal)

    @pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
    def test_grouped_heads(self, kv_heads):
        self.check(make((2, 6, 5, 4), (2, kv_heads, 7, 4), (2, kv_heads, 7, 3)), enable_gqa=True)

    def test_nonfinite(self):
        inputs = make(*SHAPES["plain"])
        with torch.no_grad():
            inputs[1][0, 0, 2, 1], inputs[2][0, 1, 3, 0] = math.nan, INF
        with sdpa_kernel(SDPBackend.MATH):
            theirs = sdpa(*inputs)
        ours = testing.attention(*inputs, nonfinite=True)
        torch.testing.assert_close(ours, theirs, equal_nan=True)

    def test_other_dtypes_are_torchs_own_steps(self):
        inputs = make(*SHAPES["plain"], dtype=torch.bfloat16)
        ours = testing.attention(*inputs, dtype=torch.bfloat16)
        query, key, value = inputs
        weights = (query @ key.mT * 0.5).softmax(-1)
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, weights @ value)


class TestOptions:
    """Those that torch has not, by their formulas, for one query."""

    def test_formula(self):
        query, key, value = (x.detach() for x in make((1, 4), (7, 4), (7, 2)))
        slope, sink = torch.tensor([0.3, 0.7], dtype=torch.float64)
        found = testing.attention(
            query, key, value, softcap=1.5, alibi_slopes=slope, sinks=sink, window_size=(4, 0),
            return_lse=True,
        )  # fmt: skip
        dots = [float(query[0] @ k) / 2 for k in key]
        scores = [1.5 * math.tanh(x / 1.5) - 0.3 * (6 - j) for j, x in enumerate(dots)]
        terms = {j: math.exp(x) for j, x in enumerate(scores) if j >= 2}
        total = math.exp(0.7) + sum(terms.values())
        close(found[1], torch.tensor([math.log(total)], dtype=torch.float64))
        expected = sum(term / total * value[j] for j, term in terms.items())
        close(found[0], expected[None])

    def test_nothing_to_attend_to(self):
        inputs = make(*SHAPES["plain"])
        nothing = torch.zeros(5, 7, dtype=torch.bool)
        output, lse = testing.attention(*inputs, nothing, return_lse=True)
        assert not output.any() and (lse == -INF).all()
        assert not any(g.any() for g in torch.autograd.grad(output.sum(), inputs))
        sinks = torch.tensor([0.5, -INF, 2.0], dtype=torch.float64)
        output, lse = testing.attention(*inputs, nothing, sinks=sinks, return_lse=True)
        assert not output.any()
        close(lse, sinks[:, None].expand(2, 3, 5))

    def test_what_is_hidden_does_not_leak(self):
        """NaN in a key that no query may see: as if it were finite."""
        inputs = make((1, 2, 4, 4), (1, 2, 5, 4), (1, 2, 5, 4))
        g, results = torch.randn(1, 2, 4, 4, dtype=torch.float64), []
        for junk in (None, None, math.nan, INF):
            if junk is not None:
                with torch.no_grad():
                    inputs[1][..., 4, :], inputs[2][..., 4, :] = junk, junk
            nonfinite = bool(results)
            output = testing.attention(*inputs, is_causal=True, nonfinite=nonfinite)
            results.append([output, *torch.autograd.grad(output, inputs, g)])
        for found in results[1:]:
            close(found, results[0])

    def test_weights_and_their_sums(self):
        query, key, value = make((2, 6, 5, 4), (2, 2, 7, 4), (2, 6, 7, 3))
        options = {"enable_gqa": True, "window_size": (3, 1), "dropout_p": 0.4, "dropout_seed": 5}
        weights = testing.attention_weights(query, key, **options)
        close(weights @ value, testing.attention(query, key, value, **options))
        for reduce, expected in (("heads", weights.mean(1)), ("queries", weights.sum(-2))):
            close(testing.attention_weights(query, key, reduce=reduce, **options), expected)

    def test_hard_is_what_a_cold_softmax_tends_to(self):
        inputs = make(*SHAPES["plain"])
        output, index = testing.hard_attention(*inputs, return_index=True, straight_through=True)
        cold = testing.attention(*inputs, scale=1e6)
        torch.testing.assert_close(output, cold, rtol=1e-6, atol=1e-6)
        assert torch.equal(index, testing.attention_weights(*inputs[:2]).argmax(-1))
        g = torch.randn_like(output)
        soft = torch.autograd.grad(testing.attention(*inputs), inputs[:2], g)
        close(torch.autograd.grad(output, inputs[:2], g), soft)

    @pytest.mark.parametrize("first_query, first_key", [(0, 0), (3, 0), (2, 5)])
    def test_place(self, first_query, first_key):
        """A part of a larger problem is what it is in the whole."""
        inputs = make((3, 2, 9, 4), (3, 2, 11, 4), (3, 2, 11, 3))
        options = {"is_causal": True, "window_size": (6, -1), "alibi_slopes": torch.rand(2)}
        scores, seen = testing.attention_scores(*inputs[:2], **options)
        rows, keys = slice(first_query, None), slice(first_key, None)
        place = testing.Place(first_query, first_key, 2, 1)
        parts = inputs[0][1:, :, rows], inputs[1][1:, :, keys]
        found = testing.attention_scores(*parts, **options, place=place)
        close(found[0], scores[1:, :, rows, keys])
        assert torch.equal(found[1], seen[rows, keys])
        kept = testing.dropout_mask(-3, 0.3, (3, 2, 9, 11))
        shape = (2, 2, 9 - first_query, 11 - first_key)
        assert torch.equal(
            testing.dropout_mask(-3, 0.3, shape, place=place), kept[1:, :, rows, keys]
        )


OPTIONS = {
    "plain": {},
    "masks": {"attn_mask": MASKS["-inf"], "is_causal": True},
    "all": {
        "softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.1]), "window_size": (3, 1),
        "sinks": torch.tensor([0.3, -1.0]), "dropout_p": 0.3, "dropout_seed": 11,
    },
    "nonfinite": {"attn_mask": MASKS["a row that sees nothing"], "nonfinite": True},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of forward mode
@pytest.mark.parametrize("options", OPTIONS)
class TestDerivatives:
    def function(self, options):
        options = OPTIONS[options]

        def f(query, key, value):
            output, lse = testing.attention(query, key, value, **options, return_lse=True)
            return output, lse.masked_fill(lse == -INF, 0)

        return f, make((2, 5, 2), (2, 7, 2), (2, 7, 1))

    def test_first_and_second_by_finite_differences(self, options):
        f, inputs = self.function(options)
        assert gradcheck(f, inputs, check_forward_ad=True)
        assert gradgradcheck(f, inputs)

    def test_forward_over_reverse(self, options):
        f, inputs = self.function(options)
        loss = lambda *x: sum(y.sin().sum() for y in f(*x))  # noqa: E731
        gradient = torch.func.grad(loss, (0, 1, 2))
        tangents = tuple(map(torch.randn_like, inputs))
        _, found = torch.func.jvp(gradient, tuple(inputs), tangents)
        first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
        expected = torch.autograd.grad(first, inputs, tangents)  # the Hessian is symmetric
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def test_vmap(self, options):
        f, inputs = self.function(options)
        samples = [torch.stack([x, 2 * x, -x]).detach() for x in inputs]
        found = torch.func.vmap(f)(*samples)
        expected = [f(*x) for x in zip(*samples, strict=True)]
        close(found, tuple(torch.stack(x) for x in zip(*expected, strict=True)))


def test_derivatives_of_all_that_is_a_tensor():
    tensors = make((2, 5, 2), (2, 7, 2), (2, 7, 1), (5, 7), (2,), (2,))

    def f(query, key, value, attn_mask, alibi_slopes, sinks):
        return testing.attention(
            query, key, value, attn_mask, 0.3, alibi_slopes=alibi_slopes, sinks=sinks,
            softcap=2.0, dropout_seed=4, return_lse=True,
        )  # fmt: skip

    assert gradcheck(f, tensors) and gradgradcheck(f, tensors)


class TestDropout:
    def test_philox_is_random123s(self):
        """The known answers that its authors publish."""
        zeros, ones = (torch.tensor(x) for x in (0, 0xFFFFFFFF))
        answer = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
        assert [x.item() for x in testing.philox([zeros] * 4, (0, 0))] == answer
        answer = [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
        assert [x.item() for x in testing.philox([ones] * 4, (0xFFFFFFFF,) * 2)] == answer

    def test_the_seed_is_what_a_call_draws(self):
        torch.manual_seed(3)
        seeds, states = [testing.dropout_seed() for _ in range(3)], torch.get_rng_state()
        torch.manual_seed(3)
        drawn = [torch.ops.qkv.dropout_seed(torch.empty(0)).item() for _ in range(3)]
        assert seeds == drawn and torch.equal(torch.get_rng_state(), states)
        assert len({x < 0 for x in [*seeds, *(testing.dropout_seed() for _ in range(30))]}) == 2

    @pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (2, 3, 4, 5), (2, 1, 3, 4, 5)])
    def test_the_mask_is_what_a_call_keeps(self, shape):
        *lead, L, S = shape
        query, key = torch.randn(*lead, L, 8), torch.randn(*lead, S, 8)
        torch.manual_seed(3)
        weights = qkv.attention_weights(query, key, dropout_p=0.4)
        torch.manual_seed(3)
        kept = testing.dropout_mask(testing.dropout_seed(), 0.4, shape)
        assert torch.equal(weights != 0, kept)


class TestTolerances:
    def test_as_far_off_as_the_baseline(self):
        truth = torch.linspace(1, 2, 100, dtype=torch.float64)
        theirs = truth.float() + 1e-3
        testing.assert_close(truth.float() - 0.99e-3, truth, theirs)
        testing.assert_close(truth.float() - 1.9e-3, truth, theirs, times=2)
        with pytest.raises(AssertionError, match=r"^the result is off by 0.0011 at \[0\]"):
            testing.assert_close(truth.float() - 1.1e-3, truth, theirs)

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_rounding_is_always_allowed(self, dtype):
        truth = torch.randn(1000, dtype=torch.float64)
        wrong = truth.to(dtype, copy=True)
        testing.assert_close(wrong, truth)
        wrong[truth.abs().argmax()] *= 1 + 80 * torch.finfo(dtype).eps
        with pytest.raises(AssertionError, match="off by .* for rounding"):
            testing.assert_close(wrong, truth)

    def test_whole_numbers_are_not_rounded(self):
        testing.assert_close(torch.arange(3), torch.arange(3))
        with pytest.raises(AssertionError, match=r"off by 1 at \[2\]: 3, where 2 is expected"):
            testing.assert_close(torch.tensor([0, 1, 3]), torch.arange(3))

    @pytest.mark.parametrize("x", [math.nan, INF, -INF])
    def test_what_is_not_finite(self, x):
        truth = torch.ones(2, 3, dtype=torch.float64)
        junk = truth.clone()
        junk[1, 2] = x
        testing.assert_close(junk, junk, junk)
        for actual, expected in ((junk, truth), (truth, junk)):
            with pytest.raises(AssertionError, match=r"off by inf at \[1, 2\]"):
                testing.assert_close(actual, expected)
        with pytest.raises(AssertionError, match="the baseline of .* is NaN or infinite"):
            testing.assert_close(truth, truth, junk)

    def test_names(self):
        one, other = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        truth = {"output": one, "grads": [one, other]}
        testing.assert_close(truth, truth, truth)
        testing.assert_close(truth, truth)
        with pytest.raises(AssertionError, match="^1 of 'grads' of the layer is off by 1 at"):
            testing.assert_close(truth | {"grads": [one, one]}, truth, name="the layer")
        for actual, message in (
            ({"output": one}, r"the result has \['output'\], but \['output', 'grads'\]"),
            (truth | {"output": None}, "'output' of the result is None, but a tensor"),
            (truth | {"output": one[:1]}, r"'output' of the result is \[1\], but \[2\]"),
        ):
            with pytest.raises(AssertionError, match=message):
                testing.assert_close(actual, truth)
        with pytest.raises(AssertionError, match="the baseline of 'output' of .* is .1., but"):
            testing.assert_close(truth, truth, truth | {"output": one[:1]})

    def test_root_mean_square(self):
        truth = torch.randn(10_000, dtype=torch.float64)
        noise = torch.randn(10_000, dtype=torch.float64)
        testing.assert_as_accurate([truth + 1.01 * noise], [truth], [truth + noise])
        with pytest.raises(AssertionError, match="at most 1.02 times the baseline's"):
            testing.assert_as_accurate([truth + 1.03 * noise], [truth], [truth + noise])

    @pytest.mark.parametrize("x", [math.nan, INF, -INF])
    def test_root_mean_square_of_what_is_not_finite(self, x):
        """As an lse has it: -inf where it is expected spoils nothing."""
        truth, junk = torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 1, x]])
        testing.assert_as_accurate(junk * 1.01, junk, junk * 1.02)
        with pytest.raises(AssertionError, match="off by 0.02, root mean square"):
            testing.assert_as_accurate(junk * 1.02, junk, junk * 1.01)
        with pytest.raises(AssertionError, match="off by inf, root mean square"):
            testing.assert_as_accurate(junk, truth, truth)
        with pytest.raises(AssertionError, match="the baseline of .* is NaN or infinite"):
            testing.assert_as_accurate(truth, truth, junk)

    def test_root_mean_square_beside_nothing(self):
        """As a gradient has it that is 0, or has no elements."""
        for truth in (torch.zeros(3), torch.zeros(0)):
            testing.assert_as_accurate(truth, truth, truth)
        with pytest.raises(AssertionError, match="off by 1.73, .* the baseline's 0 is"):
            testing.assert_as_accurate(torch.ones(3), torch.zeros(3), torch.zeros(3))

    def test_errors(self):
        one = torch.tensor([3.0, 4.0])
        assert testing.max_error(one, one + torch.tensor([0.0, 0.5])) == 0.5
        assert testing.max_error(one[:0], one[:0]) == 0
        assert testing.rms_error(one * 1.5, one) == 0.5
        for measure in (testing.max_error, testing.rms_error):
            for actual, shape in ((one[:1], r"\[1\]"), (one[:, None], r"\[2, 1\]")):
                with pytest.raises(ValueError, match=rf"actual is {shape}, but \[2\], the shape"):
                    measure(actual, one)
            for name, given in (("actual", (one * 1j, one)), ("expected", (one, one * 1j))):
                with pytest.raises(TypeError, match=f"{name} is torch.complex64, but real numbers"):
                    measure(*given)


@pytest.mark.parametrize("name", ["attention", "attention_weights", "hard_attention", "varlen_attn",
                                  "attention_with_kvcache"])  # fmt: skip
def test_arguments_are_the_products(name):
    """By place, and by name: what is not in a signature is an option of attention or of its
    scores."""
    ours, theirs = (inspect.signature(getattr(x, name)).parameters for x in (testing, qkv))
    positional = [n for n, p in theirs.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    passed_on = [*inspect.signature(testing.attention).parameters]
    passed_on += inspect.signature(testing.attention_scores).parameters
    taken = {*ours, *passed_on, "return_softmax_lse"}
    assert taken.issuperset(theirs)


Q = torch.zeros(2, 4, 5, 8)
BAD = {
    "no tensor": ({"query": 3}, TypeError, "query is 3, but a dense tensor"),
    "integers": ({"key": Q.long()}, TypeError, "key is a tensor of torch.int64, but a dense"),
    "one dimension": ({"query": Q[0, 0, 0]}, ValueError, r"query is \[8\], but \[..., rows"),
    "head_dim": ({"key": Q[..., :7]}, ValueError, r"key is \[2, 4, 5, 7\], but \[..., 8\]"),
    "rows": ({"value": Q[..., :4, :]}, ValueError, r"value is \[2, 4, 4, 8\], but \[..., 5, Dv\]"),
    "batch": ({"key": Q[:, :3]}, ValueError, r"key is \[2, 3, 5, 8\], but leading dimensions"),
    "heads": (
        {"value": Q[:, :3], "enable_gqa": True}, ValueError, "value has 3 heads, but a divisor of 4"
    ),
    "mask": ({"attn_mask": Q[0, 0, :3, :5]}, ValueError, r"attn_mask is \[3, 5\], but"),
    "long mask": (
        {"query": Q[..., :1, :], "attn_mask": torch.zeros(5, 5)}, ValueError,
        r"attn_mask is \[5, 5\], but \[..., 1 or 1, 5 or 1\]",
    ),
    "mask dtype": ({"attn_mask": Q[0, 0, :, :5].long()}, TypeError, "attn_mask is torch.int64"),
    "slopes": ({"alibi_slopes": Q[0, 0, 0, :3]}, ValueError, r"alibi_slopes is \[3\], but"),
    "sinks": ({"sinks": 1.0}, TypeError, "sinks is 1.0, but a tensor"),
    "complex sinks": (
        {"sinks": Q[0, :, 0, 0].cfloat()}, TypeError, "sinks is torch.complex64, but a floating"
    ),
    "scale": ({"scale": INF}, ValueError, "scale is inf, but a finite number"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0, but"),
    "window": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\), but"),
    "dropout_p": ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5, but a probability"),
    "no seed": ({"dropout_p": 0.5}, ValueError, "dropout_seed is None with dropout_p 0.5, but"),
    "no option": ({"sofcap": 1.0}, TypeError, "unexpected keyword argument 'sofcap'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_call(case):
    change, exception, message = BAD[case]
    with pytest.raises(exception, match=message):
        testing.attention(**{"query": Q, "key": Q, "value": Q, **change})


def test_other_bad_calls():
    with pytest.raises(ValueError, match="reduce is 'keys', but"):
        testing.attention_weights(Q, Q, reduce="keys")
    with pytest.raises(ValueError, match=r"shape is \[5\], but \[..., H, L, S\]"):
        testing.dropout_mask(1, 0.5, (5,))
    with pytest.raises(ValueError, match="seqused_k is None, but with block_table"):
        testing.varlen_attn(Q[0, 0, :, None], Q[0], Q[0], torch.tensor([0, 5]), block_table=Q)
    with pytest.raises(ValueError, match="cache_seqlens is None, but with key"):
        testing.attention_with_kvcache(Q, Q, Q, Q, Q)
    with pytest.raises(ValueError, match="key and value: both or neither"):
        testing.attention_with_kvcache(Q, Q, Q, Q, cache_seqlens=0)
    nested = torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged)
    with pytest.raises(TypeError, match="query is a nested tensor, but a dense tensor"):
        testing.attention(nested, Q, Q)


def test_it_calls_no_kernel_of_ours():
    """The reference judges the product and is no part of it."""

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.namespace == "aten", func
            return func(*args, **(kwargs or {}))

    packed, ends = Q[0, 0, :, None], torch.tensor([0, 2, 5])
    with Watch():
        assert testing.attention(Q, Q, Q, dropout_p=0.5, dropout_seed=1).shape == Q.shape
        testing.attention_weights(Q, Q)
        testing.hard_attention(Q, Q, Q)
        testing.varlen_attn(packed, packed, packed, ends)
        testing.attention_with_kvcache(Q, Q, Q)
        testing.dropout_seed()


def test_score_functions_are_the_products():
    """Dense, packed and in caches, each of which counts its queries in another way."""
    query, key, value = (torch.randn(2, 3, n, 8).double() for n in (4, 9, 9))
    table = torch.randn(3, 30).double()

    def function(s, b, h, q, k):
        return torch.where(k <= q + 1, s.tanh() * (1 + b) + table[h, q - k + 12], -torch.inf)

    ends, packed = torch.tensor([0, 3, 9]), torch.randn(3, 9, 3, 8).double()
    calls = {
        "flex_attention": ((query, key, value), {}),
        "varlen_attn": ((*packed, ends, None, 6, 6), {}),
        "attention_with_kvcache": (
            (query, key, value), {"cache_seqlens": torch.tensor([7, 9])}
        ),
    }  # fmt: skip
    for name, (call, more) in calls.items():
        options = {"score_mod": function, "softcap": 2.0, **more}
        expected = getattr(testing, name.replace("flex_", ""))(*call, **options)
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(getattr(qkv, name)(*call, **options), expected)
