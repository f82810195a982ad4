"""qkv.nn.AdditiveAttention against its formula, written down plainly."""

import io

import pytest
import torch
from common import HALVES, INF, assert_example_runs, dtypes_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from qkv.nn import AdditiveAttention, additive

B, L, S, DQ, DK, DV, HIDDEN = 2, 4, 5, 6, 3, 7, 8


def make(dtype=torch.float64, batch=(B,), **arguments):
    """A layer, and a query, a key and a value for it."""
    layer = AdditiveAttention(DQ, DK, HIDDEN, dtype=dtype, **arguments)
    sizes = ((L, DQ), (S, DK), (S, DV))
    inputs = [torch.randn(*batch, *size, dtype=dtype, requires_grad=True) for size in sizes]
    return layer, inputs


def formula(layer, query, key, value, attn_mask=None):
    """(output, weights), where no row is empty."""
    state = dict(layer.named_parameters())
    b = state.get("query_proj.bias", 0.0)
    q = query @ state["query_proj.weight"].T + b
    k = key @ state["key_proj.weight"].T
    scores = ((q[..., :, None, :] + k[..., None, :, :]).tanh() * state["v"]).sum(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return weights @ value, weights


def some_hidden(*shape):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


MASKS = {
    "none": lambda: None,
    "bool": lambda: some_hidden(L, S),
    "padding": lambda: some_hidden(B, 1, S),
    "floating": lambda: torch.randn(B, L, S).double(),
    "float32 that hides": lambda: torch.randn(S).masked_fill(~some_hidden(S), -INF),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_results_and_gradients(mask, bias):
    layer, inputs = make(bias=bias)
    mask = MASKS[mask]()
    leaves = [*inputs, *layer.parameters()]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_())
    results = [layer(*inputs, mask, need_weights=True), formula(layer, *inputs, mask)]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(layer(*inputs, mask), results[0][0])
    seeds = [torch.randn_like(x) for x in results[0]]
    grads = [torch.autograd.grad(x, leaves, seeds) for x in results]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-7)  # that of a float32 mask is rounded


@pytest.mark.parametrize("batches", [
    ((), (), ()), ((3,), (), (2, 1)), ((2, 1), (3,), ()), ((2, 3, 2),) * 3, ((0,),) * 3,
], ids=str)  # fmt: skip
def test_leading_dimensions_broadcast(batches):
    layer, inputs = make()
    inputs = [torch.randn(*b, *x.shape[1:]).double() for b, x in zip(batches, inputs, strict=True)]
    output, weights = layer(*inputs, need_weights=True)
    expected, _ = formula(layer, *inputs)
    torch.testing.assert_close(output, expected)
    assert weights.shape == (*output.shape[:-1], S)


@pytest.mark.parametrize("queries, keys", [(0, 5), (4, 0), (1, 1)])
def test_sizes(queries, keys):
    layer, (query, key, value) = make()
    inputs = (query[:, :queries], key[:, :keys], value[:, :keys])
    output, weights = layer(*inputs, need_weights=True)
    assert output.shape == (B, queries, DV) and weights.shape == (B, queries, keys)
    torch.testing.assert_close(output, formula(layer, *inputs)[0])
    assert all(g.isfinite().all() for g in torch.autograd.grad(output.sum(), [query, key, value]))


@pytest.mark.parametrize("elements", [1, B * S * HIDDEN * 3])
def test_blocks_of_queries(monkeypatch, elements):
    """A query at a time, or three and then the one that is left."""
    layer, inputs = make()
    whole = layer(*inputs)
    shapes = []
    tanh = torch.Tensor.tanh
    monkeypatch.setattr(torch.Tensor, "tanh", lambda x: shapes.append(x.shape) or tanh(x))
    monkeypatch.setattr(additive, "_BLOCK_ELEMENTS", elements)
    cut = layer(*inputs)
    assert [s[1] for s in shapes] == ([1] * 4 if elements == 1 else [3, 1])
    torch.testing.assert_close(cut, whole)
    grads = [
        torch.autograd.grad(x.sin().sum(), [*inputs, *layer.parameters()]) for x in (cut, whole)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "floating"])
def test_derivatives_of_first_and_second_order(mask, need_weights):
    layer, inputs = make(bias=True)
    mask = MASKS[mask]()
    if mask is not None and mask.is_floating_point():
        mask.requires_grad_()

    def f(*arguments):
        parameters = dict(zip(names, arguments[3:-1], strict=True))
        call = (*arguments[:3], arguments[-1], need_weights)
        return torch.func.functional_call(layer, parameters, call)

    names = [name for name, _ in layer.named_parameters()]
    arguments = (*inputs, *layer.parameters(), mask)
    assert torch.autograd.gradcheck(f, arguments)
    assert torch.autograd.gradgradcheck(f, arguments)


