"""The models, what they are given, and the steps that are timed.

A model has the sizes that it is known by and random weights, which bfloat16 holds exactly, so that
one answer in float64 is what every dtype is held against. No input is padded."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

AUDIO_FRAMES = 3000  # of 30 seconds, as Whisper takes them


@dataclass(frozen=True)
class Model:
    """config_class, model_class: their names in transformers. length: of a text, or of the text
    that a text or a sound becomes. read: the length of the text that becomes another one."""

    config_class: str
    model_class: str
    batch: int
    length: int = 0
    read: int = 0
    config: dict = field(default_factory=dict)

    def make(self) -> nn.Module:
        """With torch's attention, in float32, as a model is that was loaded: in eval mode."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config_class)(**copy.deepcopy(self.config))
        model = getattr(transformers, self.model_class)(config).eval()
        model.set_attn_implementation("sdpa")
        return rounded(model)

    def inputs(self, config) -> dict[str, dict]:
        """{"training", "forward": the arguments of the model}, and where it generates also
        {"token": those of the encoder, if it has one, and the text that is in the cache}."""
        torch.manual_seed(0)

        def text(length):
            return torch.randint(3, config.vocab_size, (self.batch, length))

        if "Classification" in self.model_class:
            given = {"input_ids": text(self.length)} if self.length else images(config, self.batch)
            labels = torch.randint(config.num_labels, (self.batch,))
            return {"training": given | {"labels": labels}, "forward": given}
        if not config.is_encoder_decoder:
            ids = text(self.length)
            return {
                "training": {"input_ids": ids, "labels": ids},
                "forward": {"input_ids": ids, "logits_to_keep": 1},  # as generate() asks
                "token": {"input_ids": ids},
            }
        given = {"input_ids": text(self.read)} if self.read else {
            "input_features": torch.randn(self.batch, config.num_mel_bins, AUDIO_FRAMES)
        }  # fmt: skip
        ids = text(self.length)
        return {
            "training": given | {"labels": ids},
            "forward": given | {"decoder_input_ids": ids[:, :1]},
            "token": given | {"decoder_input_ids": ids},
        }

    @property
    def sizes(self) -> str:
        lengths = " → ".join(str(x) for x in (self.read, self.length) if x)
        return f"{self.batch}×{lengths}" if lengths else f"{self.batch}"


MODELS = {
    "BERT-base": Model("BertConfig", "BertForSequenceClassification", 1, 512),
    "GPT-2": Model("GPT2Config", "GPT2LMHeadModel", 1, 1024),
    "ViT-S": Model(
        "ViTConfig", "ViTForImageClassification", 8,
        config={"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    ),
    "Whisper-tiny": Model("WhisperConfig", "WhisperForConditionalGeneration", 1, 128),
    "Llama 6×384": Model(
        "LlamaConfig", "LlamaForCausalLM", 1, 1024,
        config={
            "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
            "num_attention_heads": 6, "num_key_value_heads": 2,
        },
    ),
    "T5-small": Model(
        "T5Config", "T5ForConditionalGeneration", 2, 128, 512, {"decoder_start_token_id": 0}
    ),
}  # fmt: skip


def images(config, count):
    size = config.image_size
    return {"pixel_values": torch.randn(count, config.num_channels, size, size)}


def rounded(model):
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(x.bfloat16())
    return model


def make_step(kind, model, inputs, dtype) -> Callable[[], Any]:
    """A function without arguments that makes a step of this kind, a key of Model.inputs(), and
    returns the model's output. In bfloat16, training is autocast, with weights in float32, and
    anything else has its weights in bfloat16, as from_pretrained(dtype=torch.bfloat16) has them."""
    if kind == "training":
        with_weights(model, torch.promote_types(dtype, torch.float32))
        return training(model, floating(inputs, torch.promote_types(dtype, torch.float32)), dtype)
    inputs = floating(inputs, dtype)
    return {"forward": forward, "token": token}[kind](with_weights(model, dtype), inputs)


def with_weights(model, dtype):
    """The model, whose parameters have this dtype from now on; its angles stay what they were."""
    model.zero_grad()
    for x in model.parameters():
        x.data = x.data.to(dtype)
    return model


def floating(inputs, dtype):
    """With images and sounds in this dtype."""
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def training(model, inputs, dtype):
    """Forward, loss and backward. What an optimizer does has nothing to do with attention, and is
    left out."""

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(**inputs)
        output.loss.backward()
        return output

    return step


def forward(model, inputs):
    return torch.inference_mode()(lambda: model(**inputs))


def token(model, inputs):
    """One token for each row, behind those that are in the cache, which is as before when it is
    done."""
    inputs = dict(inputs)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    ids = inputs.pop(name)
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            inputs = {"encoder_outputs": model.get_encoder()(**inputs)}
        cache = model(**inputs, **{name: ids[:, :-1]}, use_cache=True).past_key_values

    @torch.inference_mode()
    def step():
        output = model(**inputs, **{name: ids[:, -1:]}, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return output

    return step
