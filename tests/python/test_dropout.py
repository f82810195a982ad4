"""Dropout: reproducible, independent, exactly the Philox that csrc/common/philox.h describes."""

import pytest
import torch
from common import COMPILERS, attend, dtypes_of, fused
from gradients import INPUTS, LEAVES, gradients
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import qkv
from qkv.testing import dropout_mask

attention = torch.ops.qkv.attention
attention_with_lse = torch.ops.qkv.attention_with_lse


def make(*sizes, batch=(2, 3), D=8, dtype=torch.float32):
    return [torch.randn(*batch, n, D, dtype=dtype) for n in sizes]


def drawn_seed(seed):
    """The seed that the operator draws after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return torch.ops.qkv.dropout_seed(torch.empty(0)).item()


def kept_weights(query, key, dropout_p, **options):
    """bool [..., H, L, S]: the weights that are kept. The values have one column for each key."""
    value = torch.eye(key.size(-2), dtype=query.dtype)
    value = value.expand(*key.shape[:-1], -1)
    return attention(query, key, value, dropout_p=dropout_p, **options) != 0


@pytest.mark.usefixtures("isa")
class TestKeptSet:
    @pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.97])
    @pytest.mark.parametrize("shapes, gqa", [
        (((2, 3, 37, 8), (2, 3, 41, 8)), False),
        (((1, 3, 5, 8), (4, 1, 130, 8)), False),
        (((2, 3, 1, 2, 70, 8), (1, 1, 2, 2, 9, 8)), False),
        (((2, 6, 33, 8), (2, 2, 35, 8)), True),
        (((3, 6, 1, 8), (3, 2, 600, 8)), True),
        (((5, 8), (7, 8)), False),
        (((1, 1, 300, 8), (1, 1, 300, 8)), False),
    ])  # fmt: skip
    def test_is_what_philox_says(self, shapes, gqa, dropout_p):
        query, key = (torch.randn(s) for s in shapes)
        seed = drawn_seed(7)
        torch.manual_seed(7)
        kept = kept_weights(query, key, dropout_p, enable_gqa=gqa)
        assert torch.equal(kept, dropout_mask(seed, dropout_p, kept.shape))

    @pytest.mark.parametrize("L, S, refused", [
        (1, 2**35, False), (1, 2**35 + 1, True), (2**32 + 1, 4, True),
    ])  # fmt: skip
    def test_keys_and_queries_without_numbers_of_their_own(self, L, S, refused):
        """The tensors are views of one row, with a window and no value columns, so the test takes
        no memory and little time."""
        query, key = (torch.ones(1, 1, 1, 8).expand(1, 1, n, 8) for n in (L, S))
        options = {"dropout_p": 0.5, "window_size": (3, 0)}
        if not refused:
            assert torch.isfinite(attention(query, key, key, **options)).all()
            return
        value = key[..., :0]  # the output of so many queries would not fit
        message = (
            rf"dropout_p is 0.5 with {L} queries and {S} keys, but at most {2**32} and {2**35}"
        )
        with pytest.raises(ValueError, match=message):
            attention(query, key, value, **options)

    @pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 0xFFFFFFFF])
    def test_any_seed(self, seed):
        query, key = make(20, 21)
        value = torch.eye(21).expand(2, 3, 21, 21)
        output, _ = fused(query, key, value, dropout_p=0.3, dropout_seed=seed)
        assert torch.equal(output != 0, dropout_mask(seed, 0.3, output.shape))

    def test_other_options_do_not_matter(self):
        """Other options change which weights are hidden, and not which of the others are kept."""
        query, key = make(40, 40)
        options = {"is_causal": True, "window_size": (9, -1), "softcap": 5.0}
        options["sinks"] = torch.zeros(3)
        seed = drawn_seed(3)
        torch.manual_seed(3)
        kept = kept_weights(query, key, 0.4, **options)
        allowed = attention(query, key, torch.eye(40).expand(2, 3, 40, 40), **options) != 0
        assert torch.equal(kept, dropout_mask(seed, 0.4, kept.shape) & allowed)

    def test_a_batch_begins_like_a_smaller_one(self):
        query, key = make(20, 20, batch=(4, 3))
        torch.manual_seed(0)
        whole = kept_weights(query, key, 0.5)
        torch.manual_seed(0)
        assert torch.equal(kept_weights(query[:2], key[:2], 0.5), whole[:2])

    def test_any_number_of_threads(self, threads):
        inputs = make(150, 170, 170, dtype=torch.float64)
        options = {"dropout_p": 0.2, "dropout_seed": 5, "is_causal": True}
        grads = [torch.randn(2, 3, 150, 8, dtype=torch.float64), None]
        threads(1)
        output, _ = fused(*inputs, **options)
        expected = gradients(fused, inputs, options, grads)
        for n in (2, 3, 4):
            threads(n)
            assert torch.equal(fused(*inputs, **options)[0], output)
            for name, g in gradients(fused, inputs, options, grads).items():
                assert torch.equal(g, expected[name])


class TestStatistics:
    """Statistics with one seed, so that no run differs, and bounds of 5 standard deviations."""

    @pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
    def test_kept_fraction(self, dropout_p):
        kept = kept_weights(*make(128, 128, batch=(4, 8)), dropout_p)
        deviation = (dropout_p * (1 - dropout_p) / kept.numel()) ** 0.5
        assert abs(kept.double().mean() - (1 - dropout_p)) < 5 * deviation
        for dim in range(4):  # and for every batch item, head, query and key alone
            others = [d for d in range(4) if d != dim]
            n = kept.numel() // kept.size(dim)
            spread = (kept.double().mean(others) - (1 - dropout_p)).abs().max()
            assert spread < 5 * (dropout_p * (1 - dropout_p) / n) ** 0.5

    @pytest.mark.parametrize("shift", [1, 2, 3, 4, 16, 64])
    @pytest.mark.parametrize("dim", range(4), ids=["batch", "head", "query", "key"])
    def test_neighbours_are_independent(self, dim, shift):
        sizes = [4, 4, 32, 32]
        sizes[dim] = 128
        kept = kept_weights(*make(sizes[2], sizes[3], batch=sizes[:2]), 0.3).double() - 0.7
        n = kept.size(dim) - shift
        products = kept.narrow(dim, 0, n) * kept.narrow(dim, shift, n)
        assert abs(products.mean()) < 5 * 0.3 * 0.7 / products.numel() ** 0.5

    def test_calls_are_independent(self):
        inputs = make(128, 128, batch=(4, 8))
        one, other = (kept_weights(*inputs, 0.3).double() - 0.7 for _ in range(2))
        assert abs((one * other).mean()) < 5 * 0.3 * 0.7 / one.numel() ** 0.5

    def test_the_mean_over_many_draws_is_attention_without(self):
        query, key, value = make(16, 16, 16, batch=(1, 1), dtype=torch.float64)
        many = [x.expand(4000, 1, 16, 8) for x in (query, key, value)]
        outputs = attention(*many, dropout_p=0.4)
        error = (outputs.mean(0, keepdim=True) - attention(query, key, value)).abs()
        assert (error < 5 * outputs.std(0) / 4000**0.5).all()


class TestGenerator:
    def call(self, inputs, seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        return qkv.attention(*inputs, dropout_p=0.5)

    def test_manual_seed_repeats(self):
        inputs = make(9, 9, 9)
        first, second = self.call(inputs, seed=1), self.call(inputs)
        assert not torch.equal(first, second)
        assert not torch.equal(first, self.call(inputs, seed=2))
        assert torch.equal(first, self.call(inputs, seed=1))
        assert torch.equal(second, self.call(inputs))

    def test_the_seed_is_the_operators_own(self):
        inputs = make(9, 9, 9)
        seed = drawn_seed(4)
        expected = fused(*inputs, dropout_p=0.5, dropout_seed=seed)[0]
        assert torch.equal(self.call(inputs, seed=4), expected)

    def test_one_draw_a_call_and_none_without_dropout(self):
        states = []
        for inputs in (make(9, 9, 9), make(60, 80, 80)):
            self.call(inputs, seed=5)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        qkv.attention(*inputs, dropout_p=0.0)
        assert torch.equal(torch.get_rng_state(), states[0])

    def test_fork_rng(self):
        inputs = make(9, 9, 9)
        torch.manual_seed(6)
        with torch.random.fork_rng():
            forked = self.call(inputs)
        assert torch.equal(self.call(inputs), forked)

    def test_rng_state_can_be_put_back(self):
        inputs = make(9, 9, 9)
        state = torch.get_rng_state()
        first = self.call(inputs)
        torch.set_rng_state(state)
        assert torch.equal(self.call(inputs), first)

    def test_the_backward_pass_draws_nothing(self):
        inputs = [x.requires_grad_() for x in make(9, 9, 9)]
        output = self.call(inputs, seed=7)
        state = torch.get_rng_state()
        output.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint_replays(self, use_reentrant):
        def block(query, key, value):
            x = torch.nn.functional.dropout(query, 0.1)  # other draws before ours
            return self.call((x, key, value)).sin()

        inputs = [x.requires_grad_() for x in make(9, 9, 9)]
        torch.manual_seed(8)
        expected = torch.autograd.grad(block(*inputs).sum(), inputs)
        torch.manual_seed(8)
        output = checkpoint(block, *inputs, use_reentrant=use_reentrant)
        torch.rand(3)  # whatever happens in between
        output.sum().backward()
        for x, g in zip(inputs, expected, strict=True):
            assert torch.equal(x.grad, g)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("backend", COMPILERS)
class TestCompile:
    """torch.compile draws at run time what eager mode draws."""

    def test_same_as_eager(self, backend):
        torch.compiler.reset()

        def step(query, key, value):
            return qkv.attention(query * 2, key, value, dropout_p=0.4, is_causal=True).cos()

        compiled = torch.compile(step, backend=backend, fullgraph=True)
        inputs = [x.requires_grad_() for x in make(9, 9, 9)]
        runs = []
        for f in (step, compiled):
            torch.manual_seed(9)
            outputs = [f(*inputs) for _ in range(3)]
            runs.append([*outputs, *(torch.autograd.grad(o.sum(), inputs) for o in outputs)])
        torch.testing.assert_close(*runs)
        assert not torch.equal(runs[1][0], runs[1][1])

    def test_two_layers(self, backend):
        """Each layer draws its own seed: the two draws are not merged into one."""
        torch.compiler.reset()

        def layers(query, key, value):
            return tuple(qkv.attention(query, key, value, dropout_p=0.4) for _ in range(2))

        inputs = make(9, 9, 9)
        one, other = torch.compile(layers, backend=backend, fullgraph=True)(*inputs)
        assert not torch.equal(one, other)


@pytest.mark.usefixtures("isa")
class TestEdges:
    @dtypes_of("f32", "f64", "bf16", "f16")
    def test_none(self, dtype):
        inputs = make(33, 35, 35, dtype=dtype)
        output = attention(*inputs, dropout_p=0.0)
        assert torch.equal(output, attention(*inputs))
        almost, _ = fused(*inputs, dropout_p=1e-12, dropout_seed=1)
        torch.testing.assert_close(almost, output)

    @dtypes_of("f32", "f64", "bf16", "f16")
    def test_all(self, dtype):
        """With dropout_p = 1 the output and its gradients are 0; the lse and its gradients are as
        without dropout."""
        inputs = make(33, 35, 35, dtype=dtype)
        output, lse = attention_with_lse(*inputs, dropout_p=1.0)
        assert (output == 0).all() and torch.equal(lse, attention_with_lse(*inputs)[1])
        g, h = torch.randn_like(output), torch.randn_like(lse)
        options = {"dropout_p": 1.0, "dropout_seed": 3}
        for x in gradients(fused, inputs, options, (g, None)).values():
            assert (x == 0).all()
        with_lse = gradients(fused, inputs, options, (g, h))
        without = gradients(fused, inputs, {}, (None, h))
        for name in INPUTS:
            torch.testing.assert_close(with_lse[name], without[name])

    def test_almost_all(self):
        inputs = make(64, 64, 64, dtype=torch.float64)
        options = {"dropout_p": 1 - 1e-3, "dropout_seed": 2}
        output, _ = fused(*inputs, **options)
        assert (output != 0).any()
        torch.testing.assert_close(output, attend(*inputs, **options)[0])

    def test_the_lse_is_not_affected(self):
        inputs = make(33, 35, 35)
        _, lse = attention_with_lse(*inputs, dropout_p=0.5)
        assert torch.equal(lse, attention_with_lse(*inputs)[1])

    def test_nothing_to_attend_to(self):
        inputs = make(4, 5, 5)
        options = {"dropout_p": 0.5, "attn_mask": torch.zeros(4, 5, dtype=torch.bool)}
        output, lse = attention_with_lse(*inputs, **options)
        assert (output == 0).all() and (lse == -torch.inf).all()

    def test_empty(self):
        for L, S in [(0, 4), (4, 0), (0, 0)]:
            output = attention(*make(L, S, S), dropout_p=0.5)
            assert torch.equal(output, torch.zeros(2, 3, L, 8))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("more", [{}, {"is_causal": True, "softcap": 2.0, "window_size": (3, -1)}])
def test_gradcheck(more):
    mask, bias, slopes, sinks = (torch.randn(s) for s in ((5, 7), (2, 1, 7), (2,), (2,)))
    inputs = [*make(5, 7, 7, batch=(1, 2), D=3), mask, bias, slopes, sinks]

    def f(*tensors):
        arguments = dict(zip(LEAVES, tensors, strict=True))
        return fused(**arguments, dropout_p=0.4, dropout_seed=11, **more)

    assert gradcheck(f, [x.double().requires_grad_() for x in inputs])
