"""The arguments of ring_attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.options import BY_HEAD, MASKS, defaults
from qkv.spans import tensor_of

TENSORS = (*MASKS, *BY_HEAD)
SCALARS = {n: x for n, x in defaults(torch.ops.qkv.attention.default).items() if n not in TENSORS}


@dataclass
class Call:
    """The arguments of ring_attention. query, key and value are `[H, L_local, D]` where there are
    documents."""

    query: Tensor
    key: Tensor
    value: Tensor
    tensors: dict[str, Tensor]  # of options.MASKS and BY_HEAD, those that are given
    scalars: dict[str, Any]  # dropout_p, is_causal, scale, enable_gqa, window_size and softcap
    seqlen: int | None
    cu_seqlens: Tensor | None
    method: str

    @property
    def masks(self) -> list[Tensor]:
        return [self.tensors[name] for name in MASKS if name in self.tensors]

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, seqlen: int | None,
        cu_seqlens: Tensor | None, method: str, **options: Any,
    ) -> "Call":  # fmt: skip
        tensors = {name: x for name in TENSORS if (x := options.pop(name, None)) is not None}
        return cls(query, key, value, tensors, SCALARS | options, seqlen, cu_seqlens, method)


def prepare(call: Call) -> None:
    """The tensor of spans; under autocast, tensors of its dtype, as qkv.attention has them;
    documents without a dimension for a batch."""
    if "spans" in call.tensors:
        call.tensors["spans"] = tensor_of(call.tensors["spans"])
    inputs = {"query": call.query, "key": call.key, "value": call.value}
    tensors = inputs | call.tensors
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        for name in tensors.keys() & {*inputs, "attn_mask"}:
            if tensors[name].is_floating_point() and tensors[name].dtype != torch.float64:
                tensors[name] = tensors[name].to(dtype)
    if call.cu_seqlens is not None and call.query.dim() == 4 and call.query.size(0) == 1:
        for name in tensors.keys() - set(BY_HEAD):
            if tensors[name].dim() == 4:
                tensors[name] = tensors[name][0]
    call.query, call.key, call.value = (tensors.pop(name) for name in inputs)
    call.tensors = tensors
