"""What of transformers asks for an attention by name: models, of which some have attention that is
written out in their own code, would take the masks of "qkv" for those of "eager", and are routed
like those that `qkv.convert` gets; and continuous batching (`generate_batch`), which has a list of
the functions it takes."""

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from qkv._conversion.layers import REQUESTED
from qkv._conversion.route import hook_model, is_routed, route_written, unhook_model, unroute
from qkv._conversion.written import asks, writes_attention
from qkv.integrations.transformers import ADDED, NAMES, _private, trials
from qkv.integrations.transformers._latents import expands_latents, unexpanded
from qkv.integrations.transformers._norms import replace_norms
from qkv.integrations.transformers._rotation import replace_rotation, restore
from qkv.integrations.transformers._suited import of_one_config, suited

_logger = logging.get_logger(__name__)
_others = False  # whether rotations and norms are replaced, too


def replace_others(on: bool) -> None:
    """Of models whose attention is set from now on; False: of none any more."""
    global _others
    _others = on
    if not on:
        restore()


def leave_latents(model: PreTrainedModel) -> None:
    """From now on the latent attention in models of this class keeps its latents unexpanded, as
    long as their config says that their attention is qkv's."""
    for part in {type(x) for x in model.modules()}:
        with trials():
            is_known = expands_latents(part)
        if is_known:
            _wrap(part, "expand_kv", functools.partial(unexpanded, (*NAMES, ADDED)))


def find_out() -> None:
    """Gives models what is suited where one of NAMES is asked for, and routes the layers in them
    that write attention out, as soon as they are there."""

    def note_request(correct, self, *args, **kwargs):
        requested = correct(self, *args, **kwargs)
        if requested in NAMES:
            self.__dict__[REQUESTED] = True
            _let_choose(type(self))
        return requested

    def settle_made(post_init, self):
        post_init(self)
        if REQUESTED in self.__dict__:
            _settle(self)

    def switch_routes(switch, self, attn_implementation, *args, **kwargs):
        requested = attn_implementation
        is_ours = requested in NAMES and requested in AttentionInterface().valid_keys()
        kept = _not_named(self.config, requested) if isinstance(requested, dict) else set()
        models = [x for x in self.modules() if isinstance(x, PreTrainedModel)]
        # The config that each module goes by is that of the innermost model around it.
        for module, config in {x: id(m.config) for m in models for x in m.modules()}.items():
            if config not in kept:
                if module.__dict__.pop(REQUESTED, False):
                    unroute(module)
                unhook_model(module)
        if not is_ours or asks(self):
            switch(self, requested, *args, **kwargs)
        if self.config._attn_implementation in NAMES:  # which is not asked for once more
            self.__dict__[REQUESTED] = True
        for model in reversed(models):  # as they were made, the inner ones first
            if REQUESTED in model.__dict__:
                _settle(model)
        if is_ours:
            _route(self, self.modules())

    _wrap(PreTrainedModel, _private.CORRECT, note_request)
    _wrap(PreTrainedModel, "post_init", settle_made)
    _wrap(PreTrainedModel, "set_attn_implementation", switch_routes)


def _not_named(config: PreTrainedConfig, requested: dict[str, Any]) -> set[int]:
    """The ids of those of a config and the configs inside it, of which a dict of implementations
    says nothing, so that they keep what they have."""
    kept = set() if "" in requested else {id(config)}
    for name in config.sub_configs:
        part, of_part = getattr(config, name, None), requested.get(name, {})
        if part is not None and isinstance(of_part, dict):
            kept |= _not_named(part, of_part)
    return kept


def _let_choose(model_class: type) -> None:
    """Lets layers be chosen by one of NAMES from the dicts that some families have for that."""
    for module_name in {x.__module__ for x in model_class.__mro__}:
        for choice in list(vars(sys.modules.get(module_name, object)).values()):
            if isinstance(choice, dict) and isinstance(choice.get("eager"), type):
                for name in NAMES:
                    choice.setdefault(name, choice.get("sdpa", choice["eager"]))


def _settle(model: PreTrainedModel) -> None:
    """Gives a model what suits it that was asked for one of NAMES and whose layers are there."""
    name, _ = suited(model)
    configs = [model.config]
    if name == ADDED:  # layers may go by the config of a model inside, which follows
        configs += [getattr(model.config, x, None) for x in model.config.sub_configs]
    for config in configs:
        if config is model.config or (config and config._attn_implementation in NAMES):
            setattr(config, _private.IMPLEMENTATION, name)
    leave_latents(model)
    if _others:
        with trials():
            for module_name in {type(x).__module__ for x in model.modules()}:
                replace_rotation(module_name)
                replace_norms(module_name)
    _route(model, of_one_config(model))


def _route(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    """Routes those of a model's modules that write attention out."""
    layers = [x for x in modules if writes_attention(type(x))]
    for layer in layers:
        if not is_routed(layer):
            route_written(layer)
            layer.__dict__[REQUESTED] = True
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

    _wrap(_private.ContinuousBatchingManager, _private.SWITCH, switch_unless_ours)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Has the method call around(method, ...); once, however often this is called."""
    method = getattr(owner, name)
    if method.__module__ != __name__:

        @functools.wraps(method, assigned=("__name__", "__doc__"))
        def wrapper(*args, **kwargs):
            return around(method, *args, **kwargs)

        setattr(owner, name, wrapper)
