"""What the operator is held against: the textbook's attention, torch's, and how far off each is."""

import functools
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import qkv
from qkv.bench import philox

INF = float("inf")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}

# torch.compile's; inductor compiles C++.
COMPILERS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++")),
]

# Of results of about 1, computed in other orders; halves are rounded at the end.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dtypes_of(*names):
    """Parametrizes a test's `dtype`."""
    return pytest.mark.parametrize("dtype", [DTYPES[n] for n in names], ids=names)


def compute_type(dtype):
    """What is computed in; the lse's dtype."""
    return torch.float32 if dtype in HALVES else dtype


def is_half(x):
    return isinstance(x, torch.Tensor) and x.dtype in HALVES


def as_torchs_math_path(f):
    """f for halves, too: in f32, its (first) result rounded at the end."""

    @functools.wraps(f)
    def g(*args, **options):
        query = args[0] if args else options["query"]
        if not is_half(query):
            return f(*args, **options)
        widen = lambda x: x.float() if is_half(x) else x  # noqa: E731
        results = f(*map(widen, args), **{name: widen(x) for name, x in options.items()})
        if isinstance(results, torch.Tensor):
            return results.to(query.dtype)
        return results[0].to(query.dtype), *results[1:]

    return g


@as_torchs_math_path
def attend(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dropout_seed=None,
):
    """(output, lse) by the textbook, in the inputs' dtype (halves: in f32, the output rounded at
    the end, as torch's math path does); torch's autograd differentiates it.

    query [..., H, L, D], key [..., Hkv, S, D], value [..., Hkv, S, Dv]
    -> [..., H, L, Dv], [..., H, L].
    Follows the operator's semantics where torch's paths disagree: mask and is_causal both apply,
    -inf in a mask hides the key, a row that sees no key gets output 0, lse -inf, gradients 0.
    dropout_seed: what qkv::dropout_seed drew. Expects finite inputs; see attend_with_junk.
    """
    if enable_gqa:
        key, value = (repeat_heads(x, query.size(-3)) for x in (key, value))
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = bend(query @ key.mT * scale, softcap, alibi_slopes)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype).masked_fill(attn_mask == -INF, 0)
    allowed = visible(*scores.shape[-2:], attn_mask, is_causal, window_size)
    scores = scores.masked_fill(~allowed, -INF)
    if sinks is not None:  # one more key
        scores = with_sinks(scores, sinks)
    empty = (scores == -INF).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    weights = scores.softmax(-1).masked_fill(empty, 0)[..., : key.size(-2)]
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -INF)
    lead = torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
    if dropout_p > 0:
        weights = dropped(weights.expand(*lead, -1, -1), dropout_p, dropout_seed)
    return weights @ value, lse.expand(*lead, -1)


def fused(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dropout_seed=None,
):
    """attend() by the operator, with the same arguments; dropout_seed instead of a drawn one."""
    seed = None if dropout_seed is None else torch.tensor([dropout_seed])
    return torch.ops.qkv.attention_forward(
        query, key, value, attn_mask, alibi_slopes, sinks, seed, None, None, None,
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        window_size=window_size, softcap=softcap,
    )  # fmt: skip


def with_sinks(scores, sinks):
    """[..., H, L, S + 1]: the sinks are one more column."""
    lead = torch.broadcast_shapes(scores.shape[:-2], sinks.shape)
    column = sinks.to(scores.dtype)[..., None, None].expand(*lead, scores.size(-2), 1)
    return torch.cat([scores.expand(*lead, *scores.shape[-2:]), column], -1)


def keep_mask(seed, dropout_p, shape):
    """bool, of `shape` [batch..., H, L, S]: True where dropout keeps the weight."""
    *lead, L, S = shape
    kept = philox.kept(seed, dropout_p, range(math.prod(lead)), range(L), range(S))
    return kept.reshape(shape)


def dropped(weights, dropout_p, dropout_seed):
    """What dropout leaves of [batch..., H, L, S]."""
    if dropout_p == 0:
        return weights
    factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0
    return weights * keep_mask(dropout_seed, dropout_p, weights.shape) * factor


