"""qkv.nn.MultiheadAttention, property by property as torch documents its own layer: each is shown
against torch's, which has the same state dict. Where ours differs on purpose, the test says so; the
list is in docs/layers.md."""

import copy
import inspect
import io
import itertools

import pytest
import torch
from common import INF
from forks import run_forked

import qkv
from qkv.nn import MultiheadAttention
from qkv.nn._linear import projections
from qkv.nn.multihead import adopt, release
from qkv.options import ScoreOptions, defaults

B, L, S, E, H, KDIM = 2, 5, 7, 16, 4, 6


def twins(**arguments):
    """torch's layer and ours, with the same parameters; biases that are not 0."""
    theirs = torch.nn.MultiheadAttention(E, H, **arguments)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    ours = MultiheadAttention(E, H, **arguments)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def batch_of(length, width=E, batched=True, batch_first=True, dtype=None):
    x = torch.randn(B, length, width, dtype=dtype)
    x = x if batched and batch_first else x[0] if not batched else x.transpose(0, 1)
    return x.requires_grad_()


def padding(keys, floating=False, batched=True):
    """The first item loses its last key, the second its last two."""
    mask = torch.arange(keys) >= torch.tensor([keys - 1, keys - 2])[:, None]
    mask = mask if batched else mask[0]
    return torch.randn(mask.shape).masked_fill(mask, -INF) if floating else mask


