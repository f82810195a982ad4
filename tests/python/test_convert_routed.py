"""qkv.convert of layers whose scaled_dot_product_attention becomes qkv's: when that begins and
ends, what copies are, and which layers it cannot reach."""

import copy
import pickle

import pytest
import torch
from common import COMPILERS
from test_convert import operators
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv import _verbose

timm = pytest.importorskip("timm")
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def layer_of_timm(is_fused=True):
    torch.manual_seed(0)
    layer = timm.layers.Attention(32, 4).eval()
    layer.fused_attn = is_fused
    return layer


def assert_not_routed():
    query = torch.randn(1, 4, 8)
    assert not operators(lambda: scaled_dot_product_attention(query, query, query))
    assert not torch.overrides._get_current_function_mode_stack()


def raise_interrupt(*args):
    raise KeyboardInterrupt


def test_traced_symbolically():
    """torch.fx hands on proxies, which have no truth; timm and torchvision get features by it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = layer_of_timm()

        def forward(self, x, is_causal=False):
            return self.attn(x, is_causal=is_causal)

    model = Model()
    expected = model(X)
    qkv.convert(model)
    graph = torch.fx.symbolic_trace(model)
    assert operators(lambda: graph(X))
    torch.testing.assert_close(graph(X), expected)


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("convert_first", [True, False])
def test_an_interrupt_ends_it(where, convert_first):
    """Ctrl-C, in the layer and in hooks on either side."""
    layer = layer_of_timm()
    if convert_first:
        conversion = qkv.convert(layer)
    module = layer.proj if where == "inside" else layer
    register = {
        "before": lambda: module.register_forward_pre_hook(raise_interrupt, prepend=True),
        "inside": lambda: module.register_forward_hook(raise_interrupt),
        "after": lambda: module.register_forward_hook(raise_interrupt),
    }
    handle = register[where]()
    if not convert_first:
        conversion = qkv.convert(layer)
    with pytest.raises(KeyboardInterrupt):
        layer(X)
    assert_not_routed()
    handle.remove()
    assert operators(lambda: layer(X))
    conversion.undo()
    assert not operators(lambda: layer(X))


def test_a_hook_that_raises_does_not_end_what_is_around():
    """A layer fails before it runs, within a mode of the caller's."""
    layer = layer_of_timm()
    layer.register_forward_pre_hook(raise_interrupt, prepend=True)
    qkv.convert(layer)
    with torch.device("meta"), torch.utils._device.DeviceContext(torch.device("cpu")):
        with pytest.raises(KeyboardInterrupt):
            layer(X)
        assert torch.zeros(1).device.type == "cpu"
    assert_not_routed()


def test_an_interrupt_while_torch_has_put_the_mode_aside():
    """torch takes a mode off its stack while that handles a function written in Python. What
    interrupts it there finds one mode less than was put on."""
    layer = layer_of_timm()
    qkv.convert(layer)

    def interrupted(*args):
        torch._C._pop_torch_function_stack()
        raise KeyboardInterrupt

    layer.proj.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        layer(X)
    assert_not_routed()


@pytest.mark.parametrize("device, why", [
    ("cpu", "a mask and is_causal together"), ("meta", "the tensors are torch.float32 on meta"),
])  # fmt: skip
def test_what_is_left_to_torch(device, why, monkeypatch):
    """It is said once, if it was asked for. torch 2.15 refuses a mask and is_causal together."""

    def attended():
        try:
            return layer(x, **call)
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(_verbose, "_IS_ON", True)
    monkeypatch.setattr(_verbose, "_said", set())
    layer, x = layer_of_timm().to(device), X.to(device)
    call = {
        "attn_mask": torch.ones(5, 5, device=device).triu(-2).bool(),
        "is_causal": why[0] == "a",
    }
    expected = attended()
    qkv.convert(layer)
    with pytest.warns(UserWarning, match=f"converted layer is left to torch: {why}$") as said:
        found = [attended() for _ in range(2)]
    assert len(said) == 1
    for y in found:
        if device == "meta":
            assert y.device == expected.device
        elif isinstance(expected, str):
            assert y == expected
        else:
            assert torch.equal(y, expected)


@pytest.mark.parametrize("is_fused", [True, False])
def test_twice(is_fused):
    model = nn.ModuleDict({"a": layer_of_timm(is_fused), "b": nn.MultiheadAttention(8, 2)})
    expected, types = model["a"](X), [type(m) for m in model.modules()]
    first, second = qkv.convert(model), qkv.convert(model)
    assert [*first.changed] == ["a", "b"]
    assert not second.changed
    assert second.left == {"a": "converted already", "b": "converted already"}
    second.undo()
    assert operators(lambda: model["a"](X))
    first.undo()
    assert [type(m) for m in model.modules()] == types
    assert model["a"].fused_attn == is_fused
    assert not operators(
        lambda: torch.testing.assert_close(model["a"](X), expected, rtol=0, atol=0)
    )
    assert qkv.convert(model).changed == first.changed


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("is_fused", [True, False])
def test_copies(duplicate, is_fused):
    """They are converted; undoing one leaves the other."""
    layer = layer_of_timm(is_fused)
    expected = layer(X)
    conversion = qkv.convert(layer)
    other = duplicate(layer)
    assert repr(other) == repr(layer) and isinstance(other, timm.layers.Attention)
    assert operators(lambda: torch.testing.assert_close(other(X), layer(X), rtol=0, atol=0))
    of_other = qkv.convert(other)
    assert of_other.changed == conversion.changed
    assert not qkv.convert(other).changed
    of_other.undo()
    assert type(other) is timm.layers.Attention and other.fused_attn == is_fused
    assert not operators(lambda: torch.testing.assert_close(other(X), expected, rtol=0, atol=0))
    assert operators(lambda: layer(X))
    again = duplicate(layer)
    conversion.undo()
    assert type(layer) is timm.layers.Attention
    assert not operators(lambda: layer(X))
    assert operators(lambda: again(X))


