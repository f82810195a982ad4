"""attn_implementation="qkv" for transformers' models that write attention out in their own code,
alone or beside layers that ask transformers' interface: what such a model gets is what "eager"
gives, compiled or not."""

import copy
import pickle

import numpy as np
import pytest
import torch
from test_convert import operators
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

import qkv.integrations.transformers  # noqa: E402

qkv.integrations.transformers.register()

from transformers import masking_utils  # noqa: E402

from qkv._conversion.route import is_routed  # noqa: E402
from qkv._conversion.written import writes_attention  # noqa: E402
from qkv.integrations.transformers._suited import suited  # noqa: E402

VERSION = transformers.__version__
LAYERS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
TEXT = LAYERS | {"vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}


def git():
    """The text layers are its own, those of the image ask."""
    config = transformers.GitConfig(
        **TEXT, vision_config=LAYERS | {"image_size": 16, "patch_size": 8}
    )
    return transformers.GitForCausalLM, config, {
        "input_ids": torch.randint(3, 61, (2, 9)), "pixel_values": torch.randn(2, 3, 16, 16),
    }  # fmt: skip


def bigbird(kind):
    """The encoder is its own, the decoder asks, and both have one config."""
    config = transformers.BigBirdPegasusConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, attention_type=kind,
        max_position_embeddings=64, block_size=4, num_random_blocks=1,
    )  # fmt: skip
    seen = torch.ones(2, 32, dtype=torch.int64)
    seen[1, 20:] = 0
    return transformers.BigBirdPegasusForConditionalGeneration, config, {
        "input_ids": torch.randint(3, 61, (2, 32)), "attention_mask": seen,
        "decoder_input_ids": torch.randint(3, 61, (2, 7)),
    }  # fmt: skip


def clap():
    """The audio layers are its own, the text asks."""
    config = transformers.ClapConfig(
        text_config=TEXT, projection_dim=16,
        audio_config={
            "hidden_size": 16, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4,
            "patch_stride": [4, 4], "patch_embeds_hidden_size": 8, "depths": [1, 1],
            "num_attention_heads": [2, 2], "window_size": 4,
        },
    )  # fmt: skip
    seen = torch.ones(2, 9, dtype=torch.int64)
    seen[1, 6:] = 0
    return transformers.ClapModel, config, {
        "input_ids": torch.randint(3, 61, (2, 9)), "attention_mask": seen,
        "input_features": torch.randn(2, 1, 256, 16), "is_longer": torch.zeros(2, 1).bool(),
    }  # fmt: skip


def reading_order():
    """The part of PP-DocLayoutV2 with attention of its own, until 5.23, in a module that also
    asks."""
    from transformers.models.pp_doclayout_v2 import modeling_pp_doclayout_v2 as family

    config = family.PPDocLayoutV2ReadingOrder.config_class(
        **LAYERS, vocab_size=61, coordinate_size=5, shape_size=6, global_pointer_head_size=8
    )
    corners = torch.randint(0, 500, (2, 6, 2))
    return family.PPDocLayoutV2ReadingOrder, config, {
        "boxes": torch.cat([corners, corners + 20], -1), "labels": torch.randint(0, 19, (2, 6)),
        "mask": torch.arange(6) < torch.tensor([[6], [4]]),
    }  # fmt: skip


def bridgetower():
    """It has no "sdpa", and its layers for both say is_causal=True where nothing is hidden."""
    vision = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_channels": 3, "patch_size": 8,
        "image_size": 16,
    }  # fmt: skip
    config = transformers.BridgeTowerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vision_config=vision,
        text_config=TEXT | {"num_hidden_layers": 2},
    )  # fmt: skip
    seen = torch.ones(2, 9, dtype=torch.int64)
    seen[1, 6:] = 0
    return transformers.BridgeTowerModel, config, {
        "input_ids": torch.randint(3, 61, (2, 9)), "attention_mask": seen,
        "pixel_values": torch.randn(2, 3, 16, 16),
    }  # fmt: skip


def deepseek_v4():
    """It has no "sdpa", and lengthens the mask by zeros and -inf."""
    config = transformers.DeepseekV4Config(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, head_dim=16, q_lora_rank=12, o_lora_rank=8, o_groups=2,
        n_routed_experts=4, num_experts_per_tok=2, sliding_window=6, index_n_heads=2,
        index_head_dim=16, index_topk=4, max_position_embeddings=64,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
    )  # fmt: skip
    return transformers.DeepseekV4ForCausalLM, config, {"input_ids": torch.randint(3, 61, (2, 13))}