def hiding(*shape, floating=False):
    """An attn_mask that leaves every query the first key."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return torch.randn(shape).masked_fill(mask, -INF) if floating else mask


def derivatives(layer, inputs, results):
    """Of all parameters and inputs, with every element of output and weights weighted alike in
    both layers."""
    total = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in results)
    leaves = [*layer.parameters(), *{id(x): x for x in inputs}.values()]
    return torch.autograd.grad(total, leaves, allow_unused=True)


def check(theirs, ours, inputs, **call):
    """The same outputs, weights and gradients. `theirs` takes torch's fast path if it may."""
    results = [layer(*inputs, **call) for layer in (theirs, ours)]
    assert (results[0][1] is None) == (results[1][1] is None)
    results = [[x for x in r if x is not None] for r in results]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
    if results[0][0].requires_grad:
        grads = [derivatives(*x) for x in zip((theirs, ours), (inputs,) * 2, results, strict=True)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


# The module as an object.


LAYERS = [
    {}, {"bias": False}, {"kdim": KDIM}, {"kdim": KDIM, "vdim": 3, "bias": False},
    {"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True, "vdim": 3},
]  # fmt: skip


@pytest.mark.parametrize("arguments", LAYERS, ids=str)
def test_state_dict_both_ways(arguments):
    theirs, ours = twins(**arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in itertools.pairwise((theirs, ours, MultiheadAttention(E, H, **arguments))):
        assert b.load_state_dict(a.state_dict()).missing_keys == []
        torch.testing.assert_close(b.state_dict(), a.state_dict())
    torch.nn.MultiheadAttention(E, H, **arguments).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("arguments", LAYERS, ids=str)
def test_initial_values(arguments):
    layers = []
    for kind in (torch.nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(0)
        layers.append(kind(E, H, **arguments).state_dict())
    torch.testing.assert_close(*layers, atol=0, rtol=0)


def test_signatures():
    """torch's arguments in torch's order; what is ours is keyword-only."""
    for name in ("__init__", "forward"):
        theirs = inspect.signature(getattr(torch.nn.MultiheadAttention, name)).parameters
        ours = inspect.signature(getattr(MultiheadAttention, name)).parameters
        shared = [(n, p.default, p.kind) for n, p in ours.items() if n in theirs]
        assert shared == [(n, p.default, p.kind) for n, p in theirs.items()]
        assert {p.kind for n, p in ours.items() if n not in theirs} == {
            inspect.Parameter.KEYWORD_ONLY
        }


def test_kind_and_repr():
    theirs, ours = twins(dropout=0.1)
    assert isinstance(ours, torch.nn.MultiheadAttention)
    assert repr(ours).replace(f"  projections={projections()}\n", "") == repr(theirs)
    assert "softcap=2.0, window_size=(3, 0)" in repr(
        MultiheadAttention(E, H, softcap=2.0, window_size=(3, 0))
    )
    for bad in ({"embed_dim": 0, "num_heads": 4}, {"embed_dim": 15, "num_heads": 4}):
        with pytest.raises((ValueError, AssertionError)):
            MultiheadAttention(**bad)


def test_copies_and_pickles():
    layer = MultiheadAttention(E, H, softcap=2.0, alibi_slopes=torch.rand(H))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    x = batch_of(L)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x, x, x), layer(x, x, x))
        assert len(other.out_proj._forward_pre_hooks) == 1


def test_states_of_old_versions():
    """torch 1.1 pickled no _qkv_same_embed_dim."""
    _, ours = twins()
    state = {n: v for n, v in ours.__dict__.items() if n != "_qkv_same_embed_dim"}
    old = MultiheadAttention.__new__(MultiheadAttention)
    old.__setstate__(copy.deepcopy(state))
    x = batch_of(L)
    torch.testing.assert_close(old(x, x, x), ours(x, x, x))


def test_adopt_and_release():
    theirs, ours = twins(batch_first=True)
    theirs.eval()
    x = batch_of(L)
    parameters, expected = dict(theirs.named_parameters()), theirs(x, x, x)
    adopt(theirs)
    assert type(theirs) is MultiheadAttention
    assert all(p is parameters[n] for n, p in theirs.named_parameters())
    torch.testing.assert_close(theirs(x, x, x), ours(x, x, x))
    torch.testing.assert_close(theirs(x, x, x), expected)
    for layer in (copy.deepcopy(theirs), theirs):
        release(layer)
        assert type(layer) is torch.nn.MultiheadAttention
        assert not layer.out_proj._forward_pre_hooks
    release(ours)
    assert type(ours) is MultiheadAttention and ours.out_proj._forward_pre_hooks


# What comes out.


KINDS = ("self", "key is value", "all differ")


def inputs_of(kind, kdim=E, **layout):
    query = batch_of(L, **layout)
    key = query if kind == "self" else batch_of(S, kdim, **layout)
    return query, key, key if kind != "all differ" else batch_of(S, **layout)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("mask", [None, "2-D", "2-D float", "3-D", "3-D float"])
@pytest.mark.parametrize("pad", [None, "bool", "float"])
@pytest.mark.parametrize("layout", ["batch first", "sequence first", "not batched"])
@pytest.mark.parametrize("kind", [*KINDS, "kdim"])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_results_and_gradients(extra, kind, layout, pad, mask, need_weights, average):
    torch.manual_seed(1)
    kdim = KDIM if kind == "kdim" else None
    form = {"batched": layout != "not batched", "batch_first": layout == "batch first"}
    theirs, ours = twins(batch_first=form["batch_first"], kdim=kdim, **extra)
    inputs = inputs_of("all differ" if kdim else kind, kdim or E, **form)
    keys = L if kind == "self" else S
    call = {"need_weights": need_weights, "average_attn_weights": average}
    if pad:
        call["key_padding_mask"] = padding(keys, pad == "float", form["batched"])
    if mask:
        shape = (L, keys) if "2" in mask else (H * (B if form["batched"] else 1), L, keys)
        call["attn_mask"] = hiding(*shape, floating="float" in mask)
    if mask and pad and ("float" in mask) != (pad == "float"):
        with pytest.warns(UserWarning, match="mismatched"):  # torch's, which ours does not have
            check(theirs, ours, inputs, **call)
    else:
        check(theirs, ours, inputs, **call)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("pad", [False, True])
def test_eval_mode(pad, average):
    """Against the operator that torch's layer calls without gradients."""
    theirs, ours = (layer.eval() for layer in twins(batch_first=True))
    x = batch_of(S)
    mask = padding(S) if pad else None
    with torch.no_grad():
        check(theirs, ours, (x, x, x), key_padding_mask=mask, average_attn_weights=average)


@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_true_hides(mask):
    """Polarity: True means "not allowed" in the layer, the opposite of qkv.attention."""
    _, ours = twins(batch_first=True)
    query, key = batch_of(L), batch_of(S)
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[:, 3] = True
    call = {mask: hidden if mask == "key_padding_mask" else hidden[:1].expand(L, S)}
    output, weights = ours(query, key, key, **call)
    assert (weights[..., 3] == 0).all() and (weights[..., 2] > 0).all()
    other = key.detach().clone()
    other[:, 3] = torch.nan
    torch.testing.assert_close(ours(query, other, other, **call), (output, weights))


@pytest.mark.parametrize("need_weights", [False, True])
def test_queries_with_nothing_to_attend_to(need_weights):
    """torch's layer gives NaN, or with need_weights=False what the path taken gives."""
    theirs, ours = twins(batch_first=True)
    x = batch_of(L)
    pad = padding(L)
    pad[1] = True
    if need_weights:
        assert theirs(x, x, x, pad)[0][1].isnan().all()
    output, weights = ours(x, x, x, pad, need_weights=need_weights)
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(L, E))
    assert weights is None or (weights[1] == 0).all()
    results = [output] if weights is None else [output, weights]
    assert all(g.isfinite().all() for g in derivatives(ours, (x,), results))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_dropout(arguments, average):
    """In training the weights are those after dropout, as torch's are: those that the values were
    averaged with. In eval mode there is none. The random numbers are not torch's."""
    _, ours = twins(dropout=0.4, batch_first=True, **arguments)
    x = batch_of(200)
    torch.manual_seed(3)
    output, weights = ours(x, x, x, average_attn_weights=average)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], output)
    torch.manual_seed(3)
    each = ours(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(weights, each.mean(1) if average else each)
    assert (each == 0).float().mean().item() == pytest.approx(0.4, abs=0.01)
    heads, last = [], E // H
    for h in range(H):
        rows = slice(2 * E + h * last, 2 * E + (h + 1) * last)
        value = x @ ours.in_proj_weight[rows].T + ours.in_proj_bias[rows]
        if arguments:
            more = torch.stack([ours.bias_v[0, 0, h * last : (h + 1) * last], torch.zeros(last)])
            value = torch.cat([value, more.expand(B, 2, last)], 1)
        heads.append(each[:, h] @ value)
    torch.testing.assert_close(output, ours.out_proj(torch.cat(heads, -1)), atol=1e-5, rtol=1e-4)
    ours.eval()
    assert (ours(x, x, x)[1] > 0).all()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_is_causal_is_a_hint(arguments, pad, need_weights):
    """With the causal mask that the hint promises, all of them are the same; ours also works
    without it, where torch's raises."""
    theirs, ours = twins(batch_first=True, **arguments)
    x = batch_of(L)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(L)
    call = {"key_padding_mask": padding(L, floating=True) if pad else None}
    call["need_weights"] = need_weights
    expected = theirs(x, x, x, attn_mask=mask, **call)
    for hint in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}, {"is_causal": True}):
        output, weights = ours(x, x, x, **call, **hint)
        torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=1e-4)
        if need_weights:
            torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True, **call)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_is_causal_beside_another_mask(arguments, floating, need_weights):
    """Without weights the other mask is ignored, with them both apply: with added keys, too."""
    _, ours = twins(batch_first=True, **arguments)
    x, later = batch_of(L), torch.ones(L, L, dtype=torch.bool).triu(1)
    other = torch.rand(B * H, L, L) < 0.3
    both = (other if need_weights else torch.zeros_like(other)) | later
    if floating:
        other = torch.zeros(other.shape).masked_fill(other, float("-inf"))
    call = {"need_weights": need_weights}
    found = ours(x, x, x, attn_mask=other, is_causal=True, **call)
    torch.testing.assert_close(found, ours(x, x, x, attn_mask=both, **call), atol=1e-5, rtol=1e-4)


