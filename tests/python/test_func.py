"""torch.func's transforms, and errors, never silent zeros, from what is not implemented yet."""

import pytest
import torch
from common import attend
from torch.autograd import forward_ad

attention = torch.ops.qkv.attention
attention_with_lse = torch.ops.qkv.attention_with_lse
CAUSAL = {"is_causal": True, "scale": 0.4}
pytestmark = pytest.mark.filterwarnings("error:.*performance drop")  # vmap by a loop, that is


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


class TestNotYet:
    """An error, never silent zeros."""

    def test_second_derivative(self, leaves):
        (g,) = torch.autograd.grad(attention(*leaves).sum(), leaves[0], create_graph=True)
        assert g.requires_grad
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            g.sum().backward()

    def test_second_derivative_through_the_incoming_gradient(self, leaves):
        output = attention(*leaves)
        seed = torch.ones_like(output, requires_grad=True)
        (g,) = torch.autograd.grad(output, leaves[0], seed, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.autograd.grad(g.sum(), seed)

    def test_hessian_by_grad_of_grad(self, leaves):
        f = lambda q: attention(q, leaves[1].detach(), leaves[2].detach()).sum()  # noqa: E731
        inner = lambda q: torch.func.grad(f)(q).sin().sum()  # noqa: E731
        with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
            torch.func.grad(inner)(leaves[0].detach())

    @pytest.mark.parametrize("op", [attention, attention_with_lse])
    @pytest.mark.parametrize("which", range(3))
    def test_jvp(self, leaves, op, which):
        plain = [x.detach() for x in leaves]

        def f(x):
            return op(*plain[:which], x, *plain[which + 1 :])

        with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
            torch.func.jvp(f, (plain[which],), (torch.ones_like(plain[which]),))

    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("which", range(3))
    def test_dual_level(self, leaves, requires_grad, which):
        inputs = [x.detach().requires_grad_(requires_grad) for x in leaves]
        with forward_ad.dual_level():
            inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
            with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
                attention(*inputs)

    def test_dual_level_without_grad_mode(self, leaves):
        with forward_ad.dual_level(), torch.no_grad():
            dual = forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0]))
            with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
                attention(dual, *leaves[1:])

    def test_dual_mask(self, leaves):
        mask = torch.zeros(6, 7, dtype=torch.float64)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(mask, torch.ones_like(mask))
            with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
                attention(*leaves, attn_mask=dual)

    def test_jvp_of_grad(self, leaves):
        f = torch.func.grad(lambda q: attention(q, *leaves[1:]).sum())
        with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
            torch.func.jvp(f, (leaves[0].detach(),), (torch.ones_like(leaves[0]),))

    def test_tangent_of_the_incoming_gradient(self, leaves):
        output = attention(*leaves)
        with forward_ad.dual_level():
            seed = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
            with pytest.raises(NotImplementedError, match="forward-mode.*not implemented"):
                torch.autograd.grad(output, leaves[0], seed)

    def test_jacfwd_and_hessian(self, leaves):
        f = lambda q: attention(q, leaves[1].detach(), leaves[2].detach()).sum()  # noqa: E731
        for transform in (torch.func.jacfwd, torch.func.hessian):
            with pytest.raises((NotImplementedError, RuntimeError), match="not implemented"):
                transform(f)(leaves[0].detach())
