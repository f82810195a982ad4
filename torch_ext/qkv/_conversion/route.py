"""While a layer is called, the scaled_dot_product_attention that it calls is qkv's, and so is
attention that it writes out.

The layer gets a class that is made from its own. There one function begins and ends what a pair of
hooks would: torch does not call the second hook after an interrupt, and calls it without the first
where another hook raises. It overrides `_call_impl`, which is all that `__call__` does and what
torch.compile keeps of a layer, and not `forward`, which others replace in single layers."""

import functools
import inspect
import sys
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import _C, Tensor, nn
from torch.overrides import TorchFunctionMode

from qkv._classes import exchange, own_class
from qkv._conversion.scores import kind_of, run_before, settle, settle_model, start
from qkv._functional import attention, has_kernels
from qkv._verbose import note_left

# What a layer that writes its attention out goes by; or why it is left to itself. FUSED: so far it
# has called scaled_dot_product_attention, and what it writes out elsewhere is yet to be tried.
UNTRIED, FUSED, MATCHED = "untried", "fused", "matched"
# The models that somebody is to unhook. Their copies have the hook, too, but are not in here.
_hooked: WeakSet[nn.Module] = WeakSet()


def route_sdpa(layer: nn.Module, **attributes: Any) -> None:
    """attributes: what the layer's attributes of these names become, until `unroute`."""
    before = {name: getattr(layer, name) for name in attributes}
    _set(layer, attributes)
    layer.__dict__["_before_route"] = before
    plain = own_class(layer)
    exchange(layer, plain, _routed(plain))


def route_written(layer: nn.Module) -> None:
    layer.__dict__.update(_way=UNTRIED, _is_settled=False, _small=set())
    route_sdpa(layer)


def hook_model(model: nn.Module) -> bool:
    """Has what leaves a model, or a layer that is one, be tensors; False if that was so before."""
    if model in _hooked:
        return False
    unhook_model(model)  # a copy of one that was hooked has the hook already
    model.register_forward_hook(settle_model)
    _hooked.add(model)
    return True


def unhook_model(model: nn.Module) -> None:
    _hooked.discard(model)
    hooks = model._forward_hooks
    for key in [key for key, hook in hooks.items() if hook is settle_model]:
        del hooks[key]


def is_routed(layer: nn.Module) -> bool:
    return "_before_route" in layer.__dict__


def is_written(layer: nn.Module) -> bool:
    return "_way" in layer.__dict__


def why_left(layer: nn.Module) -> str | None:
    """Why a layer that was routed is not computed by qkv, as its first call has shown."""
    way = layer.__dict__.get("_way", MATCHED)
    return None if way in (UNTRIED, FUSED, MATCHED) else way


def unroute(layer: nn.Module) -> None:
    """Undoes `route_sdpa`, of a copy of the layer too. To another layer it does nothing."""
    names = "_before_route", "_way", "_is_settled", "_small"
    before, *_ = (layer.__dict__.pop(name, None) for name in names)
    if before is None:
        return
    _set(layer, before)
    # It has another class if somebody else than torch made one from this one since.
    routed = own_class(layer)
    if "plain" in vars(routed):
        exchange(layer, routed, vars(routed)["plain"])


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
        route = _route_of(self, plain, args, kwargs) if is_routed(self) else None
        if route is None:
            return plain._call_impl(self, *args, **kwargs)
        # What `with route` does, but an interrupt may have come between any two lines of
        # torch's that put a mode on the stack or take it off. Then nothing, or more, is to be done.
        depth = _C._len_torch_function_stack()
        try:
            _C._push_on_torch_function_stack(route)
            output = plain._call_impl(self, *args, **kwargs)
        finally:
            route.is_on = False
            while _C._len_torch_function_stack() > depth:
                _C._pop_torch_function_stack()
        return route.end(self, output)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _new_routed, (plain,), self.__getstate__()  # the class cannot be imported

    members = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"_call_impl": call_impl, "__reduce_ex__": reduce_ex, "plain": plain}
    return type(plain.__name__, (plain,), members)


def _new_routed(plain: type[nn.Module]) -> nn.Module:
    routed = _routed(plain)
    return routed.__new__(routed)


def _route_of(layer: nn.Module, plain: Any, args: Any, kwargs: Any) -> "_Route | None":
    """None where the layer computes what is its own."""
    way = layer.__dict__.get("_way")
    if way is None or torch.compiler.is_compiling():
        return _Route()
    if _C._get_tracing_state() is not None or _C._are_functorch_transforms_active():
        return _Route()
    if why_left(layer) is not None:
        # The gradient of the call that has shown it may want that call once more, as it was.
        layer.__dict__["_is_settled"] |= _C._current_graph_task_id() == -1
    sizes = _sizes(args, kwargs)
    if layer.__dict__["_is_settled"] or sizes in layer.__dict__["_small"]:
        return None
    if _returns_weights(plain, args, kwargs) or any(map(_sees_gradients, layer.modules())):
        return None
    return _Written(way == MATCHED, sizes)


