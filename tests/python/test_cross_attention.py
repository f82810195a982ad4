"""qkv.nn.CrossAttention against the same layer of torch's operators, and against its own caches."""

import copy

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from common import COMPILERS, HALVES, INF, assert_example_runs, dtypes_of
from hypothesis import given

import qkv
from qkv.nn import CrossAttention

B, L, S, E, C, D = 2, 5, 9, 24, 12, 8


def make(heads=4, kv_heads=2, **options):
    """A layer whose norms and sinks are not what they begin with."""
    torch.manual_seed(0)
    layer = CrossAttention(E, heads, kv_heads, **({"head_dim": D, "context_dim": C} | options))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name == "sinks":
                parameter.add_(torch.randn_like(parameter) / 2)
    return layer


def sample(dtype=torch.float32, width=C):
    return torch.randn(B, L, E, dtype=dtype), torch.randn(B, S, width, dtype=dtype)


def formula(layer, x, context, mask=None):
    """The layer's output as its docstring describes it."""
    H, Hkv, state = layer.num_heads, layer.num_kv_heads, dict(layer.named_parameters())

    def heads(name, x):
        y = F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
        return y.unflatten(-1, (-1, D)).transpose(1, 2)

    def normed(name, x):
        if name not in state:
            return x
        root = (x.square().mean(-1, keepdim=True) + layer.q_norm.eps).sqrt()
        return x / root * (state[name] + layer.norm_offset)

    query, gate = heads("q_proj", x).tensor_split([H], 1)
    key, value = heads("kv_proj", context).split(Hkv, 1)
    query, key = normed("q_norm.weight", query), normed("k_norm.weight", key)
    key, value = (y.repeat_interleave(H // Hkv, 1) for y in (key, value))
    scores = query @ key.mT * (D**-0.5 if layer.scale is None else layer.scale)
    if layer.softcap:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -INF) if is_bool else scores + mask
    if "sinks" in state:
        sinks = state["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    output = scores.softmax(-1)[..., : key.size(-2)] @ value
    if layer.gate:
        output = output * gate.sigmoid()
    return F.linear(
        output.transpose(1, 2).flatten(-2), state["o_proj.weight"], state.get("o_proj.bias")
    )


MASKS = {
    "none": lambda: None,
    "bool": lambda: (torch.rand(B, 1, L, S) < 0.7) | (torch.arange(S) == 3),
    "padding": lambda: torch.arange(S) < torch.tensor([[[[S]]], [[[S - 2]]]]),
    "floating": lambda: torch.randn(4, L, S, dtype=torch.float64),
}
options = st.fixed_dictionaries({
    "kv_heads": st.sampled_from([1, 2, 4]),
    "qk_norm": st.booleans(),
    "norm_offset": st.sampled_from([0.0, 1.0]),
    "softcap": st.sampled_from([0.0, 1.5]),
    "scale": st.sampled_from([None, 0.5]),
    "sinks": st.booleans(),
    "gate": st.booleans(),
    "bias": st.booleans(),
    "out_bias": st.sampled_from([True, False]),
})  # fmt: skip
ALL = {"qk_norm": True, "sinks": True, "gate": True, "softcap": 3.0, "bias": True}


@given(drawn=options, mask=st.sampled_from([*MASKS]))
def test_outputs_and_gradients(isa, drawn, mask):
    layer, (x, context) = make(4, **drawn, dtype=torch.float64), sample(torch.float64)
    mask = MASKS[mask]()
    leaves = [x.requires_grad_(), context.requires_grad_(), *layer.parameters()]
    results = [layer(x, context, mask), formula(layer, x, context, mask)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)
    seed = torch.randn_like(x)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, leaves, seed) for y in results), rtol=1e-9, atol=1e-10
    )


