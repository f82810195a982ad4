"""The projections of layers, by oneDNN, by the core library and by torch: the same numbers,
derivatives and errors."""

import functools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from common import COMPILERS, products
from torch.func import functional_call, grad, jvp, vmap

import qkv
from qkv.nn import _linear
from qkv.nn._linear import linear, projections


@pytest.fixture(params=["oneDNN", "qkv", "torch"])
def chosen(request):
    """Who multiplies what it can; and puts back who did."""
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    torch.ops.qkv._set_projections(request.param)
    yield projections()
    torch.ops.qkv._set_projections(None)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def errors(function, x, weight, bias, reference):
    """The largest error of output and gradients of `function`, each relative to its largest."""
    found = []
    for f, dtype in ((function, x.dtype), (reference, torch.float64)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        output = f(*inputs)
        output.backward(drawn(*output.shape, seed=7).to(dtype))
        found.append([output.detach(), *(t.grad for t in inputs)])
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("shape", [(1, 5), (3, 5, 16), (2, 3, 7, 64), (257, 96), (1030, 16)])
def test_no_less_accurate_than_torch(chosen, shape):
    x, weight, bias = drawn(*shape), drawn(48, shape[-1], seed=1), drawn(48, seed=2)
    ours = errors(linear, x, weight, bias, F.linear)
    torchs = errors(F.linear, x, weight, bias, F.linear)
    for a, b in zip(ours, torchs, strict=True):
        # Of the gradient of a weight by so many rows oneDNN's is 2.4 times MKL's.
        assert a <= (3 if shape[0] > 1000 else 2) * b + 1e-7


def test_it_is_the_library_that_was_chosen(chosen):
    x = drawn(4, 16).requires_grad_()
    count = products(lambda: linear(x, drawn(8, 16), drawn(8)).sum().backward())
    assert (count > 0) == (chosen == "oneDNN")


def test_weights_that_are_no_dense_matrix_stay_torchs(onednn):
    """oneDNN would take a thousand times as long."""
    x, wide = drawn(6, 8), drawn(20, 16, seed=1)
    dense = wide[:, :8].contiguous()
    weights = [wide[:, :8], wide[:, ::2], wide[:1, :8].expand(5, 8)]
    assert products(lambda: linear(x, dense, None)) == 1
    assert products(lambda: linear(x, dense.t().contiguous().t(), None)) == 1
    for weight in weights:
        assert products(lambda weight=weight: linear(x, weight, None)) == 0
        torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight))
    for bias in (drawn(40, seed=2)[::2], drawn(1, seed=2).expand(20)):  # which it would misread
        torch.testing.assert_close(linear(x, dense, bias), F.linear(x, dense, bias))
    many = drawn(1030, 8).requires_grad_()  # of so many, the gradient is made transposed
    dense.requires_grad_()
    assert products(lambda: linear(many, dense, None).sum().backward()) == 2  # and of the input


def test_where_onednn_is_switched_off_it_is_torch(chosen):
    x, weight, bias = drawn(64, 256), drawn(512, 256, seed=1), drawn(512, seed=2)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


WEIGHTS = {  # of [48, 32], of which the core library leaves the last two to torch
    "rows": lambda w: w,
    "columns": lambda w: w.t().contiguous().t(),
    "part": lambda w: torch.cat([w, w], 1)[:, :32],
    "every other": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "odd": lambda w: w[:47, :31].t().contiguous().t(),
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("shape", [(1, 32), (2, 3, 32), (8, 32), (9, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows(few_rows, dtype, shape, weight):
    w = WEIGHTS[weight](drawn(48, 32, seed=1).to(dtype))
    x, bias = drawn(*shape).to(dtype)[..., : w.shape[1]], drawn(96, seed=2).to(dtype)[::2]
    bias = bias[: w.shape[0]]
    ours = errors(linear, x, w, bias, F.linear)
    torchs = errors(F.linear, x, w, bias, F.linear)
    for a, b in zip(ours, torchs, strict=True):
        assert a <= 2 * b + 1e-7
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w, None), F.linear(x, w))


def test_few_rows_are_the_core_librarys(few_rows):
    x, weight = drawn(8, 16), drawn(32, 16, seed=1)
    for rows, by_torch in ((x, 0), (drawn(9, 16), 1), (x[:, :15], 1)):
        w = weight[:, : rows.shape[1]]
        call = functools.partial(linear, rows, w, None)
        assert products(call, "aten::linear") == by_torch
        assert not products(call)
    with qkv.reproducible():
        assert products(lambda: linear(x, weight, None), "aten::linear") == 1


def test_strides_views_and_no_bias(chosen):
    whole = drawn(6, 4, 40)
    x, weight = whole.transpose(0, 1)[..., ::2], drawn(20, 9, seed=1).t()
    torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight))
    assert linear(x, weight, None).is_contiguous()


