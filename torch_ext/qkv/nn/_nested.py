"""Nested tensors: a batch of sequences without padding. Their values are packed documents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from qkv.nn._check import refuse

_refuse = partial(refuse, "MultiheadAttention")
Packed = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]
Nested = Any  # a Tensor with what nested ones have beside, for which torch has no public type


def packed(nested: Nested) -> Packed:
    """The values of `[B, j, E]`, `[T, E]`; where each item begins, and the last ends, `[B + 1]`;
    and what makes a nested tensor like this one of other values."""
    if nested.dim() != 3:
        _refuse(f"query is a nested tensor of {nested.dim()} dimensions, but [B, j, E] is expected")
    if nested.layout == torch.jagged:
        if nested._ragged_idx != 1 or nested.lengths() is not None:
            _refuse(
                "query is a jagged tensor that is transposed or has holes, but a contiguous "
                "[B, j, E] is expected"
            )
        ends = nested.offsets()  # the same tensor makes the result's j the same j
        return nested.values(), ends, lambda values: nested_tensor_from_jagged(values, ends)
    nested = nested.contiguous()
    sizes = nested._nested_tensor_size()  # [B, 2]
    ends = torch.nn.functional.pad(sizes[:, 0].cumsum(0), (1, 0))
    layout = (sizes, nested._nested_tensor_strides(), nested._nested_tensor_storage_offsets())
    values = nested.values().view(-1, nested.size(2))
    view: Any = torch._nested_view_from_buffer  # pyright: ignore[reportPrivateImportUsage]
    return values, ends, lambda values: view(values.flatten(), *layout)
