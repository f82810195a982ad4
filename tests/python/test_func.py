"""torch.func's transforms, and errors, never silent zeros, from what is not implemented yet."""

import pytest
import torch
from common import attend
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

import qkv
from qkv import testing

attention = torch.ops.qkv.attention
attention_with_lse = torch.ops.qkv.attention_with_lse
CAUSAL = {"is_causal": True, "scale": 0.4}


@pytest.fixture(autouse=True)
def never_by_a_loop(capfd):
    """No test may go through vmap's fallback, which says so on stderr, and not as a Python
    warning."""
    yield
    assert "performance drop" not in capfd.readouterr().err


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.fixture
def leaves():
    return [torch.randn(2, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (6, 7, 7)]


class TestFunc:
    def test_grad(self, leaves):
        plain = [x.detach() for x in leaves]
        ours = torch.func.grad(lambda *x: attention(*x, **CAUSAL).sin().sum(), (0, 1, 2))(*plain)
        f = lambda *x: attend(*x, **CAUSAL)[0].sin().sum()  # noqa: E731
        close(ours, torch.func.grad(f, (0, 1, 2))(*plain))

    def test_grad_of_lse(self, leaves):
        plain = [x.detach() for x in leaves]
        ours = torch.func.grad(lambda *x: attention_with_lse(*x)[1].sin().sum(), (0, 1))(*plain)
        close(ours, torch.func.grad(lambda *x: attend(*x)[1].sin().sum(), (0, 1))(*plain))

    def test_vjp(self, leaves):
        plain = [x.detach() for x in leaves]
        results, pull = torch.func.vjp(lambda *x: attention_with_lse(*x, **CAUSAL), *plain)
        expected, textbook = torch.func.vjp(lambda *x: attend(*x, **CAUSAL), *plain)
        close(results, expected)
        seeds = tuple(torch.randn_like(x) for x in results)
        close(pull(seeds), textbook(seeds))

    @pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 1, 1), (0, None, None), (None, 2, 0)])
    def test_vmap(self, in_dims):
        inputs = [torch.randn(3, 3, 3, 5, 4, dtype=torch.float64) for _ in range(3)]
        ours = torch.func.vmap(attention_with_lse, in_dims)(*inputs)
        close(ours, torch.func.vmap(attend, in_dims)(*inputs))

    def test_vmap_of_mask(self):
        query, key, value = (torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3))
        mask = torch.rand(6, 5, 5) > 0.3
        call = lambda f: torch.func.vmap(f, (None, None, None, 0))(query, key, value, mask)  # noqa: E731
        close(call(attention), call(lambda *x: attend(*x)[0]))

    def test_per_sample_gradients(self):
        inputs = [torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3)]

        def per_sample(f):
            gradient = torch.func.grad(lambda *x: f(*x).sin().sum(), (0, 1, 2))
            return torch.func.vmap(gradient)(*inputs)

        close(per_sample(attention), per_sample(lambda *x: attend(*x)[0]))

    def test_functional_call(self):
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.projection = torch.nn.Linear(8, 24, dtype=torch.float64)

            def forward(self, x, f):
                q, k, v = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
                return f(q, k, v)

        module, x = Attention(), torch.randn(2, 5, 8, dtype=torch.float64)
        parameters = dict(module.named_parameters())

        def gradient(f):
            loss = lambda p: torch.func.functional_call(module, p, (x, f)).sin().sum()  # noqa: E731
            return torch.func.grad(loss)(parameters)

        close(gradient(attention), gradient(lambda *x: attend(*x)[0]))


OPTIONS = {
    "window, softcap": {"window_size": (2, 1), "softcap": 1.5, "is_causal": True},
    "plain": {},
}


@pytest.fixture
def call():
    """Arguments for two heads: query, key, value, mask, slopes and sinks, each for three
    samples."""
    shapes = [(2, 5, 4), (2, 6, 4), (2, 6, 3), (5, 6), (2,), (2,)]
    return [torch.randn(3, *s, dtype=torch.float64) for s in shapes]


def positional(f, **options):
    """f as a function of a tuple of tensors, in the order of `call`."""

    def g(query, key, value, mask, slopes, sinks):
        return f(query, key, value, mask, alibi_slopes=slopes, sinks=sinks, **options)

    return g


