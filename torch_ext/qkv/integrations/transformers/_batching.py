"""Continuous batching (`generate_batch`), which has a list of the attention functions it takes."""

import functools
from collections.abc import Collection

from transformers.generation.continuous_batching import continuous_api


def allow(names: Collection[str]) -> None:
    """Lets models whose attention has one of these names batch continuously, as they are.

    transformers takes `sdpa`, `paged|eager` and FlashAttention only, since its other functions
    would ignore the paged cache."""
    manager = continuous_api.ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn
    if getattr(switch, "__module__", None) == __name__:
        return

    @functools.wraps(switch, assigned=("__name__", "__doc__"))
    def switch_unless_ours(self, model, *args, **kwargs):
        if model.config._attn_implementation not in names:
            switch(self, model, *args, **kwargs)

    manager.switch_to_cb_friendly_attn = switch_unless_ours
