"""Sinks over a ring: what a row sums over all keys counts its sink once, wherever the keys are."""

import math

import torch
from torch import Tensor

from qkv.distributed._plan import Plan

_merge = torch.ops.qkv.merge.default


def with_sinks(
    output: Tensor, lse: Tensor, sinks: Tensor, rank: int, plan: Plan
) -> tuple[Tensor, Tensor]:
    """output `[..., H, L_local, Dv]` and lse `[..., H, L_local]` of the keys of all ranks, with the
    sinks as one more part of the keys, whose values are 0. Rows of padding or in no document have
    none.

    sinks are `[..., H]`; of packed documents `[H]` or `[documents, H]`.
    """
    document = _documents_of_rows(rank, plan, lse.size(-1))
    if plan.ends is not None and sinks.dim() == 2:
        rows = sinks[document.clamp(0, len(sinks) - 1)].mT
    else:
        rows = sinks.unsqueeze(-1)
    rows = rows.to(lse.dtype).where(document >= 0, -math.inf).expand_as(lse)
    output, lse = _merge([output, output.new_zeros(()).expand_as(output)], [lse, rows])
    return output, lse


def _documents_of_rows(rank: int, plan: Plan, length: int) -> Tensor:
    """int64 `[L_local]`: the number of each row's document, 0 where the sequence is one; -1: it is
    in none."""
    document = torch.full((length,), -1)
    for span in plan.spans(rank):
        positions = torch.arange(span.positions.begin, span.positions.end)
        own = torch.zeros_like(positions)
        if plan.ends is not None:
            own = torch.bucketize(positions, torch.tensor(plan.ends), right=True) - 1
            own = own.masked_fill(own == len(plan.ends) - 1, -1)
        document[positions + span.shift] = own
    return document
