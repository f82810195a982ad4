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

Call = dict[str, Any]  # the arguments of an operator, and its results, by their names
# Of a pair of a query and a key: how many products of rows as wide as query and key are, and how
# many of rows as wide as value.
Products = tuple[int, int]


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


def _backward(call: Call) -> Products:
    """Scores, and the gradients of query and key; those of the weights and of the value."""
    names = [n.removeprefix("grad_") for n in call["results"]]
    wanted, of_values = {n for n, w in zip(names, call["output_mask"], strict=True) if w}, 0
    if call.get("grad_output") is not None:
        of_values = bool(wanted - {"value"}) + ("value" in wanted)
    return 1 + len(wanted & {"query", "key"}), of_values


def _hard_backward(call: Call) -> Products:
    """With straight_through those of soft attention, whose output it makes anew; the gradient of
    the values is looked up, as they are."""
    names, mask = call["results"], call["output_mask"]
    wanted = [w and n != "grad_value" for n, w in zip(names, mask, strict=True)]
    if not (call["straight_through"] and any(wanted)):
        return 0, 0
    of_scores, of_values = _backward(call | {"output_mask": wanted})
    return 1 + of_scores, 1 + of_values


# The last two make all their products, whatever is wanted of them: the double backward pass is the
# two of docs/report.md.
FORMULAS: dict[str, Products | Callable[[Call], Products]] = {
    "attention_forward": (1, 1),
    "attention_backward": _backward,
    "weights_forward": (1, 0),
    "weights_backward": _backward,
    "with_weights_forward": (1, 1),
    "with_weights_backward": _backward,
    "hard_forward": (1, 0),  # values are looked up
    "hard_backward": _hard_backward,
    "attention_with_kvcache": (1, 1),
    "varlen_attention_paged": (1, 1),
    "attention_forward_jvp": (3, 3),
    "attention_double_backward": (10, 5),
}


def _formula(op: Any, products: Products | Callable[[Call], Products]) -> Callable[..., int]:
    arguments = [argument.name for argument in op._schema.arguments]
    names = [result.name for result in op._schema.returns]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        call: Call = dict(zip(names, out_val, strict=True)) | {"results": names}
        call |= dict(zip(arguments, args, strict=False)) | kwargs
        value = call["v_cache"] if "v_cache" in call else call.get("value")
        of_scores, of_values = products(call) if callable(products) else products
        multiplications = of_scores * call["query"].size(-1)
        multiplications += 0 if value is None else of_values * value.size(-1)
        return 2 * _pairs(call) * multiplications

    return formula


def register() -> None:
    for name, products in FORMULAS.items():
        packet = getattr(torch.ops.qkv, name)
        if packet not in flop_registry:  # it is, if qkv has been imported before
            register_flop_formula(packet, get_raw=True)(_formula(packet.default, products))
