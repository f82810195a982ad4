"""What the attention of a class of models is, as the code of the class says it.

A model may have several kinds of attention: layers that ask transformers' `AttentionInterface`, and
layers that write attention out in their own code. Only the first can be exchanged, and only they
know what to do with the mask of an exchanged attention. Neither the name of a class nor the module
it stands in tells them apart, so that this file follows what `__init__` builds, class by class."""

import functools
import sys
from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel, masking_utils

from qkv._code import defined_in, methods_of, names_in, reached_from, things_in, words_in
from qkv._conversion.written import asks_interface
from qkv.integrations.transformers._private import _BaseAutoModelClass

_WEIGHING = {"softmax", "Softmax", "scaled_dot_product_attention"}
_MAKERS = {name for name in vars(masking_utils) if name.startswith("create_")}
_MASKS = {"mask", "attention_mask", "attn_mask", "encoder_attention_mask"}


class Attentions(NamedTuple):
    """The attention within some classes, without the parts that have a config of another class,
    which are asked for themselves."""

    asks: bool  # whether anything in there asks the interface
    unknown: bool  # whether there may be more: an Auto class builds something, which is asked for
    # itself, or something is not of transformers, and may be written in any way
    own: list[str]  # the innermost classes of attention that ask nobody, by name
    masked: list[str]  # those of them that are given masks of transformers.masking_utils, and what
    # asks the interface, but means masks that are added


def attentions(model_classes: Iterable[type[PreTrainedModel]]) -> Attentions:
    """Of these classes and of those that they are parts of: a decoder that writes its attention out
    shares its config, and so its masks, with the encoder beside it."""
    parts: set[type] = set()
    for model_class in model_classes:
        for whole in _wholes(model_class):
            parts |= within(whole, whole.config_class)
    making = {
        base for part in parts for base in part.__mro__ if names_in(defined_in(base)) & _MAKERS
    }
    given = {x for base in making for part in _builds(base) for x in within(part)}
    own = {part for part in parts if _is_own(part)}
    own -= {x for x in own if any(x not in within(y) for y in own & within(x))}
    masked = {part for part in own & given if _takes_mask(part) and _weighs(part)}
    if not all(model_class._supports_sdpa for model_class in model_classes):
        masked |= _only_added(parts, making)
    return Attentions(
        any(asks_interface(part) for part in parts),
        any(_has_unknown_parts(part) for part in parts),
        *(sorted(x.__name__ for x in some) for some in (own, masked)),
    )


def _only_added(parts: set[type], making: set[type]) -> set[type]:
    """Of a model that transformers gives no "sdpa", the parts that need the masks of "eager": those
    that lengthen a mask by zeros, which are added; and those that say `is_causal=True` where no
    causal mask is made, so that without a mask all is seen."""
    pads = {x for x in parts if any("pad" in words_in(f.__code__) for f in methods_of(x))}
    found = {x for x in pads if asks_interface(x) and _takes_mask(x)}
    causal = {x for x in _MAKERS if "bidir" not in x}
    if any(names_in(defined_in(base)) & causal for base in making):
        return found
    return found | {x for x in parts if any(_says_causal(f.__code__) for f in defined_in(x))}


def _says_causal(code: CodeType) -> bool:
    """Whether a function calls something with `is_causal=...`, and something with True."""
    keywords = {name for x in code.co_consts if isinstance(x, tuple) for name in x}
    return "is_causal" in keywords and any(x is True for x in code.co_consts)


def _wholes(model_class: type[PreTrainedModel]) -> set[type[PreTrainedModel]]:
    """The class, and the models of its module that it is a part of and shares its config with."""
    beside = vars(sys.modules.get(model_class.__module__, object)).values()
    models = {x for x in beside if isinstance(x, type) and issubclass(x, PreTrainedModel)}
    config = model_class.config_class
    return {model_class} | {
        x for x in models if x.config_class is config and model_class in within(x, config)
    }


def within(start: type, config_class: type | None = None) -> set[type]:
    """The modules that a module is built of, itself among them; with config_class no models that
    have a config of another class."""
    found, todo = set(), [start]
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        for part in (x for base in module.__mro__ for x in _builds(base)):
            other = config_class is not None and issubclass(part, PreTrainedModel)
            if not other or part.config_class is config_class:
                todo.append(part)
    return found


@functools.cache
def _is_own(module: type) -> bool:
    """Whether it is an attention that asks nobody, and neither does what it is built of."""
    if issubclass(module, PreTrainedModel) or any(asks_interface(part) for part in within(module)):
        return False
    return "attention" in module.__name__.lower() or (_takes_mask(module) and _weighs(module))


@functools.cache
def _has_unknown_parts(module: type) -> bool:
    things = [x for f in methods_of(module) for x in things_in(f)]
    has_auto = any(isinstance(x, type) and issubclass(x, _BaseAutoModelClass) for x in things)
    return has_auto or not module.__module__.startswith("transformers.")


def _weighs(module: type) -> bool:
    """Whether its methods make weights of scores; linear attention does not, nor does a module that
    leaves this to torch.nn.MultiheadAttention."""
    return not names_in(methods_of(module)).isdisjoint(_WEIGHING)


@functools.cache
def _takes_mask(module: type) -> bool:
    codes = [f.__code__ for f in methods_of(module)]
    arguments = {x for c in codes for x in c.co_varnames[: c.co_argcount + c.co_kwonlyargcount]}
    return not arguments.isdisjoint(_MASKS)


@functools.cache
def _builds(base: type) -> frozenset[type]:
    """The modules that `__init__` of this class names, itself or in a method that it calls. What
    its own bases build is not among them."""
    defined = {f.__name__: f for f in defined_in(base)}
    building = [f for name, f in defined.items() if name == "__init__"]
    for function in building:
        names = words_in(function.__code__)
        building += [f for n, f in defined.items() if n in names and f not in building]
    things = [x for f in reached_from(building) for x in things_in(f)]
    things += [vars(base).get(name) for f in building for name in words_in(f.__code__)]
    modules = {x for x in things if isinstance(x, type) and issubclass(x, nn.Module)}
    return frozenset(x for x in modules if not x.__module__.startswith("torch.") and x is not base)
