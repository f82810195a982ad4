"""What a training script asks of torch.autograd: graphs, hooks, checkpoints, frozen inputs."""

import gc
import weakref

import pytest
import torch
from common import attend
from torch.utils.checkpoint import checkpoint

import qkv

attention = torch.ops.qkv.attention
attention_with_lse = torch.ops.qkv.attention_with_lse
CAUSAL = {"is_causal": True, "scale": 0.4}


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.fixture
def leaves():
    """Leaves in f64, so that the gradients of the textbook are the truth."""
    return [torch.randn(2, 2, n, 4, dtype=torch.float64).requires_grad_() for n in (6, 7, 7)]


def by_textbook(leaves, grad_output=None, grad_lse=None):
    output, lse = attend(*leaves, **CAUSAL)
    grad_output = torch.ones_like(output) if grad_output is None else grad_output
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    return torch.autograd.grad([output, lse], leaves, [grad_output, grad_lse])


class TestBackward:
    def test_backward_accumulates_into_grad(self, leaves):
        for times in (1, 2):
            attention(*leaves, **CAUSAL).sum().backward()
            for leaf, g in zip(leaves, by_textbook(leaves), strict=True):
                close(leaf.grad, times * g)

    def test_retain_graph(self, leaves):
        output, lse = attention_with_lse(*leaves, **CAUSAL)
        first = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(output.sum() + lse.sum(), leaves)
        close(first, by_textbook(leaves))
        close(second, by_textbook(leaves, grad_lse=torch.ones_like(lse)))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(lse.sum(), leaves)

    def test_one_output_after_the_other(self, leaves):
        output, lse = attention_with_lse(*leaves, **CAUSAL)
        ours = torch.autograd.grad(lse.sum(), leaves[:2], retain_graph=True)
        zero = torch.zeros_like(output)
        close(ours, by_textbook(leaves, zero, torch.ones_like(lse))[:2])
        close(torch.autograd.grad(output.sum(), leaves), by_textbook(leaves))

    def test_lse_only_gives_value_no_gradient_but_zeros(self, leaves):
        _, lse = attention_with_lse(*leaves, **CAUSAL)
        lse.sum().backward()
        assert leaves[2].grad is None or (leaves[2].grad == 0).all()

    def test_the_two_operators_agree(self, leaves):
        output, lse = attention_with_lse(*leaves, **CAUSAL)
        alone = attention(*leaves, **CAUSAL)
        assert torch.equal(alone, output)
        for x, y in zip(
            torch.autograd.grad(alone.sum(), leaves),
            torch.autograd.grad(output.sum(), leaves),
            strict=True,
        ):
            assert torch.equal(x, y)

    def test_python_function_with_lse(self, leaves):
        output, lse = qkv.attention(*leaves, **CAUSAL, return_lse=True)
        g, h = torch.randn_like(output), torch.randn_like(lse)
        close(torch.autograd.grad([output, lse], leaves, [g, h]), by_textbook(leaves, g, h))

    def test_result_of_other_operators(self, leaves):
        """Attention stands in the middle of a graph: views and broadcasts before it, a reduction
        after it."""
        query, key, value = leaves

        def loss(f):
            x = (query * 2, key[:, :1].expand(-1, 2, -1, -1), value.flip(-1))
            return f(*x, **CAUSAL)[0].square().sum()

        ours, truth = (torch.autograd.grad(loss(f), leaves) for f in (attention_with_lse, attend))
        close(ours, truth)

    def test_grad_fn_has_a_name(self, leaves):
        assert "Attention" in attention(*leaves).grad_fn.name()

    def test_frozen_inputs(self, leaves):
        query, key, value = leaves
        assert not attention(query.detach(), key.detach(), value.detach()).requires_grad
        output, lse = attention_with_lse(query.detach(), key.detach(), value)
        assert output.requires_grad
        expected = torch.autograd.grad(attend(*leaves)[0].sum(), value)
        close(torch.autograd.grad(output.sum(), value), expected)
        with torch.no_grad():
            assert not attention(*leaves).requires_grad
        with torch.inference_mode():
            assert attention(*leaves).is_inference()

    def test_masks_made_in_inference_mode(self, leaves):
        L, S = leaves[0].shape[-2], leaves[1].shape[-2]
        with torch.inference_mode():
            mask = torch.arange(S) < torch.arange(1, L + 1).unsqueeze(1)
            spans = torch.stack([torch.zeros(L), mask.sum(1)], -1).int()
        for options in ({"attn_mask": mask}, {"spans": spans}):
            own = {name: x.clone() for name, x in options.items()}
            found, expected = (
                torch.autograd.grad(qkv.attention(*leaves, **given).sum(), leaves)
                for given in (options, own)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_inference_tensors_as_frozen_inputs(self, leaves):
        with torch.inference_mode():
            frozen = torch.randn(2, 2, 7, 4, dtype=torch.float64)
        assert attention(leaves[0].detach(), frozen, frozen).shape == (2, 2, 6, 4)

    def test_modified_after_use(self, leaves):
        """The backward pass needs query, key, value and the output again, so none of them may be
        modified."""
        for which in range(4):
            inputs = [x * 1 for x in leaves]
            output = attention(*inputs, **CAUSAL)
            loss = output.sum()
            with torch.no_grad():
                [*inputs, output][which].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    @pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
    def test_option_modified_after_use(self, leaves, name):
        tensor = torch.zeros(6, 7) > 0 if name == "attn_mask" else torch.zeros(2)
        output = attention(*leaves, **{name: tensor})
        tensor[0] = 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    def test_saved_tensors_hooks(self, leaves):
        packed = []

        def pack(x):
            packed.append(x.shape)
            return x.numpy() if not x.requires_grad else x.detach().numpy().copy()

        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            output = attention(*leaves, **CAUSAL)
        assert len(packed) == 5  # query, key, value, output, lse
        close(torch.autograd.grad(output.sum(), leaves), by_textbook(leaves))

    def test_save_on_cpu_and_tensor_hooks(self, leaves):
        seen = []
        with torch.autograd.graph.save_on_cpu():
            output = attention(*leaves, **CAUSAL)
        output.register_hook(lambda g: seen.append(g.shape))
        output.grad_fn.register_hook(lambda inputs, outputs: seen.append(len(inputs)))
        close(torch.autograd.grad(output.sum(), leaves), by_textbook(leaves))
        assert seen == [output.shape, 8]  # with those of mask, bias, slopes, sinks and tables

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, leaves, use_reentrant):
        f = lambda *x: attention(*x, **CAUSAL)  # noqa: E731
        output = checkpoint(f, *leaves, use_reentrant=use_reentrant)
        output.sum().backward()
        close([x.grad for x in leaves], list(by_textbook(leaves)))

    def test_every_leaf_accumulates(self, leaves):
        options = {"attn_mask": torch.randn(2, 1, 7), "alibi_slopes": torch.rand(2)}
        options["sinks"], options["bias"] = torch.randn(2, 2), torch.randn(2, 6, 7)
        options = {name: x.double().requires_grad_() for name, x in options.items()}
        everything = [*leaves, *options.values()]
        expected = torch.autograd.grad(attend(*leaves, **options)[0].sum(), everything)
        for times in (1, 2):
            attention(*leaves, **options).sum().backward()
            for leaf, g in zip(everything, expected, strict=True):
                close(leaf.grad, times * g)

    @pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
    def test_one_option_alone_requires_grad(self, leaves, name):
        shapes = {"attn_mask": (6, 7), "alibi_slopes": (2,), "sinks": (2,)}
        leaf = torch.randn(shapes[name]).double().requires_grad_()
        frozen = [x.detach() for x in leaves]
        ours, truth = (
            torch.autograd.grad(f(*frozen, **{name: leaf})[0].sin().sum(), leaf)
            for f in (attention_with_lse, attend)
        )
        close(ours, truth)

    def test_one_tensor_in_two_places(self, leaves):
        """One tensor is both slopes and sinks: its gradients add up."""
        x = torch.rand(2, dtype=torch.float64, requires_grad=True)
        ours, truth = (
            torch.autograd.grad(f(*leaves, alibi_slopes=x, sinks=x)[0].sin().sum(), x)
            for f in (attention_with_lse, attend)
        )
        close(ours, truth)

    def test_gradient_edges_and_graph_freeing(self, leaves):
        """The Node frees what it saved: no cycle keeps the output alive."""
        gc.disable()
        try:
            output = attention(*leaves)
            alive = weakref.ref(output)
            output.sum().backward()
            del output
            assert alive() is None
        finally:
            gc.enable()
