"""qkv.nn.SelfAttention against the same layer of torch's operators, and against its own caches."""

import copy
import io

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from common import COMPILERS, HALVES, INF, assert_example_runs, dtypes_of
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
from qkv.nn import KVCache, Rotary, SelfAttention

B, L, E, D = 2, 9, 24, 8


def make(*args, **options):
    """A layer whose norms and sinks are not what they begin with."""
    torch.manual_seed(0)
    layer = SelfAttention(E, *(args or (4, 2)), **({"head_dim": D} | options))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name or name == "sinks":
                parameter.add_(torch.randn_like(parameter) / 2)
    return layer


def sample(length=L, dtype=torch.float32):
    return torch.randn(B, length, E, dtype=dtype)


def turned(x, cos, sin, interleaved):
    """x `[B, H, L, D]` with its first pairs turned, as complex numbers."""
    part, rest = x.split([2 * cos.size(-1), x.size(-1) - 2 * cos.size(-1)], -1)
    pairs = part.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-2, -1)
    cos, sin = (t.unsqueeze(-3) for t in (cos, sin))
    real, imaginary = pairs.unbind(-1)
    pairs = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1)
    pairs = pairs if interleaved else pairs.transpose(-2, -1)
    return torch.cat((pairs.flatten(-2), rest), -1)


def formula(layer, x, mask=None, tables=None):
    """The layer's output as its docstring describes it."""
    H, Hkv, state = layer.num_heads, layer.num_kv_heads, dict(layer.named_parameters())
    rows = [n * layer.head_dim for n in (H, Hkv, Hkv, H)][: 3 + layer.gate]
    bias = state.get("qkv_proj.bias")
    biases = [None] * 4 if bias is None else bias.split(rows)
    query, key, value, *gate = (
        F.linear(x, w, b).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for w, b in zip(state["qkv_proj.weight"].split(rows), biases, strict=False)
    )
    if layer.q_norm is not None:
        norms = state["q_norm.weight"], state["k_norm.weight"]
        query, key = (
            y * (y.square().mean(-1, keepdim=True) + layer.q_norm.eps).rsqrt()
            * (w + layer.norm_offset)
            for y, w in zip((query, key), norms, strict=True)
        )  # fmt: skip
    if layer.rotary is not None:
        cos, sin = tables or layer.rotary(torch.arange(x.size(1)), x.dtype)
        query, key = (turned(y, cos, sin, layer.rotary.interleaved) for y in (query, key))
    key, value = (y.repeat_interleave(H // Hkv, 1) for y in (key, value))
    scores = query @ key.mT * (layer.head_dim**-0.5 if layer.scale is None else layer.scale)
    if layer.softcap:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    distance = torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))
    left, right = layer.window_size or (-1, -1)
    hidden = (distance < 0) & layer.is_causal
    hidden = hidden | ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    scores = scores.masked_fill(hidden, -INF)
    if "sinks" in state:
        sinks = state["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : x.size(1)]
    output = weights @ value
    if gate:
        output = output * gate[0].sigmoid()
    output = output.transpose(1, 2).flatten(-2)
    return F.linear(output, state["o_proj.weight"], state.get("o_proj.bias"))


ROTARY = {
    "none": lambda: None,
    "all": lambda: 10_000.0,
    "pairs": lambda: Rotary(D, 100.0, interleaved=True),
    "partial": lambda: Rotary(4, 50.0),
    "partial pairs": lambda: Rotary(6, 50.0, interleaved=True),
    "frequencies": lambda: Rotary(D, frequencies=torch.tensor([1.0, 0.5, 0.1, 0.01]), scale=1.2),
}
MASKS = {
    "none": lambda: None,
    "bool": lambda: (torch.rand(B, 1, L, L) < 0.7) | torch.eye(L, dtype=torch.bool),
    "padding": lambda: torch.arange(L) < torch.tensor([[[[L]]], [[[L - 2]]]]),
    "floating": lambda: torch.randn(4, L, L, dtype=torch.float64),
}
options = st.fixed_dictionaries({
    "num_kv_heads": st.sampled_from([1, 2, 4]),
    "rotary": st.sampled_from([*ROTARY]),
    "qk_norm": st.booleans(),
    "norm_offset": st.sampled_from([0.0, 1.0]),
    "is_causal": st.booleans(),
    "window_size": st.sampled_from([None, (3, 0), (2, 2), (-1, 1)]),
    "softcap": st.sampled_from([0.0, 1.5]),
    "scale": st.sampled_from([None, 0.5]),
    "sinks": st.booleans(),
    "gate": st.booleans(),
    "bias": st.booleans(),
    "out_bias": st.sampled_from([None, True, False]),
})  # fmt: skip


@given(drawn=options, mask=st.sampled_from([*MASKS]))
def test_outputs_and_gradients(isa, drawn, mask):
    drawn = drawn | {"rotary": ROTARY[drawn["rotary"]]()}
    layer, x = make(4, **drawn, dtype=torch.float64), sample(dtype=torch.float64)
    mask = MASKS[mask]()
    leaves = [x.requires_grad_(), *layer.parameters()]
    results = [layer(x, mask), formula(layer, x, mask)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)
    seed = torch.randn_like(x)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, leaves, seed) for y in results), rtol=1e-9, atol=1e-10
    )


