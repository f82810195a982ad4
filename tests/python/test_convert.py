"""qkv.convert: models of torch, transformers, timm and diffusers, changed in place and back."""

import copy
import pickle

import pytest
import torch
from common import COMPILERS
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

import qkv


def operators(call):
    """The names of qkv's operators that a call runs."""
    with profile() as found:
        call()
    return {event.key for event in found.key_averages() if event.key.startswith("qkv::")}


def results(model, *inputs, **keywords):
    """The output, and the gradients of all parameters that have one."""
    output = model(*inputs, **keywords)
    output = getattr(output, "last_hidden_state", output)
    output = getattr(output, "sample", output)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(output.square().mean(), parameters, allow_unused=True)
    return output, *(g for g in grads if g is not None)


def assert_converts(model, *inputs, **keywords):
    """The same results by qkv; undone, the same bits as before. Returns the conversion."""
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    before = results(model, *inputs, **keywords)
    conversion = qkv.convert(model)
    assert conversion.changed
    assert operators(lambda: torch.testing.assert_close(
        results(model, *inputs, **keywords), before, rtol=1e-4, atol=1e-5
    ))  # fmt: skip
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    conversion.undo()
    conversion.undo()
    assert not operators(lambda: torch.testing.assert_close(
        results(model, *inputs, **keywords), before, rtol=0, atol=0
    ))  # fmt: skip
    return conversion


@pytest.mark.parametrize("train", [True, False])
def test_torch_transformer(train):
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True).train(train)
    source, target = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    conversion = assert_converts(
        model, source, target, tgt_mask=causal, src_key_padding_mask=padding
    )
    layers = [name for name, m in model.named_modules() if type(m) is nn.MultiheadAttention]
    assert [*conversion.changed] == layers and len(layers) == 6
    assert not conversion.left


def test_inference_of_an_encoder_reaches_the_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        expected = model(x)
        conversion = qkv.convert(model)
        assert operators(lambda: torch.testing.assert_close(model(x), expected))
        conversion.undo()
        assert not operators(lambda: model(x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_model_and_conversion_is_undone_by_itself(again):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    other, conversion = again((model, qkv.convert(model)))
    conversion.undo()
    assert type(model.self_attn) is qkv.nn.MultiheadAttention
    assert type(other.self_attn) is nn.MultiheadAttention


def test_hooks_copies_and_pickles():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2)
    called = []
    layer.register_forward_hook(lambda *_: called.append(1))
    conversion = qkv.convert(layer)
    assert type(layer) is qkv.nn.MultiheadAttention
    assert [*conversion.changed] == [""]
    x = torch.randn(3, 1, 16)
    expected = layer(x, x, x)[0]
    assert called
    layer._forward_hooks.clear()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, x, x)[0], expected)
    assert not qkv.convert(layer).changed


class Attention(nn.Module):
    """One that qkv does not know."""

    def forward(self, x):
        return x.softmax(-1)


class Changed(nn.MultiheadAttention):
    pass


def test_a_forward_that_others_set():
    """As accelerate's hooks do, which call that which they have found."""
    layer, x = nn.MultiheadAttention(32, 4).eval(), torch.randn(10, 2, 32)
    found = layer.forward
    layer.forward = lambda *args, **keywords: found(*args, **keywords)
    conversion = qkv.convert(layer)
    assert conversion.left == {"": "it has a forward of its own"} and not conversion.changed
    assert type(layer) is nn.MultiheadAttention and not operators(lambda: layer(x, x, x))