@pytest.mark.parametrize("bias", [drawn(40)[::2], drawn(1).expand(20)], ids=["every other", "one"])
def test_strides_of_a_bias(chosen, bias):
    x, weight = drawn(3, 9), drawn(20, 9, seed=1)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_keeps_only_what_a_gradient_is_made_of(chosen):
    x, weight, bias = drawn(3, 4).requires_grad_(), drawn(5, 4, seed=1), drawn(5).requires_grad_()
    hidden = x * 2
    output = linear(hidden, weight, bias)
    hidden.add_(1)  # the weight is frozen
    output.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(3, 4))

    with torch.inference_mode():
        seen = drawn(3, 4)
    weight.requires_grad_()
    output = linear(drawn(3, 4), weight, bias) + linear(seen, weight.detach(), bias)
    with torch.no_grad():
        weight.add_(1)  # nobody asks for a gradient of the input
    output.sum().backward()
    torch.testing.assert_close(weight.grad, drawn(3, 4).sum(0).expand(5, 4))


def test_second_derivatives(chosen):
    x, weight, bias = (
        drawn(*s, seed=i).requires_grad_() for i, s in enumerate([(3, 4), (5, 4), (5,)])
    )

    def penalty(f):
        (g,) = torch.autograd.grad(f(x, weight, bias).tanh().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, weight, bias))

    for ours, torchs in zip(penalty(linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_transforms_go_through_torch(chosen):
    x, weight, bias = drawn(3, 4), drawn(5, 4, seed=1), drawn(5, seed=2)
    for transform in (
        lambda f: grad(lambda x: f(x, weight, bias).square().sum())(x),
        lambda f: vmap(lambda x: f(x[None], weight, bias))(x),
        lambda f: jvp(lambda w: f(x, w, bias), (weight,), (weight.cos(),))[1],
    ):
        torch.testing.assert_close(transform(linear), transform(F.linear))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_torchs(chosen, dtype):
    x, weight = drawn(3, 4, dtype=dtype), drawn(5, 4, dtype=dtype)
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))


def test_empty_and_wrong_inputs_are_torchs(chosen):
    assert linear(drawn(0, 4), drawn(5, 4), drawn(5)).shape == (0, 5)
    for x, weight, bias in ((drawn(3, 4), drawn(5, 3), None), (drawn(3, 4), drawn(5, 4), drawn(4))):
        with pytest.raises(RuntimeError) as torchs:
            F.linear(x, weight, bias)
        with pytest.raises(RuntimeError) as ours:
            linear(x, weight, bias)
        assert str(ours.value) == str(torchs.value)


@pytest.fixture
def compiled_products(monkeypatch, chosen, nothing_compiled):
    """Whoever multiplies, compiled programs ask when they run, as on CPUs where it is not torch."""
    monkeypatch.setattr(_linear, "_AT_IMPORT", "oneDNN")
    return chosen


