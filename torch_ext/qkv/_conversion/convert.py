"""Finds the attention layers of a model and has qkv compute them."""

import functools
from collections.abc import Callable

from torch import nn

from qkv._conversion.layers import Found, convert_layer
from qkv._conversion.linear import convert_linear
from qkv._conversion.route import hook_model, is_written, unhook_model, why_left
from qkv._conversion.transformers import convert_transformers, is_of_transformers
from qkv._conversion.written import asks
from qkv._refuse import refuse


class Conversion:
    """What `convert` returns; printed, it is a table."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[nn.Module, Found]] = {}
        self._undo: list[Callable[[], object]] = []

    @property
    def changed(self) -> dict[str, str]:
        """What was done to each module, by its name in the model."""
        return {n: found.what for n, (x, found) in self._layers.items() if _is_changed(x, found)}

    @property
    def left(self) -> dict[str, str]:
        """Why each module whose class is called an attention, and with `linear` each linear layer,
        was left as it was, by its name: also one that an earlier `convert` has changed, and whose
        `undo()` changes it back; and, once it has run, one that was to be changed and turned out
        to compute something else."""
        return {
            name: why_left(module) or found.what
            for name, (module, found) in self._layers.items()
            if not _is_changed(module, found)
            and not (found.is_attention and self._is_part(name, module))
        }

    def _is_part(self, name: str, module: nn.Module) -> bool:
        """Whether what was changed is around it, which computed it and does not any more; or is in
        it, and is the attention of this."""
        for other, (around, found) in self._layers.items():
            if found.is_attention and _is_changed(around, found):
                is_switched = found.is_model and not asks(module)
                if _is_within(other, name) or (_is_within(name, other) and not is_switched):
                    return True
        return False

    def _has_found(self, name: str, found: Found) -> bool:
        """Whether what is said of this model, which is left, was said of one around it."""
        models = [other for other, (_, around) in self._layers.items() if around.is_model]
        return found.is_model and found.undo is None and any(_is_within(name, x) for x in models)

    def undo(self) -> None:
        """Makes the model what it was, with the parameters that it has now. A second time this
        does nothing."""
        while self._undo:
            self._undo.pop()()

    def __repr__(self) -> str:
        rows = [(name or "the model", how) for name, how in self.changed.items()]
        rows += [(name or "the model", f"left: {why}") for name, why in self.left.items()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(f"{name:<{width}}  {what}" for name, what in rows) or "no attention found"


def convert(model: nn.Module, *, linear: bool = False) -> Conversion:
    """From now on qkv computes the attention layers of this model, in place.

    Parameters, hooks, names and the state dict stay; the results are the same but for rounding.
    Known are `torch.nn.MultiheadAttention`, models of transformers, layers of timm and diffusers,
    and any that calls scaled_dot_product_attention or writes softmax(query @ key) @ value out in
    its own code. docs/adopt.md says what becomes of each.

    Args:
        model: any module; one of the above itself, too.
        linear: also has its layers of exactly `torch.nn.Linear`, and transformers' Conv1D, multiply
            float32 by oneDNN, and few rows, as in decoding, by the kernels of this library, on CPUs
            where that was measured to be faster (docs/layers.md#who-multiplies). On others they
            are left.

    Returns:
        What was changed, what was left and why, and `undo()`. Any other layer whose class is called
        an attention is left.

    Raises:
        TypeError: model is no `torch.nn.Module`.
        ImportError: a model of a version of transformers that qkv does not know.

    Copies of a converted layer are converted, too. Tensors on other devices than the CPU are
    attended to by torch, as before. Scripted modules are left.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> qkv.convert(model)
        self_attn  torch.nn.MultiheadAttention -> qkv.nn.MultiheadAttention

    Source: the layers are those of Vaswani et al., "Attention is all you need", 2017.
    """
    if not isinstance(model, nn.Module):
        found = f"a {type(model).__name__}"
        refuse("convert: model", found, "a torch.nn.Module is expected", TypeError)
    conversion = Conversion()
    try:
        for name, module in list(model.named_modules()):
            found = convert_transformers(module) or convert_layer(module)
            found = found or (convert_linear(module) if linear else None)
            if found is not None and not conversion._has_found(name, found):
                conversion._layers[name] = module, found
                conversion._undo += [found.undo] if found.undo is not None else []
        changed = [x for x, found in conversion._layers.values() if found.undo is not None]
        if any(map(is_written, changed)):
            for module in [model, *filter(is_of_transformers, model.modules())]:
                if hook_model(module):
                    conversion._undo.append(functools.partial(unhook_model, module))
    except BaseException:
        conversion.undo()
        raise
    return conversion


def _is_changed(module: nn.Module, found: Found) -> bool:
    return found.undo is not None and why_left(module) is None


def _is_within(name: str, other: str) -> bool:
    return name.startswith(f"{other}." if other else "")