ALL = {"rotary": 10_000.0, "qk_norm": True, "sinks": True, "gate": True, "softcap": 3.0}


def test_second_derivatives():
    layer = make(4, 2, **ALL, dtype=torch.float64)
    x = sample(3, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


@given(drawn=options, parts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
@pytest.mark.parametrize("pages", [None, 4])
def test_a_cache_in_parts_is_one_call(isa, pages, drawn, parts):
    """Causal, so that no call needs what comes later. Without norms of query and key the cache's
    operator rotates, to the same bits."""
    drawn = drawn | {"rotary": ROTARY[drawn["rotary"]](), "is_causal": True}
    layer, x = make(4, **drawn), sample(sum(parts))
    cache = layer.new_cache(B, 16, pages=pages)
    with torch.no_grad():
        found = torch.cat([layer(part, cache=cache) for part in x.split(parts, 1)], 1)
        torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [sum(parts)] * B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("rotary", ["all", "pairs", "partial pairs", "frequencies"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_cache_turns_to_the_same_bits(isa, is_causal, rotary, dtype):
    """What the operator of the cache turns itself, beside tables from outside, which it is not
    told."""
    layer, x = make(rotary=ROTARY[rotary](), is_causal=is_causal), sample()
    if dtype != torch.int8:
        layer, x = layer.to(dtype), x.to(dtype)
    caches = [layer.new_cache(B, 12, dtype=dtype, pages=4) for _ in range(2)]
    with torch.no_grad():
        tables = layer.rotary(torch.arange(L), torch.promote_types(x.dtype, torch.float32))
        parts = zip(x.split([5, 3, 1], 1), *(t.split([5, 3, 1]) for t in tables), strict=True)
        for part, cos, sin in parts:
            outside = layer(part, cache=caches[1], rotary=(cos, sin))
            assert torch.equal(layer(part, cache=caches[0]), outside)
    assert torch.equal(caches[0].keys, caches[1].keys)


@pytest.mark.parametrize("pages", [None, 4])
@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_an_int8_cache(pages, default):
    """Whose scales are float32, whatever torch makes tensors of."""
    layer, x = make(**ALL), sample()
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        cache = layer.new_cache(B, L, dtype=torch.int8, pages=pages)
    finally:
        torch.set_default_dtype(usual)
    assert cache.keys.dtype == cache.values.dtype == torch.int8
    with torch.no_grad():
        found = torch.cat([layer(part, cache=cache) for part in x.split([5, 3, 1], 1)], 1)
        error = found - layer(x)
    assert 0 < error.square().mean().sqrt() < 0.01 * layer(x).std()


def test_rows_of_different_lengths():
    """A prompt padded on the right, whose true lengths are then put into the cache."""
    layer, x, lengths = make(**ALL), sample(7), torch.tensor([5, 3])
    steps = sample(4)
    cache = layer.new_cache(B, 12)
    with torch.no_grad():
        prompt = layer(x[:, :5], cache=cache)
        cache.lengths = lengths
        found = [layer(step, cache=cache) for step in steps.split([1, 3], 1)]
        for b, length in enumerate(lengths):
            whole = layer(torch.cat((x[b : b + 1, :length], steps[b : b + 1]), 1))
            row = torch.cat((prompt[b, :length], *(y[b] for y in found)))
            torch.testing.assert_close(row, whole[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.lengths, lengths + 4) and lengths.tolist() == [5, 3]


def test_keys_are_taken_back():
    layer, x = make(**ALL), sample()
    cache = layer.new_cache(B, 12)
    with torch.no_grad():
        layer(x[:, :6], cache=cache)
        layer(sample(4), cache=cache)  # a draft that is refused
        cache.lengths -= 4
        torch.testing.assert_close(layer(x[:, 6:], cache=cache), layer(x)[:, 6:])


def test_a_pool_that_rows_share():
    """As a server has it: rows come and go, with blocks from one pool."""
    layer, x = make(**ALL), sample(6)
    pool = layer.new_cache(1, 32, pages=4)
    tables = torch.tensor([[5, 0], [3, 7]], dtype=torch.int32)
    with torch.no_grad():
        for b in range(B):
            alone = KVCache(pool.keys, pool.values, torch.tensor([0]), tables[b : b + 1])
            layer(x[b : b + 1, :5], cache=alone)
        both = KVCache(pool.keys, pool.values, torch.tensor([5, 5]), tables)
        torch.testing.assert_close(layer(x[:, 5:], cache=both), layer(x)[:, 5:])


def test_no_rows_in_a_cache():
    layer = make(**ALL)
    with torch.no_grad():
        cache = KVCache.empty(0, 2, L, D, torch.float32)
        assert layer(sample()[:0], torch.ones(L, L).bool(), cache).shape == (0, L, E)


@pytest.mark.parametrize("kind", ["bool", "floating"])
def test_a_mask_beside_a_cache(kind):
    layer, x, mask = make(**ALL), sample(), MASKS[kind]()
    mask = mask if mask.dtype == torch.bool else mask.float()
    cache = layer.new_cache(B, L)
    with torch.no_grad():
        found = [
            layer(x[:, :5], mask[..., :5, :5], cache),
            layer(x[:, 5:], mask[..., 5:, :], cache),
        ]
        torch.testing.assert_close(torch.cat(found, 1), layer(x, mask))


def test_a_query_that_sees_nothing_gets_the_bias():
    layer, mask = make(gate=True, bias=True), torch.ones(L, L).bool()
    mask[3] = False
    output = layer(sample(), mask)
    assert torch.equal(output[:, 3], layer.o_proj.bias.expand(B, E))


def test_packed_documents():
    """spans keep documents apart, and positions count in each of them from 0."""
    layer, x = make(**ALL), sample()
    positions = torch.cat((torch.arange(4), torch.arange(L - 4)))
    spans = qkv.Spans.documents(torch.tensor([0] * 4 + [1] * (L - 4)))
    found = layer(x, spans=spans, positions=positions)
    torch.testing.assert_close(found, torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1))


def test_positions_and_tables_of_ones_own():
    layer, x = (
        make(rotary=Rotary(6, 20.0, interleaved=True), dtype=torch.float64),
        sample().double(),
    )
    positions = torch.randint(5000, (B, L))
    tables = layer.rotary(positions, torch.float64)
    assert tables[0].shape == (B, L, 3)
    expected = formula(layer, x, tables=tables)
    torch.testing.assert_close(layer(x, positions=positions), expected)
    torch.testing.assert_close(layer(x, rotary=tables), expected)
    bare = make(dtype=torch.float64)  # without a rotation of its own it turns halves
    own = Rotary(D, 7.0)
    turning = make(rotary=own, dtype=torch.float64)
    tables = own(torch.arange(L), torch.float64)
    torch.testing.assert_close(bare(x, rotary=tables), turning(x))


def test_angles():
    rotary = Rotary(4, base=100.0)
    cos, sin = rotary(torch.tensor([[3], [7000]]))
    angles = torch.tensor([[[3.0, 0.3]], [[7000.0, 700.0]]], dtype=torch.float64)
    torch.testing.assert_close(cos, angles.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, angles.sin().float(), rtol=0, atol=1e-7)


def test_tables_grow_and_stay_exact():
    """Beyond what is made with the layer, first in inference mode, whatever the layer's dtype."""
    rotary = Rotary(D)
    layer = make(rotary=rotary).bfloat16()
    with torch.inference_mode():
        layer(torch.zeros(1, 3000, E, dtype=torch.bfloat16))
    layer(torch.randn(1, 2500, E, dtype=torch.bfloat16)).sum().backward()
    table = rotary.table(3000)
    cos, sin = rotary(torch.arange(table.size(0)))
    assert table.dtype == torch.float32 and torch.equal(table, torch.stack((cos, sin), 1))
    assert rotary.table(2000) is table


def test_tables_outlive_what_made_them_grow():
    """A transform and FakeTensorMode leave a table that plain calls and copies can take."""
    x = sample(2100)
    expected = make(rotary=100.0)(x)
    layer = make(rotary=100.0)
    torch.func.jvp(layer, (x,), (x,))
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    layer = make(rotary=100.0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(x))
    assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        rotary = Rotary(D)
    make(rotary=rotary)(x, positions=torch.arange(2100)).sum().backward()


def test_frequencies_are_copied():
    frequencies = torch.rand(D // 2, dtype=torch.float64)
    rotary, positions = Rotary(D, frequencies=frequencies), torch.arange(5)
    expected, _ = rotary(positions)
    frequencies.zero_()
    assert torch.equal(rotary(positions)[0], expected)


def test_layers_share_a_rotation():
    rotary = Rotary(D)
    layers = torch.nn.Sequential(make(rotary=rotary), make(rotary=rotary))
    assert layers[0].rotary is layers[1].rotary is rotary
    assert not [name for name in layers.state_dict() if "rotary" in name]


def test_dropout():
    layer, x = make(dropout=0.4), sample()
    torch.manual_seed(3)
    dropped = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), dropped)
    plain = layer.eval()(x)
    assert not torch.allclose(dropped, plain)
    torch.testing.assert_close(plain, formula(layer, x))


@dtypes_of("f32", "bf16", "f16")
def test_dtypes(dtype):
    """No error is larger than that of the formula in the same dtype."""
    layer, x = make(**ALL, norm_offset=1.0, dtype=dtype), sample(dtype=dtype)
    layer.rotary = Rotary(D, 3.0)
    results = [layer(x), formula(layer, x)]
    truth = formula(layer.double(), x.double())
    assert results[0].dtype == dtype
    errors = [(y.double() - truth).square().mean().sqrt().item() for y in results]
    assert errors[0] <= 1.2 * errors[1] + (0 if dtype in HALVES else 1e-7)


def test_autocast():
    layer, x = make(**ALL), sample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x, MASKS["floating"]().float())
        cache = layer.new_cache(B, L, dtype=torch.bfloat16)
        with torch.no_grad():
            cached = [layer(part, cache=cache) for part in x.split([6, 3], 1)]
            torch.testing.assert_close(torch.cat(cached, 1), layer(x), rtol=0.05, atol=0.02)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_state_dict():
    layer = make(**ALL, bias=True)
    assert {name: [*x.shape] for name, x in layer.state_dict().items()} == {
        "qkv_proj.weight": [12 * D, E], "qkv_proj.bias": [12 * D], "o_proj.weight": [E, 4 * D],
        "o_proj.bias": [E], "q_norm.weight": [D], "k_norm.weight": [D], "sinks": [4],
    }  # fmt: skip
    x, other = sample(), SelfAttention(E, 4, 2, head_dim=D, **ALL, bias=True)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_copies():
    layer, x = make(**ALL), sample()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x))


