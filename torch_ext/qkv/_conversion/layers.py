"""Single layers, of torch, timm and diffusers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from qkv._conversion.found import Found
from qkv._conversion.route import route_sdpa
from qkv.nn.multihead import MultiheadAttention, adopt

_ROUTED = "its scaled_dot_product_attention -> qkv.attention"


def convert_layer(module: nn.Module) -> Found | None:
    """An attention layer; None for a module that is none, and for one of qkv's own."""
    library = type(module).__module__.partition(".")[0]
    if type(module) is nn.MultiheadAttention:
        what = "torch.nn.MultiheadAttention -> qkv.nn.MultiheadAttention"
        return Found(what, adopt(module))
    if library == "timm" and isinstance(getattr(module, "fused_attn", None), bool):
        return _switched(module, _set(module, "fused_attn", True), "fused_attn")
    if library == "diffusers" and hasattr(module, "set_processor") and hasattr(module, "processor"):
        return _diffusers(module)
    name = type(module).__qualname__
    if isinstance(module, MultiheadAttention):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return Found(f"{name} is a subclass of torch.nn.MultiheadAttention, with ways of its own")
    return Found(f"{name} is no layer that qkv knows") if "attention" in name.lower() else None


def _diffusers(module: Any) -> Found:
    """diffusers' processors are what a layer computes with. The one called AttnProcessor writes
    out softmax(q k) v; AttnProcessor2_0 is the same with scaled_dot_product_attention."""
    before = module.processor
    if type(before).__name__ != "AttnProcessor":
        return _switched(module, None, "")
    from diffusers.models.attention_processor import AttnProcessor2_0

    module.set_processor(AttnProcessor2_0())
    return _switched(module, lambda: module.set_processor(before), "AttnProcessor2_0")


def _switched(module: nn.Module, undo_switch: Callable[[], object] | None, name: str) -> Found:
    undo_route = route_sdpa(module)

    def undo() -> None:
        undo_route()
        if undo_switch is not None:
            undo_switch()

    return Found(_ROUTED if undo_switch is None else f"{name}; {_ROUTED}", undo)


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], object] | None:
    """Sets the attribute, and returns what sets it back; None if that is what it was."""
    before = getattr(module, name)
    if before == value:
        return None
    setattr(module, name, value)
    return lambda: setattr(module, name, before)
