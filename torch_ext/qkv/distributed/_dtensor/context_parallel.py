"""torch.distributed.tensor.experimental.context_parallel, and its newer form, on CPUs.

Both turn query, key and value into DTensors that are sharded over the sequence, perhaps with its
chunks in another order, so that causal work is balanced. Then DTensor has handlers for torch's
kernels of GPUs, which send keys and values around a ring. Here qkv's operators take part in that
ring, on torch's private interfaces: `_templated_ring_attention` and its backward pass, which take
an operator, and DTensor's table of handlers, which says whether context parallelism is on.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from qkv._machine import is_reproducible

_SEQUENCE = 2  # of [B, H, L, D], as torch has it
_GPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention.default
_FORWARD = torch.ops.qkv.attention_forward.default
_BACKWARD = torch.ops.qkv.attention_backward.default
_PASSED = {"query", "key", "value", "grad_output", "output", "logsumexp"}


def is_on(query: DTensor) -> bool:
    """Whether a query is one that torch's context parallelism has sharded. Without the table that
    says so, in some later torch, this raises rather than guess."""
    return _is_of_ring(query) and _GPU_KERNEL in DTensor._op_dispatcher._custom_op_handlers


def _is_of_ring(x: DTensor) -> bool:
    """Whether a query [B, H, L, D] is sharded over the sequence alone, or an output."""
    return x.dim() == 4 and x.placements == (Shard(_SEQUENCE),)


def check_is_on(op: Any, given: Mapping[str, DTensor]) -> None:
    """Refuses the backward pass of a ring after torch's context parallelism has been left. That it
    is one can be seen by the output: without a ring, none is sharded over the sequence."""
    if "output" in given and _is_of_ring(given["query"]) and _is_of_ring(given["output"]):
        raise RuntimeError(
            f"{op._schema.name}: output is {(Shard(_SEQUENCE),)}, as torch's context_parallel has "
            "it, but that is not active any more; expected the backward pass within it, too"
        )


def attend(op: Any, given: Mapping[str, DTensor], options: Mapping[str, Any]) -> Any:
    """attention_forward or attention_backward, around the ring.

    Raises:
        NotImplementedError: for other operators, and for what torch's ring does not pass on.
    """
    if (why := _why_not(op, given, options)) is not None:
        raise NotImplementedError(
            f"{op._schema.name}: {why}; expected qkv.distributed.ring_attention, on parts of the "
            "sequence as they are"
        )
    from torch.distributed.tensor.experimental._context_parallel import _attention

    torchs: Any = _attention

    mesh, parts = given["query"].device_mesh, [Shard(_SEQUENCE)]
    local = {name: x.redistribute(placements=parts).to_local() for name, x in given.items()}
    passed = {n: x for n, x in options.items() if n not in ("is_causal", "output_mask")}
    passed |= {"group": mesh.get_group(), "seq_dim": _SEQUENCE, "is_causal": options["is_causal"]}
    if op is _FORWARD:
        results = torchs._templated_ring_attention(op=op, **local, **passed)
    else:
        local = {"grad_out": local.pop("grad_output"), "out": local.pop("output"), **local}
        gradients = torchs._templated_ring_attention_backward(
            op=_backward, grad_out_name="grad_output", **local, **passed
        )
        results = (*gradients, *[None] * (len(op._schema.returns) - len(gradients)))
    return tuple(None if x is None else DTensor.from_local(x, mesh, parts) for x in results)


def _why_not(op: Any, given: Mapping[str, DTensor], options: Mapping[str, Any]) -> str | None:
    """What torch's ring does not pass on, if the call has something of that."""
    if op not in (_FORWARD, _BACKWARD):
        return "torch's context_parallel has no ring for it"
    if is_reproducible():
        return "what a ring's ranks add up has other bits on other CPUs, but the same are asked for"
    where = "torch's context_parallel does not tell where in the sequence a part is"
    if options.get("score_program"):
        return f"score_mod is given, but {where}"
    for name, none in {"dropout_p": 0.0, "window_size": None}.items():
        if options[name] != none:
            return f"{name} is {options[name]}, but {where}"
    if more := [name for name in given if name not in _PASSED]:
        return f"{more[0]} is given, but torch's context_parallel passes query, key and value alone"
    return None


def _backward(out: Tensor, **call: Any) -> Any:
    """attention_backward, with the name that torch's ring has for output."""
    mask = [True] * 3 + [False] * (len(_BACKWARD._schema.returns) - 3)
    return _BACKWARD(output=out, output_mask=mask, **call)[:3]