def test_second_derivatives():
    layer, inputs = make(**ALL, dtype=torch.float64), sample(torch.float64)
    inputs = [x[:1, :2].requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(layer, inputs)
    assert torch.autograd.gradgradcheck(layer, inputs)


@given(drawn=options, mask=st.sampled_from([*MASKS]))
def test_a_context_projected_once(drawn, mask):
    layer, (x, context) = make(4, **drawn), sample()
    mask = MASKS[mask]()
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    cache = layer.new_cache(context)
    rows = [None] * L if mask is None else mask.expand(*mask.shape[:-2], L, S).split(1, -2)
    with torch.no_grad():
        steps = [layer(step, cache, row) for step, row in zip(x.split(1, 1), rows, strict=True)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, context, mask), rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [S] * B


def test_rows_of_different_lengths():
    layer, (x, context) = make(**ALL), sample()
    cache = layer.new_cache(context)
    cache.lengths = torch.tensor([S, 4])
    with torch.no_grad():
        found = layer(x, cache)
    torch.testing.assert_close(found[:1], layer(x[:1], context[:1]))
    torch.testing.assert_close(found[1:], layer(x[1:], context[1:, :4]))


def test_an_int8_cache():
    layer, (x, context) = make(**ALL), sample()
    cache = layer.new_cache(context, dtype=torch.int8)
    with torch.no_grad():
        error = layer(x, cache) - layer(x, context)
        assert cache.keys.dtype == torch.int8
        assert 0 < error.square().mean().sqrt() < 0.01 * layer(x, context).std()


@pytest.mark.parametrize("gate", [True, False])
def test_what_it_attends_with(gate):
    layer, (x, context) = make(**ALL | {"gate": gate}), sample()
    query, key, value, factor = layer.project(x, context)
    output = qkv.attention(query, key, value, softcap=3.0, sinks=layer.sinks, enable_gqa=True)
    assert (factor is not None) == gate
    output = output * factor.sigmoid() if gate else output
    found = layer.o_proj(output.transpose(1, 2).flatten(2))
    assert torch.equal(found, layer(x, context))


def test_spans():
    layer, (x, context), see = make(), sample(), torch.arange(L)
    spans = torch.stack((see, see + 3), -1).int()
    mask = (torch.arange(S) >= see[:, None]) & (torch.arange(S) < see[:, None] + 3)
    torch.testing.assert_close(layer(x, context, spans=spans), layer(x, context, mask))


def test_dropout():
    layer, (x, context) = make(dropout=0.4), sample()
    dropped, plain = layer(x, context), layer.eval()(x, context)
    assert not torch.allclose(dropped, plain)
    torch.testing.assert_close(plain, formula(layer, x, context))
    with torch.no_grad(), pytest.raises(RuntimeError, match="CrossAttention: dropout is 0.4"):
        layer.train()(x, layer.new_cache(context))


@dtypes_of("f32", "bf16", "f16")
def test_dtypes(dtype):
    """No error is larger than that of the formula in the same dtype."""
    layer, inputs = make(**ALL, norm_offset=1.0, dtype=dtype), sample(dtype)
    results = [layer(*inputs), formula(layer, *inputs)]
    truth = formula(layer.double(), *(x.double() for x in inputs))
    assert results[0].dtype == dtype
    errors = [(y.double() - truth).square().mean().sqrt().item() for y in results]
    assert errors[0] <= 1.2 * errors[1] + (0 if dtype in HALVES else 1e-7)


def test_autocast():
    layer, (x, context) = make(**ALL), sample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, cache = layer(x, context), layer.new_cache(context)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, cache), output, rtol=0.05, atol=0.02)
    assert output.dtype == cache.keys.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_state_dict():
    layer, inputs = make(**ALL), sample()
    state = layer.state_dict()
    assert {name: [*x.shape] for name, x in state.items()} == {
        "q_proj.weight": [8 * D, E], "q_proj.bias": [8 * D], "kv_proj.weight": [4 * D, C],
        "kv_proj.bias": [4 * D], "o_proj.weight": [E, 4 * D], "o_proj.bias": [E],
        "q_norm.weight": [D], "k_norm.weight": [D], "sinks": [4],
    }  # fmt: skip
    other = CrossAttention(E, 4, 2, head_dim=D, context_dim=C, **ALL)
    other.load_state_dict(state)
    assert torch.equal(other(*inputs), layer(*inputs))
    assert torch.equal(copy.deepcopy(layer)(*inputs), layer(*inputs))
    for kind in ("weight", "bias"):
        parts = state.pop(f"kv_proj.{kind}").chunk(2)
        state |= {f"{name}_proj.{kind}": x for name, x in zip("kv", parts, strict=True)}
    torch.nn.init.zeros_(other.kv_proj.weight)
    other.load_state_dict(state)
    assert torch.equal(other(*inputs), layer(*inputs))


