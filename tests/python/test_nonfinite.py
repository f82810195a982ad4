"""NaN and inf: as torch's math path where a row may attend to them, nowhere else."""

import functools

import pytest
import torch
from common import (
    DTYPES,
    INF,
    TOLERANCES,
    attend,
    compute_type,
    dtypes_of,
    fused,
    reference,
)
from gradients import LEAVES, gradients
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from rounding import assert_within_rounding, magnitudes
from strategies import one_example_in
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv import testing

NAN = float("nan")
attend_with_junk = functools.partial(attend, nonfinite=True)
pytestmark = pytest.mark.usefixtures("isa")
dtypes = dtypes_of("f32", "f64", "bf16", "f16")
# (L, S, D): smaller than any tile, with tails, a decode step, many rows
sizes = pytest.mark.parametrize("L, S, D", [(5, 7, 3), (1, 150, 16), (70, 33, 24)])


def run(f, inputs, grads, options):
    """f's output and lse, and the gradients of query, key and value."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = f(*inputs, **options)
    found = torch.autograd.grad(results, inputs, grads, allow_unused=True)
    return [*results, *(torch.zeros_like(x) if g is None else g
                        for g, x in zip(found, inputs, strict=True))]  # fmt: skip


def check(inputs, grads, **options):
    """Ours against attend_with_junk: equal where finite, the same NaN, the same infinities. In the
    gradients only as finite as that one: whether inf meets -inf depends on the order of sums."""
    ours = run(fused, inputs, grads, options)
    wide = [x.double() for x in inputs], [x.double() for x in grads]
    truths = run(attend_with_junk, *wide, options)
    names = ["output", "lse", "grad_query", "grad_key", "grad_value"]
    tolerance = 3 * max(TOLERANCES[inputs[0].dtype], 1e-5)
    for name, x, truth in zip(names, ours, truths, strict=True):
        x = x.double()
        if name.startswith("grad"):
            x, truth = (y.where(y.isfinite(), NAN) for y in (x, truth))
        torch.testing.assert_close(
            x, truth, rtol=tolerance, atol=tolerance, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
    return ours


def make(L, S, D, dtype):
    inputs = [torch.randn(1, 2, n, d, dtype=dtype) for n, d in [(L, D), (S, D), (S, D + 2)]]
    grad_lse = torch.randn(1, 2, L, dtype=compute_type(dtype))
    return inputs, [torch.randn(1, 2, L, D + 2, dtype=dtype), grad_lse]


@dtypes
@sizes
@pytest.mark.parametrize("junk", [NAN, INF])
class TestMaskedNeverLeaks:
    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_padding(self, L, S, D, dtype, junk, kind):
        inputs, grads = make(L, S, D, dtype)
        hidden = torch.rand(1, 1, 1, S) < 0.5
        hidden[..., 0] = False
        for x in inputs[1:]:
            x.masked_fill_(hidden.mT, junk)
        mask = ~hidden if kind == "bool" else torch.zeros(hidden.shape).masked_fill(hidden, -INF)
        ours = check(inputs, grads, attn_mask=mask)
        assert all(x.isfinite().all() for x in ours)
        for g in ours[3:]:
            assert (g.masked_select(hidden.mT) == 0).all()

    def test_future(self, L, S, D, dtype, junk):
        inputs, grads = make(L, S, D, dtype)
        first = min(L, S) - 1  # only the last row may see it
        inputs[1][..., first + 1 :, :], inputs[2][..., first + 1 :, :] = junk, junk
        check(inputs, grads, is_causal=True)
        inputs[0][..., 0].abs_()  # or a row's only score may be -inf: see TestAsTorchsMath
        inputs[1][..., first, 0], inputs[2][..., first, 1] = junk, junk
        ours = check(inputs, grads, is_causal=True)
        assert ours[0][..., :first, :].isfinite().all()

    def test_rows_that_see_nothing(self, L, S, D, dtype, junk):
        """Of a row that sees nothing, neither the query nor what flows back into it changes any
        result."""
        inputs, grads = make(L, S, D, dtype)
        blind = torch.rand(L, 1) < 0.5
        blind[0] = True
        inputs[0].masked_fill_(blind, junk)
        grads[0].masked_fill_(blind, junk)
        grads[1].masked_fill_(blind[:, 0], junk)
        ours = check(inputs, grads, attn_mask=~blind.expand(L, S))
        assert (ours[0].masked_select(blind) == 0).all()
        assert (ours[1].masked_select(blind[:, 0]) == -INF).all()
        assert all(x.isfinite().all() for x in (ours[0], *ours[2:]))

    def test_rows_beside_one_that_sees_it_keep_their_bits(self, L, S, D, dtype, junk):
        inputs, grads = make(L, S, D, dtype)
        sees = torch.arange(L) % 2 == 1
        mask = torch.ones(L, S, dtype=torch.bool)
        mask[~sees, -1] = False
        value = inputs[2].clone()
        value[..., -1, :] = junk
        expected, found = (
            gradients(fused, [*inputs[:2], v], {"attn_mask": mask}, grads, ("query",))["query"]
            for v in (inputs[2], value)
        )
        assert torch.equal(found[..., ~sees, :], expected[..., ~sees, :])

    def test_everything_masked(self, L, S, D, dtype, junk):
        inputs, grads = ([torch.full_like(x, junk) for x in xs] for xs in make(L, S, D, dtype))
        for mask in (torch.zeros(L, S, dtype=torch.bool), torch.full((L, S), -INF)):
            output, lse, *found = check(inputs, grads, attn_mask=mask)
            assert (lse == -INF).all()
            assert all((x == 0).all() for x in (output, *found))


@dtypes
@sizes
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
class TestAttendedComesOut:
    @pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_input(self, L, S, D, dtype, junk, which, is_causal):
        inputs, grads = make(L, S, D, dtype)
        inputs[which][0, 1, -1, 1] = junk
        ours = check(inputs, grads, is_causal=is_causal)
        assert ours[0][0, 0].isfinite().all()  # the other head

    @pytest.mark.parametrize("which", range(2), ids=["grad_output", "grad_lse"])
    def test_gradient(self, L, S, D, dtype, junk, which):
        inputs, grads = make(L, S, D, dtype)
        grads[which][0, 1, -1] = junk
        check(inputs, grads, attn_mask=torch.rand(L, S) < 0.5, is_causal=True)

    def test_float_mask(self, L, S, D, dtype, junk):
        inputs, grads = make(L, S, D, dtype)
        mask = torch.randn(L, S)
        mask[0, -1], mask[-1, 0] = junk, junk
        check(inputs, grads, attn_mask=mask)


@dtypes
class TestDrawn:
    @settings(max_examples=one_example_in(2))
    @given(
        size=st.tuples(*(st.integers(1, 24) for _ in range(3))),
        junk=st.lists(
            st.tuples(
                st.integers(0, 4),  # query, key, value, grad_output, grad_lse
                st.floats(0, 1, exclude_max=True),  # where
                st.sampled_from([NAN, INF, -INF]),
            ),
            min_size=1,
            max_size=4,
        ),
        is_causal=st.booleans(),
        mask=st.sampled_from([None, "bool", "float"]),
        window=st.sampled_from([None, None, (2, 0), (-1, 3), (5, -1)]),
        softcap=st.sampled_from([0.0, 0.0, 2.0]),
        heads=st.sets(st.sampled_from(["alibi_slopes", "sinks"])),
        dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
        seed=st.integers(0, 1000),
    )
    # A row whose only score is -inf, but not hidden, beside a sink: 0 * NaN is NaN in its gradient.
    @example(
        size=(1, 1, 1), junk=[(0, 0.0, INF), (2, 0.0, NAN)], is_causal=False, mask=None,
        window=None, softcap=0.0, heads={"sinks"}, dropout_p=0.0, seed=0,
    )  # fmt: skip
    def test_junk_anywhere(
        self, dtype, size, junk, is_causal, mask, window, softcap, heads, dropout_p, seed
    ):
        torch.manual_seed(seed)
        L, S, D = size
        inputs, grads = make(L, S, D, dtype)
        for which, where, value in junk:
            x = [*inputs, *grads][which]
            x.view(-1)[int(where * x.numel())] = value
        hidden = torch.rand(L, S) < 0.6
        masks = {None: None, "bool": ~hidden, "float": torch.randn(L, S).masked_fill(hidden, -INF)}
        options = {"attn_mask": masks[mask], "is_causal": is_causal, "window_size": window}
        options |= {"dropout_p": dropout_p, "dropout_seed": seed}
        options |= {"softcap": softcap, **{name: torch.randn(2) for name in sorted(heads)}}
        blind = attend(*map(torch.zeros_like, inputs), **options)[1] == -INF
        _, lse = attend_with_junk(*inputs, **options)
        assume((lse == -INF).equal(blind))  # the rest is TestAsTorchsMath.test_all_scores_minus_inf
        check(inputs, grads, **options)


@dtypes
@sizes
class TestGradientsOfOptions:
    """The gradients of a mask, slopes and sinks: what is masked does not reach them either."""

    @pytest.mark.parametrize("junk", [NAN, INF])
    def test_masked(self, L, S, D, dtype, junk):
        inputs, grads = make(L, S, D, dtype)
        hidden = torch.rand(S) < 0.5
        hidden[0] = False
        mask = torch.randn(L, S, dtype=dtype).masked_fill(hidden, -INF)
        options = {"attn_mask": mask, "alibi_slopes": torch.rand(2), "sinks": torch.randn(2)}
        options["bias"] = torch.randn(2, L, S, dtype=dtype)
        expected = gradients(attend, inputs, options, grads, LEAVES)
        for x in inputs[1:]:
            x.masked_fill_(hidden[:, None], junk)
        found = gradients(fused, inputs, options, grads, LEAVES)
        tolerance = max(TOLERANCES[dtype], 1e-5)
        for name in LEAVES[3:]:
            atol = tolerance * max(1, expected[name].abs().max())
            torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=atol)
        assert (found["attn_mask"][:, hidden] == 0).all()

    def test_attended(self, L, S, D, dtype):
        """A row of NaN makes NaN of what it has a share in, and of nothing else."""
        inputs, grads = make(L, S, D, dtype)
        inputs[0][0, 1, -1, 0] = NAN
        options = {"attn_mask": torch.randn(2, L, S), "sinks": torch.randn(2)}
        found = gradients(fused, inputs, options, grads, ("attn_mask", "sinks"))
        assert (
            found["attn_mask"][0].isfinite().all() and found["attn_mask"][1, :-1].isfinite().all()
        )
        assert found["attn_mask"][1, -1].isnan().all()
        assert found["sinks"][0].isfinite() and found["sinks"][1].isnan()

    @pytest.mark.parametrize("sink", [0.5, 300.0])
    def test_row_that_sees_nothing(self, L, S, D, dtype, sink):
        """Its output is 0, and a gradient of it that is NaN changes nothing: first and second
        gradients, the sink's too, are as if it had been 0."""
        inputs, grads = make(L, S, D, dtype)
        mask = torch.zeros(L, S, dtype=dtype)
        mask[0] = -INF
        options = {"attn_mask": mask, "sinks": torch.tensor([sink, -sink])}
        results = []
        for value in (0, NAN):
            grads[0][:, :, 0] = value
            leaves = [x.detach().requires_grad_() for x in (*inputs, options["sinks"])]
            found = torch.autograd.grad(
                fused(*leaves[:3], attn_mask=mask, sinks=leaves[3]),
                leaves,
                grads,
                create_graph=True,
            )
            second = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in leaves])
            results.append([*found, *second])
        for expected, x in zip(*results, strict=True):
            assert torch.equal(x, expected)

    @pytest.mark.parametrize("junk", [NAN, INF, -INF])
    def test_sink(self, L, S, D, dtype, junk):
        """A sink of -inf is no sink, the others make NaN, as in a softmax. The other head does not
        change."""
        inputs, _ = make(L, S, D, dtype)
        sinks = torch.tensor([junk, 0.5], dtype=dtype)
        output, lse = fused(*inputs, sinks=sinks)
        without = {"sinks": torch.tensor([-INF, 0.5], dtype=dtype)}
        results = (f(*inputs, **without) for f in (attend, reference))
        (expected, expected_lse), (truth, _) = results
        size = magnitudes(*inputs, **without)["output"]
        torch.testing.assert_close(lse[:, 1], expected_lse[:, 1])
        for head in (0, 1) if junk == -INF else (1,):
            x, theirs, true = (y[:, head] for y in (output, expected, truth))
            assert_within_rounding(x, theirs, true, size, dtype)
        if junk != -INF:
            assert lse[:, 0].isnan().all() and output[:, 0].isnan().all()