@pytest.mark.parametrize("floating", [False, True])
def test_rows_with_nothing_to_attend_to(floating):
    layer, inputs = make(bias=True)
    mask = some_hidden(L, S)
    mask[2] = False
    given = torch.zeros(L, S).masked_fill(~mask, -INF) if floating else mask
    output, weights = layer(*inputs, given, need_weights=True)
    assert (output[:, 2] == 0).all() and (weights[:, 2] == 0).all()
    others = [0, 1, 3]
    expected, _ = formula(layer, inputs[0][:, others], *inputs[1:], mask[others])
    torch.testing.assert_close(output[:, others], expected)
    grads = torch.autograd.grad((output.sum(), weights.sum()), [*inputs, *layer.parameters()])
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, 2] == 0).all()


def test_true_shows_and_what_is_hidden_does_not_leak():
    layer, (query, key, value) = make()
    mask = torch.arange(S) != 3
    output, weights = layer(query, key, value, mask, need_weights=True)
    assert (weights[..., 3] == 0).all() and (weights[..., 2] > 0).all()
    key, value = (x.detach().clone() for x in (key, value))
    key[:, 3], value[:, 3] = torch.nan, INF
    hiding = layer(query, key, value, mask)
    assert torch.equal(hiding, output)
    # The product of a gradient of 0 and NaN; the class's docstring says so.
    assert torch.autograd.grad(hiding.sum(), layer.key_proj.weight)[0].isnan().any()


def test_dropout():
    layer, (query, key, value) = make(dropout=0.4)
    query, key, value = (x.repeat(1, 100, 1) for x in (query, key, value))
    torch.manual_seed(3)
    output, weights = layer(query, key, value, need_weights=True)
    assert (weights == 0).double().mean().item() == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(output, weights @ value)
    kept = formula(layer, query, key, value)[1] / 0.6
    torch.testing.assert_close(weights, kept.where(weights != 0, 0))
    torch.manual_seed(3)
    torch.testing.assert_close(layer(query, key, value), output)
    layer.eval()
    torch.testing.assert_close(layer(query, key, value), formula(layer, query, key, value)[0])


@dtypes_of("f32", "bf16", "f16")
def test_dtypes(dtype):
    """No error is larger than that of the formula in the same dtype."""
    layer, inputs = make(dtype, batch=(16,), bias=True)
    results = [layer(*inputs, need_weights=True), formula(layer, *inputs)]
    assert all(x.dtype == dtype for x in results[0])
    truth = formula(layer.double(), *(x.double() for x in inputs))
    for ours, plain, exact in zip(*results, truth, strict=True):
        errors = [(x.double() - exact).square().mean().sqrt().item() for x in (ours, plain)]
        assert errors[0] <= 1.2 * errors[1] + (0 if dtype in HALVES else 1e-8)


def test_autocast():
    layer, inputs = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(*inputs, some_hidden(L, S))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.v.grad.dtype == torch.float32


