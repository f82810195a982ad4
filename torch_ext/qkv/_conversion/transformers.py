"""Models of transformers, through their own switch."""

import sys
from typing import Any

from torch import nn

from qkv._conversion.found import Found
from qkv.integrations import transformers as integration

NAME = integration.NAMES[0]


def convert_transformers(module: nn.Module) -> Found | None:
    """A PreTrainedModel, with the models inside it; None for one that is switched already, and for
    any other module. transformers is not imported: where there is such a model, it has been."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return None
    models: list[Any] = [m for m in module.modules() if isinstance(m, library.PreTrainedModel)]
    before = [(m, m.config._attn_implementation) for m in models]
    if all(name == NAME for _, name in before):
        return None
    integration.register()
    models[0].set_attn_implementation(NAME)
    if models[0].config._attn_implementation != NAME:
        return Found(f"{type(module).__name__} does not take an attn_implementation")

    def undo() -> None:
        for model, name in before:
            model.set_attn_implementation(name)

    return Found(f'attn_implementation "{before[0][1]}" -> "{NAME}"', undo)
