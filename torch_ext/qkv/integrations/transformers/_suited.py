"""Which attn_implementation a model can take, as the code of its modules says.

A model may have several kinds of attention: layers that ask transformers' `AttentionInterface`, and
layers that write attention out in their own code. Only the first can be exchanged, and only they
know what to do with the mask of an exchanged attention. Neither the name of a class nor the file it
stands in tells them apart."""

import functools
from types import CodeType

from torch import nn
from transformers import PreTrainedModel, masking_utils

from qkv._code import defined_in, methods_of, names_in, things_in, words_in
from qkv._conversion.written import asks, asks_interface, weighs
from qkv.integrations.transformers import ADDED, NAMES

_MAKERS = {name for name in vars(masking_utils) if name.startswith("create_")}
_MASKS = {"mask", "attention_mask", "attn_mask", "encoder_attention_mask"}


def suited(model: PreTrainedModel) -> tuple[str, bool]:
    """The attn_implementation that a model can take, and whether any attention that goes by its
    config does by that: "qkv"; or ADDED, which is the same with the masks of "eager", where only a
    part of the attention can be exchanged; or, where none can, what its own layers have."""
    parts = of_one_config(model)
    is_asked = any(asks_interface(type(x)) for x in parts)
    if _adds_masks(parts):
        if is_asked:
            return ADDED, True
    elif is_asked or asks(model):
        return NAMES[0], is_asked
    return "sdpa" if model._supports_sdpa else "eager", False


def of_one_config(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model, without the models in it that have a config of another class, which
    are asked for themselves. A decoder that writes its attention out shares its config, and so its
    masks, with the encoder beside it."""
    parts: list[nn.Module] = [model]
    for part in parts:
        for x in part.children():
            if not isinstance(x, PreTrainedModel) or type(x.config) is type(model.config):
                parts.append(x)
    return parts


def _adds_masks(parts: list[nn.Module]) -> bool:
    """Whether a layer that writes its attention out is given masks of transformers.masking_utils,
    or one that asks the interface means masks that are added."""
    making = {base for part in parts for base in type(part).__mro__ if _makers(base)}
    given = {
        x for part in parts for base in making.intersection(type(part).__mro__)
        for name, child in part.named_children() if name in names_in(defined_in(base))
        for x in child.modules()
    }  # fmt: skip
    own = {x for part in parts if part in given and not asks(part) for x in _kinds(type(part))}
    if any(_takes_mask(x) and weighs(x) for x in own):
        return True
    if all(x._supports_sdpa for x in parts if isinstance(x, PreTrainedModel)):
        return False
    return _only_added({type(x) for x in parts}, making)


def _only_added(parts: set[type], making: set[type]) -> bool:
    """Whether a model that transformers gives no "sdpa" needs the masks of "eager": where a part
    lengthens a mask by zeros, which are added; and where one says `is_causal=True` and no causal
    mask is made, so that without a mask all is seen."""
    for part in parts:
        if asks_interface(part) and _takes_mask(part):
            if any("pad" in words_in(f.__code__) for f in methods_of(part)):
                return True
    makes_causal = any("bidir" not in name for x in making for name in _makers(x))
    return not makes_causal and any(_says_causal(f.__code__) for x in parts for f in defined_in(x))


@functools.cache
def _kinds(module: type) -> frozenset[type]:
    """The class, and the modules that its methods name, which some exchange when they are called:
    BigBird's for short sequences."""
    named = {x for f in methods_of(module) for x in things_in(f) if isinstance(x, type)}
    return frozenset({module, *(x for x in named if issubclass(x, nn.Module))})


@functools.cache
def _makers(base: type) -> set[str]:
    """The functions of transformers that make masks and that the body of this class calls."""
    return names_in(defined_in(base)) & _MAKERS


def _says_causal(code: CodeType) -> bool:
    """Whether a function calls something with `is_causal=...`, and something with True."""
    keywords = {name for x in code.co_consts if isinstance(x, tuple) for name in x}
    return "is_causal" in keywords and any(x is True for x in code.co_consts)


@functools.cache
def _takes_mask(module: type) -> bool:
    codes = [f.__code__ for f in methods_of(module)]
    arguments = {x for c in codes for x in c.co_varnames[: c.co_argcount + c.co_kwonlyargcount]}
    return not arguments.isdisjoint(_MASKS)