def test_state_dict_and_initial_values():
    layer, inputs = make(bias=True)
    assert {name: list(x.shape) for name, x in layer.state_dict().items()} == {
        "query_proj.weight": [HIDDEN, DQ], "query_proj.bias": [HIDDEN],
        "key_proj.weight": [HIDDEN, DK], "v": [HIDDEN],
    }  # fmt: skip
    other = make(bias=True)[0]
    assert not torch.equal(other(*inputs), layer(*inputs))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(*inputs), layer(*inputs))
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    layer.reset_parameters()
    assert not any(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
    assert "query_proj.bias" not in make()[0].state_dict()
    large = AdditiveAttention(4, 4, 10_000)
    assert large.v.abs().max().item() == pytest.approx(0.01, rel=0.01)


def test_device_and_repr():
    layer = AdditiveAttention(DQ, DK, HIDDEN, dropout=0.1, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    x = torch.zeros(3, L, DQ, device="meta", dtype=torch.bfloat16)
    assert layer(x, x[..., :DK], x).shape == (3, L, DQ)
    assert "dropout=0.1" in repr(layer) and "dropout" not in repr(make()[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_compile(need_weights):
    torch.compiler.reset()
    layer, inputs = make(bias=True)
    mask = some_hidden(L, S)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        found = call(*inputs, mask, need_weights=need_weights)
        found = found if need_weights else (found,)
        grads = torch.autograd.grad([x.sin().sum() for x in found], [*inputs, *layer.parameters()])
        results.append([*found, *grads])
    torch.testing.assert_close(*results)


@pytest.mark.long
def test_compile_for_any_length():
    """The first call compiles for all lengths that make one block. No two sizes of that call are
    equal: the compiler takes those that are for the same size."""
    torch.compiler.reset()
    layer, _ = make(torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for queries, keys in ((11, 13), (17, 19), (30, 31)):
        inputs = [torch.randn(B, n, d) for n, d in ((queries, DQ), (keys, DK), (keys, DV))]
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


def test_export_for_any_length():
    layer, inputs = make()
    keys = torch.export.Dim("S", min=2)
    program = torch.export.export(layer, tuple(inputs), dynamic_shapes=({}, {1: keys}, {1: keys}))
    query, key, value = (x.repeat(1, n, 1) for x, n in zip(inputs, (1, 9000, 9000), strict=True))
    torch.testing.assert_close(program.module()(query, key, value), layer(query, key, value))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("record", [
    lambda f, x: torch.jit.trace(f, x, check_trace=False),
    lambda f, x: make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*x),
], ids=["trace", "make_fx"])  # fmt: skip
def test_what_is_recorded_is_for_any_length(record, monkeypatch):
    layer, inputs = make()
    monkeypatch.setattr(additive, "_BLOCK_ELEMENTS", B * L * S * HIDDEN)  # one block
    layer, inputs = layer.requires_grad_(False), tuple(x.detach() for x in inputs)
    recorded = record(lambda *x: layer(*x), inputs)
    inputs = [x.repeat(1, n, 1) for x, n in zip(inputs, (2, 3, 3), strict=True)]
    torch.testing.assert_close(recorded(*inputs), layer(*inputs))


def test_vmap():
    layer, inputs = make()
    output = torch.vmap(layer, in_dims=(0, None, 0))(inputs[0], inputs[1][0], inputs[2])
    expected = formula(layer, inputs[0], inputs[1][0], inputs[2])[0]
    torch.testing.assert_close(output, expected)


def test_tangents_of_samples():
    """How each sample's gradient changes with keys that all share."""
    layer, (query, key, value) = make(batch=())
    queries = torch.stack([query, -query]).detach()

    def tangent(query):
        loss = lambda x: layer(query, x, value.detach()).sin().sum()  # noqa: E731
        return torch.func.jvp(torch.func.grad(loss), (key.detach(),), (key.detach().cos(),))[1]

    found = torch.func.vmap(tangent)(queries)
    torch.testing.assert_close(found, torch.stack([tangent(x) for x in queries]))


def test_learning_to_copy():
    """Which value to take stands in the key; the layer learns to find it."""
    layer = AdditiveAttention(4, 4, 16)
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    value = torch.eye(4)
    for _ in range(200):
        loss = (layer(torch.eye(4), torch.eye(4).flip(0), value) - value.flip(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01


GOOD = {
    "query": torch.zeros(B, L, DQ),
    "key": torch.zeros(B, S, DK),
    "value": torch.zeros(B, S, DV),
}
NESTED = torch.nested.nested_tensor([torch.zeros(L, DQ)] * B, layout=torch.jagged)


@pytest.mark.parametrize("change, message", [
    ({"query": torch.zeros(DQ)}, r"query is \[6\], but 2 dimensions"),
    ({"value": torch.zeros(S)}, r"value is \[5\], but 2 dimensions"),
    ({"query": torch.zeros(B, L, 9)}, r"query is \[2, 4, 9\], but a last dimension of 6.*query_d"),
    ({"key": torch.zeros(B, S, 9)}, r"key is \[2, 5, 9\], but a last dimension of 3.*key_dim"),
    ({"value": torch.zeros(B, 9, DV)}, r"value is \[2, 9, 7\], but as many keys .*\[2, 5, 3\]"),
    ({"key": torch.zeros(3, S, DK)}, r"query \[2, 4, 6\], key \[3, 5, 3\].* do not broadcast"),
    ({"query": torch.zeros(B, L, DQ).half()}, "query is torch.float16, but torch.float32, as"),
    ({"value": torch.zeros(B, S, DV).double()}, "value is torch.float64, but torch.float32"),
    ({"query": NESTED}, "query is a nested tensor"),
    ({"attn_mask": torch.zeros(L, 9)}, r"attn_mask has the shape \[4, 9\].*\[2, 4, 5\]"),
    ({"attn_mask": torch.zeros(L, S).long()}, "attn_mask is int64"),
])  # fmt: skip
def test_bad_call(change, message):
    layer = AdditiveAttention(DQ, DK, HIDDEN)
    with pytest.raises(RuntimeError, match=message):
        layer(**{**GOOD, **change})


@pytest.mark.parametrize("change, message", [
    ({"query_dim": 0}, "query_dim is 0, but 1 or more"),
    ({"key_dim": -1}, "key_dim is -1"),
    ({"hidden_dim": 0}, "hidden_dim is 0"),
    ({"dropout": 1.5}, "dropout is 1.5, but 0 to 1"),
    ({"dropout": float("nan")}, "dropout is nan"),
])  # fmt: skip
def test_bad_layer(change, message):
    with pytest.raises(ValueError, match=f"AdditiveAttention: {message}"):
        AdditiveAttention(**{"query_dim": DQ, "key_dim": DK, "hidden_dim": HIDDEN, **change})


def test_the_example_runs():
    assert_example_runs(AdditiveAttention)
