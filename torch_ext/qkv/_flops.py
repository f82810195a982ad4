"""torch.utils.flop_counter: how many floating-point operations the products of a call are.

Counted as torch counts scaled_dot_product_attention on other devices: all pairs of queries and
keys, whatever a mask, is_causal or a window hides, two products forward and five backward. (torch
2.13 has no formula for its own attention on a CPU, and counts 0.)
"""

from collections.abc import Callable
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import flop_registry, register_flop_formula

from qkv.options import DIFFERENTIABLE

Call = dict[str, Any]  # the arguments of an operator, and its results, by their names
# Of a pair of a query and a key: how many products of rows as wide as query and key are, and how
# many of rows as wide as value.
Products = tuple[int, int]
_TANGENTS = {f"{name}_tangent" for name in DIFFERENTIABLE}


def _is_known(numbers: Tensor | None) -> TypeGuard[Tensor]:
    """Nobody knows them while a program is being compiled."""
    return numbers is not None and not numbers.is_meta and not is_fake(numbers)


def _document_pairs(call: Call) -> int:
    """Of packed documents; as if there were one alone where their lengths are not known."""
    (rows, heads, _), ends, lengths = call["query"].shape, call["cu_seq_q"], call.get("seqused_k")
    if not _is_known(ends):
        table, keys = call.get("block_table"), call["key"]
        return heads * rows * (keys.size(0) if table is None else table.size(1) * keys.size(1))
    if lengths is None:
        lengths = (ends if call.get("cu_seq_k") is None else call["cu_seq_k"]).diff()
    return heads * int((ends.diff() * lengths.long()).sum())


def _cache_pairs(call: Call) -> int:
    """Of a cache; all of it where the lengths are not known."""
    batch, heads, rows, _ = call["query"].shape
    table, key, leftpad = call.get("block_table"), call.get("key"), call.get("cache_leftpad")
    size = call["k_cache"].size(2) * (1 if table is None else table.size(1))
    if not _is_known(lengths := call.get("cache_seqlens")):
        return batch * heads * rows * size
    lengths = lengths + (0 if key is None else key.size(2)) - (0 if leftpad is None else leftpad)
    return heads * rows * int(lengths.sum())


def _pairs(call: Call) -> int:
    """How many pairs of a query and a key there are, in all heads and batch items."""
    if "k_cache" in call:
        return _cache_pairs(call)
    if call.get("cu_seq_q") is not None:
        return _document_pairs(call)
    rows = call["index"] if "index" in call else call["logsumexp"]
    return prod(rows.shape) * call["key"].size(-2)


def _moves(call: Call) -> set[str]:
    """The arguments that have a tangent."""
    return {n.removesuffix("_tangent") for n, x in call.items() if n in _TANGENTS and x is not None}


def _tangents(call: Call) -> Products:
    """Of the dot products, one for query's and one for key's tangent; the weights by the values'
    tangents, and the tangents of the weights by the values."""
    moves = _moves(call)
    return len(moves & {"query", "key"}), ("value" in moves) + bool(moves - {"value"})


def _forward(call: Call) -> Products:
    """Scores and output, and their tangents where there are such."""
    of_scores, of_output = _tangents(call)
    return 1 + of_scores, 1 + of_output


def _wanted(call: Call) -> set[str]:
    """The arguments whose gradients are wanted."""
    names = [n.removeprefix("grad_") for n in call["results"]]
    return {n for n, w in zip(names, call["output_mask"], strict=True) if w}


def _backward(call: Call) -> Products:
    """Scores, and the gradients of query and key; those of the weights and of the value."""
    wanted, of_values = _wanted(call), 0
    if call.get("grad_output") is not None:
        of_values = bool(wanted - {"value"}) + ("value" in wanted)
    return 1 + len(wanted & {"query", "key"}), of_values


def _double_backward(call: Call) -> Products:
    """The two passes of docs/derivatives.md: the first where its results are not given, and the
    second where it is not only they that are wanted."""
    moves, wanted = _moves(call), _wanted(call)
    has_gradient = call.get("grad_output") is not None
    if not moves or not has_gradient and call.get("grad_logsumexp") is None:
        return 0, 0
    (of_scores, of_output), products, of_values = _tangents(call), 0, 0
    if call.get("output_tangent") is None or call.get("logsumexp_tangent") is None:
        products, of_values = 1 + of_scores, of_output
    if wanted - {"grad_output", "grad_logsumexp"}:
        products += 1 + of_scores
        products += ("query" in wanted) * (1 + ("key" in moves))
        products += ("key" in wanted) * (1 + ("query" in moves))
        of_values += has_gradient * (1 + ("value" in moves) + ("value" in wanted))
    return products, of_values


FORMULAS: dict[str, Callable[[Call], Products]] = {
    "attention_forward": _forward,
    "attention_backward": _backward,
    "attention_forward_jvp": _forward,
    "attention_double_backward": _double_backward,
    "weights_forward": _forward,
    "weights_backward": _backward,
    "with_weights_forward": _forward,
    "with_weights_backward": _backward,
    "hard_forward": lambda call: (1, 0),  # values are looked up
    "hard_backward": lambda call: _backward(call) if call["straight_through"] else (0, 0),
    "attention_with_kvcache": _forward,
    "varlen_attention_paged": _forward,
}


def _formula(op: Any, products: Callable[[Call], Products]) -> Callable[..., int]:
    arguments = [argument.name for argument in op._schema.arguments]
    names = [result.name for result in op._schema.returns]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call: Call = dict(zip(names, out_val, strict=True)) | {"results": names}
        call |= dict(zip(arguments, args, strict=False)) | kwargs
        value = call["v_cache"] if "v_cache" in call else call.get("value")
        of_scores, of_values = products(call)
        multiplications = of_scores * call["query"].size(-1)
        multiplications += 0 if value is None else of_values * value.size(-1)
        return 2 * _pairs(call) * multiplications

    return formula


def register() -> None:
    for name, products in FORMULAS.items():
        packet = getattr(torch.ops.qkv, name)
        if packet not in flop_registry:  # it is, if qkv has been imported before
            register_flop_formula(packet, get_raw=True)(_formula(packet.default, products))
