"""qkv.hard_attention: the value at the best key, which it was, and the gradients of both kinds."""

import functools

import pytest
import torch
from common import attend, compute_type, dtypes_of, fused
from gradients import gradients
from hypothesis import given, settings
from rounding import score_sizes
from strategies import cases, one_example_in

import qkv
from qkv import testing
from qkv.testing._scores import repeat_heads

pytestmark = pytest.mark.usefixtures("isa")


look_up = functools.partial(testing.hard_attention, return_index=True)


def make(L=20, S=23, H=4, Hkv=4, dtype=torch.float64):
    sizes = [(H, L, 8), (Hkv, S, 8), (Hkv, S, 5)]
    return [torch.randn(2, *s, dtype=dtype).requires_grad_() for s in sizes]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": -0.3},
    "bool mask": {"attn_mask": torch.arange(20)[:, None] % 7 < torch.arange(23) % 5},
    "float mask": {"attn_mask": torch.linspace(-3, 3, 20 * 23).sin().view(20, 23).double()},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.rand(4)},
}


@pytest.mark.parametrize("options", OPTIONS)
class TestAgainstReference:
    def test_output_index_and_gradient(self, options):
        inputs, options = make(), OPTIONS[options]
        ours = qkv.hard_attention(*inputs, **options, return_index=True)
        truth = look_up(*inputs, **options)
        assert torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])
        assert ours[1].dtype == torch.int64 and not ours[1].requires_grad
        g = torch.randn_like(ours[0])
        found, expected = (torch.autograd.grad(x[0], inputs[2], g, retain_graph=True)[0]
                           for x in (ours, truth))  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grads = torch.autograd.grad(ours[0], inputs[:2], g, allow_unused=True)
        assert all(x is None or (x == 0).all() for x in grads)

    def test_straight_through(self, options):
        """query and key get the gradients of attention, and value that of the chosen rows."""
        inputs, options = make(), OPTIONS[options]
        output = qkv.hard_attention(*inputs, **options, straight_through=True)
        assert torch.equal(output, look_up(*inputs, **options)[0])
        g = torch.randn_like(output)
        *found, of_value = torch.autograd.grad(output, inputs, g)
        expected = torch.autograd.grad(attend(*inputs, **options)[0], inputs[:2], g)
        torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-11)
        (chosen,) = torch.autograd.grad(look_up(*inputs, **options)[0], inputs[2], g)
        torch.testing.assert_close(of_value, chosen, rtol=1e-12, atol=1e-12)