def test_initial_values():
    layer = SelfAttention(E, 4, qk_norm=True, norm_offset=1.0, sinks=True)
    assert layer.q_norm.weight.eq(0).all() and layer.sinks.eq(0).all()
    assert SelfAttention(E, 4, qk_norm=True).k_norm.weight.eq(1).all()
    linear = torch.nn.Linear(E, 3 * E, bias=False).weight
    assert layer.qkv_proj.weight.abs().max() <= linear.shape[1] ** -0.5
    assert "24, 4, 4, head_dim=6, norm_offset=1.0" in repr(layer)
    layer = SelfAttention(E, 4, rotary=Rotary(6, 50.0, interleaved=True, scale=1.5))
    assert "Rotary(6, base=50, interleaved=True, scale=1.5)" in repr(layer)


@torch.no_grad()
@pytest.mark.parametrize("every", [True, False], ids=["each module", "the layer"])
def test_values_that_are_drawn_anew(every):
    """As tools do that make a model on the meta device: they ask one module after the other."""
    with torch.device("meta"):
        layer = SelfAttention(E, 4, qk_norm=True, norm_offset=1.0, sinks=True)
    for parameter in layer.to_empty(device="cpu").parameters():
        parameter.fill_(7.0)
    for module in layer.modules() if every else [layer]:
        getattr(module, "reset_parameters", lambda: None)()
    assert all(x.eq(0).all() for x in (layer.q_norm.weight, layer.k_norm.weight, layer.sinks))
    assert layer.qkv_proj.weight.abs().max() < 1 and layer.o_proj.weight.abs().max() < 1


