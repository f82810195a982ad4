"""What the operator is held against: the textbook's attention, torch's, and bounds on errors."""

import math
import os
import subprocess
import sys

import torch
import torch.nn.functional as F

import qkv

INF = float("inf")
FLOOR = 2


def attend(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """(output, lse) by the textbook, in the inputs' dtype; torch's autograd differentiates it.

    query [..., H, L, D], key [..., Hkv, S, D], value [..., Hkv, S, Dv]
    -> [..., H, L, Dv], [..., H, L].
    Follows the operator's semantics where torch's paths disagree: mask and is_causal both apply,
    -inf in a mask hides the key, a row that sees no key gets output 0, lse -inf, gradients 0.
    Expects finite inputs; see attend_with_junk.
    """
    if enable_gqa:
        key, value = (repeat_heads(x, query.size(-3)) for x in (key, value))
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query @ key.mT * scale
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        allowed = allowed & (attn_mask != -INF)
        scores = scores + attn_mask.to(scores.dtype).masked_fill(attn_mask == -INF, 0)
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed, -INF).masked_fill(empty, 0)
    output = scores.softmax(-1).masked_fill(empty, 0) @ value
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -INF)
    return output, lse.expand(output.shape[:-1])


def attend_with_junk(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """attend() for H == Hkv with NaN and inf in the inputs: each row gets its own copy of the keys
    and values, with zeros where it may not look, so that what is masked cannot leak into the
    result or any gradient. What is not masked does what it does in torch's math path."""
    L, S = query.size(-2), key.size(-2)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    allowed = torch.ones(L, S, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    bias = torch.zeros((), dtype=query.dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        allowed, bias = allowed & (attn_mask != -INF), attn_mask.to(query.dtype)
    blind = ~allowed.any(-1, keepdim=True)
    keys, values = (x[..., None, :, :].where(allowed[..., None], 0) for x in (key, value))
    scores = (query.where(~blind, 0)[..., None, :] * keys).sum(-1) * scale + bias
    scores = scores.where(allowed, -INF).where(~blind, 0)
    weights = torch._safe_softmax(scores, -1)  # 0 where all are -inf, as in torch's math path
    output = (weights[..., None] * values).sum(-2).where(~blind, 0)
    top = scores.detach().amax(-1, keepdim=True)
    nothing = blind | (top == -INF)
    sums = (scores - top.where(~nothing, 0)).exp().sum(-1, keepdim=True).where(~nothing, 1)
    return output, (top + sums.log()).where(~nothing, -INF).squeeze(-1)


def merge_masks(L, S, attn_mask, is_causal):
    """One mask for both: torch's math path refuses the two together."""
    if attn_mask is None or not is_causal:
        return attn_mask, is_causal
    causal = torch.ones(L, S, dtype=torch.bool).tril()
    if attn_mask.dtype == torch.bool:
        return attn_mask & causal, False
    return attn_mask.masked_fill(~causal, -INF), False


def sdpa(query, key, value, attn_mask=None, is_causal=False, **options):
    """torch's attention, by whichever path torch takes (see torch.nn.attention.sdpa_kernel)."""
    kv_heads = -3 if options.get("enable_gqa") else -2
    batch = torch.broadcast_shapes(*(x.shape[:kv_heads] for x in (query, key, value)))
    # torch gets the output's shape wrong if only the value, or only the mask, has some dimension
    query, key, value = (x.expand(*batch, *x.shape[kv_heads:]) for x in (query, key, value))
    attn_mask, is_causal = merge_masks(query.size(-2), key.size(-2), attn_mask, is_causal)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
    )


def max_error(x, truth):
    """Largest absolute difference; inf where one is NaN or infinite and the other is not."""
    if truth.numel() == 0:
        return 0.0
    x, truth = x.detach().double(), truth.detach().double()
    same = (x == truth) | (x.isnan() & truth.isnan())
    return (x - truth).abs().nan_to_num(nan=INF).masked_fill(same, 0).max().item()


def rms_error(x, truth):
    """Frobenius norm of the difference, relative to the truth's."""
    return ((x.detach().double() - truth).norm() / truth.norm()).item()


def assert_no_less_accurate(ours, theirs, truth):
    """At ratio 1 on the root mean square error. Over large tensors that is a steady number, but
    two of one size still differ by a percent or so from draw to draw. Generic code is allowed
    more: each of its products is rounded, while torch has fused multiply-adds on most CPUs."""
    our_error, their_error = rms_error(ours, truth), rms_error(theirs, truth)
    limit = 1.1 if qkv.active_isa() == "generic" else 1.02
    assert our_error <= limit * their_error, f"{our_error / their_error:.3f} times torch's"


def assert_within_rounding(ours, theirs, truth, size):
    """f32: no element further off than torch's worst, but for FLOOR roundings of sums of `size`.
    f64: to 1e-12 of `size`."""
    assert ours.shape == truth.shape
    error, limit = max_error(ours, truth), 1e-12 * size
    if ours.dtype == torch.float32:
        rounding, torchs = torch.finfo(torch.float32).eps * size, max_error(theirs, truth)
        limit = torchs + FLOOR * rounding
        assert error <= limit, f"off by {error:.3g}, torch {torchs:.3g}, a rounding {rounding:.3g}"
    assert error <= limit


def repeat_heads(x, heads):
    return x.repeat_interleave(heads // x.size(-3), -3)


def fold_to(x, shape):
    """Sums over the dimensions along which a tensor of `shape` was broadcast or had its heads
    repeated to reach the shape of x: what autograd does with a gradient."""
    if len(shape) >= 3 and shape[-3] not in (1, x.size(-3)):
        x = x.unflatten(-3, (shape[-3], -1)).sum(-3)
    return x.sum_to_size(shape)


def magnitudes(tensors, grad_output=None, grad_lse=None, enable_gqa=False, **options):
    """Size of the sums behind (output, lse, grad_query, grad_key, grad_value): each sum of products
    again with every term positive, times 1 + the largest score and lse, which is how far rounding
    those moves a weight; the largest element of each. One ulp of this is what one rounding costs,
    also where sums cancel (a gradient that is exactly 0, say).
    """
    shapes = [x.shape for x in tensors]
    query, key, value = (x.detach().double() for x in tensors)
    if enable_gqa:
        key, value = (repeat_heads(x, query.size(-3)) for x in (key, value))
    weights, _ = attend(query, key, torch.eye(key.size(-2), dtype=torch.float64), **options)
    weights = weights.expand(*(weights @ value).shape[:-1], -1)
    query, key, value = query.abs(), key.abs(), value.abs()
    scale = options.get("scale")
    scale = abs(scale) if scale is not None else 1 / math.sqrt(query.size(-1))
    scores = query @ key.mT * scale
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double().masked_fill(mask == -INF, 0).abs()
    top = 1 + largest(scores) + math.log(max(1, scores.size(-1)))  # no lse is larger
    sizes = [top * largest(weights @ value), top]
    if grad_output is None and grad_lse is None:
        return sizes
    if grad_output is None:
        grad_output = torch.zeros(*weights.shape[:-1], value.size(-1))
    grad_output = grad_output.double().abs()
    grad_weights = grad_output @ value.mT
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta + grad_lse.double().abs()[..., None]
    grad_scores = weights * (grad_weights + delta) * scale
    grads = (grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad_output)
    return [*sizes, *(top * largest(fold_to(g, s)) for g, s in zip(grads, shapes, strict=True))]


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def run_python(code, timeout=120, env=(), cwd=None):
    """stdout of `python -c code` in a fresh process, with `env` added to what it inherits, less
    what conftest.py sets for the tests themselves; fails with its stderr."""
    env = {**os.environ, **dict(env)}
    env.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=env,
        cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
