"""Bounds of what a mask function gives for the positions of a block, by interval arithmetic."""

import math
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from qkv._recorded import CONSTANT, Node, record, replaced

# A value is a constant of the function, a tensor; or bounds, the least and the greatest of what it
# is, a pair of int64 or bool tensors that broadcast over blocks; or None, which is unknown.

_MIN_OF_SECOND = {"floor_divide": 1, "div": 1, "remainder": 1, "__rshift__": 0}
_MAX = 1 << 61  # the sum of two such numbers is an int64, too
_UNKNOWN = torch.tensor(False), torch.tensor(True)


def bounds_of(mask_mod: Any, places: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """places: bounds of batch item, head, query and key. False and True where it is unknown."""
    try:
        recording = record(mask_mod, [torch.int64] * len(places))
    except Exception:  # who evaluates it sees the same error, unless it is recording's alone
        return _UNKNOWN
    known: dict[Any, Any] = {node: x for x, node in recording.captured}
    known |= zip(recording.arguments, places, strict=True)
    for node in recording.nodes:
        # Numbers that the function makes are results of no operation.
        known |= {x: x.like for x in node.inputs if x.level == CONSTANT}
        known[node] = _value(node, known)
    result = known.get(recording.result)
    ends = None if result is None else _ends(result)
    return (ends[0], ends[-1]) if ends and ends[0].dtype == torch.bool else _UNKNOWN


def _value(node: Node, known: dict[Any, Any]) -> Any:
    values = [known[x] for x in node.inputs]
    if node.level == CONSTANT:
        return node.like
    is_number = not node.like.dim() and not node.like.is_floating_point()
    unknown = _UNKNOWN if is_number and node.like.dtype == torch.bool else None
    if all(isinstance(x, Tensor) for x in values):
        return node.run(known.__getitem__)
    if not is_number or node.like.is_complex() or any(x is None for x in values):
        return unknown
    args, kwargs = replaced((node.args, node.kwargs), known.__getitem__)
    if node.name == "index":
        found = _looked_up(*args)
    elif _is_ruled(node, ends := [_ends(x) for x in args]):
        function = getattr(torch.ops.aten, node.name)  # with its overloads, none of them in place
        found = _RULES[node.name](function, ends, kwargs)
    else:
        return unknown
    return _kept(found, node.like.dtype) or unknown


def _ends(x: Any) -> tuple[Any, ...] | None:
    """Least and greatest of a value or of an argument that is none, such as a number or None."""
    if not isinstance(x, Tensor):
        return x if isinstance(x, tuple) else (x,)
    if x.dim() or x.is_floating_point() or x.is_complex():
        return None
    return (x if x.dtype == torch.bool else x.long(),)


def _kept(found: Any, dtype: torch.dtype) -> Any:
    """The bounds, unless the numbers may have wrapped around in the dtype that torch gives them."""
    if found is None or dtype == torch.bool:
        return found and tuple(x.bool() for x in found)
    low, high = (x.long() for x in found)
    limits = torch.iinfo(dtype)
    is_in = low.min() >= max(limits.min, -_MAX) and high.max() <= min(limits.max, _MAX)
    return (low, high) if is_in else None


def _is_ruled(node: Node, ends: list[Any]) -> bool:
    """Whether there is a rule for the operation with these arguments."""
    name, dtypes = node.name, [x.like.dtype for x in node.inputs]
    if name not in _RULES or any(x is None for x in ends):
        return False
    if name.startswith(("bitwise", "logical")) and any(x != torch.bool for x in dtypes):
        return False
    numbers = [x[0] for x in ends if isinstance(x[0], int)]
    limits = [torch.iinfo(x) for x in dtypes if x != torch.bool]
    if any(not x.min <= n <= x.max for x in limits for n in numbers):  # which torch would cast
        return False
    if name in {"add", "sub", "rsub", "mul"}:
        most = [_most(x) for x in (*ends, *((x,) for x in node.kwargs.values()))]
        return math.prod(most) <= _MAX
    least = torch.as_tensor(ends[1][0]).min() if name in _MIN_OF_SECOND else 0
    return bool(least >= _MIN_OF_SECOND.get(name, 0))


def _most(ends: tuple[Any, ...]) -> int:
    """The greatest magnitude, or 2 if that is less: a product of such is no less than the sum."""
    return max(2, *(int(torch.as_tensor(x).long().abs().max()) for x in ends))


def _at_corners(function: Any, ends: list[Any], kwargs: Any) -> Any:
    corners = [function(*corner, **kwargs) for corner in product(*ends)]
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)


