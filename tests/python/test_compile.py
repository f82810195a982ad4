"""torch.compile, fake and meta tensors, and torch's own checks of attention in many shapes; those
of every operator: test_opcheck.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from blocks import Block
from common import COMPILERS, attend, dtypes_of, needs_compiler
from strategies import LAYOUTS, lay_out
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import qkv

attention = torch.ops.qkv.attention
attention_with_lse = torch.ops.qkv.attention_with_lse
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # Dynamo's own
    pytest.mark.usefixtures("nothing_compiled"),
]


def make(*sizes, batch=(2, 3), D=8, dtype=torch.float32):
    return [torch.randn(*batch, n, D, dtype=dtype).requires_grad_() for n in sizes]


@pytest.mark.parametrize("backend", COMPILERS)
class TestCompile:
    def check(self, f, backend, sizes, dynamic):
        compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
        for L, S in sizes:
            leaves = make(L, S, S)
            results = [g(*leaves) for g in (compiled, f)]
            torch.testing.assert_close(*results)
            grads = [torch.autograd.grad(sum(y.sum() for y in r), leaves) for r in results]
            torch.testing.assert_close(*grads)
        return compiled

    def test_training(self, backend):
        def f(query, key, value):
            output, lse = attention_with_lse(query.sin(), key, value * 2, is_causal=True)
            return output.cos(), lse * 3

        self.check(f, backend, [(16, 16)], dynamic=False)

    def test_attention_alone(self, backend):
        self.check(lambda *x: (attention(*x),), backend, [(5, 9)], dynamic=False)

    def test_dynamic_shapes(self, backend):
        def f(query, key, value):
            return (attention(query + 1, key, value, is_causal=True, enable_gqa=True) * 2,)

        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        self.check(f, counter, [(9, 11), (17, 6), (33, 70)], dynamic=True)
        assert counter.frame_count == 1

    def test_dynamic_shapes_with_mask_and_layout(self, backend):
        def f(query, key, value):
            L, S = query.size(-2), key.size(-2)
            mask = torch.arange(L)[:, None] >= torch.arange(S) - 3
            heads_last = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
            return (attention(heads_last(query), heads_last(key), value, mask).transpose(1, 2) + 1,)

        self.check(f, backend, [(9, 11), (17, 6)], dynamic=True)

    def test_every_option(self, backend):
        mask, slopes, sinks = torch.randn(5, 9), torch.rand(3), torch.randn(2, 3)

        def f(query, key, value):
            return qkv.attention(
                query, key, value, mask * query.mean(), is_causal=True, window_size=(3, 2),
                softcap=2.0, alibi_slopes=slopes + key.mean(), sinks=sinks * value.mean(),
                return_lse=True,
            )  # fmt: skip

        self.check(f, backend, [(5, 9)], dynamic=False)

    def test_training_step_of_a_model(self, backend):
        def train(attend, compiled):
            torch.manual_seed(0)
            model = torch.nn.Sequential(Block(attend), Block(attend))
            step = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            losses = []
            for _ in range(4):
                loss = step(torch.ones(2, 6, 16)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        ours = train(attention, compiled=True)
        for eager in (attention, F.scaled_dot_product_attention):
            assert ours == pytest.approx(train(eager, compiled=False), rel=1e-5)
        assert ours[-1] < ours[0]

    def test_functional_gradient(self, backend):
        plain = [x.detach() for x in make(6, 6, 6)]
        f = torch.func.grad(lambda *x: attention(*x).sin().sum(), (0, 1, 2))
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*plain), f(*plain))

    def test_compiled_autograd(self, backend):
        leaves = make(7, 9, 9)
        seeds = [torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7)]

        def gradients():
            outputs = attention_with_lse(*leaves, is_causal=True, scale=0.3)
            for x in leaves:
                x.grad = None
            torch.autograd.backward(outputs, seeds)
            return [x.grad for x in leaves]

        expected = gradients()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            for _ in range(2):  # the second time from the cache
                torch.testing.assert_close(gradients(), expected)


@needs_compiler
def test_inductor_trains_a_model():
    """What the quick layer compiles to C++."""
    TestCompile().test_training_step_of_a_model("inductor")


@pytest.mark.long
def test_compiled_autograd_with_other_options():
    """Arguments that are no tensors are part of the cache's key; else two calls would share one
    graph."""
    query, key, value = make(6, 6, 6, batch=(1, 4))
    mask = torch.rand(6, 6) > 0.3
    variants = [{"is_causal": True}, {"scale": 2.0}, {"scale": 3.0}, {"attn_mask": mask}]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for options in variants:
            for inputs in ([query, key, value], [query, key.detach(), value]):
                wanted = [x for x in inputs if x.requires_grad]
                for x in wanted:
                    x.grad = None
                attention(*inputs, **options).sum().backward()
                expected = torch.autograd.grad(attend(*inputs, **options)[0].sum(), wanted)
                torch.testing.assert_close([x.grad for x in wanted], list(expected))


HEADS = {"alibi_slopes": torch.rand(3), "sinks": torch.randn(2, 3).double()}
SAMPLES = {
    "plain": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {}),
    "causal, scale": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {"is_causal": True, "scale": 0.3}),
    "bool mask": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {"attn_mask": torch.ones(5, 6) > 0}),
    "float mask": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {"attn_mask": torch.zeros(3, 1, 6)}),
    "gqa": ((2, 6, 5, 4), (2, 3, 6, 4), (2, 1, 6, 4), {"enable_gqa": True}),
    "broadcast": ((1, 3, 5, 4), (2, 1, 6, 4), (3, 6, 2), {}),
    "2-D": ((5, 4), (6, 4), (6, 7), {}),
    "3-D": ((2, 5, 4), (2, 6, 4), (2, 6, 4), {}),
    "6-D": ((2, 1, 2, 2, 5, 4), (2, 1, 2, 2, 6, 4), (1, 2, 1, 2, 6, 4), {}),
    "empty": ((2, 3, 0, 4), (2, 3, 6, 4), (2, 3, 6, 4), {}),
    "window, softcap": (
        (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {"window_size": (2, 1), "softcap": 1.5},
    ),
    "slopes, sinks": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), HEADS),
    "mask and bias": (
        (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4),
        {"attn_mask": torch.ones(2, 1, 1, 6) > 0, "bias": torch.zeros(1, 3, 5, 6)},
    ),
    "mask of its own": (
        (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), {"attn_mask": torch.zeros(3, 6, 5).mT, **HEADS},
    ),
}  # fmt: skip


@pytest.mark.one_in(16)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("requires_grad", [False, True])
@dtypes_of("f32", "f64", "bf16")
def test_opcheck(sample, requires_grad, dtype):
    *shapes, options = SAMPLES[sample]
    inputs = [torch.randn(s, dtype=dtype, requires_grad=requires_grad) for s in shapes]
    options = {
        name: x.detach().requires_grad_(requires_grad and x.dtype != torch.bool)
        if torch.is_tensor(x) else x
        for name, x in options.items()
    }  # fmt: skip
    for op in (attention, attention_with_lse):
        opcheck(op, inputs, options)


ALL_OPTIONS = {
    "dropout_p": 0.3, "is_causal": True, "scale": 0.4, "enable_gqa": False, "window_size": (3, 1),
    "softcap": 2.0,
}  # fmt: skip


@pytest.mark.one_in(5)
@dtypes_of("f32", "f16")
@pytest.mark.parametrize("wanted", [[True] * 8, [True, False] * 4], ids=["eight", "four"])
@pytest.mark.parametrize("mask", [(5, 6), (2, 3, 5, 6), (3, 1, 6), (5, 1), ()])
def test_opcheck_of_the_gradient(mask, wanted, dtype):
    query, key, value = (x.detach() for x in make(5, 6, 6, dtype=dtype))
    heads = torch.rand(3), torch.randn(2, 1, dtype=torch.float64)
    masks = torch.randn(mask, dtype=dtype), torch.randn(3, 1, 6)
    more = *masks, None, *heads, torch.tensor([3]), None, None, None
    tensors = (query, key, value, *more)
    output, lse = torch.ops.qkv.attention_forward(*tensors, **ALL_OPTIONS)
    for seeds in itertools.product([torch.randn_like(output), None], [torch.randn_like(lse), None]):
        arguments = (*seeds, *tensors, output, lse)
        options = {**ALL_OPTIONS, "output_mask": wanted}
        opcheck(torch.ops.qkv.attention_backward, arguments, options)


def describe(x):
    return x.shape, x.stride(), x.dtype


class TestMeta:
    """Meta and fake tensors give shapes, strides and dtypes of the real operator."""

    @dtypes_of("f32", "bf16")
    @pytest.mark.parametrize("sample", SAMPLES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_same_as_real(self, sample, layout, dtype):
        *shapes, options = SAMPLES[sample]
        real = [lay_out(torch.randn(s, dtype=dtype), layout) for s in shapes]
        expected = [describe(x) for x in attention_with_lse(*real, **options)]
        meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in options.items()}
        on_meta = [
            torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta") for x in real
        ]
        found = attention_with_lse(*on_meta, **meta)
        assert all(x.is_meta for x in found)
        assert [describe(x) for x in found] == expected
        assert describe(attention(*on_meta, **meta)) == expected[0]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = [mode.from_tensor(x) for x in real]
            assert [describe(x) for x in attention_with_lse(*fake, **options)] == expected

    @dtypes_of("f32", "bf16")
    @pytest.mark.parametrize("sample", SAMPLES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_same_as_real(self, sample, layout, dtype):
        *shapes, options = SAMPLES[sample]
        real = [lay_out(torch.randn(s, dtype=dtype), layout) for s in shapes]

        def gradients(inputs):
            more = [
                options.get(name)
                for name in ("attn_mask", "bias", "spans", "alibi_slopes", "sinks")
            ]
            tensors = (*inputs, *more, None, None, None, None)
            scores = {
                "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
                "window_size": None, "softcap": 0.0,
            }  # fmt: skip
            scores |= {name: x for name, x in options.items() if name in scores}
            output, lse = torch.ops.qkv.attention_forward(*tensors, **scores)
            found = torch.ops.qkv.attention_backward(
                torch.ones_like(output), None, *tensors, output, lse, **scores,
                output_mask=[True] * 8,
            )  # fmt: skip
            return [x for x in found if x is not None]

        expected = [describe(x) for x in gradients(real)]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert [describe(x) for x in gradients([mode.from_tensor(x) for x in real])] == expected

    def test_expanded(self):
        real = torch.randn(1, 1, 5, 4).expand(2, 3, 5, 4)
        meta = torch.empty(1, 1, 5, 4, device="meta").expand(2, 3, 5, 4)
        found, expected = (attention_with_lse(x, x, x) for x in (meta, real))
        assert [describe(x) for x in found] == [describe(x) for x in expected]

    def test_output_lies_like_query(self):
        """The output is laid out like query, so that the usual transpose and flatten after
        attention copy nothing."""
        query = torch.randn(2, 5, 3, 4).transpose(1, 2)
        output = attention(query, query, query)
        assert output.stride() == query.stride()
        assert output.transpose(1, 2).flatten(2).data_ptr() == output.data_ptr()

    def test_export(self):
        class Model(torch.nn.Module):
            def forward(self, query, key, value):
                return attention(query, key, value, is_causal=True)

        inputs = tuple(x.detach() for x in make(6, 8, 8))
        length = torch.export.Dim("length", min=2, max=64)
        program = torch.export.export(
            Model(), inputs, dynamic_shapes=({2: length}, {2: length + 2}, {2: length + 2}),
        )  # fmt: skip
        longer = tuple(x.detach() for x in make(20, 22, 22))
        torch.testing.assert_close(program.module()(*longer), Model()(*longer))