class TestVmapOfOptions:
    """vmap in which every sample has its own mask, slopes and sinks, or all share them."""

    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("shared", [(), (3,), (4, 5), (0,), (1, 2), (0, 1, 2)])
    def test_forward_and_gradients(self, call, options, shared):
        in_dims = tuple(None if n in shared else 0 for n in range(6))
        inputs = [x[0] if n in shared else x for n, x in enumerate(call)]

        def gradients(f):
            f = positional(f, **OPTIONS[options])
            loss = lambda *x: sum(y.sin().sum() for y in f(*x))  # noqa: E731
            of_all = torch.func.grad(loss, tuple(range(6)))
            return [
                torch.func.vmap(f, in_dims)(*inputs),
                torch.func.vmap(of_all, in_dims)(*inputs),
            ]

        close(gradients(attention_with_lse), gradients(attend))

    @pytest.mark.parametrize("mask", [(), (6,), (5, 1), (2, 1, 6), (1, 5, 6), (2, 5, 6)])
    def test_masks_of_any_rank(self, call, mask):
        call[3] = torch.randn(3, *mask, dtype=torch.float64)

        def gradient(f):
            loss = lambda *x: positional(f)(*x)[0].sin().sum()  # noqa: E731
            return torch.func.vmap(torch.func.grad(loss, (0, 3)))(*call)

        close(gradient(attention_with_lse), gradient(attend))

    @pytest.mark.parametrize("heads", [(), (1,)])
    def test_without_heads(self, heads):
        shapes = [(5, 4), (6, 4), (6, 3), (5, 6), heads, heads]
        inputs = [torch.randn(3, *s, dtype=torch.float64) for s in shapes]

        def gradients(f):
            loss = lambda *x: positional(f)(*x)[0].sin().sum()  # noqa: E731
            return torch.func.vmap(torch.func.grad(loss, tuple(range(6))))(*inputs)

        close(gradients(attention_with_lse), gradients(attend))

    def test_nested(self, call):
        inputs = [torch.stack([x, -x, 2 * x]) for x in call]

        def twice(f):
            f = positional(f)
            return torch.func.vmap(torch.func.vmap(f), in_dims=1)(*inputs)

        close(twice(attention_with_lse), twice(attend))

    def test_jacrev(self, leaves):
        """jacrev calls vmap over the backward pass alone."""
        plain = [x.detach()[:1, :1] for x in leaves]
        f = lambda g: torch.func.jacrev(lambda *x: g(*x, **CAUSAL)[0], (0, 1, 2))(*plain)  # noqa: E731
        close(f(attention_with_lse), f(attend))

    def test_packed_documents(self):
        inputs = [torch.randn(3, 9, 2, 4, dtype=torch.float64) for _ in range(3)]
        ends = torch.tensor([0, 2, 9])
        f = lambda *x: qkv.varlen_attn(*x, ends, None, 7, 7, window_size=(3, 0))  # noqa: E731
        close(torch.func.vmap(f)(*inputs), torch.stack([f(*x) for x in zip(*inputs, strict=True)]))

    @pytest.mark.parametrize("reduce", [None, "heads", "queries"])
    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 2, 5, 4)])
    def test_weights(self, reduce, shape):
        inputs = [torch.randn(3, *shape, dtype=torch.float64) for _ in range(2)]
        f = lambda *x: qkv.attention_weights(*x, reduce=reduce, is_causal=True)  # noqa: E731
        gradient = torch.func.grad(lambda *x: f(*x).sin().sum(), (0, 1))
        for g in (f, gradient):
            one_by_one = [g(*x) for x in zip(*inputs, strict=True)]
            ours = torch.func.vmap(g)(*inputs)
            for n, x in enumerate(ours if isinstance(ours, tuple) else (ours,)):
                close(x, torch.stack([y[n] if isinstance(y, tuple) else y for y in one_by_one]))

    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 2, 5, 4)])
    def test_hard(self, shape):
        inputs = [torch.randn(3, *shape, dtype=torch.float64) for _ in range(3)]
        f = lambda *x: qkv.hard_attention(*x, straight_through=True)  # noqa: E731
        gradient = torch.func.grad(lambda *x: f(*x).sin().sum(), (0, 1, 2))
        close(torch.func.vmap(f)(*inputs), torch.stack([f(*x) for x in zip(*inputs, strict=True)]))
        one_by_one = [gradient(*x) for x in zip(*inputs, strict=True)]
        ours = torch.func.vmap(gradient)(*inputs)
        close(ours, tuple(torch.stack(x) for x in zip(*one_by_one, strict=True)))
        _, index = torch.func.vmap(lambda *x: qkv.hard_attention(*x, return_index=True))(*inputs)
        assert torch.equal(index, qkv.hard_attention(*inputs, return_index=True)[1])


