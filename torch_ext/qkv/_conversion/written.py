"""Which layers write attention out, by the names in their code. Whether that is what qkv.attention
computes is seen when they run."""

import dis
import functools
from collections.abc import Callable

from torch import autograd, jit, nn

from qkv._code import methods_of, names_in, reached_from, things_in

_SDPA = {"scaled_dot_product_attention"}
_SOFTMAX = {"softmax", "Softmax", "XSoftmax", "multi_head_attention_forward"}
_PRODUCTS = ("matmul", "bmm", "einsum")


@functools.cache
def writes_attention(layer: type) -> bool:
    """Not one that asks transformers' interface, which exchanges it. Nor one with an
    autograd.Function, which would see no more of a `Scores` than its numbers, or with a scripted
    function, which takes nothing but tensors. Nor one that checkpoints a part of itself."""
    functions, words = reached_from(methods_of(layer)), names_in(methods_of(layer))
    kinds = [x for f in functions for x in things_in(f) if isinstance(x, type)]
    if any(issubclass(x, autograd.Function) for x in kinds) or "checkpoint" in words:
        return False
    if calls_scripted(layer) or not weighs(layer):
        return False
    has_product = not words.isdisjoint(_SDPA) or any(p in x for p in _PRODUCTS for x in words)
    return has_product or any(map(_multiplies, functions))


@functools.cache
def calls_sdpa(layer: type) -> bool:
    """Whether its own code does. Not where it checkpoints a part of itself: what the backward pass
    runs again is outside of the layer's call, so that it is not qkv's, and drops other weights."""
    words = names_in(methods_of(layer))
    return weighs(layer) and not words.isdisjoint(_SDPA) and "checkpoint" not in words


@functools.cache
def calls_scripted(layer: type) -> bool:
    """Whether its own code makes weights, and calls a function of TorchScript."""
    things = (x for f in reached_from(methods_of(layer)) for x in things_in(f))
    return weighs(layer) and any(isinstance(x, jit.ScriptFunction) for x in things)


@functools.cache
def weighs(layer: type) -> bool:
    """Whether its own code makes weights of scores, and is not that of a whole model."""
    is_model = any(base.__name__ == "PreTrainedModel" for base in layer.__mro__)
    is_own = not is_model and not asks_interface(layer)
    return is_own and not names_in(methods_of(layer)).isdisjoint(_SOFTMAX | _SDPA)


def asks(layer: nn.Module) -> bool:
    """Whether it, or what it is made of, asks transformers' interface."""
    return any(asks_interface(type(x)) for x in layer.modules())


@functools.cache
def asks_interface(layer: type) -> bool:
    """Whether the code of this class does, which is told without importing transformers."""
    functions = reached_from(methods_of(layer))
    return any(type(x).__name__ == "AttentionInterface" for f in functions for x in things_in(f))


def _multiplies(function: Callable[..., object]) -> bool:
    """Whether there is an @ in it; versions of Python call it differently."""
    names = {(x.opname, x.argrepr) for x in dis.get_instructions(function)}
    return any(op == "BINARY_MATRIX_MULTIPLY" or name == "@" for op, name in names)
