"""torch.func.vmap: every operator makes one call for all samples, which torch's fallback would make
one after the other.

In Python, because the C++ headers for it need a library that torch does not ship; LibTorch has no
vmap. A sample is what the function under vmap sees: one of `size` that lie along a dimension of the
batched arguments. dense.py, packed.py and cache.py put the samples of a call where the operator has
room for them; seeds.py says what dropout does with them; levels.py is about torch's side.
"""

from typing import Any

import torch

from qkv._vmap import cache, dense, packed, seeds
from qkv._vmap.levels import decomposition, in_core, in_func, kernel
from qkv._vmap.samples import Samples

_ROTATIONS = dict.fromkeys(("rotate", "rotate_backward"), dense.rule)
_OTHER_RULES = _ROTATIONS | {"attention_with_kvcache": cache.rule, "dropout_seed": seeds.rule}
# By their names, since torch takes milliseconds to list its operators: those with a kernel, ...
COMPUTING = (
    "attention_backward", "attention_double_backward", "attention_forward",
    "attention_forward_jvp", "hard_backward", "hard_forward", "varlen_attention_paged",
    "weights_backward", "weights_forward", "with_weights_backward", "with_weights_forward",
)  # fmt: skip
# ... and those that are made of these, and drop down to them.
COMPOSITES = (
    "attention", "attention_forward_jvp_backward", "attention_jvp", "attention_weights",
    "attention_with_lse", "attention_with_weights", "hard_attention", "indexed_attention",
    "latent_attention", "latent_attention_with_kvcache", "merge", "varlen_attention", "_linear",
    "_multi_head",
)  # fmt: skip
_library = torch.library.Library("qkv", "IMPL")


def _soft_or_hard(op: Any, samples: Samples, options: dict[str, Any]):
    rule = dense.rule if "cu_seq_q" not in samples.values else packed.rule
    return rule(op, samples, options)


def register() -> None:
    """By their names: an operator's Python object, which takes time to make, is made in its first
    call."""
    rules = dict.fromkeys(COMPUTING, _soft_or_hard) | _OTHER_RULES
    for name, rule in rules.items():
        _library.impl(name, kernel(name, in_func, rule), "FuncTorchBatched")
    for name in (*COMPUTING, *_ROTATIONS):
        _library.impl(name, kernel(name, in_core, rules[name]), "Batched")
    for name in COMPOSITES:
        _library.impl(name, decomposition(name), "FuncTorchBatched")
