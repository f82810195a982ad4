"""The operators with score programs, composed of torch's: until the library has its own."""

import torch
from score_programs import evaluated

from qkv import _flex
from qkv._score_function import ScoreProgram
from qkv.spans import Spans

_OPTIONS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "
    "int[]? window_size=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? bias=None, "
    "Tensor? spans=None, Tensor? sinks=None, str score_program='', Tensor? score_tables=None, "
    "Tensor? score_indices=None"
)
_library = torch.library.Library("flex_shim", "DEF")
_library.define(f"attention({_OPTIONS}) -> Tensor")
_library.define(f"attention_with_lse({_OPTIONS}) -> (Tensor, Tensor)")


def _with_lse(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False, window_size=None, softcap=0.0, alibi_slopes=None, bias=None, spans=None,
    sinks=None, score_program="", score_tables=None, score_indices=None,
):  # fmt: skip
    q, k, v = (x.double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    L, S = scores.shape[-2:]
    i, j = torch.arange(L)[:, None], torch.arange(S)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if score_program:
        tables = None if score_tables is None else score_tables.double()
        scores = evaluated(ScoreProgram(score_program, tables, score_indices), scores)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * (i + S - L - j).abs()
    for added in (attn_mask, bias):
        if added is not None:
            scores = scores + added
    if is_causal:
        scores = scores.where(j <= i, -torch.inf)
    if window_size is not None:
        left, right = window_size
        behind = i + S - L - j
        scores = scores.where(
            ((behind <= left) | (left < 0)) & ((-behind <= right) | (right < 0)), -torch.inf
        )
    if spans is not None:
        scores = scores.where(Spans(spans).to_mask(S), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().where(lse[..., None] > -torch.inf, 0)
    lse = lse if query.dtype == torch.float64 else lse.float()
    return (weights @ v).to(query.dtype), lse


def _alone(*args, **options):
    return _with_lse(*args, **options)[0]


_library.impl("attention", _alone, "CompositeImplicitAutograd")
_library.impl("attention_with_lse", _with_lse, "CompositeImplicitAutograd")


def replace(monkeypatch):
    monkeypatch.setattr(_flex, "_attention", torch.ops.flex_shim.attention.default)
    monkeypatch.setattr(
        _flex, "_attention_with_lse", torch.ops.flex_shim.attention_with_lse.default
    )