class TestVmapOfDropout:
    def kept(self, randomness, f=None, samples=4):
        """The weights that each of several equal samples keeps."""
        query, value = torch.ones(samples, 2, 16, 4), torch.eye(16).expand(samples, 2, 16, 16)
        f = f or (lambda q, v: attention(q, q, v, dropout_p=0.5))
        return torch.func.vmap(f, randomness=randomness)(query, value) != 0

    def test_error(self):
        with pytest.raises(RuntimeError, match="vmap: .*randomness"):
            self.kept("error")

    def test_error_where_only_the_value_differs(self):
        query = torch.ones(2, 16, 4)
        with pytest.raises(RuntimeError, match="vmap: .*randomness"):
            self.kept("error", lambda _, v: attention(query, query, v, dropout_p=0.5))

    def test_same(self):
        kept = self.kept("same")
        assert (kept == kept[:1]).all() and kept.any() and not kept.all()

    def test_different(self):
        kept = self.kept("different")
        for n in range(1, 4):
            assert not torch.equal(kept[n], kept[0])

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_shared_query_and_key(self, randomness):
        query = torch.ones(2, 16, 4)
        kept = self.kept(randomness, lambda _, v: attention(query, query, v, dropout_p=0.5))
        assert torch.equal(kept[0], kept[1]) == (randomness == "same")

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_manual_seed(self, randomness):
        both = []
        for _ in range(2):
            torch.manual_seed(1)
            both.append(self.kept(randomness))
        assert torch.equal(*both)

    @pytest.mark.parametrize("randomness", ["same", "different"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_gradients_keep_what_the_forward_pass_kept(self, randomness, packed):
        """The gradient of the value is the sum of the weights, and so is the output for ones."""
        query = torch.randn(4, 16, 2, 4, dtype=torch.float64)
        ends = torch.tensor([0, 7, 16])

        def f(query, value):
            if packed:
                return qkv.varlen_attn(query, query, value, ends, None, 9, 9, dropout_p=0.5)
            inputs = (x.transpose(0, 1) for x in (query, query, value))
            return attention(*inputs, dropout_p=0.5).transpose(0, 1)

        def both(query, value):
            output, pull = torch.func.vjp(lambda v: f(query, v), value)
            return output, pull(torch.ones_like(output))[0]

        value = torch.eye(16, dtype=torch.float64)[:, None].expand(4, 16, 2, 16)
        weights, grad = torch.func.vmap(both, randomness=randomness)(query, value)
        close(grad, weights.sum(1).movedim(-1, 1)[..., None].expand(4, 16, 2, 16))
        equal = torch.equal(weights[0] != 0, weights[1] != 0)
        assert equal == (randomness == "same")

    def test_the_backward_pass_alone(self):
        """vmap over the backward pass of one forward pass outside: every sample has the weights
        that it kept, in any mode."""
        query = torch.randn(2, 16, 4, dtype=torch.float64)
        value = torch.randn(2, 16, 4, dtype=torch.float64)
        torch.manual_seed(2)
        output, pull = torch.func.vjp(lambda v: attention(query, query, v, dropout_p=0.5), value)
        seeds = torch.randn(3, *output.shape, dtype=torch.float64)
        expected = torch.stack([pull(g)[0] for g in seeds])
        for randomness in ("error", "same", "different"):
            close(torch.func.vmap(pull, randomness=randomness)(seeds)[0], expected)

    def test_is_grads_batched(self):
        query = torch.randn(2, 16, 4, dtype=torch.float64)
        value = torch.randn(2, 16, 4, dtype=torch.float64, requires_grad=True)
        output = attention(query, query, value, dropout_p=0.5)
        seeds = torch.randn(3, *output.shape, dtype=torch.float64)
        grad = lambda g, batched: torch.autograd.grad(  # noqa: E731
            output, value, g, is_grads_batched=batched, retain_graph=True
        )[0]
        close(grad(seeds, True), torch.stack([grad(g, False) for g in seeds]))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_weights(self, randomness):
        f = lambda q, _: qkv.attention_weights(q, q, dropout_p=0.5)  # noqa: E731
        kept = self.kept(randomness, f)
        assert torch.equal(kept[0], kept[1]) == (randomness == "same")


class TestSecondOrder:
    """With every option: test_second_order.py."""

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}, {"dropout_p": 0.3}])
    def test_all_derivatives(self, leaves, options):
        mask = torch.randn(6, 7).double().requires_grad_()
        bias = torch.randn(2, 1, 7).double().requires_grad_()

        def f(*x):
            torch.manual_seed(0)
            return attention_with_lse(*x[:3], attn_mask=x[3], bias=x[4], **options)

        inputs = [*leaves, mask, bias]
        assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, inputs, check_fwd_over_rev=True)

    def test_rows_with_nothing_to_attend_to(self, leaves):
        mask = (torch.rand(6, 7) > 0.5).index_fill(0, torch.tensor([1]), False)
        f = lambda *x: attention(*x, mask)  # noqa: E731
        assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True)

    @pytest.mark.bf16
    def test_half_precision(self, leaves):
        """In float32 between inputs and results, as in the kernels."""
        x = [t.detach().bfloat16() for t in leaves]
        f = lambda q, k, v: attention(q, k, v).float().sin().sum()  # noqa: E731
        found = torch.func.hessian(f)(*x)
        expected = torch.func.hessian(f)(*(t.double() for t in x))
        assert found.dtype == torch.bfloat16
        # The output and its gradient are rounded, half a unit of 2^-7 each, and so is the result.
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error <= 1.5 * 2**-7

    def test_a_tensor_in_two_places(self, leaves):
        f = lambda q: attention(q, q, q)  # noqa: E731
        assert torch.autograd.gradgradcheck(f, leaves[0], check_fwd_over_rev=True)


