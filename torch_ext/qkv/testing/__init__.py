"""What attention has to give: a reference to hold models, kernels and qkv itself against.

Every function has the arguments of its namesake in `qkv`, computes in float64 what
docs/options.md says, and is made of torch's own operators alone, so that torch's autograd
differentiates it any number of times, backward and forward. It calls none of qkv's kernels and is
not fast: it holds all scores at once. docs/testing.md shows how a model is held against it.
"""

from qkv.testing._dropout import dropout_mask, dropout_seed, philox
from qkv.testing._functional import attention, attention_weights, hard_attention
from qkv.testing._items import attention_with_kvcache, varlen_attn
from qkv.testing._scores import Place, attention_scores, distance, visible
from qkv.testing._tolerance import assert_as_accurate, assert_close, max_error, rms_error

__all__ = [
    "Place",
    "assert_as_accurate",
    "assert_close",
    "attention",
    "attention_scores",
    "attention_weights",
    "attention_with_kvcache",
    "distance",
    "dropout_mask",
    "dropout_seed",
    "hard_attention",
    "max_error",
    "philox",
    "rms_error",
    "varlen_attn",
    "visible",
]