def _sees_gradients(module: nn.Module) -> bool:
    """Whether it has hooks that torch calls with gradients of tensors alone."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _sizes(args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """By which calls of a layer have scores of the same sizes; None where something else than
    tensors and numbers may say more, as a cache does."""
    given = (*kwargs, *args, *kwargs.values())
    is_known = all(x is None or isinstance(x, (Tensor, int, float, str)) for x in given)
    return tuple(x.shape if isinstance(x, Tensor) else x for x in given) if is_known else None


def _returns_weights(plain: Any, args: Any, kwargs: Any) -> bool:
    """Whether the layer is asked for its weights, by transformers' name or ways."""
    place = _places(plain.forward).get("output_attentions", len(args))
    if kwargs.get("output_attentions") or (place < len(args) and args[place]):
        return True
    collecting = sys.modules.get("transformers.utils.output_capturing")
    collected = collecting and collecting._active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


@functools.cache
def _places(forward: Any) -> dict[str, int]:
    return {name: i - 1 for i, name in enumerate(inspect.signature(forward).parameters)}


class _Route(TorchFunctionMode):
    is_on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_sdpa = func is F.scaled_dot_product_attention
        if is_sdpa and self.is_on and _is_ours(*args, **kwargs):
            func = attention  # which has the same arguments
        elif func is Tensor.unflatten:  # is in Python, of which torch.compile cannot follow super()
            func = torch.unflatten
        return func(*args, **kwargs)

    def end(self, layer: nn.Module, output: Any) -> Any:
        return output


class _Written(_Route):
    """For a layer that writes its attention out, too. steps: what was put off in it; is_small:
    whether a product was not, being of few numbers."""

    def __init__(self, is_matched: bool, sizes: tuple[Any, ...] | None):
        super().__init__()
        self.is_matched, self.is_taken, self.weights_run = is_matched, False, False
        self.sizes, self.is_small = sizes, False
        self.refused = ""
        self.steps: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func) if self.is_on else ""
        if kwargs and self.is_on:
            run_before(self, kwargs.get("out"))
            run_before(self, args[:1] if kwargs.get("inplace") else None)
        if kind == "product":
            found = start(self, func, args, kwargs)
            if found is not None:
                return found
        elif kind == "change":
            run_before(self, args[:1] or [*kwargs.values()])  # nn.init's have names only
        elif kind == "attention":
            self.is_taken = True
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def end(self, layer: nn.Module, output: Any) -> Any:
        """Decides, after the first call that is not small, whether the layer goes on this way. A
        small one has others of its sizes be the layer's own without a look at them."""
        is_tried = self.is_taken or self.refused or (self.steps and not self.is_small)
        way = layer.__dict__.get("_way")
        if is_tried if way == UNTRIED else way == FUSED and (self.refused or self.is_matched):
            layer.__dict__["_way"] = self._way()
        if self.is_small and self.sizes and not (self.is_taken or self.steps):
            layer.__dict__["_small"].add(self.sizes)
        return settle(output, self.is_taken and not _is_in_reentrant_checkpoint(layer))

    def _way(self) -> str:
        if self.refused or not self.is_taken:
            return self.refused or "its first call had no softmax(query @ key) @ value"
        if self.weights_run:
            return "it computes with its weights themselves"
        return MATCHED if self.is_matched else FUSED


def _is_in_reentrant_checkpoint(layer: nn.Module) -> bool:
    """Whether it may be, in the first pass or in that of the backward pass: what leaves it has a
    gradient if it is a tensor. The other kind of checkpoint has hooks for tensors that are saved,
    and must not get more of these."""
    if not torch.is_grad_enabled():
        return layer.training
    hooks: Any = getattr(_C, "_autograd")  # noqa: B009
    is_backward = _C._current_graph_task_id() != -1
    return is_backward and hooks._top_saved_tensors_default_hooks(True) is None


def _is_ours(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> bool:
    """Whether qkv computes this scaled_dot_product_attention. Mask and is_causal together stay
    torch's, which refuses them in some of its ways and applies both in others."""
    if not isinstance(query, Tensor):  # one of torch.fx's proxies, which have no truth
        return True
    why = "a mask and is_causal together" if is_causal and attn_mask is not None else ""
    if has_kernels(query) and not why:
        return True
    note_left("scaled_dot_product_attention of a converted layer", query, "torch", why)
    return False