CAPPED = {"softcap": 3.0}
WAYS = {
    "through the incoming gradient": lambda f, x: pulled_twice(f, x)[0],
    "grad(grad)": lambda f, x: grad(lambda q: grad(f)(q).sin().sum())(x),
    "jvp(grad)": lambda f, x: jvp(grad(f), (x,), (torch.ones_like(x),)),
    "grad(jvp)": lambda f, x: grad(lambda q: jvp(f, (q,), (torch.ones_like(q),))[1])(x),
    "tangent of the incoming gradient": lambda f, x: pulled_twice(f, x)[1],
    "hessian": lambda f, x: hessian(f)(x),
}


def pulled_twice(f, x):
    """What f's pull-back is multiplied by, by autograd and by dual numbers: its first derivative is
    linear in it."""
    leaf = x.detach().requires_grad_()
    seed = torch.tensor(2.0).double().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, seed, create_graph=True)
    (by_autograd,) = torch.autograd.grad(g.sin().sum(), seed)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(()).double(), torch.tensor(3.0).double())
        (g,) = torch.autograd.grad(f(leaf), leaf, dual)
        return by_autograd, forward_ad.unpack_dual(g).tangent


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argument", range(4), ids=["query", "key", "value", "attn_mask"])
def test_second_derivatives_with_an_option(leaves, way, argument):
    """Of each argument alone; with every option: test_second_order.py."""
    inputs = [*(x.detach() for x in leaves), torch.randn(6, 7).double()]
    results = []
    for g in (attention, lambda *x, **options: attend(*x, **options)[0]):

        def loss(x, g=g):
            return g(*inputs[:argument], x, *inputs[argument + 1 :], **CAPPED).sin().sum()

        results.append(WAYS[way](loss, inputs[argument]))
    torch.testing.assert_close(*results)


WEIGHTS = {
    "weights": lambda q, k, v, **o: qkv.attention_weights(q, k, **o),
    "heads": lambda q, k, v, **o: qkv.attention_weights(q, k, reduce="heads", **o),
    "queries": lambda *x, **o: qkv.attention_with_weights(*x, reduce="queries", **o)[1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_second_derivatives_of_weights(leaves, way, name):
    query, key, value = (x.detach()[:1, :, :4] for x in leaves)
    options = {"softcap": 2.0, "window_size": (2, 1)}
    more = {} if name == "weights" else {"reduce": name}
    results = []
    for f in (
        lambda q: WEIGHTS[name](q, key, value, **options),
        lambda q: testing.attention_weights(q, key, **options, **more),
    ):
        results.append(WAYS[way](lambda q, f=f: f(q).sin().sum(), query))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("f, order", [
    (lambda q, k, v: qkv.hard_attention(q, k, v, straight_through=True), "second"),
    (lambda q, k, v: qkv.varlen_attn(
        *(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 6]), torch.tensor([0, 7]), 6, 7
    ), "third"),
], ids=["hard", "packed documents"])  # fmt: skip
def test_not_yet(leaves, f, order):
    """Derivatives that are not implemented yet give an error, never silent zeros."""
    result = f(*leaves)
    for _ in range({"second": 1, "third": 2}[order]):
        (result,) = torch.autograd.grad(result.sin().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{order} derivatives are not implemented yet"):
        result.sum().backward()


def test_a_composed_derivative_whose_transform_has_ended():
    """torch.func.vjp differentiates what grad has made when grad has ended."""
    query, key, direction = torch.randn(3, 1, 3, 4, dtype=torch.float64)

    def gradient(query):
        return grad(lambda q: qkv.attention_weights(q, key).sin().sum())(query)

    def second(query):
        return vjp(gradient, query)[1](direction)[0]

    found = second(query)
    torch.testing.assert_close(found, jvp(gradient, (query,), (direction,))[1])
    assert not found.requires_grad
    with pytest.raises(NotImplementedError, match="under vmap when torch.func's grad or vjp"):
        vmap(second)(query[None])
