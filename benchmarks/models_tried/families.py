"""The families of transformers: which classes may stand for each, and a small model of it."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .inputs import calls
from .judge import tensors
from .shrink import small

# The kinds of models, of which the first that a family has stands for it.
_KINDS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM",
    "MASKED_LM", "ZERO_SHOT_IMAGE_CLASSIFICATION", "CTC", "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
)  # fmt: skip
TRIED = 3  # classes of a family, before it is given up


def names() -> list[str]:
    return list(CONFIG_MAPPING_NAMES)


def classes(family: str) -> Iterator[type[PreTrainedModel]]:
    """The classes of models that have the family's config, those that do most first."""
    config_class = CONFIG_MAPPING[family]
    mappings = [f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in _KINDS] + ["MODEL_MAPPING_NAMES"]
    found = []
    for mapping in mappings:
        named = getattr(modeling_auto, mapping).get(family, ())
        found += [named] if isinstance(named, str) else named
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    for name in dict.fromkeys(found):
        made = getattr(module, name, None) or getattr(transformers, name, None)
        if made is not None:
            yield made
    for made in vars(module).values():
        is_model = isinstance(made, type) and issubclass(made, PreTrainedModel)
        if is_model and made.config_class is config_class and made.__name__ not in found:
            if not made.__name__.endswith("PreTrainedModel"):
                yield made


def build(family: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A small model with attention written out ("eager"), and a call that it takes."""
    whys = []
    for model_class in list(classes(family))[:TRIED]:
        torch.manual_seed(0)
        try:
            config = small(CONFIG_MAPPING[family], family)
            model = make(model_class, config)
        except Exception as error:
            whys.append(said(error))
            continue
        try:
            for call in calls(model):
                try:
                    with torch.no_grad():
                        found = dict(tensors(model(**call)))
                    if found and all(x.isfinite().any() for x in found.values()):
                        return model, call
                    whys.append("what it returns is not finite, with random weights")
                except Exception as error:
                    whys.append(said(error))
        except Exception as error:
            whys.append(said(error))
        whys = whys or ["no arguments are known for it"]
    raise NotBuilt(whys[0] if whys else "no class of a model has this config")


class NotBuilt(Exception):
    """No model of a family could be made and called; the message says why."""


def said(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}"


def make(model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    config._attn_implementation = "eager"
    return with_noise(model_class(config).eval())


def with_noise(model: Any, by_size: bool = False) -> Any:
    """The model; its weights are not what they begin as. by_size: the noise of a parameter is as
    large as its numbers, for models that are not small."""
    with torch.no_grad():  # what starts at 0 or 1 would hide mistakes
        for parameter in model.parameters():
            if parameter.is_floating_point():
                spread = float(parameter.std()) if by_size and parameter.numel() > 1 else 0.0
                parameter += 0.05 * (spread or 1.0) * torch.randn_like(parameter)
    return model