class TestShapes:
    def test_grouped_heads(self):
        inputs = make(H=6, Hkv=2)
        ours = qkv.hard_attention(*inputs, enable_gqa=True, return_index=True)
        truth = look_up(*inputs, enable_gqa=True)
        assert torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])
        g = torch.randn_like(ours[0])
        found, expected = (torch.autograd.grad(x[0], inputs[2], g)[0] for x in (ours, truth))
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("shapes", [
        ((5, 8), (6, 8), (6, 3)), ((3, 5, 8), (1, 6, 8), (3, 6, 8)),
        ((2, 1, 3, 5, 8), (1, 2, 3, 6, 8), (3, 6, 8)), ((5, 8), (6, 8), (2, 3, 6, 8)),
    ])  # fmt: skip
    def test_ranks_and_broadcasting(self, shapes):
        inputs = [torch.randn(s).double().requires_grad_() for s in shapes]
        ours, truth = qkv.hard_attention(*inputs, return_index=True), look_up(*inputs)
        assert torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])
        g = torch.randn_like(ours[0])
        found, expected = (torch.autograd.grad(x[0], inputs[2], g)[0] for x in (ours, truth))
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("L, S", [(0, 4), (4, 0), (0, 0), (1, 1), (1, 3000), (300, 1)])
    def test_sizes(self, L, S):
        inputs = make(L, S)
        ours, truth = qkv.hard_attention(*inputs, return_index=True), look_up(*inputs)
        assert torch.equal(ours[0], truth[0]) and torch.equal(ours[1], truth[1])
        for g in torch.autograd.grad(ours[0].sum(), inputs, allow_unused=True):
            assert g is None or g.isfinite().all()

    @dtypes_of("f32", "f64", "bf16", "f16")
    @settings(max_examples=one_example_in(4))
    @given(case=cases(max_work=300_000))
    def test_drawn(self, dtype, case):
        """Rounding may decide between keys that are almost equally good: the key that was chosen is
        one that the query sees, and its score is the largest, but for what rounding may do to the
        two."""
        inputs, options = case.tensors(dtype)
        for name in ("dropout_p", "dropout_seed", "sinks"):
            options.pop(name, None)
        output, index = qkv.hard_attention(*inputs, **options, return_index=True)
        truth, best = look_up(*inputs, **options)
        assert torch.equal(index < 0, best < 0) and output.dtype == dtype
        key, value = inputs[1:]
        if options["enable_gqa"]:
            value = repeat_heads(value, inputs[0])
        if key.size(-2) == 0:
            assert torch.equal(output, truth.to(dtype))
            return
        chosen = value.expand(*index.shape[:-1], *value.shape[-2:]).gather(
            -2, index.clamp(min=0)[..., None].expand(*index.shape, value.size(-1))
        )
        assert torch.equal(output, chosen.masked_fill(index[..., None] < 0, 0))
        scores, seen = testing.attention_scores(*inputs[:2], **options)
        # As many roundings as there are products, and a few.
        roundings = (key.size(-1) + 16) * torch.finfo(compute_type(dtype)).eps
        room = roundings * (score_sizes(*inputs[:2], **options) + options.get("softcap", 0.0))

        def of(scores, which):
            scores = scores.expand(*index.shape, key.size(-2))
            return scores.gather(-1, which.clamp(min=0)[..., None])[..., 0]

        sees = index >= 0
        assert of(seen, index)[sees].all()
        behind = of(scores, best) - of(scores, index)
        assert (behind <= of(room, best) + of(room, index))[sees].all()


class TestMeaning:
    def test_a_dictionary(self):
        words = torch.eye(4, dtype=torch.float32)
        numbers = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
        output, index = qkv.hard_attention(words[[2, 0]], words, numbers, return_index=True)
        assert output.tolist() == [[30.0], [10.0]] and index.tolist() == [2, 0]

    @pytest.mark.parametrize("S", [1, 5, 16, 33, 300])
    def test_the_first_of_equals(self, S):
        query, key = torch.ones(1, 2, 3, 8), torch.ones(1, 2, S, 8)
        value = torch.arange(S).float()[:, None].expand(1, 2, S, 1)
        output, index = qkv.hard_attention(query, key, value, return_index=True)
        assert (index == 0).all() and (output == 0).all()
        mask = torch.arange(S) >= S - 1
        output, index = qkv.hard_attention(query, key, value, mask, return_index=True)
        assert (index == S - 1).all() and (output == S - 1).all()

    def test_rows_with_nothing_to_attend_to(self):
        inputs = make()
        mask = torch.ones(20, 23, dtype=torch.bool)
        mask[3] = False
        for straight_through in (False, True):
            output, index = qkv.hard_attention(
                *inputs, mask, return_index=True, straight_through=straight_through
            )
            assert (output[..., 3, :] == 0).all() and (index[..., 3] == -1).all()
            assert (index[..., 4] >= 0).all()
            seed = torch.zeros_like(output)
            seed[..., 3, :] = 1
            for g in torch.autograd.grad(output, inputs, seed, allow_unused=True):
                assert g is None or (g == 0).all()

    def test_nan_counts_as_the_largest(self):
        query, key, value = (x.detach() for x in make())
        key[..., 7, :] = float("nan")
        _, index = qkv.hard_attention(query, key, value, return_index=True)
        assert (index == 7).all()
        _, index = qkv.hard_attention(query, key, value, torch.arange(23) != 7, return_index=True)
        assert (index != 7).all()

    def test_hidden_values_do_not_leak(self):
        query, key, value = (x.detach() for x in make())
        value[..., 20:, :], key[..., 20:, :] = float("nan"), float("inf")
        assert qkv.hard_attention(query, key, value, torch.arange(23) < 20).isfinite().all()

    def test_it_is_what_a_cold_softmax_tends_to(self):
        inputs = make()
        torch.testing.assert_close(
            qkv.attention(*inputs, scale=1e6), qkv.hard_attention(*inputs), rtol=1e-6, atol=1e-6
        )