def test_two_masks_beside_a_bias_are_added_without_rounding():
    """What all keys get takes nothing off the digits of what tells them apart."""
    _, ours = twins(batch_first=True, dtype=torch.bfloat16)
    x, mask, padding = batch_of(L).bfloat16(), torch.randn(L, L).bfloat16(), torch.full((B, L), 200)
    call = {"attn_mask": mask, "attn_bias": torch.zeros(1, dtype=torch.bfloat16)}
    _, weights = ours(x, x, x, padding.bfloat16(), **call)
    torch.testing.assert_close(weights, ours(x, x, x, **call)[1], atol=0, rtol=0.02)


@pytest.mark.parametrize("need_weights", [False, True])
def test_gradients_of_floating_masks(need_weights):
    theirs, ours = twins(batch_first=True)
    query, key = batch_of(L), batch_of(S)
    masks = [torch.randn(s, requires_grad=True) for s in ((B, S), (B * H, L, S))]
    grads = []
    for layer in (theirs, ours):
        output, weights = layer(query, key, key, masks[0], need_weights, masks[1])
        results = [output] if weights is None else [output, weights]
        grads.append(derivatives(layer, (query, key, *masks), results))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_dtypes(dtype, need_weights):
    theirs, ours = twins(batch_first=True, dtype=dtype)
    truth = copy.deepcopy(ours).double()
    x = batch_of(L, dtype=dtype)
    call = {"need_weights": need_weights, "attn_mask": hiding(L, L)}
    results = [layer(x, x, x, **call)[0] for layer in (theirs, ours)]
    assert results[0].dtype == results[1].dtype == dtype
    expected = truth(*(x.double(),) * 3, **call)[0]
    errors = [(y.double() - expected).abs().max().item() for y in results]
    assert errors[1] <= 1.5 * errors[0] + 1e-13  # one rounding more or less


