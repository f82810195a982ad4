"""Small calls skip the dispatcher where it would do nothing: nobody may be able to tell."""

import pytest
import torch
from common import INF, NO_OPTIONS, attend, dtypes_of
from forks import run_forked
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import qkv
from qkv import testing

ops = torch.ops.qkv
FORWARD, BACKWARD = ops.attention_forward.default, ops.attention_backward.default


def make(*shape, dtype=torch.float32):
    return [torch.randn(shape or (1, 2, 4, 8), dtype=dtype).requires_grad_() for _ in range(3)]


def low_level(query, key, value, attn_mask=None, **options):
    """(output, lse) of the operator, called through the dispatcher."""
    return FORWARD(query, key, value, **NO_OPTIONS | {"attn_mask": attn_mask} | options)


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    """A tensor with __torch_dispatch__, around another tensor."""

    seen = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        unwrap = lambda x: x.inner if isinstance(x, cls) else x  # noqa: E731
        results = func(*map(unwrap, args), **{n: unwrap(x) for n, x in (kwargs or {}).items()})
        return tuple(cls(x) for x in results)


class TestWhoWatches:
    def test_dispatch_mode(self):
        x = make()
        with Watching() as mode:
            output = qkv.attention(*x)
        assert FORWARD in mode.seen
        with Watching() as mode:
            torch.autograd.grad(output.sum(), x)
        assert BACKWARD in mode.seen

    def test_dispatch_mode_without_gradients(self):
        x = make()
        with torch.no_grad(), Watching() as mode:
            qkv.attention(*x)
        assert mode.seen == [FORWARD]

    @pytest.mark.parametrize("which", range(3))
    def test_subclass_in_any_place(self, which):
        x = [t.detach() for t in make()]
        expected = qkv.attention(*x)
        Logged.seen.clear()
        x[which] = Logged(x[which])
        output = qkv.attention(*x)
        assert Logged.seen == [FORWARD] and torch.equal(output.inner, expected)

    @pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
    def test_subclass_as_an_option(self, name):
        x = [t.detach() for t in make()]
        Logged.seen.clear()
        qkv.attention(*x, **{name: Logged(torch.zeros(() if name == "attn_mask" else 2))})
        assert Logged.seen == [FORWARD]

    def test_function_mode(self):
        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Mode():
            qkv.attention(*make())
        assert ops.attention.default in seen

    def test_profiler(self):
        x = make()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(qkv.attention(*x).sum(), x)
        names = {event.key for event in profile.key_averages()}
        assert {"qkv::attention", "qkv::attention_forward", "qkv::attention_backward"} <= names

    def test_make_fx(self):
        graph = make_fx(lambda *x: qkv.attention(*x))(*(t.detach() for t in make()))
        assert FORWARD in [node.target for node in graph.graph.nodes]

    def test_vmap_and_grad_make_one_call(self):
        """torch.func's levels are dispatch keys of this thread, so the call goes through the
        dispatcher. test_func.py looks at the numbers."""
        x = [t.detach() for t in make(3, 1, 2, 4, 8)]
        with Watching() as mode:
            torch.func.vmap(qkv.attention)(*x)
        assert mode.seen.count(FORWARD) == 1
        with Watching() as mode:
            torch.func.vmap(torch.func.grad(lambda *t: qkv.attention(*t).sum()))(*x)
        assert mode.seen.count(FORWARD) == 1 and mode.seen.count(BACKWARD) == 1


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.randn(4, 4)},
    "mask, bias": {"attn_mask": torch.rand(4, 4) < 0.8, "bias": torch.randn(2, 4, 4)},
    "all hidden": {"attn_mask": torch.full((4, 4), -INF)},
    "slopes and sinks": {"alibi_slopes": torch.rand(2), "sinks": torch.randn(2)},
    "softcap and window": {"softcap": 2.0, "window_size": (1, 1), "scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@dtypes_of("f32", "f64", "bf16", "f16")
class TestSameAsDispatched:
    def test_forward(self, options, dtype):
        x = make(dtype=dtype)
        options = {
            n: t.to(dtype) if n == "attn_mask" else t for n, t in options.items()
        }  # fmt: skip
        expected = low_level(*x, **options)
        for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with guard():
                found = qkv.attention(*x, **options, return_lse=True)
                alone = qkv.attention(*x, **options)
            assert torch.equal(alone, expected[0])
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
                assert a.requires_grad == (guard is torch.enable_grad)
                assert a.is_inference() == (guard is torch.inference_mode)

    def test_backward(self, options, dtype):
        x = make(dtype=dtype)
        options = {
            n: t.detach().to(dtype if n == "attn_mask" else t.dtype).requires_grad_()
            if torch.is_tensor(t) else t
            for n, t in options.items()
        }  # fmt: skip
        leaves = [*x, *(t for t in options.values() if torch.is_tensor(t))]
        output, lse = low_level(*x, **options)
        g = torch.randn_like(output)
        expected = torch.autograd.grad(output, leaves, g)
        with Watching():  # under which calls go through the dispatcher
            watched = torch.autograd.grad(qkv.attention(*x, **options), leaves, g)
        found = torch.autograd.grad(qkv.attention(*x, **options), leaves, g)
        for a, b, c in zip(found, expected, watched, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sizes", [
    (1, 1, 1, 8), (2, 3, 70, 24), (1, 4, 1, 2000, 64), (1, 1, 5, 3000, 32), (1, 2, 300, 300, 64),
    (2, 0, 4, 8), (1, 1, 4, 0, 8),
], ids=str)  # fmt: skip
@dtypes_of("f32", "f64", "bf16", "f16")
def test_without_lse(sizes, dtype):
    """The output is the same whether its lse is asked for or not; also where keys are split, and
    where rows are not finite."""
    B, H, L, *S, D = sizes
    S = S[0] if S else L
    query, key, value = (torch.randn(B, H, n, D).to(dtype) for n in (L, S, S))
    mask = torch.rand(L, S) < 0.7
    for junk in (False, True):
        if junk:
            for x in (key, value):
                x.view(-1)[::97] = INF
        expected = low_level(query, key, value, mask)[0]
        found = qkv.attention(query, key, value, mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_lazy_negative_and_zero():
    """Tensors whose numbers are not yet in their memory: lazily negated ones, and zero tensors."""
    x = [t.detach() for t in make()]
    expected = qkv.attention(-x[0], x[1], x[2])
    assert torch.equal(qkv.attention(torch._neg_view(x[0]), x[1], x[2]), expected)
    zero = torch._efficientzerotensor((1, 2, 4, 8))
    assert torch.equal(qkv.attention(*x[:2], zero), torch.zeros(1, 2, 4, 8))


def test_forward_mode():
    """Direct calls know tangents too, and are not mistaken for constants."""
    x = [t.detach().double() for t in make()]
    tangents = [torch.randn_like(t) for t in x]
    _, expected = torch.func.jvp(lambda *x: attend(*x)[0], tuple(x), tuple(tangents))
    with torch.autograd.forward_ad.dual_level():
        duals = map(torch.autograd.forward_ad.make_dual, x, tangents)
        found = torch.autograd.forward_ad.unpack_dual(qkv.attention(*duals)).tangent
    torch.testing.assert_close(found, expected)
    found, expected = (
        torch.func.jvp(lambda q, f=f: f(q, x[1], softcap=2.0), (x[0],), (x[0],))[1]
        for f in (qkv.attention_weights, testing.attention_weights)
    )
    torch.testing.assert_close(found, expected)


def test_second_derivatives():
    x = [t.detach().double().requires_grad_() for t in make()]
    for options in ({}, {"softcap": 2.0}):
        results = []
        for f in (qkv.attention, lambda *x, **options: attend(*x, **options)[0]):
            (g, *_) = torch.autograd.grad(f(*x, **options).sum(), x, create_graph=True)
            results.append(torch.autograd.grad(g.sin().sum(), x))
        torch.testing.assert_close(*results)


def test_a_workspace_of_every_thread():
    """The workspace that a thread keeps for its small calls is its own, and freed with it."""
    code = """
import threading, torch, qkv
x = torch.randn(1, 2, 4, 8)
expected = qkv.attention(x, x, x)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def run(n):
    def call():
        assert torch.equal(qkv.attention(x, x, x), expected)
    for _ in range(n):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
run(10)
before = resident()
run(200)
print(resident() - before)
"""
    assert float(run_forked(code)) < 20  # 200 of them would be 100 MiB