@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn."])
def test_projections_apart_are_joined(prefix):
    layer = make(bias=True)
    parts = dict(zip("qkv", layer.qkv_proj.weight.split([4 * D, 2 * D, 2 * D]), strict=True))
    biases = dict(zip("qkv", layer.qkv_proj.bias.split([4 * D, 2 * D, 2 * D]), strict=True))
    apart = {f"{prefix}{name}_proj.weight": weight for name, weight in parts.items()}
    apart |= {f"{prefix}{name}_proj.bias": bias for name, bias in biases.items()}
    apart |= {f"{prefix}o_proj.{n}": p for n, p in layer.o_proj.named_parameters()}
    other = SelfAttention(E, 4, 2, head_dim=D, bias=True)
    model = other
    for name in reversed(prefix.split(".")[:-1]):
        model = torch.nn.ModuleDict({name: model})
    model.load_state_dict(apart)
    x = sample()
    assert torch.equal(other(x), layer(x)) and f"{prefix}q_proj.weight" in apart
    swapped = apart | {f"{prefix}q_proj.weight": parts["k"], f"{prefix}k_proj.weight": parts["q"]}
    with pytest.raises(
        RuntimeError, match=r"q_proj.weight.* have \[2, 4, 2\] heads, but \[4, 2, 2"
    ):
        model.load_state_dict(swapped)
    del apart[f"{prefix}v_proj.bias"]
    with pytest.raises(RuntimeError, match="Missing key.*qkv_proj.bias"):
        model.load_state_dict(apart)


