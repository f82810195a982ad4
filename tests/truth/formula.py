"""Attention of one problem in torch's plain operators: what every call is held against.

A problem is one batch item or one document: query `[H, L, D]`, key `[Hkv, S, D]`, value
`[Hkv, S, Dv]`. Batches, packed documents, pages and caches are cut into problems by problems.py.
Nothing here comes from qkv, so that a mistake there cannot be repeated here. Autograd finds the
derivatives, of any order.

The formula is that of docs/options.md:

    cap(x)    = softcap * tanh(x / softcap)
    score_ij  = f(cap(scale * query_i . key_j)) - slope * |i + S - L - j| + mask_ij + bias_ij
    lse_i     = log(exp(sink) + sum over visible j of exp(score_ij))
    weight_ij = kept_ij / (1 - dropout_p) * exp(score_ij - lse_i)
    output_i  = sum_j weight_ij * value_j

f is a function of the caller's own, whose -inf hides.

A row with nothing to attend to has output 0, lse -inf (the sink, if there is one), gradients 0.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

INF = math.inf


@dataclasses.dataclass
class Options:
    """What one problem may have besides query, key and value. masks: bool or floating tensors that
    broadcast to [H, L, S]; slopes, sinks: [H]; kept: bool [H, L, S], what dropout keeps."""

    scale: float | None = None
    softcap: float = 0.0
    is_causal: bool = False
    window: tuple[int, int] | None = None
    masks: tuple = ()
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    dropout_p: float = 0.0
    function: Callable | None = None  # of scores [H, L, S]


@dataclasses.dataclass
class Attended:
    output: torch.Tensor | None  # [H, L, Dv]
    lse: torch.Tensor  # [H, L]
    weights: torch.Tensor  # [H, L, S], after dropout
    scores: torch.Tensor  # [H, L, S], -inf where hidden


class Plain:
    """Arithmetic in which every operation is rounded to the tensors' dtype, and nothing else."""

    has_errors = False

    def dots(self, query, key):
        return query @ key.mT

    def tanh(self, x):
        return torch.tanh(x)

    def scores(self, scores):
        return scores

    def exponentials(self, exponentials):
        return exponentials

    def rows(self, scores, seen, top, sinks):
        return scores

    def total(self, total):
        return total

    def average(self, exponentials, value, total):
        """The output, from the exponentials after dropout and the sum of those before it."""
        return (exponentials / total) @ value


PLAIN = Plain()


def heads_as(x, heads):
    """x with a head for each of `heads`: head h is x's head `h // (heads / x's heads)`."""
    return x if x.size(0) == heads else x.repeat_interleave(heads // x.size(0), 0)


def visible(L, S, options):
    """bool [L, S], or [H, L, S] by a mask: which keys each query may see."""
    i, j = torch.arange(L)[:, None], torch.arange(S)
    seen = torch.ones(L, S, dtype=torch.bool)
    if options.is_causal:
        seen = seen & (j <= i)
    left, right = options.window or (-1, -1)
    if left >= 0:
        seen = seen & (j >= i + S - L - left)
    if right >= 0:
        seen = seen & (j <= i + S - L + right)
    for mask in options.masks:
        seen = seen & (mask if mask.dtype == torch.bool else mask.detach() != -INF)
    return seen


def scores_of(query, key, options, arithmetic=PLAIN):
    """[H, L, S] before anything is hidden, and bool [H, L, S], what is seen."""
    H, L, D = query.shape
    key = heads_as(key, H)
    S = key.size(1)
    scale = options.scale if options.scale is not None else (D**-0.5 if D else 1.0)
    scores = arithmetic.dots(query, key) * scale
    if options.softcap:
        scores = options.softcap * arithmetic.tanh(scores / options.softcap)
    seen = visible(L, S, options)
    if options.function is not None:
        scores = options.function(scores)
        seen = seen & (scores.detach() != -INF)
        scores = scores.masked_fill(scores.detach() == -INF, 0)
    if options.slopes is not None:
        distance = (torch.arange(L)[:, None] + (S - L) - torch.arange(S)).abs()
        scores = scores - options.slopes[:, None, None] * distance
    for mask in options.masks:
        if mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(mask.detach() == -INF, 0)
    return arithmetic.scores(scores), seen.expand(H, L, S)


def attend(query, key, value, options, arithmetic=PLAIN):
    """Attended. value may be None: then there is no output."""
    scores, seen = scores_of(query, key, options, arithmetic)
    dtype = scores.dtype
    top = scores.detach().masked_fill(~seen, -INF)
    top = top.amax(-1) if top.size(-1) else top.new_full(top.shape[:-1], -INF)
    sinks = None if options.sinks is None else options.sinks[:, None]  # [H, 1]
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -INF, 0)
    scores = arithmetic.rows(scores, seen, top, sinks)
    exponentials = (scores - top[..., None]).masked_fill(~seen, -INF).exp()
    total = exponentials.sum(-1)
    if sinks is not None:
        total = total + (sinks - top).exp()
    total = arithmetic.total(total)
    nothing = total == 0
    lse = torch.where(nothing, -INF, top + total.masked_fill(nothing, 1).log())
    kept = arithmetic.exponentials(exponentials)
    if options.kept is not None:
        p = options.dropout_p
        kept = kept * options.kept.to(dtype) * (1 / (1 - p) if p < 1 else 0.0)
    whole = torch.where(nothing | ~seen.any(-1), 1, total)[..., None]
    output = None
    if value is not None:
        value = heads_as(value, query.size(0))
        output = arithmetic.average(kept, value, whole)
    return Attended(output, lse, kept / whole, scores.masked_fill(~seen, -INF))
