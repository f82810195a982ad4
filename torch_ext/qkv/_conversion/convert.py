"""Finds the attention layers of a model and has qkv compute them."""

from collections.abc import Callable

from torch import nn

from qkv._conversion.layers import convert_layer
from qkv._conversion.transformers import convert_transformers
from qkv._refuse import refuse


class Conversion:
    """What `convert` returns; printed, it is a table.

    changed: what was done to each module, by its name in the model.
    left: why each module whose class is called an attention was left as it was, by its name: also
        one that an earlier `convert` has changed, and whose `undo()` changes it back.
    """

    def __init__(self) -> None:
        self.changed: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._undo: list[Callable[[], object]] = []

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


def convert(model: nn.Module) -> Conversion:
    """From now on qkv computes the attention layers of this model, in place.

    Parameters, hooks, names and the state dict stay; the results are the same but for rounding.
    Known are `torch.nn.MultiheadAttention`, models of transformers, timm's layers with a
    `fused_attn`, and diffusers' whose `processor` has a way to scaled_dot_product_attention;
    docs/adopt.md says what becomes of each.

    Args:
        model: any module; one of the above itself, too.

    Returns:
        What was changed, what was left and why, and `undo()`. Any other layer whose class is called
        an attention is left: `qkv.replace_sdpa()` reaches those that call
        scaled_dot_product_attention.

    Raises:
        TypeError: model is no `torch.nn.Module`.
        ImportError: a model of a version of transformers that qkv does not know.

    Copies of a converted layer, by copy or pickle, are converted; `convert` of a copy returns what
    undoes the copy. Tensors on other devices than the CPU are attended to by torch, as before.
    Scripted modules cannot be converted, nor converted ones of timm and diffusers scripted.

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
            if found is not None and found.undo is not None:
                conversion.changed[name] = found.what
                conversion._undo.append(found.undo)
            elif found is not None:
                conversion.left[name] = found.what
    except BaseException:
        conversion.undo()
        raise
    # What is within a layer that was changed was computed by it, and is not any more.
    inside = tuple(f"{name}." if name else "" for name in conversion.changed)
    conversion.left = {n: why for n, why in conversion.left.items() if not n.startswith(inside)}
    return conversion