@pytest.mark.parametrize("call", [
    {}, {"average_attn_weights": False}, {"need_weights": False}, {"attn_mask": torch.zeros(L, L)},
], ids=str)  # fmt: skip
@pytest.mark.bf16
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_autocast(arguments, call):
    theirs, ours = twins(batch_first=True, **arguments)
    x = batch_of(L)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [layer(x, x, x, **call) for layer in (theirs, ours)]
    for a, b in zip(*results, strict=True):
        if a is not None:
            assert a.dtype == b.dtype == torch.bfloat16
            torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
    ours.zero_grad()
    sum(y.float().sum() for y in results[1] if y is not None).backward()
    assert ours.in_proj_weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, L, E), (B, 0, E)], ids=str)
def test_nothing_in_a_dimension(shape):
    theirs, ours = twins(batch_first=True)
    x = torch.randn(shape)
    output, weights = ours(x, x, x)
    assert output.shape == shape and weights.shape == (shape[0], shape[1], shape[1])


# What the layer has beyond torch's.


GIVEN = {
    "scale": 0.3, "softcap": 2.0, "window_size": (2, 1), "alibi_slopes": torch.rand(H),
    "sinks": torch.randn(H),
}  # fmt: skip


def heads_of(layer, x):
    """query, key and value, `[B, H, L, D]`, by W_Q, W_K and W_V as docs/layers.md finds them."""
    projected = x @ layer.in_proj_weight.T + layer.in_proj_bias
    return projected.unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("names", [*((n,) for n in GIVEN), tuple(GIVEN)], ids=str)
def test_options(names):
    options = {n: GIVEN[n] for n in names}
    layer = MultiheadAttention(E, H, batch_first=True, **options)
    assert list(layer.state_dict()) == list(torch.nn.MultiheadAttention(E, H).state_dict())
    x = batch_of(9)
    query, key, value = heads_of(layer, x)
    expected = qkv.testing.attention(query, key, value, **options).transpose(1, 2).flatten(2)
    output, weights = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(output, layer.out_proj(expected.float()))
    torch.testing.assert_close(weights, qkv.attention_weights(query, key, **options))
    assert all(f"{n}=" in repr(layer) for n in names)


