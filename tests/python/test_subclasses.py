"""Tensors that are more than tensors: those with __torch_dispatch__ see every operator, forward and
backward, with and without torch.compile; those with __torch_function__ keep their type."""

import pytest
import samples
import torch
from torch.utils._pytree import tree_map_only

import qkv

two_tensors = pytest.importorskip("torch.testing._internal.two_tensor")
logging_tensors = pytest.importorskip("torch.testing._internal.logging_tensor")
TwoTensor = two_tensors.TwoTensor


class Wrapped(torch.Tensor):
    """Around another tensor; `seen` are the operators that it was given to."""

    seen = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def is_made_of_others(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"qkv::{name}", "CompositeImplicitAutograd"
    )


@pytest.mark.parametrize("name", samples.names())
def test_every_operator(name):
    for call in samples.calls(name):
        twin = tree_map_only(torch.Tensor, torch.clone, call)
        torch.manual_seed(1)
        expected = samples.operator(name)(**call)
        Wrapped.seen.clear()
        torch.manual_seed(1)
        found = samples.operator(name)(**tree_map_only(torch.Tensor, Wrapped, twin))
        ours = [op for op in Wrapped.seen if op.namespace == "qkv"]
        assert ours or name == "merge"  # which is made of torch's
        assert is_made_of_others(name) or ours == [samples.operator(name)]
        torch.testing.assert_close(
            tree_map_only(Wrapped, lambda x: x.inner, found), expected, rtol=0, atol=0
        )
        for n in ("k_cache", "v_cache"):  # which are written to, through the wrapper
            assert n not in call or torch.equal(call[n], twin[n])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward_and_backward(requires_grad):
    inputs = [torch.randn(2, 3, 5, 8, requires_grad=requires_grad) for _ in range(3)]
    Wrapped.seen.clear()
    wrapped = [Wrapped(x).requires_grad_(requires_grad) for x in inputs]
    output = qkv.attention(*wrapped, is_causal=True)
    assert isinstance(output, Wrapped)
    expected = qkv.attention(*inputs, is_causal=True)
    assert torch.equal(output.inner, expected)
    if not requires_grad:
        return
    grads = torch.autograd.grad(output.sum(), wrapped)
    truths = torch.autograd.grad(expected.sum(), inputs)
    for x, truth in zip(grads, truths, strict=True):
        assert isinstance(x, Wrapped) and torch.equal(x.inner, truth)
    assert Wrapped.seen.count(torch.ops.qkv.attention_backward.default) == 1


def test_tangents():
    x = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    expected = torch.func.jvp(qkv.attention, tuple(x), tuple(x))[1]
    Wrapped.seen.clear()
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(Wrapped(t), Wrapped(t)) for t in x]
        output = torch.autograd.forward_ad.unpack_dual(qkv.attention(*duals))
    assert torch.ops.qkv.attention_forward_jvp.default in Wrapped.seen
    assert torch.equal(output.tangent.inner, expected)


def test_logging_tensor():
    x = torch.randn(1, 2, 5, 8)
    with logging_tensors.capture_logs() as logs:
        output = qkv.attention(*(logging_tensors.LoggingTensor(x) for _ in range(3)))
    assert isinstance(output, logging_tensors.LoggingTensor)
    assert any("qkv.attention_forward.default" in line for line in logs)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_tensors_in_one(compiled):
    torch.compiler.reset()
    f = lambda *x: qkv.attention(*x, is_causal=True, softcap=2.0)  # noqa: E731
    parts = [[torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)] for _ in range(2)]
    both = [TwoTensor(a.detach(), b.detach()).requires_grad_() for a, b in zip(*parts, strict=True)]
    g = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    output = g(*both)
    grads = torch.autograd.grad(output.sum(), both)
    for side, inputs in zip("ab", parts, strict=True):
        expected = f(*inputs)
        truths = torch.autograd.grad(expected.sum(), inputs)
        torch.testing.assert_close(getattr(output, side), expected)
        torch.testing.assert_close([getattr(x, side) for x in grads], [*truths])


def test_a_type_with_a_name():
    """A subclass without methods: torch's operators keep the type, and so do ours."""

    class Named(torch.Tensor):
        pass

    x = torch.randn(1, 2, 5, 8).as_subclass(Named)
    assert type(x.sin()) is Named
    assert type(qkv.attention(x, x, x)) is Named
    assert all(type(y) is Named for y in qkv.attention(x, x, x, return_lse=True))


def test_parameters_are_tensors():
    x = torch.nn.Parameter(torch.randn(1, 2, 5, 8))
    output = qkv.attention(x, x, x)
    assert type(output) is torch.Tensor and output.requires_grad
