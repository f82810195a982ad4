"""What of transformers asks for an attention by name: models, of which some have attention that is
written out in their own code and would take the masks of "qkv" for those of "eager", and continuous
batching (`generate_batch`), which has a list of the functions it takes."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.utils import logging

from qkv.integrations.transformers import ADDED, NAMES
from qkv.integrations.transformers._classes import attentions, within
from qkv.integrations.transformers._latents import expands_latents, unexpanded
from qkv.integrations.transformers._private import CORRECT, SWITCH, ContinuousBatchingManager
from qkv.integrations.transformers._rotation import replace_rotation, restore_rotations

_logger = logging.get_logger(__name__)


_rotates = False  # whether rotations are replaced, too


def rotate_too(on: bool) -> None:
    """Of models whose attention is set from now on; False: of none any more."""
    global _rotates
    _rotates = on
    if not on:
        restore_rotations()


class Suited(NamedTuple):
    """What a model can take of what it is asked to."""

    name: str  # the attn_implementation
    asks: bool  # whether any of its attention, as far as it is known, goes by that
    why: str  # about the attention that does not, or nothing

    def with_added(self) -> "Suited":
        """The same with the masks of "eager"."""
        return self._replace(name=ADDED) if self.name in NAMES else self


def suited(model: PreTrainedModel, requested: str = NAMES[0]) -> Suited:
    """requested; or ADDED, which is the same with the masks of "eager", where only a part of the
    attention can be exchanged; or "eager", where none can."""
    found = attentions(_models_of_one_config(model))
    names = ", ".join(found.own)
    why = names and f"the attention of {names} is written out in its own code and not exchanged"
    if found.masked and found.asks:
        return Suited(ADDED, True, why)
    if found.own and (found.masked or not (found.asks or found.unknown)):
        return Suited("eager", False, why)
    return Suited(requested, found.asks, why)


def leave_latents(model: PreTrainedModel) -> None:
    """From now on the latent attention in models of this class keeps its latents unexpanded, as
    long as their config says that their attention is qkv's."""
    for part in within(type(model)):
        if expands_latents(part):
            _wrap(part, "expand_kv", functools.partial(unexpanded, (*NAMES, ADDED)))


def find_out() -> None:
    """Gives models what is suited where one of NAMES is asked for; "eager" with a warning."""

    def correct_for_classes(correct, self, *args, **kwargs):
        requested = correct(self, *args, **kwargs)
        if requested not in NAMES:
            return requested
        found = suited(self, requested)
        if found.name == "eager":
            _logger.warning_once(
                f'attn_implementation="{requested}": {found.why}; {type(self).__name__} stays with '
                '"eager"'
            )
        if found.name == ADDED:  # layers may go by the config of a model inside, which follows
            for config in (getattr(self.config, x, None) for x in self.config.sub_configs):
                if config is not None and config._attn_implementation in NAMES:
                    config._attn_implementation = ADDED
        leave_latents(self)
        if _rotates:
            for module_name in {part.__module__ for part in within(type(self))}:
                replace_rotation(module_name)
        return found.name

    _wrap(PreTrainedModel, CORRECT, correct_for_classes)


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
