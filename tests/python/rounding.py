"""Bounds on errors: no larger than torch's, or than what rounding the sums behind it costs.

The one rule for half precision: of the same numbers, with factors of the same dtype (as_torch), the
error is no larger than torch's own. It is the root mean square that is compared
(assert_no_less_accurate); or, of tensors that are too small for that to be a steady number, the
maximum, but for half an ulp of the largest result (testing.assert_close); or, where sums may
cancel, so that torch's error is a matter of luck, but for an ulp of the terms
(assert_within_rounding).
"""

import math
from typing import NamedTuple

import torch
from common import HALVES, INF

import qkv
from qkv import testing
from qkv.testing._dropout import dropped
from qkv.testing._scores import repeat_heads

FLOOR = 2
NO_WEIGHT = 1e-36  # weights below the normal numbers of f32 may be 0


def assert_no_less_accurate(ours, theirs, truth, limit=1.02):
    """The root mean square error is no larger than torch's, at ratio 1. Over large tensors that is
    a steady number, but two of one size still differ by a percent or so from draw to draw. Generic
    code is allowed more: each of its products is rounded, while torch has fused multiply-adds on
    most CPUs."""
    limit = max(limit, 1.1 if qkv.active_isa() == "generic" else 1)
    testing.assert_as_accurate(ours, truth, theirs, times=limit)


class Magnitude(NamedTuple):
    """The size of the numbers behind a result: `terms` is the largest of the sums that it is made
    of, with every term positive; `top` is 1 + the largest score and lse, which is how far rounding
    those moves a weight."""

    terms: float
    top: float


def assert_within_rounding(ours, theirs, truth, size, dtype):
    """`dtype` is query's, in which was computed; the result may be in another, a mask's say.
    f32: no element further off than torch's worst, but for FLOOR roundings of sums of `size`.
    f64: to 1e-12 of `size`.
    bf16, f16: no further than in f32, but for one ulp of the terms: the weights may be rounded
    before they are summed up, and the output is, before it tells the gradients the sum of a row.
    The scores never are."""
    assert ours.shape == truth.shape
    error, torchs = testing.max_error(ours, truth), testing.max_error(theirs, truth)
    coarsest = max((ours.dtype, dtype), key=lambda x: torch.finfo(x).eps)
    if coarsest == torch.float64:
        assert error <= 1e-12 * size.terms * size.top
        return
    rounding = FLOOR * torch.finfo(torch.float32).eps * size.terms * size.top + NO_WEIGHT
    if coarsest in HALVES:
        info = torch.finfo(coarsest)
        rounding += info.eps * (size.terms + info.smallest_normal)
    assert error <= torchs + rounding, (
        f"off by {error:.3g}, torch {torchs:.3g}, roundings {rounding:.3g}"
    )


def fold_to(x, shape):
    """Sums over the dimensions along which a tensor of `shape` was broadcast or had its heads
    repeated to reach the shape of x: what autograd does with a gradient."""
    if len(shape) >= 3 and shape[-3] not in (1, x.size(-3)):
        x = x.unflatten(-3, (shape[-3], -1)).sum(-3)
    return x.sum_to_size(shape)


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def score_sizes(query, key, attn_mask=None, *, scale=None, alibi_slopes=None, bias=None, **options):
    """[..., H, L, S]: the scores with every term positive, without softcap, of all keys, hidden or
    not. options: of these only enable_gqa matters."""

    def added(mask):
        is_floating = mask is not None and mask.is_floating_point()
        return mask.abs().nan_to_num(posinf=0) if is_floating else None

    return testing.attention_scores(
        query.abs(), key.abs(), added(attn_mask), bias=added(bias),
        enable_gqa=options.get("enable_gqa", False),
        scale=None if scale is None else abs(scale),
        alibi_slopes=None if alibi_slopes is None else -alibi_slopes.double().abs(),
    )[0]  # fmt: skip


def magnitudes(query, key, value, *, grads=(None, None), **options):
    """{name: Magnitude} of the sums behind each result of attend() (output, lse), and behind the
    gradient of each argument. One ulp of it is the error of one rounding, also where sums cancel (a
    gradient that is exactly 0, say). grads: of output and lse; None for either."""
    slopes, sinks = (options.get(name) for name in ("alibi_slopes", "sinks"))
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    least = torch.finfo(query.dtype).smallest_normal
    query, key, value = (x.detach().double() for x in (query, key, value))
    if options.pop("enable_gqa", False):
        key, value = (repeat_heads(x, query) for x in (key, value))
    L, S = query.size(-2), key.size(-2)
    scale = options.get("scale")
    scale = abs(scale) if scale is not None else 1 / math.sqrt(query.size(-1))
    output, lse = testing.attention(query, key, value.abs(), **options, return_lse=True)
    dropout_p, seed = options.pop("dropout_p", 0.0), options.pop("dropout_seed", None)
    weights = testing.attention_weights(query, key, **options).expand(*lse.shape, S)

    query, key, value = query.abs(), key.abs(), value.abs()
    scores = score_sizes(query, key, **options)
    top = 1 + largest(scores) + math.log(max(1, S))  # no lse is larger
    if sinks is not None:
        wide = sinks.double()  # float8 has few operators of its own
        top += largest(wide.masked_fill(wide == -INF, 0))
    sizes = {"output": Magnitude(largest(output), top), "lse": Magnitude(1, top)}
    if grads == (None, None):
        return sizes

    kept = dropped(torch.ones_like(weights), dropout_p, seed, None)
    zero = torch.zeros(*lse.shape, 1, dtype=torch.float64)
    grad_output, grad_lse = (None if g is None else g.double().abs() for g in grads)
    grad_output = zero.expand(*lse.shape, value.size(-1)) if grad_output is None else grad_output
    grad_weights = kept * (grad_output @ value.mT)
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    # An output below the normal numbers of f16 is rounded like the least of them.
    delta = delta + least * grad_output.sum(-1, keepdim=True)
    delta = delta + (zero if grad_lse is None else grad_lse[..., None])
    grad_scores = weights * (grad_weights + delta)
    found = {
        "query": fold_to(scale * grad_scores @ key, shapes["query"]),
        "key": fold_to(scale * grad_scores.mT @ query, shapes["key"]),
        "value": fold_to((kept * weights).mT @ grad_output, shapes["value"]),
    }
    for name in ("attn_mask", "bias"):
        if (mask := options.get(name)) is not None:
            found[name] = grad_scores.sum_to_size(mask.shape)
    if slopes is not None:
        slope = (grad_scores * testing.distance(L, S)).sum((-2, -1))
        found["alibi_slopes"] = slope.sum_to_size(slopes.shape)
    if sinks is not None:
        sink = (sinks.double()[..., None] - lse).exp().masked_fill(lse == -INF, 0)
        found["sinks"] = (sink * delta.squeeze(-1)).sum(-1).sum_to_size(sinks.shape)
    return sizes | {name: Magnitude(largest(x), top) for name, x in found.items()}