def test_every_option_of_the_scores():
    """A new option of qkv.attention becomes one of the layer, with the default of the schema."""
    parameters = inspect.signature(MultiheadAttention).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY}
    elsewhere = {"bias", "spans", "enable_gqa"}  # two in forward; the layer has no third
    names = {*ScoreOptions.__annotations__} - elsewhere
    schema = defaults(torch.ops.qkv.attention.default)
    assert ours == {n: schema[n] for n in names}


def test_learned_options():
    """Parameters are learned, saved and loaded; other tensors move with the layer alone."""
    sinks = torch.nn.Parameter(torch.zeros(H))
    layer = MultiheadAttention(E, H, sinks=sinks, alibi_slopes=torch.rand(H))
    assert {*layer.state_dict()} - {*MultiheadAttention(E, H).state_dict()} == {"sinks"}
    x = batch_of(L)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    assert layer.sinks is sinks and (sinks.grad != 0).all()
    assert layer.double().alibi_slopes.dtype == torch.float64


@pytest.mark.parametrize("window", [(), (1,), (1, 2, 3), 3], ids=str)
def test_a_window_is_two_numbers(window):
    with pytest.raises(ValueError, match=r"window_size is .*, but \(left, right\) or None"):
        MultiheadAttention(E, H, window_size=window)


@pytest.mark.parametrize("name", ["window_size", "alibi_slopes"])
@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_options_that_count_from_the_last_key(name, extra):
    with pytest.raises(ValueError, match=f"{name} is given, but None is expected with"):
        MultiheadAttention(E, H, **{extra: True, name: GIVEN[name]})


