"""The RMS norms of transformers' models, by `qkv.rotate`, which norms before it turns and here has
nothing to turn.

Model files have a class of their own each. Its `forward` is replaced where a trial finds that it is
the norm, times `weight` or `1 + weight`."""

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkv._functional import has_kernels
from qkv._rotate import rotate
from qkv._watched import is_watched
from qkv.integrations.transformers._rotation import replace, replaced

# After the width. Other arguments say that a norm is of groups, or has a bias.
_ARGUMENTS = (["eps"], ["eps", "with_scale"])
_EPSILONS = ("variance_epsilon", "eps")


class _Trial(NamedTuple):
    """What a class was found to do."""

    epsilon: str  # the attribute's name
    offset: float  # of the weight


def replace_norms(module_name: str) -> None:
    """Of the classes in the module of this name; once, however often it is called."""
    for cls in list(vars(sys.modules.get(module_name, object)).values()):
        if _is_norm(cls, module_name) and (cls, "forward") not in replaced:
            found = _trial(cls)
            if found is not None:
                replace(cls, "forward", _norming(cls.forward, found))


def _is_norm(cls: Any, module_name: str) -> bool:
    """By its name, and whether it has a forward of its own."""
    is_class = inspect.isclass(cls) and issubclass(cls, nn.Module) and "Norm" in cls.__name__
    return is_class and cls.__module__ == module_name and "forward" in vars(cls)


def _trial(cls: type[nn.Module]) -> _Trial | None:
    """None if it is another module than a norm of the last dimension with one weight."""
    arguments, called_with = (list(inspect.signature(x).parameters) for x in (cls, cls.forward))
    if arguments[1:] not in _ARGUMENTS or len(called_with) != 2:
        return None
    try:
        norm: Any = cls(8).float()  # whatever the default dtype is, here and below
        epsilon = next((name for name in _EPSILONS if hasattr(norm, name)), "")
        if not epsilon or [name for name, _ in norm.named_parameters()] != ["weight"]:
            return None
        # Other numbers than it begins with, so that it is seen to go by them.
        numbers = torch.Generator().manual_seed(0)
        weight, x = (
            torch.randn(*shape, generator=numbers, dtype=torch.float32)
            for shape in ((8,), (2, 3, 8))
        )
        norm.weight.data = weight.clone()
        setattr(norm, epsilon, 0.25)
        with torch.no_grad():
            found = norm(x)
            is_half = norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    except Exception:
        return None  # it takes other arguments, or is no such module
    for offset in (0.0, 1.0):
        expected = _normed(x, weight, 0.25, offset)
        if is_half and found.shape == x.shape and torch.allclose(found, expected, atol=1e-5):
            return _Trial(epsilon, offset)
    return None


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if offset:  # added in float32, as models do: what is above 1 would lose its digits
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    rows = x.reshape(1, -1, x.size(-1))
    none = rows.new_empty(rows.size(1), 0)
    return rotate(rows, rows[:0], none, none, query_weight=weight, eps=eps)[0].view(x.shape)


def _norming(forward: Any, found: _Trial) -> Any:
    name = [*inspect.signature(forward).parameters][1]

    @functools.wraps(forward)
    def norming(self, *args, **named):
        if not args and name in named:
            args = (named.pop(name),)
        if len(args) != 1 or named:
            return forward(self, *args, **named)  # whose error it is
        x = args[0]
        weight: Any = self.weight if "weight" in self._parameters else None
        is_ours = type(weight) is nn.Parameter and weight.shape == x.shape[-1:]
        is_ours = is_ours and weight.dtype == x.dtype and x.numel() > 0
        if is_ours and type(x) is Tensor and has_kernels(x) and not is_watched(x):
            return _normed(x, weight, getattr(self, found.epsilon), found.offset)
        return forward(self, x)

    return norming