MODELS = {
    "bridgetower": (bridgetower, {"BridgeTowerModel": "qkv_added_masks"}),
    "deepseek_v4": (deepseek_v4, {"DeepseekV4Model": "qkv_added_masks"}),
    "git": (git, {"GitModel": "eager", "GitVisionModel": "qkv"}),
    "bigbird full": (lambda: bigbird("original_full"), {
        "BigBirdPegasusEncoder": "qkv_added_masks", "BigBirdPegasusDecoder": "qkv_added_masks",
    }),
    "bigbird sparse": (lambda: bigbird("block_sparse"), {
        "BigBirdPegasusEncoder": "qkv_added_masks", "BigBirdPegasusDecoder": "qkv_added_masks",
    }),
    "clap": (clap, {"ClapTextModel": "qkv", "ClapAudioModel": "eager"}),
}  # fmt: skip
if VERSION >= "5.23":  # before, its config refuses a part of itself
    asks = {"PPDocLayoutV2ReadingOrder": "eager" if VERSION < "5.24" else "qkv"}
    MODELS["reading order"] = reading_order, asks


def both(name):
    """The same model with "eager" and with "qkv", and a call of it."""
    torch.manual_seed(0)
    model_class, config, call = MODELS[name][0]()
    eager, ours = (
        model_class._from_config(copy.deepcopy(config), attn_implementation=how).eval()
        for how in ("eager", "qkv")
    )
    with torch.no_grad():  # of the size that trained ones have, so that mistakes show
        for parameter in eager.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ours.load_state_dict(eager.state_dict())
    return eager, ours, call


def tensors(output):
    """The floating tensors at the top of an output."""
    values = [output] if isinstance(output, torch.Tensor) else output.values()
    return [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]


def implementations(model):
    models = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return {type(m).__name__: m.config._attn_implementation for m in models}


@pytest.mark.one_in(3)
@torch.no_grad()
@pytest.mark.parametrize("name, compiled", [
    *((name, False) for name in MODELS), ("git", True), ("bigbird full", True),
])  # fmt: skip
def test_what_eager_gives(name, compiled):
    eager, ours, call = both(name)
    np.random.seed(0)  # BigBird's blocks
    expected = tensors(eager(**call))
    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    np.random.seed(0)
    found = tensors(run(**call))
    torch._dynamo.reset()
    assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_what_can_be_exchanged_is(name):
    _, model, call = both(name)
    wanted = MODELS[name][1]
    assert implementations(model) | wanted == implementations(model)
    assert operators(lambda: model(**call))


@torch.no_grad()
@pytest.mark.parametrize("switched, compiled", [(False, False), (True, False), (True, True)])
def test_git_is_causal(switched, compiled):
    """Whether it is made with "qkv" or switched to it."""
    torch.manual_seed(0)
    model_class, config, call = git()
    model = model_class._from_config(config, attn_implementation="eager" if switched else "qkv")
    model.eval()
    if switched:
        model.set_attn_implementation("qkv")
    run = torch.compile(model, backend="aot_eager") if compiled else model
    first = run(**call).logits
    call["input_ids"][:, -1] = 60 - call["input_ids"][:, -1]
    second = run(**call).logits
    torch._dynamo.reset()
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.allclose(first[:, -1], second[:, -1])


def test_git_generates_the_same():
    eager, ours, call = both("git")
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(**call, **options), eager.generate(**call, **options))


@pytest.mark.parametrize("name", ["bridgetower", "git", "bigbird full", "clap"])
def test_convert_switches_what_can_be_exchanged(name):
    """ "sdpa" stays where a model has it, with its layers routed; undone, all is as it was."""
    model_class, config, _ = MODELS[name][0]()
    model = model_class(config)
    before = implementations(model)
    conversion = qkv.convert(model)
    for part, implementation in MODELS[name][1].items():
        expected = before[part] if implementation == "eager" else implementation
        assert implementations(model)[part] == expected
    writes_out = name != "bridgetower"  # all of which asks, for masks that are added
    assert ("writes out -> qkv" in " ".join(conversion.changed.values())) == writes_out
    assert not qkv.convert(model).changed
    conversion.undo()
    assert implementations(model) == before


@torch.no_grad()
@pytest.mark.parametrize("name", ["bridgetower", "deepseek_v4"])
def test_convert_gives_what_eager_gives(name):
    """Also in layers that go by the config of another part of the model."""
    model, _, call = both(name)
    expected = tensors(model(**call))
    assert qkv.convert(model).changed
    assert_close(tensors(model(**call)), expected, atol=1e-5, rtol=1e-4)


class Attention(torch.nn.Module):
    """Adds the mask that it gets to its scores."""

    def forward(self, x, attention_mask):
        return weigh(x @ x.mT + attention_mask) @ x


class Summing(torch.nn.Module):
    def forward(self, x, attention_mask):
        return (x * attention_mask).cumsum(1)


def weigh(scores):
    return torch.nn.functional.softmax(scores, -1)


