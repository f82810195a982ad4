"""What the integration takes of transformers beside its documented names, and so what another
version may lack. The mask functions that `_pattern` knows, `expand_kv`, the functions that
`_rotation` replaces, and the dicts that layers are chosen from, are tried where they are used:
without them models are slower, and not wrong."""

# ruff: noqa: F401
from qkv._library import version_of
from qkv.integrations.transformers import TRIED

try:
    from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import (
        DynamicIndexedLayer,
        DynamicLayer,
        StaticIndexedLayer,
        StaticLayer,
    )
    from transformers.generation.continuous_batching import PagedAttentionCache
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        causal_mask_function,
        eager_mask,
        prepare_padding_mask,
        sdpa_mask,
    )
    from transformers.utils.import_utils import is_tracing
    from transformers.utils.output_capturing import _active_collector

    # Methods that are wrapped, by the classes that have them.
    SWITCH = ContinuousBatchingManager.switch_to_cb_friendly_attn.__name__
    CORRECT = PreTrainedModel.get_correct_attn_implementation.__name__
    # What a config has its attn_implementation in, alone, without the configs inside it.
    IMPLEMENTATION = "_attn_implementation_internal"
    getattr(PreTrainedConfig(), IMPLEMENTATION)
    # What an interface has registered, by name.
    REGISTERED = "_global_mapping"
    getattr(AttentionInterface, REGISTERED)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"qkv.integrations.transformers was tried with transformers {TRIED[0]} to {TRIED[1]}, and "
        f"{version_of('transformers')} lacks something that it needs: {error}"
    ) from error
