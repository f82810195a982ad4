"""What models of transformers are called with, by the names of their arguments."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .special import CALLS

BATCH, TOKENS, PADDING = 2, 13, 3  # more tokens than any window, which padding does not fill


def calls(model: Any) -> Iterator[dict[str, Any]]:
    """Calls that the model may take, those that say more first."""
    config = model.config
    taken = inspect.signature(model.forward).parameters
    if make := CALLS.get(config.model_type) or CALLS.get(type(model).__name__):
        yield make(config)
        return
    extra = {
        name: MAKERS[name](config) for name, x in taken.items()
        if name in MAKERS
        and (x.default is inspect.Parameter.empty or name in ("bbox", "is_longer"))
    }  # fmt: skip
    texts = text(config, taken) if "input_ids" in taken else None
    for key, makers in MEDIA.items():
        if key in taken:
            for make in makers:
                media = make(config, taken)
                if media is None:
                    continue
                if texts is None:
                    yield extra | media
                else:
                    with_tokens = _with_tokens(model, key, media, texts)
                    if with_tokens is not None:
                        yield extra | media | with_tokens
                    yield extra | media | texts
    if texts is not None:
        yield extra | texts
    if extra:
        yield extra


def part(config: Any, *names: str) -> Any:
    """The first of these configs that there is inside, or the config itself."""
    for name in names:
        if getattr(config, name, None) is not None:
            found = getattr(config, name)
            return part(found, *names)
    return config


def number(config: Any, *names: str, default: int = 0) -> int:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, (list, tuple)) and found and isinstance(found[0], int):
            found = found[-1]
        if isinstance(found, int) and found > 0:
            return found
    return default


def text(config: Any, taken: Any) -> dict[str, Any]:
    """Tokens of which the second row ends in padding; a target where there is a decoder."""
    vocabulary = number(
        config.get_text_config(), "vocab_size", default=number(config, "vocab_size", default=60)
    )
    tokens = torch.randint(3, min(60, vocabulary), (BATCH, TOKENS))
    mask = torch.ones_like(tokens)
    mask[1, -PADDING:] = 0
    pad = number(config.get_text_config(), "pad_token_id")
    found = {"input_ids": tokens.masked_fill(mask == 0, pad)}
    if "attention_mask" in taken:
        found["attention_mask"] = mask
    if "decoder_input_ids" in taken:
        found["decoder_input_ids"] = torch.randint(3, min(60, vocabulary), (BATCH, 9))
    return found


def _with_tokens(model: Any, key: str, media: dict, texts: dict) -> dict | None:
    """The text with as many special tokens before it as the model makes rows of the media."""
    config = model.config
    kind = "audio" if "input" in key or "audio" in key else "video" if "video" in key else "image"
    token = number(config, f"{kind}_token_id", f"{kind}_token_index", "media_placeholder_token_id")
    features = getattr(model, f"get_{kind}_features", None)
    if not token or features is None:
        return None
    given = inspect.signature(features).parameters
    try:
        with torch.no_grad():
            rows = features(**{k: v for k, v in media.items() if k in given})
        count = _rows(rows) // BATCH
    except Exception:
        return None
    tokens = torch.full((BATCH, count), token)
    ids = torch.cat([texts["input_ids"][:, :1], tokens, texts["input_ids"][:, 1:]], 1)
    found = texts | {"input_ids": ids}
    found["attention_mask"] = torch.cat([torch.ones_like(tokens), texts["attention_mask"]], 1)
    taken = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in taken:
            found[name] = (ids == token).long()
    return found


def _rows(features: Any) -> int:
    """How many rows a model puts in the place of tokens."""
    if hasattr(features, "pooler_output") and features.pooler_output is not None:
        features = features.pooler_output
    elif hasattr(features, "last_hidden_state"):
        features = features.last_hidden_state
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if isinstance(features, (list, tuple)):
        return sum(_rows(x) for x in features)
    raise TypeError(f"features are a {type(features).__name__}")


def _vision(config: Any) -> Any:
    return part(
        config,
        "vision_config",
        "vision_encoder_config",
        "image_encoder_config",
        "backbone_config",
        "encoder_config",
        "encoder",
    )


def _image_size(vision: Any) -> tuple[int, int]:
    size = next(
        (
            getattr(vision, x)
            for x in ("image_size", "img_size", "input_size")
            if getattr(vision, x, None)
        ),
        64,
    )
    return (
        tuple(size)
        if isinstance(size, (list, tuple)) and len(size) == 2
        else (size if isinstance(size, int) else 64,) * 2
    )  # type: ignore


def images(config: Any, taken: Any) -> dict[str, Any] | None:
    """`[B, C, H, W]`."""
    vision = _vision(config)
    channels = number(vision, "num_channels", "in_channels", "in_chans", default=3)
    return {"pixel_values": torch.randn(BATCH, channels, *_image_size(vision))}


def sized_images(config: Any, taken: Any) -> dict[str, Any] | None:
    """The same with their sizes."""
    found = images(config, taken)
    if found is None or "image_sizes" not in taken:
        return None
    return found | {"image_sizes": torch.tensor([_image_size(_vision(config))] * BATCH)}


def several_images(config: Any, taken: Any) -> dict[str, Any] | None:
    """`[B, N, C, H, W]`, of one image or frame each, or of as many frames as a config says."""
    found = images(config, taken)
    assert found is not None
    frames = number(
        _vision(config),
        "num_frames",
        "video_length",
        default=number(config, "num_frames", default=1),
    )
    found["pixel_values"] = found["pixel_values"].unsqueeze(1).repeat(1, frames, 1, 1, 1)
    if "image_attention_mask" in taken:
        found["image_attention_mask"] = torch.ones(BATCH, TOKENS, frames)
    return found


def rows_of_patches(config: Any, taken: Any) -> dict[str, Any] | None:
    """Images of 4 x 4 patches, `[B, N, C * P * P]`."""
    if "spatial_shapes" not in taken:
        return None
    vision = _vision(config)
    size = number(vision, "patch_size", default=8)
    return {
        "pixel_values": torch.randn(BATCH, 16, 3 * size * size),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def patches(config: Any, taken: Any) -> dict[str, Any] | None:
    """Patches of images of 4 x 4, one after the other, `[N, C * T * P * P]`."""
    if "image_grid_thw" not in taken:
        return None
    vision = _vision(config)
    size = number(vision, "patch_size", default=8)
    width = number(vision, "num_channels", "in_channels", default=3) * size * size
    width *= number(vision, "temporal_patch_size", default=1)
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    return {"pixel_values": torch.randn(16 * BATCH, width), "image_grid_thw": grid}


def hidden_patches(config: Any, taken: Any) -> dict[str, Any] | None:
    """The same for the vision part alone."""
    if "grid_thw" not in taken:
        return None
    found = patches(config, {"image_grid_thw": None})
    assert found is not None
    name = "pixel_values" if "pixel_values" in taken else "hidden_states"
    return {name: found["pixel_values"], "grid_thw": found["image_grid_thw"]}


def videos(config: Any, taken: Any) -> dict[str, Any] | None:
    vision = _vision(config)
    frames = number(vision, "num_frames", "frames_per_clip", default=4)
    found = images(config, taken)
    assert found is not None
    return {"pixel_values_videos": found["pixel_values"].unsqueeze(1).repeat(1, frames, 1, 1, 1)}


def _audio(config: Any) -> Any:
    return part(
        config,
        "audio_config",
        "encoder_config",
        "audio_encoder_config",
        "speech_config",
        "encoder",
        "thinker_config",
    )


def _features(shape: Callable[[int, int], tuple[int, ...]]) -> Callable:
    def make(config: Any, taken: Any) -> dict[str, Any]:
        audio = _audio(config)
        bins = number(
            audio,
            "num_mel_bins",
            "n_mels",
            "feature_size",
            "input_feat_size",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "num_mels",
            "input_dim",
            "mel_dim",
            default=16,
        )
        frames = 2 * number(audio, "max_source_positions", default=32)
        found: dict[str, Any] = {"input_features": torch.randn(BATCH, *shape(bins, frames))}
        for name in ("feature_attention_mask", "input_features_mask"):
            if name in taken:
                found[name] = torch.ones(BATCH, frames, dtype=torch.long)
        if "decoder_input_ids" in taken and "input_ids" not in taken:
            found["decoder_input_ids"] = torch.randint(3, 60, (BATCH, 9))
        return found

    return make


def _sound(*shape: int) -> Callable:
    def make(config: Any, taken: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"input_values": torch.randn(BATCH, *shape)}
        if "decoder_input_ids" in taken:
            found["decoder_input_ids"] = torch.randint(3, 60, (BATCH, 9))
        return found

    return make


def _spectrogram(config: Any, taken: Any) -> dict[str, Any]:
    bins = number(config, "num_mel_bins", "n_mels", default=16)
    return {"input_values": torch.randn(BATCH, number(config, "max_length", default=64), bins)}


def _past(config: Any, taken: Any) -> dict[str, Any]:
    length = number(
        config, "context_length", default=number(config, "prediction_length", default=8)
    )
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = number(config, "num_input_channels", "input_size", default=1)
    past = torch.randn(
        BATCH, length + lags, *([channels] if channels > 1 or "patch" in config.model_type else [])
    )
    found: dict[str, Any] = {"past_values": past}
    if "past_time_features" in taken:
        width, ahead = number(config, "num_time_features"), config.prediction_length
        found |= {
            "past_time_features": torch.randn(BATCH, length + lags, width),
            "past_observed_mask": torch.ones_like(past),
            "future_values": torch.randn(BATCH, ahead),
            "future_time_features": torch.randn(BATCH, ahead, width),
        }
    return found


MEDIA: dict[str, tuple[Callable, ...]] = {
    "grid_thw": (hidden_patches,),
    "pixel_values": (patches, rows_of_patches, images, sized_images, several_images),
    "pixel_values_videos": (videos,),
    "input_features": (
        _features(lambda bins, n: (bins, n)),
        _features(lambda bins, n: (n, bins)),
        _features(lambda bins, n: (1, 16 * bins, bins)),
    ),
    "input_values": (_sound(3200), _sound(1, 3200), _spectrogram),
    "past_values": (_past,),
}


def _boxes(config: Any) -> Tensor:
    corners = torch.randint(0, 30, (BATCH, TOKENS, 4))
    return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)


def _hidden(config: Any) -> Tensor:
    return torch.randn(BATCH, TOKENS, number(config, "hidden_size", "d_model", default=64))


# Other arguments without which a model cannot be called.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "bbox": _boxes,
    "qformer_input_ids": lambda config: torch.randint(3, 60, (BATCH, 5)),
    "task_inputs": lambda config: torch.randint(
        3, 60, (BATCH, number(config, "task_seq_len", default=8))
    ),
    "is_longer": lambda config: torch.zeros(BATCH, 1, dtype=torch.bool),
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "query_embeds": _hidden,
    "encoder_hidden_states": _hidden,
}