def test_a_checkpoint_without_the_gate():
    layer, other = make(3, 3, head_dim=D), make(3, 3, head_dim=D, gate=True)
    parts = layer.qkv_proj.weight.split(3 * D)
    apart = {f"{n}_proj.weight": part for n, part in zip("qkv", parts, strict=True)}
    message = r"q_proj.weight.* have \[2, 3, 3, 1\] heads, but \[3, 3, 3, 3\]"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(apart | {"o_proj.weight": layer.o_proj.weight})
    one = {f"{n}_proj.weight": torch.zeros(E, E) for n in "qkvo"}
    with pytest.raises(RuntimeError, match=r"\[1, 1, 1, 0\] heads, but \[1, 1, 1, 1\]"):
        make(1, 1, head_dim=E, gate=True).load_state_dict(one)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_steps(compiler):
    """Training, a prompt and a step of decoding, without a break in the graph."""
    layer, x = make(**ALL), sample()
    compiled = torch.compile(layer, backend=compiler, fullgraph=True)
    grads = []
    for f in (layer, compiled):
        output = f(x)
        grads.append([output, *torch.autograd.grad(output.sin().sum(), [*layer.parameters()])])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    cache = layer.new_cache(B, 3000)  # beyond the table that is there
    with torch.no_grad():
        found = [compiled(part, cache=cache) for part in x.split([6, 1, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(found, 1), layer(x), rtol=1e-4, atol=1e-5)
    assert cache.lengths.tolist() == [L] * B


@pytest.mark.parametrize(
    "options",
    [{"mask": torch.ones(L, L).tril(2) > 0}, {"positions": torch.arange(L) + 3}],
    ids=["mask", "positions"],
)
def test_compiled_for_any_length(options):
    """Where x alone has a length that the graph has as a symbol."""
    layer, x = make(rotary=100.0), sample()
    torch._dynamo.maybe_mark_dynamic(x, 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **options), layer(x, **options))


def test_export():
    layer, x = make(**ALL).eval(), sample()
    length = torch.export.Dim("length", min=2)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: length},))
    for y in (x, sample(L + 4), sample(2100)):  # beyond the table that is there
        torch.testing.assert_close(program.module()(y), layer(y))


class Step(torch.nn.Module):
    """A step with a cache that is made of tensors."""

    def __init__(self, **options):
        super().__init__()
        self.layer = make(rotary=1e4, **options).eval().requires_grad_(False)

    def forward(self, x, keys, values, lengths, mask=None):
        return self.layer(x, mask, KVCache(keys, values, lengths))


