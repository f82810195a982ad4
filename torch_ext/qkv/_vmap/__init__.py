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
from qkv._vmap.levels import core_kernel, decomposition, func_kernel
from qkv._vmap.samples import Samples

# Of the package's operators.
_NAMES = [n[5:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("qkv::")]


def _operators(key: str) -> list[str]:
    """Those that have a kernel of their own for this dispatch key, but for those that begin with
    "_", which are about the machine and take no tensors."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(n for n in _NAMES if n[0] != "_" and has_kernel(f"qkv::{n}", key))


_ROTATIONS = dict.fromkeys(("rotate", "rotate_backward"), dense.rule)
_OTHER_RULES = _ROTATIONS | {"attention_with_kvcache": cache.rule, "dropout_seed": seeds.rule}
COMPUTING = [name for name in _operators("CPU") if name not in _OTHER_RULES]
# What is made of the low-level operators, and drops down to them.
COMPOSITES = [*_operators("CompositeImplicitAutograd"), "_linear"]
_library = torch.library.Library("qkv", "IMPL")


def _soft_or_hard(op: Any, samples: Samples, options: dict[str, Any]):
    rule = dense.rule if "cu_seq_q" not in samples.values else packed.rule
    return rule(op, samples, options)


def register() -> None:
    """By their names: an operator's Python object, which takes time to make, is made in its first
    call."""
    rules = dict.fromkeys(COMPUTING, _soft_or_hard) | _OTHER_RULES
    for name, rule in rules.items():
        _library.impl(name, func_kernel(name, rule), "FuncTorchBatched")
    for name in (*COMPUTING, *_ROTATIONS):
        _library.impl(name, core_kernel(name, rules[name]), "Batched")
    for name in COMPOSITES:
        _library.impl(name, decomposition(name), "FuncTorchBatched")