class TestGradients:
    def test_straight_through_reaches_the_options(self):
        inputs = [x.detach() for x in make()]
        options = {"attn_mask": torch.randn(4, 20, 23).double(), "alibi_slopes": torch.rand(4)}
        g = torch.randn(2, 4, 20, 5).double()
        wanted = ("query", "key", "attn_mask", "alibi_slopes")

        def hard(**arguments):
            return (qkv.hard_attention(**arguments, straight_through=True),)

        found = gradients(hard, inputs, options, [g], wanted)
        expected = gradients(fused, inputs, options, [g, None], wanted)
        for name in wanted:
            torch.testing.assert_close(found[name], expected[name])

    def test_learning_to_choose(self):
        """Keys learn to be found, which without straight_through get no gradient at all."""
        value = torch.eye(6)
        query = torch.randn(6, 16)
        key = torch.randn(6, 16).requires_grad_()
        optimizer = torch.optim.Adam([key], 0.1)
        wanted = torch.arange(6).flip(0)
        for _ in range(200):
            output = qkv.hard_attention(query, key, value, straight_through=True)
            loss = (output - value[wanted]).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _, index = qkv.hard_attention(query, key, value, return_index=True)
        assert torch.equal(index, wanted)

    def test_gradcheck_of_value(self):
        query, key, value = (x.detach() for x in make(5, 6))
        f = lambda v: qkv.hard_attention(query, key, v)  # noqa: E731
        assert torch.autograd.gradcheck(f, value.requires_grad_())

    @pytest.mark.parametrize("twice", [
        lambda f, x: torch.func.jvp(lambda *y: torch.func.jvp(f, y, x[::-1])[1], x, x)[1],
        lambda f, x: torch.func.vjp(lambda *y: torch.func.jvp(f, y, x[::-1])[1], *x)[1](x[0].cos()),
    ], ids=["jvp(jvp)", "grad(jvp)"])  # fmt: skip
    def test_derivatives_of_the_tangent(self, twice):
        """The values in attention's share of it are constants, at every level."""
        inputs = tuple(x.detach()[..., :8, :5] for x in make(8, 8))
        found, expected = (
            twice(lambda *x, f=f: f(*x, straight_through=True), inputs)
            for f in (qkv.hard_attention, testing.hard_attention)
        )
        torch.testing.assert_close(found, expected)

    def test_any_number_of_threads(self, threads):
        inputs = make(200, 300, dtype=torch.float32)
        g = torch.randn(2, 4, 200, 5)
        threads(1)

        def run():
            output, index = qkv.hard_attention(*inputs, straight_through=True, return_index=True)
            return [output, index, *torch.autograd.grad(output, inputs, g)]

        expected = run()
        for n in (2, 3, 4):
            threads(n)
            for x, y in zip(run(), expected, strict=True):
                assert torch.equal(x, y)


def test_returns():
    inputs = make()
    output = qkv.hard_attention(*inputs)
    assert isinstance(output, torch.Tensor) and output.shape == (2, 4, 20, 5)
    assert not qkv.hard_attention(*(x.detach() for x in inputs)).requires_grad


def test_compile():
    torch.compiler.reset()
    inputs = make()

    def f(*inputs):
        output, index = qkv.hard_attention(*inputs, straight_through=True, return_index=True)
        return output * (index[..., None] + 1)

    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        output = g(*inputs)
        results.append([output, *torch.autograd.grad(output.sum(), inputs)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("change, exception, message", [
    ({"key": torch.zeros(2, 4, 5, 7)}, RuntimeError, "key has the shape"),
    ({"value": torch.zeros(2, 4, 6, 8)}, RuntimeError, "value has the shape"),
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"softcap": -1.0}, ValueError, "softcap is -1"),
    ({"attn_mask": torch.zeros(5, 6)}, RuntimeError, "attn_mask has the shape"),
    ({"query": torch.zeros(2, 4, 5, 8).half()}, RuntimeError, "key is float32, but query is float"),
])  # fmt: skip
def test_bad_call(change, exception, message):
    Q = torch.zeros(2, 4, 5, 8)
    with pytest.raises(exception, match=message):
        qkv.hard_attention(**{"query": Q, "key": Q, "value": Q, **change})
