"""qkv.nn.MultiheadAttention within torch: its Transformer layers, torch's own samples of their
modules, nested tensors, torch.compile, torch.func, other devices."""

import copy

import pytest
import torch
from common import COMPILERS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import FunctionInput

from qkv.nn import MultiheadAttention
from qkv.nn.multihead import adopt

B, L, E, H = 3, 6, 16, 4
nn = torch.nn
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning"),  # nested tensors
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
]


def with_ours(model):
    """A copy of the model with our layer in the place of each of torch's."""
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        if type(module) is nn.MultiheadAttention:
            adopt(module)
    return model


def tensors(results):
    results = results if isinstance(results, tuple) else (results,)
    return [x for x in results if x is not None]


def gradients(model, inputs, results, **options):
    leaves = [*model.parameters(), *(x for x in inputs if x.requires_grad)]
    total = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results)
    return torch.autograd.grad(total, leaves, allow_unused=True, **options)


def tangents(model, call, name=""):
    """Of the results, along a direction in the parameters, or in those with such a name."""
    with forward_ad.dual_level():
        duals = {
            n: forward_ad.make_dual(p, torch.linspace(-1, 1, p.numel()).view_as(p).to(p))
            for n, p in model.named_parameters()
            if name in n
        }
        results = tensors(functional_call(model, duals, call.args, call.kwargs))
        return [forward_ad.unpack_dual(x).tangent for x in results]


# torch's samples of its own modules.


SAMPLED = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    nn.TransformerEncoder, nn.Transformer,
)  # fmt: skip


def samples_of(kind, training):
    """The ModuleInput of torch.testing._internal, in f64."""
    from torch.testing._internal.common_modules import module_db

    (info,) = [info for info in module_db if info.module_cls is kind]
    return info.module_inputs_func(info, "cpu", torch.float64, True, training)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", SAMPLED, ids=lambda kind: kind.__name__)
def test_samples_of_torch(kind, training):
    """Results, their tangents, and the gradients of parameters and inputs, of first and second
    order."""
    samples = samples_of(kind, training)
    assert samples
    for sample in samples:
        made, call = sample.constructor_input, sample.forward_input
        theirs = kind(*made.args, **made.kwargs).double()
        for module in theirs.modules():  # drawn numbers differ
            if isinstance(module, nn.Dropout | nn.MultiheadAttention):
                setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
        theirs.train(training)
        ours = with_ours(theirs)
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel has no second derivatives
            results = [tensors(model(*call.args, **call.kwargs)) for model in (theirs, ours)]
            torch.testing.assert_close(*(tangents(model, call) for model in (theirs, ours)))
        torch.testing.assert_close(*results)
        inputs = [*call.args, *call.kwargs.values()]
        inputs = [x for x in inputs if isinstance(x, torch.Tensor)]
        grads = results
        for order in (1, 2):
            pairs = zip((theirs, ours), grads, strict=True)
            grads = [gradients(m, inputs, r, create_graph=order == 1) for m, r in pairs]
            torch.testing.assert_close(*grads)
            grads = [[x for x in g if x is not None and x.requires_grad] for g in grads]


# torch's Transformer layers.


def encoder(batch_first=True, **arguments):
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=batch_first, **arguments)
    return nn.TransformerEncoder(layer, 2).eval()


def padding(*lengths):
    return torch.arange(L) >= torch.tensor(lengths)[:, None]


def count_calls(model):
    """The list grows by an item with each call of the first layer's attention."""
    attention, calls = model.layers[0].self_attn, []
    forward = attention.forward
    attention.forward = lambda *args, **options: calls.append(args) or forward(*args, **options)
    return calls


