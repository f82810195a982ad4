"""Models of transformers, through the switch in their configs."""

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from qkv._conversion.layers import Found
from qkv.integrations import transformers as integration


def is_of_transformers(module: nn.Module) -> bool:
    """Whether it is one of transformers' models."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(module, library.PreTrainedModel)


def convert_transformers(module: nn.Module) -> Found | None:
    """A PreTrainedModel, with the models inside it; None for one that has no attention that can be
    switched, and for any other module. What cannot be switched stays what it is, "sdpa" for
    instance. transformers is not imported: where there is such a model, it has been."""
    if not is_of_transformers(module):
        return None
    models: list[Any] = [*filter(is_of_transformers, module.modules())]
    outermost = {id(m.config): m for m in reversed(models)}  # of those that share a config
    models = [m for m in models if outermost[id(m.config)] is m]
    before = [(c, c._attn_implementation) for m in models for c in _with_parts(m.config)]
    names = (*integration.NAMES, integration.ADDED)
    integration.register()  # also for what another process has converted
    from qkv.integrations.transformers._own_attention import leave_latents  # imports it
    from qkv.integrations.transformers._suited import suited

    for model in models:
        leave_latents(model)
    models = [m for m in models if m.config._attn_implementation not in names]
    if not models:
        return Found("converted already", is_model=True)
    found = [(m, name) for m in models for name, asks in [suited(m)] if asks]
    # Layers of a model may go by the config of a model inside it.
    added = {id(x) for m, name in found if name == integration.ADDED for x in m.modules()}
    found = [(m.config, integration.ADDED if id(m) in added else name) for m, name in found]
    switched = [(config._attn_implementation, name) for config, name in found]
    if not switched:
        return None
    # The other configs follow those around them.
    to = {id(c): name for c, name in before if id(c) in outermost}
    to |= {id(config): name for config, name in found}
    _set([(config, to[id(config)]) for config, _ in before if id(config) in to])
    what = ", ".join(dict.fromkeys(f'"{old}" -> "{new}"' for old, new in switched))
    return Found(f"attn_implementation {what}", functools.partial(_set, before), is_model=True)


def _with_parts(config: Any) -> Iterator[Any]:
    """A config and those inside it, the outer ones first."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _with_parts(part)


def _set(implementations: list[tuple[Any, str]]) -> None:
    """One after the other, since a config hands it on to those inside it."""
    for config, name in implementations:
        config._attn_implementation = name
