"""DTensor: every operator on tensors that are sharded over a mesh of processes.

Each process calls the operator on its part of the heads and of the batch. layout.py says which
dimensions of which tensor are heads and batch, plan.py what a dimension of the mesh divides,
heads.py who has which key/value heads, and rule.py makes the call.

The rules are registered by torch.library.register_torch_dispatch. The other public door,
torch.distributed.tensor.experimental.register_sharding, cannot express them: it keeps what it has
decided by the shapes and the integers of a call, so that a call with another output_mask or another
enable_gqa would get what was decided for the first one; it says what a dimension of the mesh may
divide without knowing the others, and uneven groups of heads are wrong only for all of them
together; it cannot hand a process some of the heads of a replicated key; and tensors that are
keyword arguments stay as they are.
"""

import torch
from torch.distributed.tensor import DTensor

from qkv._vmap import COMPOSITES, COMPUTING
from qkv.distributed._dtensor.rule import decompose, rule, seed_rule


def register() -> None:
    rules = dict.fromkeys((*COMPUTING, "attention_with_kvcache", "varlen_attention_paged"), rule)
    rules |= dict.fromkeys(COMPOSITES, decompose)
    rules["dropout_seed"] = seed_rule
    for name, function in rules.items():
        torch.library.register_torch_dispatch(f"qkv::{name}", DTensor, function)
