"""Arguments that make no sense are refused, in words that name them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qkv._refuse import refuse


def check_key(key: Tensor, query: Tensor, enable_gqa: bool) -> None:
    check_tensor("query", query)
    check_tensor("key", key)
    if key.size(-1) != query.size(-1):
        refuse("key", key, f"[..., {query.size(-1)}] is expected, as query")
    check_heads("key", key, query, enable_gqa)


def check_value(value: Tensor, key: Tensor, query: Tensor, enable_gqa: bool) -> None:
    check_tensor("value", value)
    if value.size(-2) != key.size(-2):
        refuse("value", value, f"[..., {key.size(-2)}, Dv] is expected, as many rows as key has")
    check_heads("value", value, query, enable_gqa)


def check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.is_nested or not x.is_floating_point():
        kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else repr(x)
        kind = "a nested tensor" if isinstance(x, Tensor) and x.is_nested else kind
        refuse(name, kind, "a dense tensor of a floating dtype is expected", TypeError)
    if x.dim() < 2:
        refuse(name, x, "[..., rows, columns] is expected")


def check_heads(name: str, x: Tensor, query: Tensor, enable_gqa: bool) -> None:
    """Leading dimensions broadcast; with enable_gqa the heads of x divide those of query."""
    heads, kv_heads = (y.size(-3) if y.dim() > 2 else 1 for y in (query, x))
    if enable_gqa and heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{name} has {kv_heads} heads, but a divisor of {heads} is expected, query's"
        )
    batch = -3 if enable_gqa else -2
    if not broadcasts(x.shape[:batch], query.shape[:batch]):
        others = [*query.shape]
        refuse(name, x, f"leading dimensions that broadcast with query's, {others}, are expected")


def check_broadcast(
    name: str, x: Tensor, lead: Sequence[int], meaning: str, or_bool: str = ""
) -> None:
    if not isinstance(x, Tensor):
        refuse(name, repr(x), "a tensor is expected", TypeError)
    if not broadcasts(x.shape, lead):
        wanted = f"a shape that broadcasts with {meaning}, here {[*lead]}, is expected"
        refuse(name, x, wanted)
    if not x.is_floating_point() and not (or_bool and x.dtype == torch.bool):
        refuse(name, x.dtype, f"{or_bool}a floating dtype is expected", TypeError)


def check_mask(name: str, mask: Tensor, lead: Sequence[int], L: int, S: int) -> None:
    check_broadcast(name, mask, (*lead, L, S), "[..., H, L, S]", "bool or ")
    if any(n not in (1, m) for n, m in zip(mask.shape[::-1], (S, L), strict=False)):
        refuse(name, mask, f"[..., {L} or 1, {S} or 1] is expected")


def check_numbers(scale: float | None, softcap: float, window_size: tuple[int, int] | None) -> None:
    if scale is not None and not math.isfinite(scale):
        refuse("scale", scale, "a finite number is expected")
    if not 0 <= softcap < math.inf:
        refuse("softcap", softcap, "a finite number, 0 for none, is expected")
    if window_size is not None and (len(window_size) != 2 or min(window_size) < -1):
        refuse("window_size", window_size, "(left, right), each -1 or more, is expected")


def check_dropout(dropout_p: float, seed: int | Tensor | None) -> None:
    if not 0 <= dropout_p <= 1:
        refuse("dropout_p", dropout_p, "a probability from 0 to 1 is expected")
    if dropout_p > 0 and seed is None:
        wanted = "the number that says which weights are dropped is expected: see"
        found = f"None with dropout_p {dropout_p}"
        refuse("dropout_seed", found, f"{wanted} qkv.testing.dropout_seed")


def broadcasts(one: Sequence[int], other: Sequence[int]) -> bool:
    sizes = zip(reversed(one), reversed(other), strict=False)
    return all(m == n or 1 in (m, n) for m, n in sizes)