def step_inputs(lengths):
    keys, values = torch.randn(2, B, 2, 16, D)
    return sample(1), keys, values, torch.tensor(lengths)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_trace_is_for_more_positions_than_the_first_table_has():
    layer = SelfAttention(16, 2, rotary=100.0, window_size=(4, 0))
    traced = torch.jit.trace(layer, (torch.randn(1, 3, 16),), check_trace=False)
    x = torch.randn(1, 2100, 16)
    torch.testing.assert_close(traced(x), layer(x))


# With norms, or without positions, the layer turns the query itself.
every_step = pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"is_causal": False}])


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
@every_step
@pytest.mark.parametrize("record", [
    lambda step, x: torch.jit.trace(step, x, check_trace=False), lambda step, x: make_fx(step)(*x),
], ids=["trace", "make_fx"])  # fmt: skip
def test_a_recorded_step_is_for_all_lengths(record, options):
    step = Step(**options)
    recorded = record(step, step_inputs([3, 3]))
    for lengths in ([5, 5], [2, 7]):
        x = step_inputs(lengths)
        found = recorded(*(y.clone() for y in x))
        torch.testing.assert_close(found, step(*x))


@every_step
def test_a_step_without_numbers(options):
    mask = torch.zeros(16)
    meta = [x.to("meta") for x in (*step_inputs([3, 3]), mask)]
    assert Step(**options).to("meta")(*meta).shape == (B, 1, E)
    with FakeTensorMode() as mode:
        found = Step(**options)(*step_inputs([3, 3]), torch.zeros(16))
    assert mode.is_our_fake(found) and found.shape == (B, 1, E)


@every_step
def test_a_step_of_each_sample(options):
    step, steps = Step(**options), [step_inputs(lengths) for lengths in ([3, 3], [5, 2])]
    samples = [torch.stack(x) for x in zip(*steps, strict=True)]
    expected = torch.stack([step(*x) for x in steps])
    torch.testing.assert_close(torch.func.vmap(step)(*samples), expected)


def test_views_and_not_copies(monkeypatch):
    """query, key and value are read where the product is, and the output is written so that the
    last product reads it."""
    seen = []

    def attention(query, key, value, *args, **options):
        output = qkv.attention(query, key, value, *args, **options)
        seen.extend([query, key, value, output])
        return output

    monkeypatch.setattr("qkv.nn._heads.attention", attention)
    make()(sample())
    query, key, value, output = seen
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert output.transpose(1, 2).is_contiguous()
    seen.clear()
    make(**ALL)(sample())
    assert all(y.transpose(1, 2).is_contiguous() for y in (*seen[:2], seen[3]))


def test_meta():
    with torch.device("meta"):
        layer = SelfAttention(E, 4, 2, head_dim=D, **ALL)
        assert layer(torch.empty(B, L, E)).shape == (B, L, E)
    layer.to_empty(device="cpu")
    layer.load_state_dict(make(**ALL).state_dict())
    x = sample()
    torch.testing.assert_close(layer(x), make(**ALL)(x))


BAD_ARGUMENTS = [
    ((0, 4), {}, "SelfAttention: embed_dim is 0, but 1 or more, an integer, is expected"),
    ((24, 0), {}, "num_heads is 0, but 1 or more"),
    ((24, 4, 0), {}, "num_kv_heads is 0, but 1 or more"),
    (("24", 4), {}, "embed_dim is 24, but 1 or more"),
    ((24, None), {}, "num_heads is None, but 1 or more"),
    ((24, 4, 2.0), {}, "num_kv_heads is 2.0, but 1 or more"),
    ((24, 4), {"head_dim": torch.ones(3)}, r"head_dim is \[3\], but 1 or more"),
    ((24, 4), {"dropout": "0.1"}, "dropout is 0.1, but 0 to 1"),
    ((24, 4), {"rotary": "llama"}, "rotary is llama, but a Rotary, its base or None is expected"),
    ((24, 4), {"head_dim": 0}, "head_dim is 0, but 1 or more"),
    ((24, 4, 3), {}, "num_kv_heads is 3, but a divisor of num_heads, 4,"),
    ((24, 5), {}, "embed_dim is 24, but a multiple of num_heads, 5,"),
    ((24, 4), {"dropout": 1.5}, "dropout is 1.5, but 0 to 1"),
    ((24, 4), {"rotary": Rotary(8)}, "rotary.dim is 8, but at most head_dim, 6,"),
    ((15, 3), {"rotary": 10.0}, "Rotary: dim is 5, but an even number"),
    ((24, 4), {"rotary": 0.0}, "Rotary: base is 0.0, but a positive number"),
    ((24, 4), {"rotary": True}, "Rotary: base is True, but a positive number"),
]