@dtypes
@sizes
@pytest.mark.parametrize("junk", [NAN, INF])
@pytest.mark.parametrize("blind", ["some", "all"])
class TestBlindRowsAndASinkThatIsNotFinite:
    """A row that sees nothing has output 0 and gradients 0, and its sink for lse, whatever the sink
    is; other rows of that head are NaN, and the other head does not change."""

    def make(self, L, S, D, dtype, junk, blind):
        inputs, grads = make(L, S, D, dtype)
        rows = torch.arange(L) % 3 == 0 if blind == "some" else torch.ones(L, dtype=torch.bool)
        mask = torch.zeros(L, S, dtype=dtype).masked_fill(rows[:, None], -INF)
        return inputs, grads, rows, {"attn_mask": mask, "sinks": torch.tensor([junk, 0.5])}

    def test_gradients(self, L, S, D, dtype, junk, blind):
        inputs, grads, rows, options = self.make(L, S, D, dtype, junk, blind)
        names = ("query", "key", "value", "attn_mask", "sinks")
        found = gradients(fused, inputs, options, grads, names)
        finite = options | {"sinks": torch.tensor([0.0, 0.5])}
        expected = gradients(fused, inputs, finite, grads, names)
        output, lse = fused(*inputs, **options)
        assert torch.equal(output[:, 1], fused(*inputs, **finite)[0][:, 1])
        assert (output[:, :, rows] == 0).all() and output[:, 0, ~rows].isnan().all()
        torch.testing.assert_close(
            lse[:, 0, rows], torch.full_like(lse[:, 0, rows], junk), equal_nan=True
        )
        assert lse[:, 0, ~rows].isnan().all()
        assert (found["query"][:, :, rows] == 0).all()
        assert (found["attn_mask"][rows] == 0).all()
        for name in names[:3]:
            assert torch.equal(found[name][:, 1], expected[name][:, 1])
        seen = not rows.all()
        assert found["query"][:, 0, ~rows].isnan().all()
        assert (found["key"][:, 0].isnan() if seen else found["key"][:, 0] == 0).all()
        assert (found["value"][:, 0].isnan() if seen else found["value"][:, 0] == 0).all()
        assert found["sinks"][0].isnan() if seen else found["sinks"][0] == expected["sinks"][0]
        truth = testing.attention(*inputs, **options, return_lse=True)
        for x, y in zip((output, lse), truth, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x == 0, y == 0)

    def test_gradient_of_the_lse_alone(self, L, S, D, dtype, junk, blind):
        inputs, (_, g), rows, options = self.make(L, S, D, dtype, junk, blind)
        sinks = options["sinks"].requires_grad_()
        (grad,) = torch.autograd.grad(fused(*inputs, **options)[1], sinks, g)
        assert grad[1].isfinite() and grad[0].isnan() == (not rows.all())
        if rows.all():
            torch.testing.assert_close(grad[0], g[:, 0].sum().to(grad), rtol=1e-4, atol=1e-4)

    def test_weights(self, L, S, D, dtype, junk, blind):
        inputs, _, rows, options = self.make(L, S, D, dtype, junk, blind)
        leaves = [x.requires_grad_() for x in (*inputs[:2], options["sinks"])]
        weights = qkv.attention_weights(*inputs[:2], **options)
        assert (weights[:, :, rows] == 0).all() and weights[:, 0, ~rows].isnan().all()
        assert torch.equal(
            qkv.attention_with_weights(*inputs, **options)[1].isnan(), weights.isnan()
        )
        found = torch.autograd.grad(weights, leaves, torch.randn_like(weights))
        assert (found[0][:, :, rows] == 0).all() and found[1][:, 1].isfinite().all()
        assert found[2][0].isnan() if not rows.all() else (found[2] == 0).all()

    def test_tangents(self, L, S, D, dtype, junk, blind):
        inputs, _, rows, options = self.make(L, S, D, dtype, junk, blind)
        tangents = [torch.randn_like(x) for x in inputs]
        output, lse, of_output, of_lse = qkv.attention_jvp(
            *inputs, **options, query_tangent=tangents[0], key_tangent=tangents[1],
            value_tangent=tangents[2], sinks_tangent=torch.tensor([3.0, 4.0]),
        )  # fmt: skip
        for x in (output, of_output):
            assert (x[:, :, rows] == 0).all() and x[:, 1].isfinite().all()
            assert x[:, 0, ~rows].isnan().all()
        assert (of_lse[:, 0, rows] == 3).all() and of_lse[:, 0, ~rows].isnan().all()
        assert torch.equal(lse.isnan(), fused(*inputs, **options)[1].isnan())

    def test_higher_derivatives(self, L, S, D, dtype, junk, blind):
        """Fused, and from the third on composed."""
        inputs, _, rows, options = self.make(L, S, D, dtype, junk, blind)
        leaves = [x.requires_grad_() for x in (*inputs, options["sinks"])]
        results = [fused(*inputs, **options)[0]]
        for _ in range(3):
            seeds = [torch.randn_like(x) for x in results]
            results = torch.autograd.grad(results, leaves, seeds, create_graph=True)
            assert (results[0][:, :, rows] == 0).all()
            assert all(x[:, 1].isfinite().all() for x in results[:3])
            if rows.all():
                assert all((x == 0).all() for x in results)


