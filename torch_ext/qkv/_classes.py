"""Classes that torch makes from those of layers: fully_shard for all layers of a class, and
parametrizations for each layer, have one of their own, with the layer's as its last base."""

from typing import Any

import torch

_MAKERS = ("torch.distributed.", "torch.nn.utils.parametrize")


def own_class(layer: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a layer, or that from which torch made it."""
    found: Any = type(layer)
    while found.__module__.startswith(_MAKERS) and "forward" not in vars(found):
        found = found.__bases__[-1]
    return found


def exchange(layer: Any, old: type, new: type) -> None:
    """Makes a layer of the class old one of new, and a layer of a class that was made from old one
    of a class that is made from new in the same way."""
    layer.__class__ = _exchanged(type(layer), old, new)


def _exchanged(kind: type, old: type, new: type) -> type:
    if kind is old:
        return new
    if not issubclass(kind, old):
        return kind
    bases = tuple(_exchanged(base, old, new) for base in kind.__bases__)
    members = {x: y for x, y in vars(kind).items() if x not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, members)
