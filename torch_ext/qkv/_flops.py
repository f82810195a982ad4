"""torch.utils.flop_counter: how many floating-point operations the products of a call are.

Counted as torch counts scaled_dot_product_attention on other devices: all pairs of queries and
keys, whatever a mask, is_causal or a window hides, two products forward and five backward. (torch
2.13 has no formula for its own attention on a CPU, and counts 0.)
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from qkv.options import DIFFERENTIABLE

Call = dict[str, Any]  # the arguments of an operator, and its results, by their names
_TANGENTS = {f"{name}_tangent" for name in DIFFERENTIABLE}


def _numbers(tensor: Tensor | None) -> list[int] | None:
    """None where there are none, or nobody knows them while a program is being compiled."""
    if tensor is None or tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return None
    return tensor.tolist()


def _document_pairs(call: Call) -> int:
    """Of packed documents; as if there were one alone where their lengths are not known."""
    (rows, heads, _), ends = call["query"].shape, call["cu_seq_q"]
    if (ends_q := _numbers(ends)) is None:
        table, keys = call.get("block_table"), call["key"]
        return heads * rows * (keys.size(0) if table is None else table.size(1) * keys.size(1))
    lengths = _numbers(call.get("seqused_k"))
    if lengths is None:
        ends_k = ends_q if call.get("cu_seq_k") is None else call["cu_seq_k"].tolist()
        lengths = [end - begin for begin, end in zip(ends_k, ends_k[1:], strict=False)]
    queries = [end - begin for begin, end in zip(ends_q, ends_q[1:], strict=False)]
    return heads * sum(q * k for q, k in zip(queries, lengths, strict=True))


def _cache_pairs(call: Call) -> int:
    """Of a cache; all of it where the lengths are not known."""
    batch, heads, rows, _ = call["query"].shape
    table, key, leftpad = call.get("block_table"), call.get("key"), call.get("cache_leftpad")
    size = call["k_cache"].size(2) * (1 if table is None else table.size(1))
    lengths = _numbers(call.get("cache_seqlens"))
    if lengths is None:
        return batch * heads * rows * size
    more = 0 if key is None else key.size(2)
    hidden = sum(_numbers(leftpad) or ())
    return heads * rows * (sum(lengths) + len(lengths) * more - hidden)


def _pairs(call: Call) -> int:
    """How many pairs of a query and a key there are, in all heads and batch items."""
    if "k_cache" in call:
        return _cache_pairs(call)
    if call.get("cu_seq_q") is not None:
        return _document_pairs(call)
    rows = call["index"] if "index" in call else call["logsumexp"]
    return prod(rows.shape) * call["key"].size(-2)


def _forward(call: Call) -> int:
    """Scores; the output, where there is one."""
    value = call["v_cache"] if "v_cache" in call else call.get("value")
    return call["query"].size(-1) + (0 if value is None else value.size(-1))


def _moves(call: Call) -> set[str]:
    """The arguments that have a tangent."""
    return {n.removesuffix("_tangent") for n, x in call.items() if n in _TANGENTS and x is not None}


def _tangent_scores(call: Call) -> int:
    """The tangents of the dot products: a product for query's and one for key's."""
    return call["query"].size(-1) * len(_moves(call) & {"query", "key"})


def _tangent_output(call: Call) -> int:
    """The weights by the values' tangents, and the tangents of the weights by the values."""
    moves = _moves(call)
    return call["value"].size(-1) * (("value" in moves) + bool(moves - {"value"}))


def _jvp(call: Call) -> int:
    return _forward(call) + _tangent_scores(call) + _tangent_output(call)


def _wanted(call: Call) -> set[str]:
    """The arguments whose gradients are wanted."""
    names = [n.removeprefix("grad_") for n in call["results"]]
    return {n for n, w in zip(names, call["output_mask"], strict=True) if w}


def _backward(call: Call) -> int:
    """Scores; the gradients of the weights and of the value; those of query and key."""
    wanted = _wanted(call)
    head_dim, products = call["query"].size(-1), 1 + len(wanted & {"query", "key"})
    flops = head_dim * products
    if call.get("grad_output") is not None:
        of_weights = bool(wanted - {"value"})
        flops += call["value"].size(-1) * (of_weights + ("value" in wanted))
    return flops


def _double_backward(call: Call) -> int:
    """The two passes of docs/derivatives.md: the first where its results are not given, and the
    second where it is not only they that are wanted."""
    moves, wanted = _moves(call), _wanted(call)
    has_gradient = call.get("grad_output") is not None
    if not moves or not has_gradient and call.get("grad_logsumexp") is None:
        return 0
    flops, scores = 0, call["query"].size(-1) + _tangent_scores(call)
    if call.get("output_tangent") is None or call.get("logsumexp_tangent") is None:
        flops += scores + _tangent_output(call)
    if wanted - {"grad_output", "grad_logsumexp"}:
        flops += scores
        flops += call["query"].size(-1) * ("query" in wanted) * (1 + ("key" in moves))
        flops += call["query"].size(-1) * ("key" in wanted) * (1 + ("query" in moves))
        if has_gradient:
            flops += call["value"].size(-1) * (1 + ("value" in moves) + ("value" in wanted))
    return flops


def _hard_backward(call: Call) -> int:
    return _backward(call) if call["straight_through"] else 0


# The multiplications of a pair of a query and a key.
FORMULAS: dict[str, Callable[[Call], int]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "attention_forward_jvp": _jvp,
    "attention_double_backward": _double_backward,
    "weights_forward": _forward,
    "weights_backward": _backward,
    "with_weights_forward": _forward,
    "with_weights_backward": _backward,
    "hard_forward": lambda call: call["query"].size(-1),  # values are looked up
    "hard_backward": _hard_backward,
    "attention_with_kvcache": _forward,
    "varlen_attention_paged": _forward,
}


def _formula(op: Any, multiplications: Callable[[Call], int]) -> Callable[..., int]:
    arguments = [argument.name for argument in op._schema.arguments]
    names = [result.name for result in op._schema.returns]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call: Call = dict(zip(names, out_val, strict=True)) | {"results": names}
        call |= dict(zip(arguments, args, strict=False)) | kwargs
        return 2 * _pairs(call) * multiplications(call)

    return formula


def register() -> None:
    for name, multiplications in FORMULAS.items():
        packet = getattr(torch.ops.qkv, name)
        if packet not in flop_registry:  # it is, if qkv has been imported before
            formula = _formula(packet.default, multiplications)
            register_flop_formula(packet, get_raw=True)(formula)