@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_a_decoding_step_keeps_its_bits_beside_hidden_junk(dtype, group):
    """Also where several products read the same keys, some at a time, as those of many queries or
    long rows do."""
    for D in (64, 128, 320):
        for S in (45, 100, 190, 400):
            inputs = [torch.randn(1, 2, n, D, dtype=dtype) for n in (S, S)]
            query = torch.randn(1, 2 * group, 1, D, dtype=dtype)
            mask = torch.ones(S, dtype=torch.bool)
            mask[[S // 3, S - 2]] = False
            expected, found = (
                qkv.attention(
                    query,
                    *(x.masked_fill(~mask[:, None], junk) for x in inputs),
                    attn_mask=mask,
                    enable_gqa=True,
                )
                for junk in (0.0, NAN)
            )
            assert torch.equal(found, expected), (D, S)


@dtypes
class TestGroupedHeads:
    def test_one_bad_key_head(self, dtype):
        query, key, value = (torch.randn(1, h, 20, 8, dtype=dtype) for h in (6, 2, 2))
        key[0, 1, 3, 0], value[0, 0, 7] = NAN, INF
        ours = torch.ops.qkv.attention(query, key, value, is_causal=True, enable_gqa=True)
        repeated = (x.repeat_interleave(3, 1) for x in (key, value))
        truth, _ = attend_with_junk(query, *repeated, is_causal=True)
        tolerance = max(TOLERANCES[dtype], 1e-5)
        torch.testing.assert_close(ours, truth, equal_nan=True, rtol=tolerance, atol=tolerance)


@dtypes
class TestAsTorchsMath:
    """attend_with_junk is our own reading of torch; here is torch itself."""

    @pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
    @pytest.mark.parametrize("junk", [NAN, INF, -INF])
    def test_unmasked(self, dtype, which, junk):
        inputs, (grad_output, _) = make(19, 23, 8, dtype)
        inputs[which][0, 0, 4, 2] = junk
        results = []
        for f in (torch.ops.qkv.attention, scaled_dot_product_attention):
            leaves = [x.clone().requires_grad_() for x in inputs]
            with sdpa_kernel(SDPBackend.MATH):
                output = f(*leaves)
            results.append([output, *torch.autograd.grad(output, leaves, grad_output)])
        for x, y in zip(*results, strict=True):
            tolerance = 3 * max(TOLERANCES[dtype], 1e-5)
            torch.testing.assert_close(x, y, equal_nan=True, rtol=tolerance, atol=tolerance)

    def test_all_scores_minus_inf(self, dtype):
        """A row that may attend, but whose every score is -inf, is one that sees nothing: torch's
        _safe_softmax says so. What its 0 times a NaN in a value would be is left open."""
        query, value = torch.ones(1, 1, 3, 4, dtype=dtype), torch.randn(1, 1, 5, 4, dtype=dtype)
        key = torch.full((1, 1, 5, 4), -INF, dtype=dtype)
        output, lse = torch.ops.qkv.attention_with_lse(query, key, value)
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(output, scaled_dot_product_attention(query, key, value))
        assert (output == 0).all() and (lse == -INF).all()


@dtypes
class TestHugeScores:
    @pytest.mark.parametrize("power", [2, 5, 10, 17])
    def test_one_key_wins(self, dtype, power):
        """Scores so far apart that every weight is 0 or 1; up to 1e34 in size."""
        size = min(10.0**power, torch.finfo(dtype).max / 64)
        query = torch.randn(2, 2, 21, 1, dtype=dtype).sign() * size
        key = torch.randperm(43).to(dtype).view(43, 1).expand(2, 2, 43, 1) * size
        inputs = [query, key, torch.randn(2, 2, 43, 5, dtype=dtype)]
        ours = torch.ops.qkv.attention_with_lse(*inputs, scale=1.0)
        for x, truth in zip(ours, attend(*inputs, scale=1.0), strict=True):
            tolerance = max(TOLERANCES[dtype], 1e-5)
            torch.testing.assert_close(x, truth, rtol=tolerance, atol=1e-6)

    def test_gradients_of_a_certain_choice(self, dtype):
        """With weights of 0 and 1, query and key get no gradient but the rounding of numbers that
        cancel."""
        query, key, value = (torch.randn(1, 2, 17, 8, dtype=dtype) for _ in range(3))
        size = min(1e6, torch.finfo(dtype).max / 64)
        leaves = [x.requires_grad_() for x in (query * size, key * size, value)]
        output = torch.ops.qkv.attention(*leaves)
        grad = torch.randn_like(output)
        grads = torch.autograd.grad(output, leaves, grad)
        rounding = torch.finfo(dtype).eps * (grad.abs() @ value.abs().mT).max() * size
        assert grads[0].abs().max() < 4 * rounding and grads[1].abs().max() < 4 * rounding
        truth = torch.autograd.grad(attend(*leaves)[0], value, grad)[0]
        torch.testing.assert_close(grads[2], truth)

    @pytest.mark.parametrize("least", [-1e4, -1e9, -1e30, "f32", "bf16", "f16"])
    @pytest.mark.parametrize("where", ["some", "row", "all"])
    def test_finite_mask_values_that_stand_for_minus_inf(self, dtype, least, where):
        """Finite numbers are numbers: a row of them attends to all its keys."""
        inputs, _ = make(19, 33, 8, dtype)
        mask = torch.zeros(19, 33)
        if least in DTYPES:
            mask = mask.to(dtype if dtype == DTYPES[least] else torch.float32)
            least = torch.finfo(DTYPES[least]).min
        mask[{"some": (slice(None), slice(3, None)), "row": 4, "all": slice(None)}[where]] = least
        assert mask.isfinite().all()
        self.compare(inputs, mask)

    def test_large_positive_mask(self, dtype):
        inputs, _ = make(19, 33, 8, dtype)
        self.compare(inputs, torch.full((19, 33), torch.finfo(torch.float32).max))

    def compare(self, inputs, mask):
        """Beside -1e4 an f32 score keeps three digits after the point, hence the tolerance; beside
        the others none, so that all weights are equal."""
        ours = torch.ops.qkv.attention_with_lse(*inputs, mask)
        tolerance = max(TOLERANCES[inputs[0].dtype], 1e-5)
        for x, truth in zip(ours, attend(*inputs, mask), strict=True):
            torch.testing.assert_close(x, truth, rtol=tolerance, atol=max(3e-3, tolerance))
            assert (x.isfinite() == truth.isfinite()).all()

    def test_wide_range_of_scores(self, dtype):
        """Weights go from 1 down through the subnormal numbers to 0."""
        key = torch.linspace(-200, 0, 301, dtype=dtype).view(1, 1, 301, 1)
        value = torch.eye(301, dtype=dtype).view(1, 1, 301, 301)
        ours = torch.ops.qkv.attention(torch.ones(1, 1, 3, 1, dtype=dtype), key, value, scale=1.0)
        truth, _ = attend(torch.ones(1, 1, 3, 1).double(), key.double(), value.double(), scale=1.0)
        tolerance = max(TOLERANCES[dtype], 1e-5)
        least = 1e-7 if dtype == torch.float16 else 1e-36
        torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=least)
