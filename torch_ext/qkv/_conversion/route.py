"""While a layer is called, the scaled_dot_product_attention that it calls is qkv's.

The layer gets a class that is made from its own. There one function begins and ends what a pair of
hooks would: torch does not call the second hook after an interrupt, and calls it without the first
where another hook raises. It overrides `_call_impl`, which is all that `__call__` does and what
torch.compile keeps of a layer, and not `forward`, which others replace in single layers."""

import functools
from typing import Any

import torch.nn.functional as F
from torch import _C, nn
from torch.overrides import TorchFunctionMode

from qkv._functional import attention, has_kernels
from qkv._verbose import note_left


def route_sdpa(layer: nn.Module, **attributes: Any) -> None:
    """attributes: what the layer's attributes of these names become, until `unroute`."""
    before = {name: getattr(layer, name) for name in attributes}
    _set(layer, attributes)
    layer.__dict__["_before_route"] = before
    layer.__class__ = _routed(type(layer))


def unroute(layer: nn.Module) -> None:
    """Undoes `route_sdpa`, of a copy of the layer too. To another layer it does nothing."""
    before = layer.__dict__.pop("_before_route", None)
    if before is None:
        return
    _set(layer, before)
    # It has another class if that was made from this one since, as fully_shard does.
    if "plain" in vars(type(layer)):
        layer.__class__ = type(layer).plain  # pyright: ignore[reportAttributeAccessIssue]


def _set(layer: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        delattr(layer, name)  # torch does not let a submodule become anything else
        setattr(layer, name, value)


@functools.cache
def _routed(plain: type[nn.Module]) -> type[nn.Module]:
    """`plain`, with calls that are routed while the layer has a `_before_route`, which holds the
    attributes that `unroute` gives back.

    Both methods get along with a `self` that is not of this class any more: torch.compile keeps
    bound methods."""

    def call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_before_route" not in self.__dict__:
            return plain._call_impl(self, *args, **kwargs)
        # What `with _Route()` does, but an interrupt may have come between any two lines of
        # torch's that put a mode on the stack or take it off. Then nothing, or more, is to be done.
        route, depth = _Route(), _C._len_torch_function_stack()
        try:
            _C._push_on_torch_function_stack(route)
            return plain._call_impl(self, *args, **kwargs)
        finally:
            route.is_on = False
            while _C._len_torch_function_stack() > depth:
                _C._pop_torch_function_stack()

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _new_routed, (plain,), self.__getstate__()  # the class cannot be imported

    members = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"_call_impl": call_impl, "__reduce_ex__": reduce_ex, "plain": plain}
    return type(plain.__name__, (plain,), members)


def _new_routed(plain: type[nn.Module]) -> nn.Module:
    routed = _routed(plain)
    return routed.__new__(routed)


class _Route(TorchFunctionMode):
    is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_sdpa = func is F.scaled_dot_product_attention
        if is_sdpa and self.is_on and _is_ours(*args, **kwargs):
            func = attention  # which has the same arguments
        return func(*args, **kwargs)


def _is_ours(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> bool:
    """Whether qkv computes this scaled_dot_product_attention. Mask and is_causal together stay
    torch's, which refuses them in some of its ways and applies both in others."""
    why = "a mask and is_causal together" if is_causal and attn_mask is not None else ""
    if has_kernels(query) and not why:
        return True
    note_left("scaled_dot_product_attention of a converted layer", query, "torch", why)
    return False