@pytest.mark.parametrize("pad", [None, "bool", "float"])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("arguments", [{}, {"add_zero_attn": True}], ids=str)
def test_attn_bias(arguments, mask, pad):
    """A learned bias [H, L, S] beside both masks; torch needs it and them in one [B * H, L, S]."""
    theirs, ours = twins(batch_first=True, **arguments)
    query, key = batch_of(L), batch_of(S)
    bias = torch.randn(H, L, S, requires_grad=True)
    masks = {
        "key_padding_mask": padding(S, pad == "float") if pad else None,
        "attn_mask": hiding(L, S, floating=mask == "float") if mask else None,
    }
    output, weights = ours(query, key, key, **masks, attn_bias=bias)
    total = bias.expand(B, H, L, S)
    for added, place in zip(masks.values(), ((slice(None), None, None), ()), strict=True):
        if added is not None:
            boolean = added.dtype == torch.bool
            added = torch.where(added, -INF, 0.0) if boolean else added
            total = total + added[place]
    expected = theirs(query, key, key, attn_mask=total.flatten(0, 1))
    torch.testing.assert_close((output, weights), expected, atol=1e-5, rtol=1e-4)
    grads = [
        torch.autograd.grad(y[0].square().sum() + y[1].square().sum(), bias)
        for y in ((output, weights), expected)
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_float32_masks_of_a_float64_layer():
    """Two masks and a bias, of which two are summed before the operator adds them in float64."""
    layer = qkv.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x = torch.randn(B, L, E, dtype=torch.float64)
    masks = {"key_padding_mask": (B, L), "attn_mask": (L, L), "attn_bias": (H, L, L)}
    single = {name: torch.randn(shape) for name, shape in masks.items()}
    double = {name: mask.double() for name, mask in single.items()}
    torch.testing.assert_close(
        layer(x, x, x, **single), layer(x, x, x, **double), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("call", [
    {"need_weights": False}, {"average_attn_weights": False}, {"is_causal": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_spans(arguments, call):
    """Beside padding and for each head, they are what a mask of all pairs is."""
    _, layer = twins(batch_first=True, **arguments)
    x, pad = batch_of(L), padding(L)
    seen = torch.rand(H, L, L) > 0.5
    mask = (~seen).expand(B, H, L, L).flatten(0, 1)
    if call.get("is_causal"):  # with attn_mask it would be a hint
        mask = mask | torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = layer(x, x, x, pad, attn_mask=mask, **call | {"is_causal": False})
    spans = qkv.Spans.from_mask(seen)
    torch.testing.assert_close(layer(x, x, x, pad, spans=spans, **call), expected)
    if "need_weights" in call:
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        found = compiled(x, x, x, pad, spans=spans.tensor, **call)
        torch.testing.assert_close(found, expected)


def test_compiled_for_any_length():
    """Where the query alone has a length that the graph has as a symbol."""
    _, layer = twins(batch_first=True)
    query, key = torch.randn(B, L, E), torch.randn(B, S, E)
    torch._dynamo.maybe_mark_dynamic(query, 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for mask in (torch.rand(L, S) > 0.5, torch.rand(B * H, L, S) > 0.5):
        call = {"attn_mask": mask, "need_weights": False}
        torch.testing.assert_close(
            compiled(query, key, key, **call), layer(query, key, key, **call)
        )


@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("is_batched", [False, True])
def test_vmap_of_spans(arguments, is_batched):
    """Over layers' inputs, each of which has spans of its own."""
    _, layer = twins(batch_first=True, **arguments)
    x = batch_of(L) if not is_batched else batch_of(L)[:, None]
    spans = qkv.Spans.prefix(torch.arange(1, len(x) + 1), L)

    def attend(x, spans):
        return layer(x, x, x, spans=spans)

    found = torch.func.vmap(attend)(x, spans)
    each = [attend(*pair) for pair in zip(x, map(qkv.Spans, spans.tensor), strict=True)]
    for y, expected in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(y, torch.stack(expected))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_nested_tensor_of_no_items(need_weights):
    layer = qkv.nn.MultiheadAttention(E, H, batch_first=True)
    nested = torch.nested.nested_tensor_from_jagged(torch.randn(0, E), torch.tensor([0]))
    output, weights = layer(nested, nested, nested, need_weights=need_weights)
    assert output.values().shape == (0, E)
    assert weights.shape == (0, 0, 0) if need_weights else weights is None


@pytest.mark.parametrize("need_weights", [False, True])
def test_spans_of_a_nested_tensor(need_weights):
    """By positions within an item, as the bias has it."""
    _, layer = twins(batch_first=True)
    items, spans = [batch_of(n)[0] for n in (3, 5)], qkv.Spans.window(5, 1, 0)
    nested = torch.nested.nested_tensor(items, layout=torch.jagged)
    output, weights = layer(nested, nested, nested, need_weights=need_weights, spans=spans)
    for place, (item, found) in enumerate(zip(items, output.unbind(), strict=True)):
        n = len(item)
        expected, expected_weights = layer(item, item, item, attn_mask=~spans.to_mask(5)[:n, :n])
        torch.testing.assert_close(found, expected)
        if need_weights:
            torch.testing.assert_close(weights[place, :n, :n], expected_weights)


# Memory.


MEASURE = """
import torch, qkv
L = 4096
layer = qkv.nn.MultiheadAttention(64, 4, batch_first=True)
x = torch.randn(2, L, 64)
pad = torch.zeros(2, L, dtype=torch.bool)
mask = torch.zeros(L, L)

def peak():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM"))

layer(x[:, :64], x[:, :64], x[:, :64])  # libraries and thread stacks
open("/proc/self/clear_refs", "w").write("5")
before = peak()
layer(x, x, x, pad, attn_mask=mask, {call})[0].sum().backward()
print((peak() - before) / 1024)
"""


@pytest.mark.parametrize("call, weights", [("need_weights=False", 0), ("need_weights=True", 128)])
def test_no_mask_or_weights_of_all_heads(call, weights):
    """[B, H, L, S] would take 512 MB; the averaged weights take 128, and nothing else does."""
    assert float(run_forked(MEASURE.format(call=call), 300)) <= weights + 100


# Errors, each of which names the argument, what it was and what was expected.


@pytest.mark.parametrize("shapes, call, message", [
    ([(B, L, 9)] * 3, {}, r"query is \[2, 5, 9\].*the last of 16"),
    ([(L,)] * 3, {}, "query is .5., but 3 dimensions"),
    ([(B, L, E), (L, E), (L, E)], {}, r"key is \[5, 16\].*3 dimensions"),
    ([(B, L, E), (B, S, E), (B, L, E)], {}, r"value is \[2, 5, 16\].*as in key, \[2, 7, 16\]"),
    ([(B, L, E), (3, S, E), (3, S, E)], {}, r"key is \[3, 7, 16\].*batch_first is True"),
    ([(B, L, E)] * 3, {"key_padding_mask": (L, B)}, r"key_padding_mask is \[5, 2\].*\[2, 5\] is"),
    ([(L, E)] * 3, {"key_padding_mask": (1, L)}, r"key_padding_mask is \[1, 5\], but \[5\] is"),
    ([(B, L, E)] * 3, {"attn_mask": (L, S)}, r"attn_mask is \[5, 7\].*\[5, 5\] or \[8, 5, 5\] is"),
    ([(L, E)] * 3, {"attn_mask": (B * H, L, L)}, r"attn_mask is \[8, 5, 5\].*or \[4, 5, 5\] is"),
    ([(B, L, E)] * 3, {"attn_bias": (L, S)}, r"attn_bias is \[5, 7\].*to \[2, 4, 5, 5\]"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("arguments", [{}, {"add_zero_attn": True}], ids=str)
def test_shapes_that_do_not_fit(shapes, call, message, arguments):
    theirs, ours = twins(batch_first=True, **arguments)
    inputs = [torch.zeros(s) for s in shapes]
    call = {n: torch.zeros(s) for n, s in call.items()}
    with pytest.raises(RuntimeError, match=message):
        ours(*inputs, **call)
    if "attn_bias" not in call:
        with pytest.raises((RuntimeError, AssertionError)):
            theirs.train()(*inputs, **call)


WRONG = [(torch.float32, torch.float64), (torch.float32, torch.float16)]
WRONG += [(torch.bfloat16, torch.float16), (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize("dtype, other", [(torch.float32, torch.uint8), *WRONG])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "attn_bias"])
def test_dtypes_of_masks_that_do_not_fit(name, dtype, other):
    """The operator, to which they are attn_mask and bias, is not asked; nor is it where they are
    two, of which one becomes its bias."""
    ours = twins(batch_first=True)[1].to(dtype)
    x = batch_of(L).to(dtype)
    masks = {"key_padding_mask": torch.zeros(B, L), "attn_mask": torch.zeros(L, L)}
    masks["attn_bias"] = torch.zeros(L, L)
    wrong = masks.pop(name).to(other)
    kinds = "" if name == "attn_bias" else "bool .True = hidden., "
    message = (
        f"MultiheadAttention: {name} is {other}, but {kinds}float32 or the dtype of the projected "
        f"query, {dtype}, is expected"
    )
    for more in ({}, masks):
        with pytest.raises(RuntimeError, match=message):
            ours(x, x, x, **{name: wrong}, **more)


def test_dtype_of_the_bias_of_a_nested_tensor():
    _, ours = twins(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(L, E)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="attn_bias is torch.float64, but float32 or"):
        ours(x, x, x, attn_bias=torch.zeros(L, L, dtype=torch.float64))


def test_half_masks_under_autocast():
    """Autocast makes of query another dtype than masks of a half-precision model have."""
    _, ours = twins(batch_first=True)
    x = batch_of(L)
    pad, mask = torch.randn(B, L).half(), torch.randn(L, L).half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [
            ours(x, x, x, key_padding_mask=y(pad), attn_mask=y(mask))[0]
            for y in (torch.Tensor.half, torch.Tensor.float)
        ]
    torch.testing.assert_close(*outputs, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_hint_is_not_looked_at(need_weights):
    _, ours = twins(batch_first=True)
    x = batch_of(L)
    call = {"attn_mask": torch.zeros(L, L, dtype=torch.float64), "need_weights": need_weights}
    if not need_weights:
        ours(x, x, x, is_causal=True, **call)
    else:
        with pytest.raises(RuntimeError, match="attn_mask is torch.float64"):
            ours(x, x, x, is_causal=True, **call)