def test_undo_within_what_wraps_the_last_projection():
    """As peft's adapters do: nothing is left that keeps torch's encoder off its fast path."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    conversion = qkv.convert(layer)
    projection = layer.self_attn.out_proj
    layer.self_attn.out_proj = nn.Sequential(projection)
    conversion.undo()
    layer.self_attn.out_proj = projection
    with torch.no_grad(), profile() as found:
        layer(torch.randn(2, 5, 32))
    assert "aten::_transformer_encoder_layer_fwd" in {x.key for x in found.key_averages()}


def test_undo_beneath_a_forward_that_others_set():
    layer, x = nn.MultiheadAttention(32, 4).eval(), torch.randn(10, 2, 32)
    expected = layer(x, x, x)
    conversion = qkv.convert(layer)
    found = layer.forward
    layer.forward = lambda *args, **keywords: found(*args, **keywords)
    assert operators(lambda: layer(x, x, x))
    conversion.undo()
    assert not operators(lambda: layer(x, x, x))
    torch.testing.assert_close(layer(x, x, x), expected, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="no spans"):
        layer(x, x, x, spans=torch.tensor([0, 1], dtype=torch.int32))


def test_what_is_left_is_named():
    model = nn.ModuleDict({"mine": Attention(), "sub": Changed(8, 2), "linear": nn.Linear(2, 2)})
    conversion = qkv.convert(model)
    assert not conversion.changed
    assert conversion.left == {
        "mine": "Attention is no layer that qkv knows",
        "sub": "Changed is a subclass of torch.nn.MultiheadAttention, with ways of its own",
    }
    assert "mine  left: Attention is no" in repr(conversion)
    assert repr(qkv.convert(nn.Linear(2, 2))) == "no attention found"


class AttentionBlock(nn.Module):
    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


def test_parts_of_an_attention_that_is_changed():
    """What is in it, or around it, is not said to be left."""
    around = Attention()
    around.inner = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"a": AttentionBlock(Attention()), "b": around, "c": Attention()})
    conversion = qkv.convert(model)
    assert [*conversion.changed] == ["a", "b.inner"]
    assert [*conversion.left] == ["c"]


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    def fail(module):
        if type(module) is nn.Identity:
            raise ImportError

    monkeypatch.setattr("qkv._conversion.convert.convert_transformers", fail)
    model = nn.Sequential(nn.MultiheadAttention(8, 2), AttentionBlock(None), nn.Identity())
    with pytest.raises(ImportError):
        qkv.convert(model)
    assert [type(x) for x in model] == [nn.MultiheadAttention, AttentionBlock, nn.Identity]


def test_a_scripted_model_is_left():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.ModuleDict({"a": torch.jit.script(layer), "b": nn.MultiheadAttention(8, 2)})
    conversion = qkv.convert(model)
    assert [*conversion.changed] == ["b"]
    assert conversion.left == {"a": "scripted; qkv.replace_sdpa() takes what it calls"}


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match="convert: model is a function, but a torch.nn.Module"):
        qkv.convert(lambda x: x)


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=4, vocab_size=50, attn_implementation="sdpa"
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    tokens = torch.randint(50, (2, 9))
    seen = torch.ones_like(tokens)
    seen[1, 6:] = 0
    conversion = assert_converts(model, tokens, attention_mask=seen)
    assert conversion.changed == {"": 'attn_implementation "sdpa" -> "qkv"'}
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("qkv")
    around = nn.Sequential(nn.Sequential(model))
    assert qkv.convert(around).left == {"0.0": "converted already"}
    # A part of it is not a model that has a config to itself.
    layers = model.encoder.layer if name == "Bert" else model.layers
    part = qkv.convert(layers)
    assert len(part.left) == 2 and not part.changed
    assert {*part.left.values()} == {"it attends as its model's config says: convert the model"}


def test_transformers_within_a_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        attn_implementation="eager",
    )  # fmt: skip
    model = nn.ModuleDict({"a": transformers.BertModel(config), "b": nn.MultiheadAttention(8, 2)})
    conversion = qkv.convert(model)
    assert [*conversion.changed] == ["a", "b"]
    assert not conversion.left
    again = qkv.convert(model)
    assert not again.changed and again.left == dict.fromkeys("ab", "converted already")
    again.undo()
    assert model["a"].config._attn_implementation == "qkv"
    conversion.undo()
    assert model["a"].config._attn_implementation == "eager"


class AttentionPooling(nn.Module):
    """As classifiers have it on top of an encoder: attention by name, and none of transformers'."""

    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, hidden, attention_mask):
        scores = self.score(hidden).masked_fill(attention_mask[..., None] == 0, -1e9)
        return (scores.softmax(1) * hidden).sum(1)


