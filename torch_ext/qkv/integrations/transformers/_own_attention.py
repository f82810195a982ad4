"""What of transformers asks for an attention by name: models, of which some have attention that is
written out in their own code, would take the masks of "qkv" for those of "eager", and are routed
like those that `qkv.convert` gets; and continuous batching (`generate_batch`), which has a list of
the functions it takes."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from qkv._conversion.route import hook_model, is_routed, route_written, unhook_model, unroute
from qkv._conversion.written import asks, writes_attention
from qkv.integrations.transformers import ADDED, NAMES
from qkv.integrations.transformers._classes import attentions, within
from qkv.integrations.transformers._latents import expands_latents, unexpanded
from qkv.integrations.transformers._norms import replace_norms, restore_norms
from qkv.integrations.transformers._private import CORRECT, SWITCH, ContinuousBatchingManager
from qkv.integrations.transformers._rotation import replace_rotation, restore_rotations

_logger = logging.get_logger(__name__)
# In models: that they were asked for qkv, and their layers are to be routed; in layers: that they
# are routed since their model was.
_REQUESTED = "_qkv_requested"
_others = False  # whether rotations and norms are replaced, too


def replace_others(on: bool) -> None:
    """Of models whose attention is set from now on; False: of none any more."""
    global _others
    _others = on
    if not on:
        restore_rotations()
        restore_norms()


def suited(model: PreTrainedModel, requested: str = NAMES[0]) -> tuple[str, bool]:
    """The attn_implementation that a model can take, and whether any of its attention, as far as it
    is known, goes by that: requested; or ADDED, which is the same with the masks of "eager", where
    only a part of the attention can be exchanged; or, where none can, what its own layers have."""
    found = attentions(_models_of_one_config(model))
    if found.masked and found.asks:
        return ADDED, True
    if found.own and (found.masked or not (found.asks or found.unknown)):
        return "sdpa" if model._supports_sdpa else "eager", False
    return requested, found.asks


def leave_latents(model: PreTrainedModel) -> None:
    """From now on the latent attention in models of this class keeps its latents unexpanded, as
    long as their config says that their attention is qkv's."""
    for part in within(type(model)):
        if expands_latents(part):
            _wrap(part, "expand_kv", functools.partial(unexpanded, (*NAMES, ADDED)))


def find_out() -> None:
    """Gives models what is suited where one of NAMES is asked for, and routes the layers in them
    that write attention out, as soon as they are there."""

    def correct_for_classes(correct, self, *args, **kwargs):
        requested = correct(self, *args, **kwargs)
        if requested not in NAMES:
            return requested
        name, _ = suited(self, requested)
        if name == ADDED:  # layers may go by the config of a model inside, which follows
            for config in (getattr(self.config, x, None) for x in self.config.sub_configs):
                if config is not None and config._attn_implementation in NAMES:
                    config._attn_implementation = ADDED
        leave_latents(self)
        if _others:
            for module_name in {part.__module__ for part in within(type(self))}:
                replace_rotation(module_name)
                replace_norms(module_name)
        self.__dict__[_REQUESTED] = True
        return name

    def route_made(post_init, self):
        post_init(self)
        if self.__dict__.pop(_REQUESTED, False):
            _route(self)

    def switch_routes(switch, self, requested, *args, **kwargs):
        for module in self.modules():
            if module.__dict__.pop(_REQUESTED, False):
                unroute(module)
            unhook_model(module)
        if requested not in NAMES or asks(self):
            switch(self, requested, *args, **kwargs)
        if requested in NAMES:
            self.__dict__[_REQUESTED] = True
        for module in list(self.modules()):
            if isinstance(module, PreTrainedModel) and module.__dict__.pop(_REQUESTED, False):
                _route(module)

    _wrap(PreTrainedModel, CORRECT, correct_for_classes)
    _wrap(PreTrainedModel, "post_init", route_made)
    _wrap(PreTrainedModel, "set_attn_implementation", switch_routes)


def _route(model: PreTrainedModel) -> None:
    layers = [x for x in model.modules() if writes_attention(type(x))]
    for layer in layers:
        if not is_routed(layer):
            route_written(layer)
            layer.__dict__[_REQUESTED] = True
    for module in model.modules() if layers else ():
        if isinstance(module, PreTrainedModel):
            hook_model(module)
    if not layers and not asks(model):
        _logger.warning_once(f"{type(model).__name__} has no attention that qkv knows")


def batch_continuously(names: Collection[str]) -> None:
    """Lets models whose attention has one of these names batch continuously, as they are.

    transformers takes `sdpa`, `paged|eager` and FlashAttention only, since its other functions
    would ignore the paged cache."""

    def switch_unless_ours(switch, self, model, *args, **kwargs):
        if model.config._attn_implementation not in names:
            switch(self, model, *args, **kwargs)

    _wrap(ContinuousBatchingManager, SWITCH, switch_unless_ours)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Has the method call around(method, ...); once, however often this is called."""
    method = getattr(owner, name)
    if method.__module__ != __name__:

        @functools.wraps(method, assigned=("__name__", "__doc__"))
        def wrapper(*args, **kwargs):
            return around(method, *args, **kwargs)

        setattr(owner, name, wrapper)


def _models_of_one_config(model: PreTrainedModel) -> set[type[PreTrainedModel]]:
    """The classes of a model and of the models in it that have the same config, as far as they are
    there: transformers asks the outermost alone when it sets their attention."""
    inside = (x for x in model.modules() if isinstance(x, PreTrainedModel))
    return {type(x) for x in inside if x.config is model.config}
