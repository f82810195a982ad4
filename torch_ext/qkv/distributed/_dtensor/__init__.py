"""DTensor: every operator on tensors that are sharded over a mesh of processes.

Each process calls the operator on its part of the heads and of the batch: see rule.py.

The rules are registered by torch.library.register_torch_dispatch, which is public. So is
torch.distributed.tensor.experimental.register_sharding, but that cannot express them:

- It remembers its decisions by the shapes and the integers of a call. A call with another
  output_mask, enable_gqa or reduce would get what was decided for the first one.
- A dimension of the mesh is described without the others. Whether groups of heads stay whole
  depends on all of them together.
- No process can be given one of the heads of a key that is replicated.
- Tensors that are keywords, as those of attention_with_kvcache, would not be redistributed.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from qkv._vmap import COMPOSITES, COMPUTING
from qkv.distributed._dtensor import rotate
from qkv.distributed._dtensor.rule import decompose, rule, seed_rule


def register() -> None:
    rules: dict[str, Any] = dict.fromkeys(COMPOSITES, decompose)
    rules |= dict.fromkeys((*COMPUTING, "attention_with_kvcache"), rule)
    rules |= dict.fromkeys(("rotate", "rotate_backward"), rotate.rule)
    for name, function in (rules | {"dropout_seed": seed_rule}).items():
        torch.library.register_torch_dispatch(f"qkv::{name}", DTensor, function)
    # What stops torch's forward mode, for all operators: DTensor has no rule for a question that is
    # asked of every tensor and its tangent.
    torch.library.register_torch_dispatch("aten::_has_same_storage_numel", DTensor, _same_numel)


def _same_numel(cls: type, op: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Of the tensors as a whole: their parts may be sharded in different ways."""
    return args[0].shape == args[1].shape
