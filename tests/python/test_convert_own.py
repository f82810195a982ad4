"""qkv.convert of layers that write attention out in their own code: of transformers' families, and
of layers that do what might go wrong in between."""

import copy
import pickle
import re
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from test_convert import operators
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

import qkv.integrations.transformers  # noqa: E402

qkv.integrations.transformers.register()

from own_models import FAMILIES, build  # noqa: E402

from qkv._conversion import route, scores  # noqa: E402

# Their own code cannot have float64, or makes NaN of its least number twice.
SINGLE = {"fastspeech2", "xglm", "canine", "prophetnet", "led", "longformer"}
# Their softmax is float32 whatever the model is.
ROUNDED = SINGLE | {"bloom", "codegen", "flaubert", "funnel", "gpt_neo", "gptj", "mpt", "xlm"}
ROUNDED |= {"git", "seggpt"}
# The classes in a family that do something else, and why they are left.
LEFT = {
    "groupvit_vision": "its first call had no softmax(query @ key) @ value",
    "led": "its first call had no softmax(query @ key) @ value",
    "longformer": "its first call had no softmax(query @ key) @ value",
    "vits": "it computes with its weights themselves",
}
NONE_CHANGED = {"longformer", "vits"}


@pytest.fixture
def calls(monkeypatch):
    """How often a converted layer has called qkv.attention, written out or, as those of some
    families in a later version of transformers, by its name, where rows that begin at different
    keys are those of a cache."""
    found = []
    modules = [import_module(f"qkv.{x}") for x in ("_conversion.core", "_conversion.route")]
    modules += [import_module("qkv.nn._attend")]
    places = [(module, "attention") for module in modules] + [(qkv, "attention_with_kvcache")]
    for module, name in places:
        attention = getattr(module, name)

        def counted(*args, _attention=attention, **kwargs):
            found.append(1)
            return _attention(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return found


def floating(output):
    """The floating tensors in an output."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if hasattr(output, "values") else output
    return [x for value in values if not isinstance(value, (int, float, str)) and value is not None
            for x in floating(value)]  # fmt: skip


def results(model, call):
    """The outputs, and the gradient of each parameter that has one."""
    torch.manual_seed(0)
    outputs = floating(model(**call))
    weights = [torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    losses = [(x * w).mean() for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(losses, parameters, allow_unused=True)
    return [x.detach() for x in outputs], found


def assert_same(found, expected, tolerance):
    """Each by its own size."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            finite = theirs.isfinite()
            assert torch.equal(ours.isfinite(), finite)
            size = theirs[finite].abs().max().item() if finite.any() else 0.0
            assert_close(ours[finite], theirs[finite], rtol=0, atol=tolerance * (size + 1e-3))


def double(model, call):
    return model.double(), {
        k: x.double() if x.is_floating_point() else x for k, x in call.items()
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, calls):
    model, call = build(name)
    if name not in SINGLE:
        model, call = double(model, call)
    expected = results(model, call)
    conversion = qkv.convert(model)
    promised = len(conversion.changed)
    first = results(model, call)
    calls.clear()
    second = results(model, call)
    ways = [layer.__dict__.get("_way") for layer in model.modules()]
    assert len(calls) >= ways.count("matched")
    assert bool(calls) != (name in NONE_CHANGED)
    assert set(conversion.left.values()) == ({LEFT[name]} if name in LEFT else set())
    assert len(conversion.changed) + len(conversion.left) == promised
    outputs, grads = (1e-4, 5e-3) if name in SINGLE else (1e-6, 3e-5)
    if name not in ROUNDED:
        outputs, grads = 1e-11, 1e-10
    for found in (first, second):
        assert_same(found[0], expected[0], outputs)
        assert_same(found[1], expected[1], grads)
    conversion.undo()
    calls.clear()
    assert_same(results(model, call)[0], expected[0], 0.0)
    assert not calls


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted({*FAMILIES} - NONE_CHANGED - SINGLE - {"levit"}))
def test_by_name(name, calls):
    """attn_implementation="qkv", from the beginning and set in a model that is there."""
    eager, call = build(name)
    config = copy.deepcopy(eager.config)
    made = type(eager)._from_config(config, attn_implementation="qkv").eval()
    made.load_state_dict(eager.state_dict())
    with torch.no_grad():
        torch.manual_seed(0)
        expected = floating(eager(**call))
        eager.set_attn_implementation("qkv")
        for model in (made, eager):
            model(**call)
            calls.clear()
            torch.manual_seed(0)
            assert_same(floating(model(**call)), expected, 1e-4)
            assert calls
        eager.set_attn_implementation("eager")
        calls.clear()
        eager(**call)
        assert not calls


