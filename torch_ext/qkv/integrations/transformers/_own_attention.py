"""Models whose attention is written out in their own code: transformers would give them the masks
of "qkv", which they would take for those of "eager"."""

import functools
import sys
from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

_logger = logging.get_logger(__name__)


def leave_alone(names: Collection[str]) -> None:
    """Gives such models "eager" where one of these names is asked for, with a warning."""
    correct = PreTrainedModel.get_correct_attn_implementation
    if getattr(correct, "__module__", None) == __name__:
        return

    @functools.wraps(correct, assigned=("__name__", "__doc__"))
    def correct_unless_own(self, *args, **kwargs):
        found = correct(self, *args, **kwargs)
        if found not in names or not _has_own_attention(type(self)):
            return found
        _logger.warning_once(
            f'attn_implementation="{found}": the attention of {type(self).__name__} is written out '
            'in its own code and cannot be exchanged; it stays with "eager"'
        )
        return "eager"

    PreTrainedModel.get_correct_attn_implementation = correct_unless_own


def _has_own_attention(model_class: type) -> bool:
    """Whether the module of the class has layers called attention, and not the interface that those
    of other models ask."""
    module = sys.modules.get(model_class.__module__)
    names = {} if module is None else vars(module)
    return "ALL_ATTENTION_FUNCTIONS" not in names and any(
        "Attention" in name
        and isinstance(thing, type)
        and issubclass(thing, nn.Module)
        and thing.__module__ == model_class.__module__
        for name, thing in names.items()
    )