def classifiers():
    """Beside an encoder, in a subclass of one, and beside one that an Auto class builds; all of the
    same weights and config."""
    transformers = pytest.importorskip("transformers")

    class Beside(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = self.make(config)
            self.pool = AttentionPooling(config.hidden_size)
            self.post_init()

        def make(self, config):
            return transformers.BertModel(config)

        def forward(self, tokens, seen):
            return self.pool(self.bert(tokens, attention_mask=seen).last_hidden_state, seen)

    class Auto(Beside):
        def make(self, config):
            return transformers.AutoModel.from_config(config)

    class Subclass(transformers.BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.pool = AttentionPooling(config.hidden_size)
            self.post_init()

        def forward(self, tokens, seen):
            hidden = super().forward(tokens, attention_mask=seen).last_hidden_state
            return self.pool(hidden, seen)

    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=50,
    )  # fmt: skip
    return {"beside": Beside, "auto": Auto, "subclass": Subclass}, config


@pytest.mark.parametrize("name", ["beside", "auto", "subclass"])
@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_transformers_with_a_layer_of_the_users(name, before):
    kinds, config = classifiers()
    torch.manual_seed(0)
    model = kinds[name]._from_config(config, attn_implementation=before).eval()
    encoder = model if name == "subclass" else model.bert
    seen = torch.ones(2, 9, dtype=torch.int64)
    seen[1, 6:] = 0
    conversion = assert_converts(model, torch.randint(50, (2, 9)), seen)
    assert f'attn_implementation "{before}" -> "qkv"' in conversion.changed.popitem()[1]
    assert {model.config._attn_implementation, encoder.config._attn_implementation} == {before}
    made = kinds[name]._from_config(config, attn_implementation="qkv")
    assert made.config._attn_implementation == "qkv"


def sam_vision():
    """Its attention is its own, and it has "sdpa"."""
    transformers = pytest.importorskip("transformers", "5.23", "its encoder has another config")
    return transformers.SamVisionModel(transformers.SamVisionConfig(
        hidden_size=16, mlp_dim=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
        patch_size=4, output_channels=4,
    ))  # fmt: skip


def test_transformers_beside_attention_that_is_not_exchanged():
    """Another model, with a config of its own, stays as fast as it was."""
    kinds, config = classifiers()
    model = kinds["beside"](config)
    model.vision = sam_vision()
    conversion = qkv.convert(model)
    assert model.bert.config._attn_implementation == "qkv"
    assert model.vision.config._attn_implementation == "sdpa"
    layer = "vision.vision_encoder.layers.0.attn"
    assert "SamVisionSdpaAttention writes out" in conversion.changed[layer]
    conversion.undo()
    assert model.bert.config._attn_implementation == "sdpa"


def test_transformers_without_attention_to_exchange():
    """Its config stays what it was, and its layers are routed."""
    transformers = pytest.importorskip("transformers")
    bloom = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    for model, before in ((transformers.BloomModel(bloom), "eager"), (sam_vision(), "sdpa")):
        assert model.config._attn_implementation == before
        conversion = qkv.convert(model)
        assert "" not in conversion.changed and len(conversion.changed) == 1
        assert model.config._attn_implementation == before


@pytest.fixture(scope="module")
def timm():
    return pytest.importorskip("timm")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("backend", COMPILERS)
def test_timm(timm, is_fused, backend):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    ).eval()
    for block in model.blocks:
        block.attn.fused_attn = is_fused
    conversion = assert_converts(model, torch.randn(2, 3, 32, 32))
    assert [*conversion.changed] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(block.attn.fused_attn == is_fused for block in model.blocks)
    qkv.convert(model)
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    assert operators(lambda: copy.deepcopy(model)(x))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), expected)
    assert operators(lambda: compiled(x))