@pytest.mark.parametrize(("args", "options", "message"), BAD_ARGUMENTS)
def test_bad_arguments(args, options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(*args, **options)


def test_bad_frequencies():
    with pytest.raises(ValueError, match=r"frequencies is \[3\], but \[4\], one for each pair"):
        Rotary(8, frequencies=torch.ones(3))


@pytest.mark.parametrize(
    "options", [{"batch": 0, "length": 1}, {"batch": 1, "length": 0}, {"pages": 0}], ids=str
)
def test_bad_caches(options):
    name = next(name for name, number in options.items() if number == 0)
    with pytest.raises(ValueError, match=f"SelfAttention: {name} is 0, but 1 or more, an integer,"):
        make().new_cache(**({"batch": 1, "length": 1} | options))


BAD_CALLS = [
    ({"x": torch.zeros(L, E)}, r"SelfAttention: x is \[9, 24\], but \[B, L, 24\] is expected"),
    ({"x": torch.zeros(B, L, E + 1)}, r"x is \[2, 9, 25\], but \[B, L, 24\]"),
    ({"mask": torch.ones(L, L + 1).bool()}, r"mask is \[9, 10\], but what broadcasts to \[2, 4, 9"),
    ({"mask": torch.ones(1, B, 1, L, L).bool()}, r"mask is \[1, 2, 1, 9, 9\], but what broadcasts"),
    ({"mask": torch.ones(L, L).int()}, r"mask is torch.int32, but bool \(True = may attend\)"),
    (
        {"mask": torch.ones(L, L).double()},
        "mask is torch.float64, but bool .*, float32 or the dtype",
    ),
    (
        {"mask": torch.ones(L, L).half(), "cache": make().new_cache(B, 16)},
        "SelfAttention: mask is torch.float16, but bool",
    ),
    (
        {"x": torch.nested.nested_tensor([torch.zeros(2, E)], layout=torch.jagged)},
        r"x is nested, but \[B, L, 24\]",
    ),
    ({"positions": torch.arange(L + 1)}, r"positions is \[10\], but \[9\] or \[2, 9\] is expected"),
    ({"cache": make().new_cache(3, 16)}, r"cache.lengths is \[3\], but \[2\], a number for each"),
    ({"cache": make().new_cache(B, 8)}, "key has 9 rows, but k_cache has room for 8"),
    ({"cache": make(4, 4).new_cache(B, 16)}, r"key has the shape \[2, 2, 9, 8\], but .* expected"),
    (
        {"cache": make().new_cache(B, 16), "mask": torch.ones(L, L - 1).bool()},
        r"mask is \[9, 8\], but a number for",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls(call, message):
    with torch.no_grad(), pytest.raises(RuntimeError, match=message) as error:
        make()(**({"x": sample()} | call))
    print(error.value)


@pytest.mark.parametrize(("call", "message"), [
    x for x in BAD_CALLS if {"x", "positions"} & x[0].keys()
])  # fmt: skip
def test_bad_calls_of_project(call, message):
    with pytest.raises(RuntimeError, match=message):
        make().project(**({"x": sample()} | call))


@pytest.mark.parametrize(
    "lengths", [[-1, -1], [-1, 0], [100_000, 0], [1.0, 1.0], [0.0, 2.0]], ids=str
)
def test_lengths_that_no_rotation_begins_at(lengths):
    layer = make(qk_norm=True, rotary=1e4).eval()
    cache = layer.new_cache(B, 16)
    cache.lengths = torch.tensor(lengths)
    with torch.no_grad(), pytest.raises(RuntimeError, match="cache.lengths is .* in a row, but"):
        layer(sample(), cache=cache)


def test_caches_are_for_inference():
    layer = make(dropout=0.1)
    cache = layer.new_cache(B, 16)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="dropout is 0.1, but 0 is expected with"),
    ):
        layer(sample(), cache=cache)
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.eval()(sample(), cache=cache)
    assert cache.lengths.tolist() == [0] * B


def test_the_example_runs():
    assert_example_runs(SelfAttention)
    assert_example_runs(Rotary)
