"""Sinks over a ring: each row begins with its sink, before any rank's keys come, so that it counts
once wherever these are."""

import math

import torch
from torch import Tensor

from qkv.distributed._plan import Plan


def starting_lse(
    sinks: Tensor | None, shape: tuple[int, ...], rank: int, plan: Plan, dtype: torch.dtype
) -> Tensor:
    """The lse of rows that have seen no keys yet, of this shape `[..., H, L_local]`: their sinks;
    -inf without, and where a row is padding or in no document.

    sinks are `[..., H]`; of packed documents `[H]` or `[documents, H]`.
    """
    nothing = torch.full(shape, -math.inf, dtype=dtype)
    if sinks is None:
        return nothing
    document = _documents_of_rows(rank, plan, shape[-1])
    if plan.ends is not None and sinks.dim() == 2 and sinks.size(0) > 1:
        rows = sinks[document.clamp(min=0)].mT
    else:
        rows = sinks[0 if plan.ends is not None and sinks.dim() == 2 else ...].unsqueeze(-1)
    return torch.where(document < 0, nothing, rows.to(dtype))


def sinks_gradient(
    sinks: Tensor, rows_of_queries: dict[str, Tensor], rank: int, plan: Plan
) -> Tensor:
    """What the rows of this rank add to the gradient of sinks: the weight of a row's sink, times
    how much less all that it sees is worth than the gradient of its lse.

    rows_of_queries: output, lse, and their gradients where there are such."""
    lse = rows_of_queries["lse"]
    delta = torch.zeros_like(lse)
    if "grad_output" in rows_of_queries:
        delta += (rows_of_queries["output"] * rows_of_queries["grad_output"]).sum(-1)
    if "grad_lse" in rows_of_queries:
        delta -= rows_of_queries["grad_lse"]
    with torch.enable_grad():
        leaf = sinks.detach().to(lse.dtype).requires_grad_()
        rows = starting_lse(leaf, tuple(lse.shape), rank, plan, lse.dtype)
    share = -(rows.detach() - lse).exp() * delta
    share.masked_fill_(rows == -math.inf, 0)  # so that what padding holds does not matter
    (grad,) = torch.autograd.grad(rows, leaf, share)
    return grad.to(sinks.dtype)


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
