"""Models of timm and diffusers, small by their arguments: `timm:module`, `diffusers:class`."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import diffusers
import timm
import torch
from torch import nn

from .families import NotBuilt, said, with_noise
from .shrink import small_arguments

# Of the models of a module of timm the first that has one of these in its name, in this order.
_SMALLEST = ("test_", "xx", "atto", "nano", "pico", "femto", "tiny", "xs", "_s", "small", "0", "")
_IS_ATTENTION = re.compile(r"fused_attn|softmax|Attention")
_MODELS = re.compile(
    r"(?!Multi|Auto(?!enc)|Onnx|EMA|.*Multi\w*Net).*(Model|Transformer\w*|Autoencoder.*)"
)
_OTHER_IN_TRAINING = (nn.modules.batchnorm._BatchNorm, nn.Dropout)
# Arguments that models cannot do without, though they have a default.
_GIVEN = (
    "timestep", "encoder_hidden_states", "pooled_projections", "img_ids", "txt_ids", "guidance",
    "img_shapes", "encoder_hidden_states_mask",
)  # fmt: skip
TOKENS = 16  # 4 x 4, where a model wants an image as rows


def names() -> list[str]:
    modules = [
        x for x in timm.list_modules()
        if _IS_ATTENTION.search(inspect.getsource(sys.modules[f"timm.models.{x}"]))
    ]  # fmt: skip
    models = [x for x in dir(diffusers) if _MODELS.fullmatch(x)]
    return [f"timm:{x}" for x in modules] + [f"diffusers:{x}" for x in models]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    library, _, of = name.partition(":")
    torch.manual_seed(0)
    made = _timm(of) if library == "timm" else _diffusers(of)
    whys = []
    for model, call in made:
        model = with_noise(model.train(), by_size=True)  # in evaluation some keep graphs
        for part in model.modules():
            if isinstance(part, _OTHER_IN_TRAINING):
                part.eval()
        try:
            with torch.no_grad():
                model(**call)
            return model, call
        except Exception as error:
            whys.append(said(error))
    raise NotBuilt(whys[0])


def _timm(module: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    models = timm.list_models(module=module)
    name = next(x for part in _SMALLEST for x in models if part in x)
    try:
        model = timm.create_model(name, num_classes=5, depth=2)
    except (TypeError, AssertionError):
        model = timm.create_model(name, num_classes=5)
    (argument, *_) = inspect.signature(model.forward).parameters
    yield model, {argument: torch.randn(2, *model.default_cfg["input_size"])}


def _diffusers(name: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    kind = getattr(diffusers, name)
    arguments = small_arguments(kind.__init__)
    model = kind(**arguments)
    for shape in _SHAPES:
        yield model, _call(model, shape)


# Of what a model of diffusers makes less noisy, with C channels.
_SHAPES = {
    "image": lambda c: (2, c, 8, 8),
    "rows": lambda c: (2, TOKENS, c),
    "video": lambda c: (2, c, 2, 8, 8),
    "frames": lambda c: (2, 2, c, 8, 8),
    "sound": lambda c: (2, c, 16),
    "large image": lambda c: (2, c, 32, 32),
}


def _call(model: Any, shape: str) -> dict[str, Any]:
    config = model.config

    def width(*names: str) -> int:
        return next((x for n in names if isinstance(x := getattr(config, n, None), int)), 64)

    texts = width(
        "joint_attention_dim",
        "cross_attention_dim",
        "caption_channels",
        "text_embed_dim",
        "text_dim",
        "cap_feat_dim",
        "encoder_hid_dim",
        "text_states_dim",
        "in_channels_text",
    )  # noqa: E501
    makers: dict[str, Any] = {
        "timestep": lambda: torch.tensor([1.0, 2.0]),
        "timesteps": lambda: torch.tensor([1.0, 2.0]),
        "r_timestep": lambda: torch.tensor([0.5, 1.0]),
        "timestep_r": lambda: torch.tensor([0.5, 1.0]),
        "controlnet_cond": lambda: torch.randn(2, 3, 64, 64),
        "conditioning_scale": lambda: 1.0,
        "fps": lambda: torch.tensor([8, 8]),
        "rope_interpolation_scale": lambda: (1.0, 1.0, 1.0),
        "num_frames": lambda: 2,
        "height": lambda: 4,
        "width": lambda: 4,
        "encoder_hidden_states": lambda: torch.randn(2, 7, texts),
        "encoder_attention_mask": lambda: torch.ones(2, 7),
        "encoder_hidden_states_mask": lambda: torch.ones(2, 7),
        "pooled_projections": lambda: torch.randn(2, width("pooled_projection_dim")),
        "img_ids": lambda: torch.cartesian_prod(*[torch.arange(4.0)] * 2, torch.arange(1.0)),
        "txt_ids": lambda: torch.zeros(7, 3),
        "guidance": lambda: torch.ones(2),
        "img_shapes": lambda: [[(1, 4, 4)]] * 2,
        "class_labels": lambda: torch.tensor([1, 2]),
    }
    call = {}
    for name, argument in inspect.signature(model.forward).parameters.items():
        needed = argument.default is inspect.Parameter.empty
        if name in ("hidden_states", "sample", "x"):
            channels = width("in_channels", "latent_channels", "sample_channels")
            call[name] = torch.randn(_SHAPES[shape](channels))
        elif name in makers and (needed or name in _GIVEN):
            call[name] = makers[name]()
    return call