@pytest.mark.parametrize("pad", [None, (6, 4, 3)])
def test_encoder_in_eval_mode_calls_the_layer(pad):
    """torch's fast path would call an operator of its own, and of torch's layer it does."""
    theirs = encoder()
    ours = with_ours(theirs)
    x = torch.randn(B, L, E)
    mask = None if pad is None else padding(*pad)
    calls = [count_calls(model) for model in (theirs, ours)]
    with torch.no_grad():
        results = [model(x, src_key_padding_mask=mask) for model in (theirs, ours)]
    assert [len(c) for c in calls] == [0, 1]
    assert calls[1][0][0].is_nested == (pad is not None)  # without the padding
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
@pytest.mark.parametrize("pad", [None, (6, 4, 3), "in the middle"])
@pytest.mark.parametrize("arguments", [
    {}, {"norm_first": True}, {"batch_first": False}, {"bias": False}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_encoder(training, arguments, pad, mask):
    theirs = encoder(dropout=0.0, **arguments).train(training)
    ours = with_ours(theirs)
    x = torch.randn(B, L, E, requires_grad=True)
    call = {}
    if pad is not None:
        call["src_key_padding_mask"] = padding(6, 4, 3) if pad != "in the middle" else (
            torch.arange(L).remainder(3) == 1).expand(B, L)  # fmt: skip
    if mask is not None:
        call["mask"] = nn.Transformer.generate_square_subsequent_mask(L)
        if mask != "causal":
            call["mask"] = torch.randn(L, L) if mask == "float" else torch.eye(L, dtype=torch.bool)
    given = x if arguments.get("batch_first", True) else x.transpose(0, 1)
    results = [tensors(model(given, **call)) for model in (theirs, ours)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    grads = [gradients(m, [x], r) for m, r in zip((theirs, ours), results, strict=True)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(batch_first):
    """Encoder, decoder, and the attention of one to the other, which has masks of its own."""
    theirs = nn.Transformer(E, H, 1, 2, 32, dropout=0.0, batch_first=batch_first)
    ours = with_ours(theirs)
    source, target = torch.randn(B, L, E), torch.randn(B, 5, E)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    call = {
        "tgt_mask": theirs.generate_square_subsequent_mask(5),
        "tgt_is_causal": True,
        "memory_key_padding_mask": padding(6, 4, 3),
        "src_key_padding_mask": padding(6, 4, 3),
    }
    results = [tensors(model(source, target, **call)) for model in (theirs, ours)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    grads = [gradients(m, [], r) for m, r in zip((theirs, ours), results, strict=True)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


# Nested tensors.


def nested(layout, *lengths):
    items = [torch.randn(n, E, requires_grad=True) for n in lengths]
    return items, torch.nested.as_nested_tensor(items, layout=layout)


LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
OPTIONS = [
    {}, {"softcap": 2.0, "window_size": (1, 2), "alibi_slopes": torch.rand(H)},
    {"sinks": torch.rand(H), "scale": 0.3},
]  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_nested_tensors(layout, is_causal, options):
    """Item by item what the layer gives for it alone; gradients too, which torch's layer has not.
    The weights are padded with zeros, as torch's are."""
    layer = MultiheadAttention(E, H, batch_first=True, **options)
    items, x = nested(layout, 3, 5, 1)
    output, weights = layer(x, x, x, is_causal=is_causal)
    expected = [layer(i, i, i, is_causal=is_causal) for i in items]
    assert output.layout == layout and weights.shape == (3, 5, 5)
    torch.testing.assert_close(output.unbind(), tuple(e[0] for e in expected))
    for found, (_, wanted) in zip(weights, expected, strict=True):
        n = len(wanted)
        torch.testing.assert_close(found[:n, :n], wanted)
        assert (found[n:] == 0).all() and (found[:, n:] == 0).all()
    sums = [
        sum(o.square().sum() for o in output.unbind()) + weights.square().sum(),
        sum(o.square().sum() + w.square().sum() for o, w in expected),
    ]
    leaves = [*items, *layer.parameters()]
    grads = [torch.autograd.grad(s, leaves) for s in sums]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
    assert (x + output).layout == layout  # of the same ragged sizes


def test_nested_tensors_as_torchs_layer_has_them():
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    _, x = nested(torch.strided, 3, 5, 1)
    with torch.no_grad():
        for average in (True, False):
            results = [
                m(x, x, x, average_attn_weights=average) for m in (theirs, with_ours(theirs))
            ]
            torch.testing.assert_close(results[0][0].unbind(), results[1][0].unbind())
            torch.testing.assert_close(results[0][1], results[1][1])


def test_dropout_of_nested_tensors():
    """The weights are those that the values were averaged with."""
    layer = MultiheadAttention(E, 1, dropout=0.5)
    _, x = nested(torch.strided, 30, 50)
    output, weights = layer(x, x, x)
    assert (weights[1] == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    for item, found, weight in zip(x.unbind(), output.unbind(), weights, strict=True):
        value = nn.functional.linear(item, layer.in_proj_weight[2 * E :])
        n = len(item)
        expected = layer.out_proj(weight[:n, :n] @ value)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@LAYOUTS
def test_nested_tensors_that_do_not_fit(layout):
    _, x = nested(layout, 3, 5)
    _, y = nested(layout, 3, 5)
    layer = MultiheadAttention(E, H)
    for bad in ((x, y, y), (y[0].detach(), x, x)):
        with pytest.raises(RuntimeError, match="the same tensor three times"):
            layer(*bad)
    flat = torch.nested.as_nested_tensor([torch.randn(3), torch.randn(5)], layout=layout)
    with pytest.raises(RuntimeError, match=r"query is a nested tensor of 2 dim.*\[B, j, E\] is"):
        layer(flat, flat, flat)
    for mask in ("key_padding_mask", "attn_mask"):
        with pytest.raises(RuntimeError, match=f"{mask} is given, but None"):
            layer(x, x, x, **{mask: torch.zeros(2, 5)})
    for arguments, message in (
        ({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": E + 1}, "kdim or vdim"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            MultiheadAttention(E, H, **arguments)(x, x, x)


def test_jagged_tensors_with_holes():
    offsets, lengths = torch.tensor([0, 3, 8]), torch.tensor([2, 5])
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, E), offsets, lengths)
    with pytest.raises(RuntimeError, match="transposed or has holes"):
        MultiheadAttention(E, H)(x, x, x)


# torch.compile, torch.export, torch.func.


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("call", [
    {}, {"need_weights": False, "is_causal": True}, {"key_padding_mask": padding(6, 4, 3)},
], ids=str)  # fmt: skip
def test_compile(backend, call):
    torch.compiler.reset()
    layer = MultiheadAttention(E, H, batch_first=True, softcap=3.0)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(B, L, E, requires_grad=True)
    results = [tensors(f(x, x, x, **call)) for f in (layer, compiled)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(gradients(layer, [x], r) for r in results))


def test_compile_a_jagged_tensor():
    torch.compiler.reset()
    layer = MultiheadAttention(E, H, batch_first=True)
    _, x = nested(torch.jagged, 3, 5)

    def f(x):
        return layer(x, x, x, need_weights=False)[0]

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).values(), f(x).values())


def test_compile_an_encoder():
    torch.compiler.reset()
    theirs = encoder()
    x, mask = torch.randn(B, L, E), padding(6, 4, 3)
    with torch.no_grad():
        compiled = torch.compile(with_ours(theirs), backend="aot_eager", fullgraph=True)
        found, expected = (m(x, src_key_padding_mask=mask) for m in (compiled, theirs))
    torch.testing.assert_close(found[~mask], expected[~mask])


def test_export():
    layer = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, L, E)
    exported = torch.export.export(layer, (x, x, x)).module()
    torch.testing.assert_close(exported(x, x, x), layer(x, x, x))


@pytest.mark.parametrize("kdim", (E, 5))
def test_forward_mode_without_grad(kdim):
    """torch.no_grad() leaves forward mode on, for each parameter by itself."""
    layer = MultiheadAttention(E, H, kdim=kdim)
    torch.nn.init.normal_(layer.in_proj_bias)
    call = FunctionInput(torch.randn(L, B, E), torch.randn(5, B, kdim), torch.randn(5, B, E))
    for name, _ in layer.named_parameters():
        expected = tangents(layer, call, name)
        with torch.no_grad():
            found = tangents(layer, call, name)
        assert all(x.abs().sum() > 0 for x in expected[:1])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_of_each_sample():
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(B, L, E)
    found = [
        vmap(grad(lambda p, x, m=m: functional_call(m, p, (x, x, x))[0].square().sum()), (None, 0))(
            dict(m.named_parameters()), x
        )
        for m in (theirs, with_ours(theirs))
    ]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_ensemble():
    """Several layers as one call, with stacked parameters."""
    layers = [MultiheadAttention(E, H, batch_first=True) for _ in range(3)]
    stacked = stack_module_state(layers)
    shell = copy.deepcopy(layers[0]).to("meta")
    x = torch.randn(B, L, E)
    found = vmap(lambda *state: functional_call(shell, state, (x, x, x)))(*stacked)
    expected = [layer(x, x, x) for layer in layers]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize("derive", [
    lambda f, x: torch.func.jvp(f, (x,), (x,)),
    lambda f, x: torch.func.grad(lambda y: torch.func.grad(lambda z: f(z).sum())(y).sum())(x),
], ids=["forward mode", "second order"])  # fmt: skip
def test_second_derivatives_and_forward_mode(derive):
    """As torch's layer has them."""
    layer = MultiheadAttention(E, H).double()
    x = torch.randn(L, E, dtype=torch.float64)
    forward = nn.MultiheadAttention.forward
    found = derive(lambda x: layer(x, x, x, need_weights=False)[0], x)
    torch.testing.assert_close(found, derive(lambda x: forward(layer, x, x, x)[0], x))
    for result in (0, 1):  # the output beside the weights, and the weights
        found, expected = (
            derive(lambda x, f=f, i=result: f(layer, x, x, x)[i].sin(), x)
            for f in (MultiheadAttention.forward, forward)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_derivatives_of_second_order(options, need_weights):
    """Against differences, with the options that torch's layer has not."""
    layer = MultiheadAttention(8, H, batch_first=True, **options).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    call = {"need_weights": need_weights, "is_causal": True}
    call["key_padding_mask"] = torch.tensor([[False] * 3, [False, False, True]])

    def f(x, weight):
        return tuple(tensors(functional_call(layer, {"in_proj_weight": weight}, (x, x, x), call)))

    leaves = x, layer.in_proj_weight
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True, fast_mode=True)


# Other devices.


def test_meta():
    layer = MultiheadAttention(E, H, batch_first=True, device="meta", add_zero_attn=True)
    x = torch.randn(B, L, E, device="meta")
    for call in ({}, {"is_causal": True}, {"key_padding_mask": padding(6, 4, 3).to("meta")}):
        output, weights = layer(x, x, x, **call)
        assert output.is_meta and output.shape == x.shape
        assert weights.is_meta and weights.shape == (B, L, L + 1)


def test_another_device(monkeypatch):
    """torch's own forward, or an error that says what it has not."""
    calls = []
    monkeypatch.setattr(
        nn.MultiheadAttention, "forward", lambda self, *args, **call: calls.append((args, call))
    )
    plain, capped = (MultiheadAttention(E, H, softcap=s) for s in (0, 1))
    with FakeTensorMode():
        x, bias = torch.empty(B, L, E, device="cuda"), torch.empty(L, L, device="cuda")
        plain(x, x, x, bias, False, is_causal=True)
        with pytest.raises(NotImplementedError, match="on cuda:0.*has no softcap and no attn_bias"):
            capped(x, x, x, attn_bias=bias)
    ((inputs, call),) = calls
    assert all(i is x for i in inputs) and call.pop("key_padding_mask") is bias
    assert call == {
        "attn_mask": None, "need_weights": False, "average_attn_weights": True, "is_causal": True,
    }  # fmt: skip
