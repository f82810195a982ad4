"""Configs of transformers, made small by what their numbers are called.

A config is first made as it is by default, so that all its numbers have values; those whose names
say what they are become small, and a new config is made with these."""

import dataclasses
import inspect
import re
from typing import Any

from .special import CONFIGS, SECTIONS

VOCABULARY = 96
LAYERS = 8  # at most, where each of them is of another kind
# What a number of this name is at most; the first pattern that matches the whole name counts.
SIZES = {
    r"index_topk|image_embedding_size": 4,
    r"(.*_)?vocab_size(_.*)?": VOCABULARY,
    r".*codebook_size|.*num_embeddings": 64,
    r".*rotary_dim": 8,
    r".*num_experts_per_(tok|token)|.*top_?k(_experts)?|num_experts_per_token": 2,
    r"n_group|topk_group|num_expert_group|.*first_k_dense.*": 1,
    r".*n_routed_experts|.*num_(local_)?experts|moe_num_experts|num_routed_experts": 4,
    r".*(num_layers|n_layers?|depth|_layers|num_.*blocks?|num_stages_in_.*)": 2,
    r".*(key_value|kv)_heads|num_kv.*|n_head_kv|.*num_(linear_)?key_heads|multi_query_group_num": 2,
    r".*(heads|n_head|n_heads|head_num|num_heads.*|attention_heads.*)": 4,
    r".*(head_dim|d_kv|head_size|attention_head_size|kv_channels|head_dim_.*)": 16,
    r".*kv_lora_rank": 16,
    r".*lora_rank": 24,
    r".*(intermediate|ffn|mlp_dim|d_ff|feed_?forward|feedforward).*": 48,
    r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|projection_dim|(text|vision|output|input|model|encoder|decoder|conv|embedding|block|llm|out|proj|mm|query|qformer|feature|audio|fpn|decoder|mask|hidden|base|cross|condition)_?(hidden_)?(size|dim|width|channels|features)|dim|width|d_inner|embed_size|embedding_dim|(.*_)?hidden_size_.*|n_inner|d_embed|out_hidden_size)": 64,  # noqa: E501
    r".*(sliding_window.*|local_attention|local_window.*|attention_window.*)": 6,
    r"max_.*(position|source|target|len|seq).*|n_positions|n_ctx|seq_len.*": 64,
    r".*(image_size|img_size|input_size|crop_size)": 64,
    r".*num_queries|num_latents|.*query_tokens|.*num_query.*": 8,
    r"n_?mels|.*mel_bins|num_mel.*": 16,
    r"type_vocab_size": 2,
    r".*num_patches": 16,
    r"num_pos_feats": 32,
}  # fmt: skip
_DROPPED = re.compile(
    r".*(dropout|_drop|drop_path|layerdrop|drop_rate|dropout_.*|_pdrop|jitter.*|mask_time_prob"
    r"|mask_feature_prob|apply_spec_augment).*"
)
_PER_LAYER = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "decoder_layers")


def small(config_class: type, name: str = "", **given: Any) -> Any:
    """A small config of the class. given: arguments that come before all others."""
    default = config_class(**_starts(config_class))
    family = getattr(config_class, "model_type", "") or name
    changes = {}
    arguments = _arguments(config_class)
    parts = getattr(config_class, "sub_configs", None) or {}
    for key in arguments:
        value = _value(default, key)
        if hasattr(value, "sub_configs") and not isinstance(value, dict):
            changes[key] = small(type(value))
        elif key not in parts:
            found = _small(key, value)
            if found is not None:
                changes[key] = found
    _heads(default, arguments, changes)
    changes |= _layers(default, arguments, changes)
    changes |= _tokens(default, arguments, changes)
    changes |= CONFIGS.get(family, {}) | given
    _rope(default, changes)
    return config_class(**changes)


def _starts(config_class: type) -> dict[str, Any]:
    """What a config cannot be made without."""
    return CONFIGS.get(getattr(config_class, "model_type", ""), {}).get("default", {})


def _arguments(config_class: type) -> list[str]:
    names = []
    if dataclasses.is_dataclass(config_class):
        names += [f.name for f in dataclasses.fields(config_class) if f.init]
    for base in config_class.__mro__:
        if "__init__" in vars(base):
            names += [
                p.name
                for p in inspect.signature(base.__init__).parameters.values()
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
            ]
    skipped = ("transformers_version", "dtype", "id2label", "label2id")
    return [x for x in dict.fromkeys(names) if x not in skipped]


