"""Single layers, of torch, timm and diffusers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from weakref import WeakSet

from torch import jit, nn

from qkv._classes import own_class
from qkv._code import methods_of, names_in
from qkv._conversion.route import is_routed, route_sdpa, route_written, unroute
from qkv._conversion.written import (
    asks_interface,
    calls_scripted,
    calls_sdpa,
    weighs,
    writes_attention,
)
from qkv.nn.multihead import MultiheadAttention, adopt, release

_ROUTED = "its scaled_dot_product_attention -> qkv.attention"
# As accelerate's hooks make it, which keep that of the class and go on calling it.
OWN_FORWARD = "it has a forward of its own"
# Functions that end in torch's scaled_dot_product_attention; the second is diffusers'.
_FUSED = {"scaled_dot_product_attention", "dispatch_attention_fn"}
# The layers that a Conversion can undo. Their copies are converted too, but are not in here.
_converted: WeakSet[nn.Module] = WeakSet()
# In models of transformers: that they were asked for qkv, and their layers are to be routed; in
# layers: that they are routed since their model was, and until that is asked for something else.
REQUESTED = "_qkv_requested"


class Found(NamedTuple):
    """A module that was changed, or an attention that was left as it was."""

    what: str  # what was done, or why nothing was
    undo: Callable[[], object] | None = None  # None: nothing was done
    is_model: bool = False  # whether the layers within go by what was done
    is_attention: bool = True


def convert_layer(module: nn.Module) -> Found | None:
    """An attention layer; None for a module that is none, and for one of qkv's own."""
    if isinstance(module, jit.ScriptModule):
        return Found("scripted; qkv.replace_sdpa() takes what it calls", is_model=True)
    if module in _converted or (is_routed(module) and REQUESTED in module.__dict__):
        return Found("converted already")
    _restore(module)  # a copy of a converted layer: from here on it is one that can be undone
    kind = own_class(module)
    library, name = kind.__module__.partition(".")[0], kind.__qualname__
    if kind is nn.MultiheadAttention:
        if "forward" in vars(module):
            return Found(OWN_FORWARD)
        adopt(cast(nn.MultiheadAttention, module))
        return _changed(module, "torch.nn.MultiheadAttention -> qkv.nn.MultiheadAttention")
    if library == "timm" and isinstance(getattr(module, "fused_attn", None), bool):
        return _timm(module)
    if library == "diffusers" and hasattr(module, "set_processor") and hasattr(module, "processor"):
        return _diffusers(module)
    if isinstance(module, MultiheadAttention):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return Found(f"{name} is a subclass of torch.nn.MultiheadAttention, with ways of its own")
    if library not in ("torch", "qkv"):
        is_written = writes_attention(kind)
        # Not one with an attention inside that gives a scripted function what it computes.
        if is_written and not any(calls_scripted(type(x)) for x in module.modules()):
            route_written(module)
            return _changed(module, f"the attention that {name} writes out -> qkv.attention")
        if calls_sdpa(kind):
            route_sdpa(module)
            return _changed(module, _ROUTED)
    if asks_interface(kind):
        return Found("it attends as its model's config says: convert the model", is_model=True)
    is_attention = "attention" in name.lower() and weighs(kind)
    return Found(f"{name} is no layer that qkv knows") if is_attention else None


def _restore(module: nn.Module) -> None:
    _converted.discard(module)
    release(module)
    unroute(module)


def _changed(module: nn.Module, what: str) -> Found:
    _converted.add(module)
    return Found(what, functools.partial(_restore, module))


def _timm(module: Any) -> Found:
    attributes = {} if module.fused_attn else {"fused_attn": True}
    route_sdpa(module, **attributes)
    return _changed(module, "; ".join([*attributes, _ROUTED]))


def _diffusers(module: Any) -> Found:
    """diffusers' processors are what a layer computes with. AttnProcessor writes out
    softmax(q k) v; AttnProcessor2_0 is the same with scaled_dot_product_attention, but that it has
    the usual scale, whatever the layer's is, and norms query and key, where a layer has norms."""
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    processor = type(module.processor)
    if not _FUSED.isdisjoint(names_in(methods_of(processor))):
        route_sdpa(module)
        return _changed(module, _ROUTED)
    if processor is AttnProcessor and isinstance(module, Attention) and _is_usual(module):
        route_sdpa(module, processor=AttnProcessor2_0())
        return _changed(module, f"AttnProcessor2_0; {_ROUTED}")
    name = processor.__name__
    return Found(f"its processor, {name}, does not call scaled_dot_product_attention")


def _is_usual(module: Any) -> bool:
    has_norms = module.norm_q is not None or module.norm_k is not None
    return module.scale == (module.inner_dim // module.heads) ** -0.5 and not has_norms