def _eq(_: Any, ends: list[Any], __: Any) -> Any:
    (a, b), (c, d) = ((x[0], x[-1]) for x in ends)
    return (a == d) & (b == c), (a <= d) & (b >= c)


def _ne(*args: Any) -> Any:
    never, always = _eq(*args)
    return ~always, ~never


def _abs(_: Any, ends: list[Any], __: Any) -> Any:
    low, high = ends[0][0], ends[0][-1]
    return low.maximum(-high).clamp(min=0), low.abs().maximum(high.abs())


def _remainder(_: Any, ends: list[Any], __: Any) -> Any:
    """Exact within one multiple of the divisor."""
    (a, b), (c, d) = ((torch.as_tensor(x[0]), torch.as_tensor(x[-1])) for x in ends)
    is_one = (c == d) & (a // d == b // d)
    return torch.where(is_one, a % d, 0), torch.where(is_one, b % d, d - 1)


def _to_copy(_: Any, ends: list[Any], kwargs: Any) -> Any:
    if kwargs.get("dtype") == torch.bool != ends[0][0].dtype:
        return _ne(_, [ends[0], (0,)], {})
    return ends[0][0], ends[0][-1]


# Each of these grows or falls with each of its arguments while the others stay, so that its bounds
# are among its values at the bounds of the arguments.
_MONOTONE = (
    "add sub rsub mul neg floor_divide div __rshift__ minimum maximum clamp clamp_min clamp_max "
    "where clone lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or "
    "logical_xor logical_not"
)
_RULES: dict[str, Any] = dict.fromkeys(_MONOTONE.split(), _at_corners)
_RULES |= {"eq": _eq, "ne": _ne, "abs": _abs, "remainder": _remainder, "_to_copy": _to_copy}


def _looked_up(table: Any, indices: list[Any]) -> Any:
    """Least and greatest of a constant table where at most one index is a range: those of two
    windows that cover the range, whose length is a power of two."""
    ranges: list[Any] = [_ends(x) for x in indices]
    if not isinstance(table, Tensor) or any(x is None or x[0].dtype == torch.bool for x in ranges):
        return None
    at = [x[0] for x in ranges]
    wide = [n for n, x in enumerate(ranges) if not torch.equal(x[0], x[-1])]
    is_out = [x[0].min() < 0 or x[-1].max() >= n for n, x in zip(table.shape, ranges, strict=True)]
    if len(wide) > 1 or any(is_out):
        return None
    least = most = table if table.dtype == torch.bool else table.long()
    dim, width = next(iter(wide), 0), 1
    low, high = ranges[dim][0], ranges[dim][-1]
    length, found = high - low + 1, None
    while True:
        n = least.size(dim)
        begin, end = low.clamp(max=n - 1), (high + 1 - width).clamp(0, n - 1)
        of = [(*at[:dim], x, *at[dim + 1 :]) for x in (begin, end)]
        pair = least[of[0]].minimum(least[of[1]]), most[of[0]].maximum(most[of[1]])
        is_reached = length >= width
        old = found or pair
        found = tuple(torch.where(is_reached, *x) for x in zip(pair, old, strict=True))
        if width * 2 > length.max():
            return found
        least = least.narrow(dim, 0, n - width).minimum(least.narrow(dim, width, n - width))
        most = most.narrow(dim, 0, n - width).maximum(most.narrow(dim, width, n - width))
        width *= 2