@pytest.mark.parametrize("backend", COMPILERS)
def test_compiled(compiled_products, backend):
    """Of sizes that are not known yet; both ways a weight may lie, and gradients of all."""
    weight, bias = drawn(32, 16, seed=1).requires_grad_(), drawn(32, seed=2).requires_grad_()
    both = torch.compile(
        lambda x: linear(linear(x, weight, bias).tanh(), weight.t(), None),
        backend=backend, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for rows in (1, 3, 1100):
        x = drawn(2, rows, 16).requires_grad_()
        inputs = (x, weight, bias)
        expected = F.linear(F.linear(x, weight, bias).tanh(), weight.t())
        torch.testing.assert_close(both(x), expected)
        found = torch.autograd.grad(both(x).square().sum(), inputs)
        theirs = torch.autograd.grad(expected.square().sum(), inputs)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        few, many = (functools.partial(both, drawn(1, n, 16)) for n in (1, 20))
        counts = [products(call, name) for call in (few, many) for name in NAMES]
    expected = {"torch": [0, 2, 0, 2], "oneDNN": [2, 0, 2, 0], "qkv": [0, 0, 0, 2]}
    assert counts == expected[compiled_products]


NAMES = ("mkldnn::_linear_pointwise", "aten::linear")


def test_compiled_transforms_go_through_torch(compiled_products):
    x, weight, bias = drawn(3, 16), drawn(32, 16, seed=1), drawn(32, seed=2)
    for call in (
        lambda f: vmap(lambda x: f(x[None], weight, bias))(x),
        lambda f: grad(lambda x: f(x, weight, bias).square().sum())(x),
        lambda f: jvp(lambda w: f(x, w, bias), (weight,), (weight.cos(),))[1],
    ):
        ours = torch.compile(lambda call=call: call(linear), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(ours(), call(F.linear))
    cast = torch.compile(lambda: linear(x, weight, bias), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast().dtype == torch.bfloat16


def test_the_recorded_operator(compiled_products):
    x, weight, bias = (
        drawn(*s, seed=i).requires_grad_() for i, s in enumerate([(4, 16), (32, 16), (32,)])
    )
    torch.library.opcheck(torch.ops.qkv._product.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.qkv._product.default, (x, weight.detach()))
    vector = drawn(16).requires_grad_()
    torch.library.opcheck(torch.ops.qkv._product.default, (vector, weight, bias))
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    found, expected = (
        torch.autograd.grad(f(vector, weight, bias).square().sum(), (vector, weight, bias))
        for f in (compiled, F.linear)
    )
    torch.testing.assert_close(found, expected)


def test_what_is_exported_is_torchs(compiled_products):
    layer = _linear.ConvertedLinear(16, 32)
    program = torch.export.export(layer, (drawn(3, 16),))
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.linear.default
    ]


class Watching(torch.Tensor):
    seen: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_what_is_traced_and_subclasses_are_torchs(chosen):
    x, weight, bias = drawn(3, 4), drawn(5, 4), drawn(5)
    traced = torch.jit.trace(linear, (x, weight, bias))
    assert [node.kind() for node in traced.graph.nodes()] == ["aten::linear"]
    for i in range(3):
        Watching.seen.clear()
        linear(*[t.as_subclass(Watching) if j == i else t for j, t in enumerate((x, weight, bias))])
        assert Watching.seen == [F.linear]


def test_layer_says_who_multiplies(chosen):
    layer = qkv.nn.MultiheadAttention(16, 2)
    assert (f"projections={chosen}" in repr(layer)) == (chosen != "torch")


def test_a_layer_is_mapped_in_what_is_compiled(nothing_compiled):
    """torch.vmap names what it maps by its repr, which Dynamo traces then."""
    layer, x = _linear.Linear(16, 8), drawn(3, 2, 16)
    compiled = torch.compile(lambda x: vmap(layer)(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_layer_trains_alike(chosen):
    torch.manual_seed(0)
    torchs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    ours = qkv.nn.MultiheadAttention(32, 4, batch_first=True)
    ours.load_state_dict(torchs.state_dict())
    x = drawn(2, 9, 32)
    gradients = []
    for layer in (torchs, ours):
        layer(x, x, x)[0].square().sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    values = {name: p.detach() for name, p in ours.named_parameters()}
    torch.testing.assert_close(functional_call(ours, values, (x, x, x))[0], torchs(x, x, x)[0])