class Making(transformers.PreTrainedModel):
    """Makes masks, and hands them to what it builds."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True
    kinds = ()

    def __init__(self, config):
        super().__init__(config)
        self.parts = torch.nn.ModuleList([kind() for kind in self.kinds])
        self.inner = self.build(config)
        self.post_init()

    def build(self, config):
        return None

    def forward(self, x, mask):
        mask = masking_utils.create_causal_mask(self.config, x, mask, None, None)
        return [part(x, mask) for part in self.parts]


class Own(Making):
    kinds = (Attention,)


class OwnWithoutSdpa(Own):
    _supports_sdpa = False


class OwnAndAsking(Own):
    def build(self, config):
        return transformers.LlamaModel(config)


class OwnAndOther(Own):
    """The model inside goes by a config of its own."""

    def build(self, config):
        small = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}
        return transformers.AutoModel.from_config(transformers.ViTConfig(**small))


class AskingAndSumming(OwnAndAsking):
    kinds = (Summing,)


class BesideMasks(AskingAndSumming):
    """Its own part gets no masks but the user's."""

    def forward(self, x, mask):
        return super().forward(x, mask), self.beside(x, mask)

    def build(self, config):
        self.beside = Attention()
        return super().build(config)


class OwnWithoutMasks(Making):
    def build(self, config):
        self.beside = Attention()


@pytest.mark.parametrize("model_class, expected", [
    (Own, ("sdpa", False)),
    (OwnWithoutMasks, ("sdpa", False)),
    (OwnWithoutSdpa, ("eager", False)),
    (OwnAndAsking, ("qkv_added_masks", True)),
    (OwnAndOther, ("sdpa", False)),
    (AskingAndSumming, ("qkv", True)),
    (BesideMasks, ("qkv", True)),
    (transformers.LlamaForCausalLM, ("qkv", True)),
])  # fmt: skip
def test_what_suits_a_model(model_class, expected):
    """And what it has if it is made with it."""
    config = transformers.LlamaConfig(**TEXT, attn_implementation="qkv")
    model = model_class(config)
    assert suited(model) == expected
    assert model.config._attn_implementation == expected[0]


class Longer(OwnAndAsking):
    """What it adds is there after post_init of what it is made from."""

    kinds = ()

    def __init__(self, config):
        super().__init__(config)
        self.parts.append(Attention())
        self.post_init()


def test_a_model_that_is_made_in_two_steps():
    config = transformers.LlamaConfig(**TEXT, attn_implementation="qkv")
    model = Longer(config)
    assert model.config._attn_implementation == "qkv_added_masks"
    assert "_before_route" in model.parts[0].__dict__


@torch.no_grad()
def test_a_part_that_goes_by_the_masks_around_it_when_switched():
    model_class, config, _ = bridgetower()
    made = model_class._from_config(copy.deepcopy(config), attn_implementation="qkv")
    model = model_class._from_config(config, attn_implementation="eager")
    model.set_attn_implementation("qkv")
    assert implementations(model) == implementations(made)


def test_one_part_is_switched_and_the_others_stay():
    """By a dict, as transformers has it; by the argument's name, as well as by its place."""
    model_class, config, _ = clap()

    def states(model):
        audio = [is_routed(x) for x in model.modules() if writes_attention(type(x))]
        return model.config.text_config._attn_implementation, {*audio}

    asked = {"": "qkv", "text_config": "qkv", "audio_config": "eager"}
    made = model_class._from_config(copy.deepcopy(config), attn_implementation=asked)
    assert states(made) == ("qkv", {False})
    model = model_class._from_config(config, attn_implementation="qkv")
    assert states(model) == ("qkv", {True})
    for asked, expected in [
        ({"text_config": "eager"}, ("eager", {True})),
        ({"audio_config": "eager"}, ("eager", {False})),
        ({"text_config": "qkv"}, ("qkv", {False})),
        ({"audio_config": "qkv"}, ("qkv", {True})),
        ("eager", ("eager", {False})),
    ]:
        model.set_attn_implementation(attn_implementation=asked)
        assert states(model) == expected


def test_what_convert_undoes_and_unregister():
    """A model that was given "qkv" keeps it when a convert of it is undone; after unregister none
    takes it, also of those whose config does not say it."""
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config)

    def is_ours():
        return any(map(is_routed, model.modules())) and len(model._forward_hooks) == 1

    model.set_attn_implementation("qkv")
    conversion = qkv.convert(model)
    assert {*conversion.left.values()} == {"converted already"} and not conversion.changed
    conversion.undo()
    assert is_ours()
    qkv.integrations.transformers.unregister()
    try:
        model.set_attn_implementation("qkv")
        assert not is_ours()
    finally:
        qkv.integrations.transformers.register()


@torch.no_grad()
def test_convert_of_what_another_process_has_converted():
    """Its pickle says "qkv", and nobody has told this process's transformers what that is."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    qkv.convert(model)
    tokens = torch.arange(6)[None]
    expected = model(tokens).logits
    qkv.integrations.transformers.unregister()
    try:
        loaded = pickle.loads(pickle.dumps(model))
        assert qkv.convert(loaded).left == {"": "converted already"}
        assert torch.equal(loaded(tokens).logits, expected)
    finally:
        qkv.integrations.transformers.register()