def bend(scores, softcap=0.0, alibi_slopes=None):
    """Softcap and ALiBi, on [..., H, L, S]."""
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype)[..., None, None]
        scores = scores - slopes * distance(*scores.shape[-2:])
    return scores


def distance(L, S):
    """|i + S - L - j|: how far each key is from the query's own place, seen from the ends."""
    return (torch.arange(L)[:, None] + (S - L) - torch.arange(S)).abs()


def visible(L, S, attn_mask=None, is_causal=False, window_size=None):
    """bool, broadcastable to [..., L, S]: which keys each query may attend to."""
    allowed = torch.ones(L, S, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril()
    if window_size is not None:
        left, right = window_size
        behind = torch.arange(L)[:, None] + (S - L) - torch.arange(S)
        if left >= 0:
            allowed = allowed & (behind <= left)
        if right >= 0:
            allowed = allowed & (-behind <= right)
    if attn_mask is None:
        return allowed
    return allowed & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -INF)


@as_torchs_math_path
def attend_with_junk(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dropout_seed=None,
):
    """attend() for H == Hkv with NaN and inf in the inputs: each row gets its own copy of the keys
    and values, with zeros where it may not look, so that what is masked cannot leak into the
    result or any gradient. What is not masked does what it does in torch's math path."""
    L, S = query.size(-2), key.size(-2)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    allowed = visible(L, S, attn_mask, is_causal, window_size)
    blind = ~allowed.any(-1, keepdim=True)
    keys, values = (x[..., None, :, :].where(allowed[..., None], 0) for x in (key, value))
    scores = (query.where(~blind, 0)[..., None, :] * keys).sum(-1) * scale
    scores = bend(scores.where(allowed, 0), softcap, alibi_slopes)  # 0 times inf is NaN
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(query.dtype)
    scores = scores.where(allowed, -INF)
    if sinks is None:
        scores = scores.where(~blind, 0)
    else:
        scores = with_sinks(scores, sinks)
    weights = torch._safe_softmax(scores, -1)  # 0 where all are -inf, as in torch's math path
    weights = dropped(weights[..., :S], dropout_p, dropout_seed)
    output = (weights[..., None] * values).sum(-2).where(~blind, 0)
    if sinks is not None:
        blind = torch.zeros_like(blind)  # they see the sink
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


SDPA_OPTIONS = {"attn_mask", "is_causal", "scale", "enable_gqa"}


def unfused(query, key, value, **options):
    """(output, lse) as torch gives them: by its own attention if it can, else step by step."""
    output, lse = attend(query, key, value, **options)
    if options.keys() <= SDPA_OPTIONS:
        output = sdpa(query, key, value, **options)
    return output, lse


def in_own_dtype(query, key, value, **options):
    """(output, lse) of 4-D inputs as torch gives them without widening halves: the output by its
    fused kernel, which takes a mask of four dimensions only; what that has no argument for, step by
    step, every step rounded to the inputs' dtype."""
    output, lse = attend.__wrapped__(query, key, value, **options)
    if options.keys() <= SDPA_OPTIONS:
        if (mask := options.get("attn_mask")) is not None:
            options["attn_mask"] = mask.expand(*query.shape[:-1], key.size(-2))
        output = sdpa(query, key, value, **options)
    return output, lse


def rounds_factors(dtype):
    """Whether the operator multiplies this dtype as it is: weights are rounded to it, too."""
    pairs = "bf16" in qkv.active_isa() or "amx" in qkv.active_isa()
    return dtype == torch.bfloat16 and pairs and qkv.half_products() == "native"


def as_torch(dtype):
    """What the operator must be as accurate as: torch with the same factors. (output, lse)."""
    return in_own_dtype if rounds_factors(dtype) else unfused


def reference(query, key, value, **options):
    """attend() in f64."""
    wide = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }
    return attend(query.double(), key.double(), value.double(), **wide)


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


def repeat_heads(x, heads):
    return x.repeat_interleave(heads // x.size(-3), -3)


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
