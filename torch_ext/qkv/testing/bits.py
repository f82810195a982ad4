"""SHA-256 of what a fixed set of calls returns where bits are the same on every CPU.

    python -m qkv.testing.bits

prints the table of docs/determinism.md, or another one where the promise is broken. Inputs are made
of integers by Philox, not by torch's generator, and are exact in every dtype they are given in.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qkv
from qkv.nn import KVCache
from qkv.testing._dropout import WORD, philox

Results = tuple[Tensor, ...]


def numbers(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nearly normal numbers: sums of four of 16 bits, from the stream of Philox that `name` has."""
    count = torch.Size(shape).numel()
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    at = torch.arange((count + 1) // 2)
    zero = torch.zeros_like(at)
    words = torch.stack(philox((at, zero, zero, zero), (key & WORD, key >> 32)), -1).view(-1, 2)
    sums = (words & 0xFFFF).sum(-1) + (words >> 16).sum(-1) - 2 * 0xFFFF
    return (sums[:count].double() / 2**15).view(shape).to(dtype)


def _attended(
    B: int, H: int, L: int, S: int, D: int, dtype: torch.dtype = torch.float32, Hkv: int = 0,
    causal: bool = False, **options: Any,
) -> Results:  # fmt: skip
    """Output, log-sum-exp and all gradients."""
    sizes = {"query": (B, H, L, D), "key": (B, Hkv or H, S, D), "value": (B, Hkv or H, S, D)}
    inputs = {name: numbers(name, *size, dtype=dtype) for name, size in sizes.items()}
    given: dict[str, Any] = {n: x() if callable(x) else x for n, x in options.items()}
    leaves = [*inputs.values()]
    leaves += [x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    for x in leaves:
        x.requires_grad_()
    torch.manual_seed(0)  # of dropout
    results = qkv.attention(
        inputs["query"], inputs["key"], inputs["value"],
        is_causal=causal, enable_gqa=bool(Hkv), return_lse=True, **given,
    )  # fmt: skip
    incoming = [numbers("grad", *x.shape, dtype=x.dtype) for x in results]
    return *results, *torch.autograd.grad(results, leaves, incoming)


def _second() -> Results:
    leaves = [numbers(n, 1, 2, 20, 24, dtype=torch.float64).requires_grad_() for n in "qkv"]
    query, key, value = leaves
    output = qkv.attention(query, key, value, is_causal=True)
    first = torch.autograd.grad(output, leaves, torch.ones_like(output), create_graph=True)
    return torch.autograd.grad(first, leaves, [x.detach() for x in first])


def _forward_mode() -> Results:
    query, key, value, *tangents = (numbers(name, 1, 2, 70, 40) for name in "qkvabc")
    return torch.func.jvp(qkv.attention, (query, key, value), tuple(tangents))


def _weights() -> Results:
    query, key = numbers("query", 2, 4, 30, 32), numbers("key", 2, 4, 90, 32)
    return qkv.attention_weights(query, key), qkv.attention_weights(query, key, reduce="queries")


def _packed() -> Results:
    query, key, value = (numbers(name, 150, 4, 32) for name in ("query", "key", "value"))
    ends = torch.tensor([0, 1, 70, 150], dtype=torch.int32)
    return (qkv.varlen_attn(query, key, value, ends, ends, 80, 80, window_size=(-1, 0)),)


def _cached(dtype: torch.dtype, pages: int | None = None) -> Results:
    """100 keys, then steps of 1 and 7 queries; in blocks of `pages` keys, if it is not None."""
    cache, results = KVCache.empty(2, 2, 128, 32, dtype, pages), []
    for n, L in enumerate((100, 1, 7)):
        of = torch.float32 if dtype == torch.int8 else dtype
        query = numbers(f"query {n}", 2, 8, L, 32, dtype=of)
        key, value = (numbers(f"{name} {n}", 2, 2, L, 32, dtype=of) for name in ("key", "value"))
        results.append(cache.attend(query, key, value, causal=True))
    return tuple(results)


def _rotated() -> Results:
    query, key = numbers("query", 2, 4, 30, 64), numbers("key", 2, 2, 30, 64)
    angles = numbers("angles", 30, 32)
    weights = [numbers(n, 64).requires_grad_() for n in ("query weight", "key weight")]
    leaves = [query.requires_grad_(), key.requires_grad_(), *weights]
    rotated = qkv.rotate(
        query, key, angles, 1 - angles, query_weight=weights[0], key_weight=weights[1]
    )
    return *rotated, *torch.autograd.grad(rotated, leaves, [x.detach() for x in rotated])


def _scored() -> Results:
    leaves = [numbers(name, 2, 4, 150, 32) for name in ("query", "key", "value")]
    leaves.append(numbers("table", 4, 16))
    query, key, value, table = (x.requires_grad_() for x in leaves)
    output = qkv.flex_attention(
        query, key, value, lambda s, b, h, q, k: torch.sin(s) + s * table[h, (q - k) % 16]
    )
    return output, *torch.autograd.grad(output, leaves, output.detach())


CALLS: dict[str, Callable[[], Results]] = {
    "float32": partial(_attended, 2, 4, 197, 197, 64),
    "float64": partial(_attended, 1, 2, 70, 90, 40, torch.float64),
    "bfloat16": partial(_attended, 1, 4, 130, 130, 64, torch.bfloat16),
    "float16": partial(_attended, 1, 4, 130, 130, 64, torch.float16),
    "causal, grouped heads": partial(_attended, 1, 8, 300, 300, 128, Hkv=2, causal=True),
    "one query of grouped heads": partial(_attended, 2, 8, 1, 1000, 128, Hkv=2),
    "a window, softcap": partial(_attended, 1, 2, 200, 260, 32, window_size=(40, 3), softcap=5.0),
    "slopes, sinks": partial(_attended, 
        1, 4, 90, 90, 32, alibi_slopes=lambda: numbers("slopes", 4) / 16,
        sinks=lambda: numbers("sinks", 4),
    ),
    "a boolean mask": partial(_attended, 
        1, 2, 90, 150, 32, attn_mask=lambda: numbers("mask", 90, 150).gt(-1)
    ),
    "a bias by key, with its gradient": partial(_attended, 
        1, 2, 90, 150, 32, bias=lambda: numbers("bias", 1, 150)
    ),
    "a bias by head, with its gradient": partial(_attended, 
        2, 2, 40, 50, 32, bias=lambda: numbers("bias", 2, 40, 50)
    ),
    "dropout": partial(_attended, 1, 2, 90, 150, 32, dropout_p=0.3),
    "weights": _weights,
    "second derivatives": _second,
    "forward mode": _forward_mode,
    "packed documents": _packed,
    "a cache": partial(_cached, torch.float32),
    "a cache in blocks, bfloat16": partial(_cached, torch.bfloat16, 16),
    "a cache of int8": partial(_cached, torch.int8),
    "a rotation with norms": _rotated,
    "a score function, its table": _scored,
}  # fmt: skip


def digest(results: Results) -> str:
    """16 hexadecimal digits. Zeros have no sign here: of a sum that is 0, it means nothing."""
    sha = hashlib.sha256()
    for x in results:
        bits = (x.detach() + 0.0).contiguous().view(torch.uint8)
        sha.update(bytes(bits.flatten().tolist()))
    return sha.hexdigest()[:16]


def table() -> str:
    """A line for each of CALLS: its name and digest."""
    with qkv.reproducible():
        return "\n".join(f"{name:36}{digest(call())}" for name, call in CALLS.items())


if __name__ == "__main__":
    print(table())