def test_copies_of_torchs_layer():
    layer = nn.MultiheadAttention(32, 4)
    conversion = qkv.convert(layer)
    encoder = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
    of_copies = qkv.convert(encoder)
    assert of_copies.changed == dict.fromkeys("01", conversion.changed[""])
    of_copies.undo()
    assert all(type(m) is nn.MultiheadAttention for m in encoder)
    assert not any(m.out_proj._forward_pre_hooks for m in encoder)
    assert type(layer) is qkv.nn.MultiheadAttention
    ours = qkv.nn.MultiheadAttention(32, 4)
    assert not qkv.convert(ours).changed
    assert type(ours) is qkv.nn.MultiheadAttention


def test_forward_that_others_set():
    """As accelerate does; before or after."""
    layer = layer_of_timm()
    for conversions in (1, 2):
        forward = layer.forward
        layer.forward = lambda x, forward=forward: forward(2 * x)
        if conversions == 1:
            conversion = qkv.convert(layer)
    assert operators(lambda: layer(X))
    conversion.undo()
    assert not operators(lambda: layer(X))


def test_a_class_made_of_the_converted_one():
    """By others than torch: the class stays, and what it inherits ends with undo()."""
    layer = layer_of_timm()
    conversion = qkv.convert(layer)
    layer.__class__ = type("Sharded", (type(layer),), {})
    assert operators(lambda: layer(X))
    conversion.undo()
    assert type(layer).__name__ == "Sharded"
    assert not operators(lambda: layer(X))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("backend", COMPILERS)
def test_compiled_before_and_between(in_place, backend):
    """What is compiled follows the layer there and back."""
    layer = layer_of_timm()
    expected = layer(X)

    def compiled():
        if in_place:
            layer.compile(fullgraph=True, backend=backend)
        return layer if in_place else torch.compile(layer, fullgraph=True, backend=backend)

    before = compiled()
    before(X)
    conversion = qkv.convert(layer)
    between = compiled()
    assert operators(lambda: torch.testing.assert_close(before(X), expected))
    assert operators(lambda: torch.testing.assert_close(between(X), expected))
    conversion.undo()
    assert not operators(lambda: torch.testing.assert_close(before(X), expected))
    assert not operators(lambda: torch.testing.assert_close(between(X), expected))
    assert_not_routed()


class Unflattens(nn.Module):
    """`unflatten` is one of the few methods of tensors that are in Python, where a mode is on."""

    def forward(self, x):
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def test_compiled_with_heads_by_unflatten():
    layer = Unflattens()
    expected = layer(X)
    qkv.convert(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert operators(lambda: torch.testing.assert_close(compiled(X), expected))


@pytest.fixture(scope="module")
def processors():
    return pytest.importorskip("diffusers.models.attention_processor")


def diffusers_layer(processors, processor, **options):
    torch.manual_seed(0)
    return processors.Attention(32, heads=4, dim_head=8, processor=processor, **options).eval()


def test_processors_that_do_not_call_it_are_left(processors):
    model = nn.ModuleDict({
        "sliced": diffusers_layer(processors, processors.SlicedAttnProcessor(2)),
        "fused": diffusers_layer(processors, processors.AttnProcessor2_0()),
        "xformers": diffusers_layer(processors, processors.XFormersAttnProcessor()),
        "unscaled": diffusers_layer(processors, processors.AttnProcessor(), scale_qk=False),
    })  # fmt: skip
    expected = {name: layer(X) for name, layer in model.items() if name != "xformers"}
    conversion = qkv.convert(model)
    assert [*conversion.changed] == ["fused"]
    assert conversion.left == {
        name: f"its processor, {processor}, does not call scaled_dot_product_attention"
        for name, processor in [
            ("sliced", "SlicedAttnProcessor"),
            ("xformers", "XFormersAttnProcessor"),
            ("unscaled", "AttnProcessor"),
        ]
    }
    for name, output in expected.items():
        torch.testing.assert_close(model[name](X), output)
    assert operators(lambda: model["fused"](X))


class Own:
    """A processor of the user's, by way of diffusers' own."""

    def __new__(cls):
        from diffusers.models.attention_processor import AttnProcessor2_0

        return type("Own", (AttnProcessor2_0,), {})()


def test_an_inherited_call(processors):
    layer = diffusers_layer(processors, Own())
    assert qkv.convert(layer).changed
    assert operators(lambda: layer(X))


def test_a_processor_set_since_gives_way(processors):
    """undo() gives back the processor that the layer had."""
    before = processors.AttnProcessor()
    layer = diffusers_layer(processors, before)
    conversion = qkv.convert(layer)
    layer.set_processor(processors.IPAdapterAttnProcessor2_0(32, 32))  # an nn.Module
    conversion.undo()
    assert layer.processor is before
    assert "processor" not in dict(layer.named_children())
