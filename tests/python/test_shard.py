"""`shard` of the low-level operators: a call that computes a part of a larger one. The truth is the
larger call itself, with a mask that hides the other keys, and without its other rows and heads."""

import pytest
import torch
from common import NO_OPTIONS
from torch.func import jvp, vjp

from qkv import testing

B, H, HKV, L, S, D, DV = 3, 4, 2, 19, 23, 6, 5
FORWARD = torch.ops.qkv.attention_forward

# The batch items, heads, queries and keys of each part.
PARTS = {
    "rows": (slice(0, B), slice(0, H), slice(7, 19), slice(0, S)),
    "keys": (slice(0, B), slice(0, H), slice(0, L), slice(5, 18)),
    "all": (slice(1, 3), slice(2, 4), slice(3, 12), slice(9, 23)),
    "nothing to see": (slice(0, 1), slice(0, 2), slice(0, 2), slice(21, 23)),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (3, 1)},
    "causal window": {"is_causal": True, "window_size": (6, -1), "softcap": 2.0},
    "slopes": {"alibi_slopes": (H,)},
    "slopes, causal": {"alibi_slopes": (B, H), "is_causal": True, "sinks": (H,)},
    "dropout": {"dropout_p": 0.4},
    "dropout, bias": {"dropout_p": 0.4, "window_size": (-1, 9), "bias": (B, 1, L, S)},
}
pytestmark = [
    pytest.mark.parametrize("part", PARTS),
    pytest.mark.parametrize("options", OPTIONS),
]


def draw(options):
    """{name: tensor} of what is differentiable, and the other options."""
    shapes = {"query": (B, H, L, D), "key": (B, HKV, S, D), "value": (B, HKV, S, DV)}
    shapes |= {n: x for n, x in options.items() if n in ("alibi_slopes", "sinks", "bias")}
    tensors = {n: torch.randn(x, dtype=torch.float64) for n, x in shapes.items()}
    return tensors, {n: x for n, x in options.items() if n not in shapes}


def cut(name, x, part):
    batch, heads, rows, keys = part
    if name in ("alibi_slopes", "sinks"):
        return x[batch, heads] if x.dim() == 2 else x[heads]
    if name == "bias":
        return x[batch, :, rows, keys]
    if name == "query":
        return x[batch, heads, rows]
    return x[batch, heads.start * HKV // H : heads.stop * HKV // H, keys]


def numbers(part):
    batch, heads, rows, keys = part
    return (rows.start, keys.start, L, S, heads.start, H, batch.start)


def of_part(part, tensors, options):
    """output and lse of a part, as a function of all tensors of the whole."""
    seed = torch.tensor([7]) if options.get("dropout_p") else None
    given = NO_OPTIONS | options | {"dropout_seed": seed, "enable_gqa": True}

    def f(*x):
        parts = {n: cut(n, y, part) for n, y in zip(tensors, x, strict=True)}
        output, lse = FORWARD(**given | parts, shard=numbers(part))
        return output, lse.masked_fill(lse == -torch.inf, 0)

    return f


def of_whole(part, tensors, options):
    batch, heads, rows, keys = part
    sees = torch.zeros(S, dtype=torch.bool)
    sees[keys] = True
    seed = {"dropout_seed": 7} if options.get("dropout_p") else {}

    def f(*x):
        given = dict(zip(tensors, x, strict=True)) | options | seed
        output, lse = testing.attention(
            **given, attn_mask=sees.expand(L, S), enable_gqa=True, return_lse=True
        )
        output, lse = output[batch, heads, rows], lse[batch, heads, rows]
        return output, lse.masked_fill(lse == -torch.inf, 0)

    return f


def both(part, options):
    tensors, options = draw(OPTIONS[options])
    arguments = PARTS[part], tensors, options
    return of_part(*arguments), of_whole(*arguments), tuple(tensors.values())


def like(tensors):
    return tuple(torch.randn_like(x) for x in tensors)


def test_results_gradients_and_tangents(part, options):
    f, truth, x = both(part, options)
    results, back = vjp(f, *x)
    expected, back_in_truth = vjp(truth, *x)
    torch.testing.assert_close(results, expected)
    grads = like(results)
    torch.testing.assert_close(back(grads), back_in_truth(grads))
    directions = like(x)
    torch.testing.assert_close(jvp(f, x, directions), jvp(truth, x, directions))


def test_second_derivatives(part, options):
    f, truth, x = both(part, options)
    directions, grads = like(x), like(f(*x))

    def of_gradients(f):
        return lambda *x: vjp(f, *x)[1](grads)

    (_, change), (_, true_change) = (jvp(of_gradients(g), x, directions) for g in (f, truth))
    torch.testing.assert_close(change, true_change)
    (_, back), (_, back_in_truth) = (vjp(of_gradients(g), *x) for g in (f, truth))
    torch.testing.assert_close(back(directions), back_in_truth(directions))