@torch.no_grad()
@pytest.mark.parametrize("name", ["mpnet", "deberta", "bloom", "gptj", "layoutlmv3"])
def test_half_is_as_close(name):
    """As what the layers write out in bfloat16, to what they write out in float32."""
    model, call = build(name)
    exact = model(**call)[0]
    half = model.bfloat16()
    call = {k: x.bfloat16() if x.is_floating_point() else x for k, x in call.items()}
    theirs = half(**call)[0]
    conversion = qkv.convert(half)
    half(**call)
    ours = half(**call)[0]
    assert not conversion.left and ours.dtype == torch.bfloat16
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bloom", "gptj", "gpt_neo", "codegen", "vits"])
def test_checkpoints(name, reentrant):
    """From the first call on, also where that decides that the layer is left."""
    model, call = build(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if "vits" in name:
        model.config.layerdrop = 0.0
        for layer in model.text_encoder.encoder.layers:
            layer.attention.dropout = 0.0
        model.text_encoder.encoder.layerdrop = 0.0
    call |= {} if name == "vits" else {"use_cache": False}
    expected = results(model, call)[1]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    qkv.convert(model)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)
        outputs = floating(model(**call))
        weights = [torch.linspace(0.5, 1.5, x.numel()).view(x.shape) for x in outputs]
        torch.autograd.backward([(x * w).mean() for x, w in zip(outputs, weights, strict=True)])
        assert_same([p.grad for p in model.parameters()], expected, 5e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_of_weights_that_leave_a_checkpoint(reentrant):
    """The one that is reentrant gives gradients to what is a tensor when it leaves, alone."""
    model = nn.ModuleList([Attention(lambda _, q, k, v: [w := (q @ k.mT).softmax(-1), w @ v])])
    x, gradients = torch.randn(3, 5, 8, requires_grad=True), []
    for change in (lambda _: None, qkv.convert):
        change(model)
        model.zero_grad()
        weights, output = checkpoint(lambda x: (*model[0](x),), x, use_reentrant=reentrant)
        (weights.square().sum() + output.sum()).backward()
        gradients.append(model[0].proj.weight.grad)
    assert_close(*gradients)


@pytest.mark.parametrize("family, name", [
    ("BloomForCausalLM", "bloom"), ("GPTJForCausalLM", "gptj"), ("MptForCausalLM", "mpt"),
    ("GPTNeoForCausalLM", "gpt_neo"), ("FalconForCausalLM", "falcon"), ("XGLMForCausalLM", "xglm"),
])  # fmt: skip
def test_generates_the_same(family, name, calls):
    model, call = build(name)
    model = getattr(transformers, family)(model.config).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    call["attention_mask"] = call["attention_mask"].flip(1)  # padding before the prompt
    expected = model.generate(**call, **options)
    conversion = qkv.convert(model)
    assert torch.equal(model.generate(**call, **options), expected)
    assert calls and not conversion.left


@torch.no_grad()
@pytest.mark.parametrize("name", ["mpnet", "bloom", "gpt_neo", "groupvit_text"])
def test_weights_that_are_asked_for(name):
    """They are the model's own, to the bit."""
    model, call = build(name)
    expected = model(**call, output_attentions=True)
    qkv.convert(model)
    for _ in range(2):
        found = model(**call, output_attentions=True)
        assert_close(found.attentions, expected.attentions, rtol=0, atol=0)
        model(**call)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mpt", "prophetnet"])
def test_weights_of_layers_that_always_return_them(name):
    """They are put off within the model, and tensors where they leave it."""
    model, call = build(name)
    expected = model(**call, output_attentions=True)
    conversion = qkv.convert(model)
    for _ in range(2):
        found = model(**call, output_attentions=True)
        assert found.keys() == expected.keys()
        for key in (x for x in expected if x.endswith("attentions")):
            assert {type(x) for x in found[key]} == {torch.Tensor}
            assert_close(found[key], expected[key])
    conversion.undo()
    assert not model._forward_hooks


@torch.no_grad()
def test_compiled_it_is_the_models_own():
    model, call = build("mpnet")
    expected = model(**call)[0]
    qkv.convert(model)
    run = torch.compile(model, backend="aot_eager")
    found = run(**call)[0]
    torch._dynamo.reset()
    assert_close(found, expected)
    assert_close(model(**call)[0], expected)


class Attention(nn.Module):
    """Written out, with something of the test's own done to the scores."""

    def __init__(self, body, dropout=0.0):
        super().__init__()
        self.body = body
        self.proj = nn.Linear(8, 24)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        query, key, value = self.proj(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.body(self, query, key, value)

    def plain(self, query, key, value):
        weights = self.drop((query @ key.mT / 2).softmax(-1))
        return weights @ value

    def in_place_through_a_view(self, query, key, value):
        scores = query @ key.mT
        view = scores.view(-1, *scores.shape[2:])
        view += torch.arange(5.0)
        scores /= 2
        return view.softmax(-1).view(scores.shape) @ value

    def query_changed_in_between(self, query, key, value):
        query = query.clone()
        scores = query @ key.mT
        query.mul_(3)
        return scores.softmax(-1) @ value

    def mask_changed_in_between(self, query, key, value):
        mask = torch.arange(5.0)
        scores = query @ key.mT + mask
        mask[2] = 9.0
        return scores.softmax(-1) @ value

    def key_changed_by_an_argument(self, query, key, value):
        key = key.clone()
        scores = query @ key.mT
        nn.functional.relu(key, inplace=True)
        return scores.softmax(-1) @ value

    def key_overwritten(self, query, key, value):
        key = key.detach().clone()
        with torch.no_grad():
            scores = query @ key.mT
            torch.mul(value, 2, out=key)
        return scores.softmax(-1) @ value

    def data_exchanged(self, query, key, value):
        key = key.detach().clone()
        with torch.no_grad():
            scores = query @ key.mT
            key.data = key + 1 + value
        return scores.softmax(-1) @ value

    def filled_by_a_tensor(self, query, key, value):
        fill = self.proj.bias[:5]
        return torch.where(fill > 0, query @ key.mT, fill).softmax(-1) @ value

    def filled_by_a_learned_number(self, query, key, value):
        fill = self.proj.bias[0] - 2e4
        return torch.where(torch.arange(5) > 2, fill, query @ key.mT).softmax(-1) @ value

    def zeroed_where_two_masks_hide(self, query, key, value):
        """Which hide all of the first query's keys only together, and of them one is zeroed."""
        mask, padded = torch.ones(5, 5).triu(1).bool(), torch.arange(5) == 0
        scores = (query @ key.mT).masked_fill(mask, -1e9).masked_fill(padded, -1e9)
        return scores.softmax(-1).masked_fill(padded, 0.0) @ value

    def changed_unrecorded(self, query, key, value):
        scores = query @ key.mT
        with torch.no_grad():
            scores += self.proj.bias[:5]
        return scores.softmax(-1) @ value

    def weights_without_gradient(self, query, key, value):
        with torch.no_grad():
            weights = (query @ key.mT + self.proj.bias[:5]).softmax(-1)
        return weights @ value

    def scores_without_gradient(self, query, key, value):
        with torch.no_grad():
            scores = query @ key.mT
        return (scores + self.proj.bias[:5]).softmax(-1) @ value

    def looked_at_unrecorded(self, query, key, value):
        scores = query @ key.mT
        with torch.no_grad():
            highest = scores.max()
        with torch.inference_mode():
            scores.mean()
        return (scores - highest).softmax(-1) @ value

    def derived_before_a_change(self, query, key, value):
        scores = query @ key.mT
        first = scores * 2
        scores += torch.arange(5.0)
        return first.softmax(-1) @ value + scores.softmax(-1) @ value

    def filled_twice(self, query, key, value):
        """Together the masks hide all of the first query's keys."""
        mask = torch.ones(5, 5).triu(1).bool()
        scores = (query @ key.mT).masked_fill(mask, -1e9)
        scores = scores.masked_fill(~mask & (torch.arange(5)[:, None] == 0), -1e9)
        return scores.softmax(-1) @ value

    def grouped(self, query, key, value):
        return (query @ key[:, :1].mT).softmax(-1) @ value[:, :1]

    def three_terms(self, query, key, value):
        row, column = torch.arange(5.0), torch.arange(5.0)[:, None]
        scores = torch.where(row > column, -torch.inf, 2 * (query @ key.mT + row) + row * column)
        return (scores - column * row / 2 + self.proj.bias[0] * row).softmax(-1) @ value

    def times_a_triangle(self, query, key, value):
        """As OpenAI GPT hides keys, before heads are apart."""
        seen = torch.ones(5, 5).tril()
        scores = (query @ key.mT).flatten(0, 1) * seen.expand(6, 5, 5) + -1e4 * (1 - seen)
        return (scores.view(3, 2, 5, 5) + torch.arange(5.0)).softmax(-1) @ value

    def times_a_triangle_with_heads_apart(self, query, key, value):
        seen = torch.ones(5, 5).tril()
        scores = ((query @ key.mT).flatten(0, 1) * seen.expand(6, 5, 5)).view(3, 2, 5, 5)
        return (scores + -1e4 * (1 - seen)).softmax(-1) @ value

    def filled_by_two_numbers(self, query, key, value):
        """Together the masks hide all of the first query's keys, of which it sees the first."""
        mask = torch.ones(5, 5).triu(1).bool()
        scores = (query @ key.mT).masked_fill(mask, -torch.inf)
        scores = scores.masked_fill(~mask & (torch.arange(5)[:, None] == 0), -1e9)
        return scores.softmax(-1) @ value

    def filled_by_two_numbers_that_hide_no_row(self, query, key, value):
        mask = torch.ones(5, 5).triu(1).bool()
        scores = (query @ key.mT).masked_fill(mask, -1e9) / 2
        scores = scores.masked_fill(torch.ones(5, 5).triu(2).bool(), -torch.inf)
        return scores.softmax(-1) @ value

    def joined_heads_times_a_mask(self, query, key, value):
        """Heads are joined when scores are made, and apart where a mask is multiplied."""
        seen = (torch.arange(5) < torch.tensor([3, 4, 5])[:, None])[:, None, None]
        scores = (query.flatten(0, 1) @ key.flatten(0, 1).mT).view(3, 2, 5, 5)
        scores = (scores * seen - 1e9 * ~seen).flatten(0, 1)
        return (scores.softmax(-1) @ value.flatten(0, 1)).view(value.shape)

    def filled_and_then_times_a_learned_number(self, query, key, value):
        """Which has no gradient of what is hidden, though -inf stands for that."""
        mask = torch.ones(5, 5).triu(1).bool()
        scores = (query @ key.mT).masked_fill(mask, -1e9) * (2 + self.proj.bias[:1]).exp()
        return scores.softmax(-1) @ value

    def filled_and_then_times_a_number_below_0(self, query, key, value):
        mask = torch.ones(5, 5).triu(1).bool()
        scores = (query @ key.mT).masked_fill(mask, -1e9) * (self.proj.bias[:1] - 2)
        return scores.softmax(-1) @ value

    def times_a_triangle_that_is_seen(self, query, key, value):
        return ((query @ key.mT) * torch.ones(5, 5).tril()).softmax(-1) @ value

    def times_a_triangle_half_of_which_is_hidden(self, query, key, value):
        seen = torch.ones(5, 5)
        return ((query @ key.mT) * seen.tril() + -1e4 * seen.triu(2)).softmax(-1) @ value

    def times_a_mask_that_hides_a_row(self, query, key, value):
        seen = torch.ones(5, 5).tril(-1)
        return ((query @ key.mT) * seen + -1e9 * (1 - seen)).softmax(-1) @ value

    def viewed_as_before(self, query, key, value):
        scores = (query @ key.mT).flatten(0, 1)
        filled = scores.view(3, 2, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
        return filled.view_as(scores).softmax(-1).reshape_as(filled) @ value

    def other_dimension(self, query, key, value):
        return (query @ key.mT).softmax(-2) @ value

    def times_a_head_mask(self, query, key, value):
        return ((query @ key.mT).softmax(-1) * torch.tensor([0.0, 1.0]).view(2, 1, 1)) @ value

    def written_into_tensors(self, query, key, value):
        query, key, weights, output = query.detach(), key.detach(), value.new(), value.new()
        torch.softmax(query @ key.mT, -1, out=weights)
        torch.matmul((query @ key.mT).softmax(-1), value.detach(), out=output)
        return weights @ value + output

    def changed_by_a_function(self, query, key, value):
        scores = query @ key.mT
        first = scores * 2
        nn.functional.relu(scores, inplace=True)
        return first.softmax(-1) @ value

    def added_to_a_tensor(self, query, key, value):
        scores = torch.ones(3, 2, 5, 5)
        scores.add_(query @ key.mT)
        scores.mul_(query @ key.mT)
        return scores.softmax(-1) @ value

    def output_changed_in_place(self, query, key, value):
        query = query.contiguous()  # else the output is a copy
        output = (query @ key.mT).softmax(-1) @ value
        output += query
        return output.mul_(0.5)

    def without_the_greatest(self, query, key, value):
        scores = query @ key.mT
        greatest = scores.amax(-1, True)
        assert greatest.shape == (3, 2, 5, 1)
        assert torch.softmax(scores, -1, torch.float32).dtype == torch.float32
        return (scores - greatest).softmax(-1) @ value


# One thing each that is done to scores s, to weights w or in their place.
LARGE = torch.ones(2, 1, 1, 1, 1)
SCORES = {
    "greatest_of_a_key": lambda s: s - s.amax(-2, keepdim=True),
    "larger_term": lambda s: s + LARGE,
    "term_of_integers": lambda s: s + torch.arange(5),
    "larger_factor": lambda s: s * LARGE,
    "divided_by_zero": lambda s: s / 0.0,
    "larger_mask": lambda s: s.masked_fill(LARGE > 0, -1e9),
    "dropped_scores": lambda s: nn.functional.dropout(s, 0.5),
    "integers": lambda s: s.to(torch.int64).double(),
    "absolute": lambda s: abs(s),
    "powers": lambda s: 2**s,
    "remainders": lambda s: s % 2 + (2 // (+s).detach()),
}
SCORES_TAKEN = {
    "factor_in_a_tensor": lambda s: s * torch.tensor(0.5),
    "contiguous": lambda s: s.contiguous(),
    "initialised": lambda s: s + nn.init.constant_(torch.empty(5), 1.0),
}
WEIGHTED = {
    "scores_for_weights": lambda w, s, v: s @ v,
    "weights_in_a_row": lambda w, s, v: w.flatten(2) @ v.repeat(1, 1, 5, 1)[:, 0],
    "more_values": lambda w, s, v: w[:1] @ v,
    "dropped_twice": lambda w, s, v: nn.functional.dropout(nn.functional.dropout(w)) @ v,
    "weights_of_weights": lambda w, s, v: (w @ w) @ v,
    "sum_of_queries": lambda w, s, v: torch.einsum("bhij,bhje->bhe", w, v),
    "scores_by_name": lambda w, s, v: torch.softmax(input=s, dim=-1) @ v,
    "values_by_name": lambda w, s, v: torch.matmul(w, other=v),
}
SHORT = {
    name: lambda self, q, k, v, change=change: change(q @ k.mT).softmax(-1) @ v
    for name, change in (SCORES | SCORES_TAKEN).items()
} | {
    name: lambda self, q, k, v, weigh=weigh: weigh((q @ k.mT).softmax(-1), q @ k.mT, v)
    for name, weigh in WEIGHTED.items()
} | {
    "key_by_name": lambda self, q, k, v: torch.matmul(q, other=k.mT).softmax(-1) @ v,
    "term_by_name": lambda self, q, k, v: torch.baddbmm(
        input=torch.zeros(1), batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT
    ).softmax(-1) @ v.flatten(0, 1),
    "one_item_for_all": lambda self, q, k, v: (q[:1] @ k[:1].mT).softmax(-1) @ v,
}  # fmt: skip
BODIES = {
    **{name: name in SCORES_TAKEN for name in SHORT},
    "without_the_greatest": True,
    "output_changed_in_place": True,
    **dict.fromkeys(("written_into_tensors", "changed_by_a_function", "added_to_a_tensor"), False),
    **dict.fromkeys(("plain", "in_place_through_a_view", "derived_before_a_change", "filled_twice",
                     "grouped", "three_terms", "times_a_triangle",
                     "weights_without_gradient", "scores_without_gradient",
                     "times_a_triangle_with_heads_apart", "viewed_as_before",
                     "filled_by_two_numbers_that_hide_no_row",
                     "joined_heads_times_a_mask", "filled_and_then_times_a_learned_number"), True),
    **dict.fromkeys(("query_changed_in_between", "mask_changed_in_between", "other_dimension",
                     "key_changed_by_an_argument", "key_overwritten", "data_exchanged",
                     "filled_by_a_tensor", "filled_by_a_learned_number", "changed_unrecorded",
                     "looked_at_unrecorded",
                     "times_a_head_mask", "times_a_triangle_that_is_seen",
                     "times_a_triangle_half_of_which_is_hidden",
                     "times_a_mask_that_hides_a_row", "filled_by_two_numbers",
                     "zeroed_where_two_masks_hide",
                     "filled_and_then_times_a_number_below_0"), False),
}  # fmt: skip


class CheckpointedAttention(Attention):
    def forward(self, x):
        query, key, value = self.proj(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return checkpoint(self.plain, query, key, value, use_reentrant=True)


def test_a_layer_that_checkpoints_a_part_of_itself_is_left():
    """The backward pass would drop other weights than the forward pass: gradients of neither."""
    gradients = []
    for kind in (Attention, CheckpointedAttention):
        torch.manual_seed(0)
        layer = kind(Attention.plain, dropout=0.5)
        conversion = qkv.convert(layer) if kind is CheckpointedAttention else None
        torch.manual_seed(1)
        layer(torch.ones(3, 5, 8)).square().sum().backward()
        gradients.append(layer.proj.weight.grad)
    assert_close(*gradients)
    assert [*conversion.left.values()] == ["CheckpointedAttention is no layer that qkv knows"]


@torch.jit.script
def doubled(x: torch.Tensor):
    return 2 * x


class ScriptedAttention(Attention):
    def forward(self, x):
        query, key, value = self.proj(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.body == "plain":
            return doubled(query @ key.mT).softmax(-1) @ value
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Pooled(Attention):
    """Which has another attention inside, and is one itself."""

    def forward(self, x):
        weights = (x[:, :1] @ x.mT).softmax(-1)
        return weights @ self.inner(x).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("body", ["plain", "fused"])
def test_scripted_functions_take_nothing_but_tensors(body, calls):
    """Of such a layer its scaled_dot_product_attention is taken, if it calls it; of what is around
    it nothing that is written out, since the layer's products would be noted down for that."""
    model = Pooled(Attention.plain)
    model.inner = ScriptedAttention(body)
    x = torch.randn(3, 5, 8)
    expected = results(model, {"x": x})
    conversion = qkv.convert(model)
    for found, other in zip(results(model, {"x": x}), expected, strict=True):
        assert_same(found, other, 1e-5)
    assert bool(calls) == (body == "fused")
    assert list(conversion.changed) == ["inner"]


def test_einops_takes_scores(monkeypatch):
    """einops goes by types, and has a dict for those that it has seen."""
    layer = Attention(Attention.plain)
    qkv.convert(layer)
    # It is there from the layer's import on, or only now, as after a pickle is loaded.
    einops = SimpleNamespace(_type2backend={}, get_backend=lambda x: type(x))
    monkeypatch.setitem(sys.modules, "einops._backends", einops)
    layer(torch.randn(3, 5, 8))
    assert einops._type2backend == {scores.Scores: torch.Tensor}


@pytest.mark.parametrize("name, taken", BODIES.items())
def test_what_a_layer_does_to_its_scores(name, taken, calls):
    torch.manual_seed(0)
    layer = Attention(SHORT.get(name) or getattr(Attention, name)).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        expected = results(layer, {"x": x})
        conversion = qkv.convert(layer)
        for _ in range(2):
            calls.clear()
            found = results(layer, {"x": x})
            assert_same(found[0], expected[0], 1e-12)
            assert_same(found[1], expected[1], 1e-12)
        assert bool(calls) == taken
        assert conversion.left == ({} if taken else {
            "": "its first call had no softmax(query @ key) @ value"
        })  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("body", [
    lambda _, q, k, v: (q @ k[:2].mT).softmax(-1) @ v,
    lambda _, q, k, v: (q @ k.mT).softmax(-1) @ v.double(),
    lambda _, q, k, v: torch.where(torch.ones(5, 5), q @ k.mT, -1e9).softmax(-1) @ v,
    lambda _, q, k, v: (q @ k.mT).masked_fill(torch.ones(5, 5), -1e9).softmax(-1) @ v,
], ids=["sizes", "dtypes", "condition", "mask"])  # fmt: skip
def test_what_torch_refuses(body):
    """With torch's error, also by a layer that qkv computes."""
    layer, x = Attention(body), torch.randn(3, 5, 8)
    with pytest.raises(RuntimeError) as expected:
        layer(x)
    qkv.convert(layer)
    layer.body = Attention.plain
    layer(x)
    layer.body = body
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        layer(x)


def test_a_layer_that_is_initialised_by_its_first_call(calls):
    layer, x = Attention(Attention.plain), torch.randn(3, 5, 8)
    layer.proj = nn.LazyLinear(24)
    qkv.convert(layer)
    found = layer(x)
    assert calls
    assert_close(found, Attention.forward(layer, x))


@torch.no_grad()
@pytest.mark.parametrize("products, taken", [(3 * 2 * 5 * 5 * 4, True), (601, False)])
def test_small_products_stay_as_they_are_written(products, taken, calls, monkeypatch):
    monkeypatch.setattr(scores, "SMALL", products)
    layer, small, large = Attention(Attention.plain), torch.randn(3, 5, 8), torch.randn(3, 6, 8)
    expected = layer(small), layer(large)
    conversion = qkv.convert(layer)
    for _ in range(2):
        calls.clear()
        assert_close(layer(small), expected[0], rtol=0, atol=1e-6 if taken else 0)
        assert bool(calls) == taken and conversion.changed
    assert (layer._way == "matched") == taken
    assert_close(layer(large), expected[1])
    assert calls and layer._way == "matched"


@torch.no_grad()
def test_small_calls_are_not_looked_at_twice(monkeypatch):
    """Unless something among the arguments may be larger than it was, as a cache."""
    monkeypatch.setattr(scores, "SMALL", 601)
    starts = []
    monkeypatch.setattr(route, "start", lambda *args: starts.append(1) or scores.start(*args))
    layer = Attention(Attention.plain)
    layer.forward = lambda x, cache=None: Attention.forward(layer, x)
    qkv.convert(layer)
    for cache, looked_at in [(None, True), (None, False), ([], True), ([], True)]:
        starts.clear()
        layer(torch.randn(3, 5, 8), cache=cache)
        assert bool(starts) == looked_at


def test_what_is_written_out_beside_a_fused_call_is_tried_too():
    """A layer whose first call goes to scaled_dot_product_attention has shown nothing of it."""
    torch.manual_seed(0)
    mask = torch.tensor([False, False, True, False, True])
    layer = Attention(lambda _, q, k, v: nn.functional.scaled_dot_product_attention(q, k, v))
    x = torch.randn(3, 5, 8)
    conversion = qkv.convert(layer)
    layer(x)
    assert conversion.changed and not conversion.left
    layer.body = lambda _, q, k, v: (q @ k.mT - 3e4).masked_fill(mask, -2e4).softmax(-1) @ v
    assert_close(layer(x), Attention.forward(layer, x), rtol=0, atol=0)
    assert conversion.left == {"": "its softmax(query @ key) @ value differs from qkv's"}


def test_hooks_within_that_see_gradients(calls):
    """torch calls them with tensors alone: such a call is the layer's own."""
    layer, seen = Attention(Attention.plain), []
    qkv.convert(layer)
    hook = layer.drop.register_full_backward_hook(lambda *given: seen.append(given[2][0].shape))
    layer(torch.randn(3, 5, 8)).sum().backward()
    assert seen == [(3, 2, 5, 5)] and not calls
    hook.remove()
    layer(torch.randn(3, 5, 8))
    assert calls


def test_refused_where_it_differs():
    """-1e4 hides a key, unless scores are as low."""
    torch.manual_seed(0)
    mask = torch.tensor([False, False, True, False, True])
    layer = Attention(lambda _, q, k, v: (q @ k.mT - 3e4).masked_fill(mask, -2e4).softmax(-1) @ v)
    x = torch.randn(3, 5, 8)
    expected = layer(x)
    conversion = qkv.convert(layer)
    assert conversion.changed and not conversion.left
    assert_close(layer(x), expected, rtol=0, atol=0)
    assert conversion.left == {"": "its softmax(query @ key) @ value differs from qkv's"}
    assert "left: its softmax" in repr(conversion) and not conversion.changed


def rows_that_see_nothing(way):
    """The second call has some, whose weights are then not equal, or not 0."""
    causal, padding = torch.ones(5, 5).triu(1).bool(), torch.arange(5) < 1
    bias, low = torch.randn(2, 5, 5), torch.tensor(torch.finfo(torch.float32).min)

    def body(self, query, key, value):
        is_hidden = padding & (self.calls > 1)
        self.calls += 1
        scores = (query @ key.mT).masked_fill(causal, -torch.inf if way == "max" else -1e4)
        if way == "max":
            return torch.max(scores.masked_fill(is_hidden, -torch.inf), low).softmax(-1) @ value
        scores = scores + (bias if way == "bias" else 3.0)
        return scores.masked_fill(is_hidden, -1e4).softmax(-1) @ value

    return body


@pytest.mark.parametrize("way", ["bias", "number", "max"])
def test_rows_that_see_nothing(way):
    torch.manual_seed(0)
    layer, x = Attention(rows_that_see_nothing(way)), torch.randn(3, 5, 8)
    layer.calls = 2
    expected = layer(x)
    conversion = qkv.convert(layer)
    layer.calls = 0
    for _ in range(2):
        layer(x)
    assert conversion.changed and not conversion.left
    assert_close(layer(x), expected)


def test_weights_leave_a_model_as_a_tensor_after_a_second_convert_is_undone():
    """The hook that sees to it is the first one's."""

    def body(self, query, key, value):
        weights = (query @ key.mT).softmax(-1)
        return weights @ value, weights

    model, x = nn.Sequential(Attention(body)), torch.randn(3, 5, 8)
    expected = model(x)
    qkv.convert(model)
    model(x)
    qkv.convert(model).undo()
    found = model(x)
    assert {*map(type, found)} == {torch.Tensor}
    assert_close(found, expected)


def test_weights_that_are_looked_at_later():
    """As a training loop logs them, where no gradients are recorded."""

    def body(self, query, key, value):
        self.weights = (query @ key.mT).softmax(-1)
        return self.weights @ value

    layer, x = Attention(body), torch.randn(3, 5, 8)
    layer(x)
    expected = layer.weights.detach().clone()
    conversion = qkv.convert(layer)
    layer(x)
    assert conversion.changed
    with torch.no_grad():
        assert_close(layer.weights.mean(), expected.mean())
        assert_close(pickle.loads(pickle.dumps(layer.weights)), expected)
    assert layer.weights.requires_grad


def test_weights_that_are_looked_at_too_late():
    """As those of every step of a decoder whose cache is written in place."""
    keys = torch.randn(3, 2, 5, 4)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Attention(self.attend)

        def attend(self, layer, query, key, value):
            weights = (query @ keys.mT).softmax(-1)
            return weights @ value, weights

        def forward(self, x):
            output, weights = self.layer(x)
            keys[:, :, 0] += 1
            return output, weights + 0

    model, x = Decoder().eval(), torch.randn(3, 5, 8)
    conversion = qkv.convert(model)
    message = "convert: weights that a layer returned or kept are looked at after a tensor"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        model(x)
    assert conversion.changed
    conversion.undo()
    model(x)


def test_dropout():
    """Of the weights, with the same expectation and another stream of random numbers."""
    torch.manual_seed(0)
    layer = Attention(Attention.plain, dropout=0.25)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        expected = layer.eval()(x)
        conversion = qkv.convert(layer)
        assert_close(layer(x), expected)
        layer.train()
        mean = torch.stack([layer(x) for _ in range(500)]).mean(0)
        assert not conversion.left and not torch.allclose(layer(x), expected)
    assert_close(mean, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast(autocast):
    torch.manual_seed(0)
    layer, x = Attention(Attention.plain), torch.randn(3, 5, 8)
    with torch.autocast("cpu", enabled=autocast):
        expected = layer(x)
        conversion = qkv.convert(layer)
        layer(x)
        found = layer(x)
    assert not conversion.left and found.dtype == expected.dtype
    assert_close(found, expected, rtol=0, atol=0.02 if autocast else 1e-5)


def test_autocast_of_values_in_float32():
    """What it gives has autocast's dtype; so have weights that are looked at after it."""

    def body(self, query, key, value):
        self.scores = query.float() @ key.float().mT
        return self.scores.softmax(-1) @ value.float()

    torch.manual_seed(0)
    layer, x = Attention(body), torch.randn(3, 5, 8)
    expected = []
    for is_converted in (False, True):
        conversion = qkv.convert(layer) if is_converted else None
        layer(x)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            output, found = layer(x), layer.scores
        expected.append((output, found + 0))
    assert conversion.changed
    assert expected[0][0].dtype == expected[1][0].dtype == torch.float16
    assert_close(expected[1][0], expected[0][0], rtol=0, atol=2e-3)
    assert torch.equal(expected[1][1], expected[0][1])


@pytest.mark.parametrize("duplicate", [
    copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))
])  # fmt: skip
@pytest.mark.parametrize("has_run", [True, False])
def test_copies(duplicate, has_run, calls):
    layer, x = Attention(Attention.plain), torch.randn(3, 5, 8)
    expected = layer(x)
    conversion = qkv.convert(layer)
    if has_run:
        layer(x)
    other = duplicate(layer)
    conversion.undo()
    assert_close(other(x), expected)
    assert calls
    qkv.convert(other).undo()
    calls.clear()
    assert type(other) is type(layer) is Attention and not other._forward_hooks
    assert torch.equal(other(x), expected) and torch.equal(layer(x), expected)
    assert not calls


def test_threads():
    layer, found = Attention(Attention.plain), {}
    inputs = [torch.randn(3, 5 + i, 8) for i in range(4)]
    expected = [layer(x) for x in inputs]
    qkv.convert(layer)

    def run(i):
        found[i] = [layer(inputs[i]) for _ in range(50)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(expected):
        assert_close(found[i], [x] * 50)


def test_an_exception_ends_it():
    def body(self, query, key, value):
        (query @ key.mT).softmax(-1)
        raise KeyboardInterrupt

    layer = Attention(body)
    conversion = qkv.convert(layer)
    with pytest.raises(KeyboardInterrupt):
        layer(torch.randn(3, 5, 8))
    assert not torch.overrides._get_current_function_mode_stack()
    assert conversion.changed and not conversion.left
    layer.body = Attention.plain
    assert operators(lambda: layer(torch.randn(3, 5, 8)))


def test_under_functorch_it_is_the_layers_own(calls):
    layer, x = Attention(Attention.plain), torch.randn(4, 3, 5, 8)
    expected = torch.stack([layer(y) for y in x])
    qkv.convert(layer)
    assert_close(torch.func.vmap(layer)(x), expected)
    assert not calls