def small_arguments(function: Any) -> dict[str, Any]:
    """Small values of arguments that are numbers by default."""
    found = {}
    for name, argument in inspect.signature(function).parameters.items():
        if argument.default is not inspect.Parameter.empty:
            value = _small(name, argument.default)
            if value is not None:
                found[name] = value
    return found


def _value(config: Any, key: str) -> Any:
    """What an argument is by default, also where it is another in each layer."""
    try:
        return getattr(config, key, None)
    except RuntimeError:
        return vars(type(config)).get(key)


def _small(key: str, value: Any) -> Any:
    """The small value of an argument, or None where it stays."""
    if isinstance(value, float) or (isinstance(value, (int, bool)) and "spec_augment" in key):
        return type(value)(0) if value and _DROPPED.fullmatch(key) else None
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        if "axes_dim" in key:  # of a rotation, whose sum is a head's
            return {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}.get(len(value))
        return _pyramid(key, value)
    if type(value) is not int or value <= 0:
        return None
    at_most = _size(key)
    return at_most if at_most is not None and value > at_most else None


def _size(key: str) -> int | None:
    return next((size for name, size in SIZES.items() if re.fullmatch(name, key)), None)


def _pyramid(key: str, values: list[int] | tuple[int, ...]) -> Any:
    """Numbers of one for each stage of a network: as they grow by default."""
    at_most = _size(key)
    if at_most is None:
        return None
    if at_most == 2:  # layers
        return type(values)(min(x, 1) for x in values)
    least = min(values)
    if at_most == 4:
        return type(values)(max(1, x // least) for x in values)
    if max(values) <= at_most or least <= 0:
        return None
    return type(values)(x * min(at_most // 2, least) // least for x in values)


def _layers(default: Any, arguments: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Where lists say what each layer is, one layer of each kind, and at least two."""
    count_name = next((x for x in _PER_LAYER if x in arguments), None)
    count = _value(default, count_name) if count_name else None
    if not isinstance(count, int) or count < 2:
        return {}
    lists = {
        key: value for key in arguments
        if isinstance(value := _value(default, key), (list, tuple)) and len(value) == count
    }  # fmt: skip
    if not lists:
        return {}
    rows = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    kept = [i for i in range(count) if rows.index(rows[i]) == i][:LAYERS]
    kept = sorted(kept + ([i for i in range(count) if i not in kept][:1] if len(kept) < 2 else []))
    found = {key: type(value)(value[i] for i in kept) for key, value in lists.items()}
    return found | {count_name: len(kept)}


def _heads(default: Any, arguments: list[str], changes: dict[str, Any]) -> None:
    """Keys and values have as many heads as queries where they have by default."""
    pairs = [
        (x, x.replace("key_value", "attention")) for x in arguments if "num_key_value_heads" in x
    ]
    for shared, own in pairs:
        if shared in changes and _value(default, shared) == _value(default, own):
            changes[shared] = changes.get(own, changes[shared])


def _tokens(default: Any, arguments: list[str], changes: dict[str, Any]) -> dict[str, Any]:
    """Special tokens that the small vocabulary lacks get places at its end, in their order."""
    names = [x for x in arguments if re.fullmatch(r".*(token|idx|_id|token_id|index)", x)]
    ids = {x: _value(default, x) for x in names}
    large = sorted({v for v in ids.values() if type(v) is int and v >= VOCABULARY - 32})
    place = {v: VOCABULARY - 1 - i for i, v in enumerate(reversed(large))}
    found = {x: place[v] for x, v in ids.items() if type(v) is int and v in place}
    if "eos_token_id" in arguments:
        found["eos_token_id"] = 2 if isinstance(ids.get("eos_token_id"), int) else None
    if "pad_token_id" in arguments and type(ids.get("pad_token_id")) is int:
        found["pad_token_id"] = 0 if ids["pad_token_id"] >= 0 else ids["pad_token_id"]
    if type(ids.get("bos_token_id")) is int:
        found["bos_token_id"] = 1
    return found


def _rope(default: Any, changes: dict[str, Any]) -> None:
    """Sections of rotated numbers, whose sum is half of a head, shrink as heads do."""
    ropes = getattr(default, "rope_parameters", None)
    has_sections = isinstance(ropes, dict) and "mrope_section" in ropes
    if not isinstance(ropes, dict) or not (has_sections or default.model_type in SECTIONS):
        return
    given = ropes.get("mrope_section") or SECTIONS[default.model_type]
    half = int(changes.get("head_dim", 16) * ropes.get("partial_rotary_factor", 1.0)) // 2
    section = [x * half // sum(given) for x in given]
    section[-1] += half - sum(section)
    changes["rope_parameters"] = ropes | {"mrope_section": section}