def test_the_layer_of_a_model():
    """Mllama's, whose state dict fits as it is."""
    models = pytest.importorskip("transformers.models.mllama.modeling_mllama")
    config = models.MllamaTextConfig(
        hidden_size=E, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    theirs = models.MllamaTextCrossAttention(config, 3)
    torch.nn.init.normal_(theirs.q_norm.weight)
    layer = CrossAttention(E, 4, 2, qk_norm=True, norm_eps=config.rms_norm_eps)
    layer.load_state_dict(theirs.state_dict())
    x, context = sample(width=E)
    torch.testing.assert_close(layer(x, context), theirs(x, cross_attention_states=context)[0])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_steps(compiler):
    layer, (x, context) = make(**ALL), sample()
    compiled, grads = torch.compile(layer, backend=compiler, fullgraph=True), []
    for f in (layer, compiled):
        output = f(x, context)
        grads.append([output, *torch.autograd.grad(output.sin().sum(), [*layer.parameters()])])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    cache = layer.new_cache(context)
    with torch.no_grad():
        found = [compiled(step, cache) for step in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(found, 1), grads[0][0], rtol=1e-4, atol=1e-5)


def test_bad_arguments():
    for options, message in {
        ("context_dim", 0): "CrossAttention: context_dim is 0, but 1 or more",
        ("context_dim", "24"): "context_dim is 24, but 1 or more",
        ("num_kv_heads", 3): "num_kv_heads is 3, but a divisor of num_heads, 4,",
        ("dropout", -1.0): "dropout is -1.0, but 0 to 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            CrossAttention(E, 4, **dict([options]))
    with pytest.raises(TypeError, match="rotary"):
        CrossAttention(E, 4, rotary=10.0)


BAD_CALLS = [
    ({"x": torch.zeros(L, E)}, r"CrossAttention: x is \[5, 24\], but \[B, L, 24\] is expected"),
    ({"context": torch.zeros(B, S, E)}, r"context is \[2, 9, 24\], but \[2, S, 12\] is expected"),
    ({"context": torch.zeros(3, S, C)}, r"context is \[3, 9, 12\], but \[2, S, 12\] is expected"),
    ({"context": torch.zeros(C)}, r"context is \[12\], but \[2, S, 12\] is expected"),
    ({"mask": torch.ones(L, L).bool()}, r"mask is \[5, 5\], but what broadcasts to \[2, 4, 5, 9\]"),
    ({"mask": torch.ones(L, S).int()}, r"mask is torch.int32, but bool \(True = may attend\)"),
    ({"context": make().new_cache(torch.zeros(3, S, C))}, r"cache.lengths is \[3\], but \[2\]"),
    (
        {"context": make().new_cache(torch.zeros(B, S, C)), "mask": torch.ones(L, S - 1).bool()},
        r"mask is \[5, 8\], but a number for each of the longest row's 9 keys is expected",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls(call, message):
    x, context = sample()
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        make()(**({"x": x, "context": context} | call))


def test_bad_calls_of_project():
    x, context = sample()
    with pytest.raises(RuntimeError, match=r"CrossAttention: x is \[24\], but \[B, L, 24\]"):
        make().project(x[0, 0], context)


def test_a_bad_context_for_a_cache():
    with pytest.raises(RuntimeError, match=r"context is \[9, 12\], but \[B, S, 12\] is expected"):
        make().new_cache(torch.zeros(S, C))


def test_the_example_runs():
    assert_example_runs(CrossAttention)
