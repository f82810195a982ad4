"""The attention of models of transformers as arguments of `SelfAttention`."""

import sys
from typing import Any

import torch

from qkv._refuse import refuse
from qkv.nn.rotary import Rotary

# Names of models whose `<name>Attention` is known to be no more than its attributes say.
_MODELS = (
    "Gemma2", "Gemma3", "GptOss", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe",
    "Qwen3Next",
)  # fmt: skip
_NORMED_ABOVE_1 = ("Gemma3", "Qwen3Next")


def arguments_of(module: Any) -> dict[str, Any]:
    """The arguments of the layer that computes what module does."""
    name = type(module).__name__.removesuffix("Attention")
    if name not in _MODELS or not hasattr(module, "config"):
        known = ", ".join(f"{model}Attention" for model in _MODELS)
        refuse("module", type(module).__name__, f"one of {known} of transformers is expected")
    config, norm = module.config, getattr(module, "q_norm", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    if window is not None:
        window = (window - 1, 0 if module.is_causal else window - 1)
    return {
        "embed_dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": module.head_dim,
        "rotary": _rotary(module, name),
        "qk_norm": norm is not None,
        "norm_eps": config.rms_norm_eps,
        "norm_offset": float(name in _NORMED_ABOVE_1),
        "is_causal": module.is_causal,
        "window_size": window,
        "softcap": getattr(module, "attn_logit_softcapping", None) or 0.0,
        "scale": module.scaling,
        "sinks": hasattr(module, "sinks"),
        "gate": name == "Qwen3Next",
        "dropout": module.attention_dropout,
        "bias": module.q_proj.bias is not None,
        "out_bias": module.o_proj.bias is not None,
        "device": module.q_proj.weight.device,
        "dtype": module.q_proj.weight.dtype,
    }


def _rotary(module: Any, name: str) -> Rotary:
    """The frequencies that the model's own rotation begins with."""
    embedding = getattr(sys.modules[type(module).__module__], f"{name}RotaryEmbedding")
    with torch.device("cpu"):  # its frequencies are numbers, where module may be on meta
        embedding = embedding(module.config)
    kind, of_layer = embedding.rope_type, ""
    if isinstance(kind, dict):  # Gemma 3: one for layers with a window, another for those without
        kind, of_layer = kind[module.layer_type], f"{module.layer_type}_"
    if kind in ("dynamic", "longrope"):
        wanted = "one that does not depend on the length is expected"
        refuse("module.config.rope_parameters", f"of type {kind!r}", wanted)
    frequencies = getattr(embedding, f"{of_layer}inv_freq")
    scale = getattr(embedding, f"{of_layer}attention_scaling")
    return Rotary(2 * frequencies.numel(), frequencies=frequencies, scale=scale)
