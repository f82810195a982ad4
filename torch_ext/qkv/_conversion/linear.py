"""Linear layers, multiplied by whoever makes that fastest."""

import functools
import sys
from typing import Any
from weakref import WeakSet

from torch import nn

from qkv._classes import exchange, own_class
from qkv._conversion.layers import OWN_FORWARD, Found
from qkv.nn._linear import ConvertedLinear, projections

# Those that a Conversion can undo. Their copies are converted too, but are not in here.
_converted: WeakSet[nn.Module] = WeakSet()


def convert_linear(module: nn.Module) -> Found | None:
    """A layer of torch's Linear or transformers' Conv1D; None for any other, and for a layer of a
    subclass, which may multiply in a way of its own."""
    for theirs, ours in _kinds():
        if own_class(module) not in (theirs, ours):
            continue
        if projections() == "torch":
            return Found("torch multiplies as fast on this CPU", is_attention=False)
        if "forward" in vars(module):
            return Found(OWN_FORWARD, is_attention=False)
        if module in _converted:
            return Found("converted already", is_attention=False)
        if own_class(module) is theirs:  # and not a copy of one that was converted
            exchange(module, theirs, ours)
        _converted.add(module)
        undo = functools.partial(_undo, module, ours, theirs)
        return Found(f"{theirs.__name__} -> by {projections()}", undo, is_attention=False)
    return None


def _undo(module: nn.Module, ours: type, theirs: type) -> None:
    _converted.discard(module)
    exchange(module, ours, theirs)


def _kinds() -> list[tuple[Any, Any]]:
    """A class, and that which takes its place. transformers is not imported."""
    kinds: list[tuple[Any, Any]] = [(nn.Linear, ConvertedLinear)]
    if library := sys.modules.get("transformers.pytorch_utils"):
        from qkv.integrations.transformers._conv1d import ConvertedConv1D

        kinds.append((library.Conv1D, ConvertedConv1D))
    return kinds