def test_scripted_timm(timm):
    """timm's own tests script every model. A module that is scripted cannot be converted, but
    replace_sdpa reaches it: forward and backward give what the model gives as it is."""
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3
    )
    scripted = torch.jit.script(model)
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    for _ in range(3):  # the profiling executor optimises the second and third run
        model.zero_grad()
        with qkv.replace_sdpa():
            found = scripted(x)
            found.square().sum().backward()
            assert sum(qkv.sdpa_report().taken.values()) == 2
        torch.testing.assert_close(found, expected)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


def test_timm_when_forward_fails(timm):
    layer = timm.layers.Attention(32, 4)
    qkv.convert(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5, 31))
    query = torch.randn(1, 4, 8)
    assert not operators(lambda: scaled_dot_product_attention(query, query, query))


@pytest.mark.parametrize("processor", ["AttnProcessor", "AttnProcessor2_0"])
def test_diffusers(processor):
    processors = pytest.importorskip("diffusers.models.attention_processor")
    torch.manual_seed(0)
    layer = processors.Attention(
        32, heads=4, dim_head=8, processor=getattr(processors, processor)()
    )
    model = nn.Sequential(layer)
    conversion = assert_converts(model, torch.randn(2, 7, 32))
    assert [*conversion.changed] == ["0"]
    assert type(layer.processor).__name__ == processor


def test_diffusers_processors_that_differ():
    """AttnProcessor ignores norms and has the layer's scale, AttnProcessor2_0 the other way."""
    processors = pytest.importorskip("diffusers.models.attention_processor")
    layers = nn.Sequential(
        processors.Attention(32, heads=4, dim_head=8, qk_norm="layer_norm"),
        processors.Attention(32, heads=4, dim_head=8),
        processors.Attention(32, heads=4, dim_head=8, scale_qk=False),
    )
    layers[1].scale *= 2
    for layer in layers:
        layer.set_processor(processors.AttnProcessor())
    x = torch.randn(2, 7, 32)
    expected = layers(x)
    why = "its processor, AttnProcessor, does not call scaled_dot_product_attention"
    assert qkv.convert(layers).left == dict.fromkeys("012", why)
    torch.testing.assert_close(layers(x), expected, rtol=0, atol=0)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized(layer):
    name = "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "gain"
    nn.utils.parametrize.register_parametrization(layer, name, Doubled())


def sharded(layer):
    """The class of what fully_shard was called for."""
    base = type("FSDPModule", (), {})
    members = {"__module__": "torch.distributed.fsdp._fully_shard._fsdp_init"}
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (base, type(layer)), members)


class Gained(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, query, key, value):
        query = query * self.gain
        return (nn.functional.scaled_dot_product_attention(query, key, value),)


@pytest.mark.parametrize("wrap", [parametrized, sharded])
@pytest.mark.parametrize("make", [Gained, lambda: nn.MultiheadAttention(8, 2)])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_classes_that_torch_makes(make, wrap, before):
    """They are converted, and back, as those that they are made of are."""
    model, x = nn.Sequential(make()), torch.randn(3, 5, 8)
    [layer], kind = model, type(model[0])
    call = lambda: layer(x, x, x)  # noqa: E731
    if before:
        wrap(layer)
    conversions = [qkv.convert(model)]
    if not before:
        wrap(layer)
    found = call()
    for _ in range(2):
        assert operators(call) and isinstance(layer, kind)
        conversions.pop().undo()
        assert not operators(call) and isinstance(layer, kind)
        torch.testing.assert_close(call()[0], found[0])
        conversions.append(qkv.convert(model))
        assert [*conversions[0].changed] == ["0"]
    if wrap is parametrized:
        nn.utils.parametrize.remove_parametrizations(layer, [*layer.parametrizations][0])
        torch.testing.assert_close(call()[0], found[0])
    conversions.pop().undo()
    assert type(layer) is kind or wrap is sharded
